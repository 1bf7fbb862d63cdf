"""GGUF files: the tensors and the vocabulary in them, llama.cpp's tokens, and the form of conversations."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, fail
from test_tokenizer import TEXTS
from test_weights import saved, tiny_gpt

from lab.cli import UserError
from lab.data.chat import render_chat
from lab.data.tokenizers import byte_names, get_or_train, get_tokenizer
from lab.hf.export import export
from lab.hf.gguf_file import CHAT_TEMPLATE, gguf_name
from lab.registry import load_model, tokenizer_name

EXAMPLE = ROOT / "examples" / "laptop_model"
PROMPTS = ["The import statement", "Return a list of", 'def add(a, b):\n    """Naïve']
# in a python that has llama_cpp: [prompts, tokens] -> for each prompt [its ids, greedy tokens]
LLAMA = """
import json, sys
import llama_cpp

path, prompts, count = json.loads(sys.argv[1])
# keys and values in float32, not 16 bits
llm = llama_cpp.Llama(path, n_ctx=0, n_threads=1, type_k=0, type_v=0, verbose=False)
found = []
for prompt in prompts:
    ids, made = llm.tokenize(prompt.encode(), add_bos=True), []
    for token in llm.generate(ids, temp=0.0, reset=True):
        made.append(token)
        if len(made) == count:
            break
    found.append([ids, made])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def llama():
    """llama(path, prompts, count): what llama.cpp makes of them."""
    python = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        pytest.skip("pip install llama-cpp-python; LLAMA_CPP_PYTHON names the python that has it")

    def ask(path, prompts, count):
        words = [python, "-c", LLAMA, json.dumps([str(path), prompts, count])]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.fixture(params=["bytes", "gpt2", "bpe"])
def source(request, tmp_path):
    """A trained model of bytes, and random ones with the other tokenizers."""
    if request.param == "bytes":
        return str(EXAMPLE)
    size, name = 50257, "gpt2"
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_files")
    else:
        (tmp_path / "run").mkdir()
        name = get_or_train(tmp_path / "run", "bpe:290", TEXTS, 0)
        size = get_tokenizer(name).vocab_size
    model = tiny_gpt(size, 128, block_size=128, tokenizer=Path(name).name)
    return saved(model, tmp_path / "run/model.pt")


def test_llama_cpp_gives_the_same_tokens(source, llama, tmp_path):
    """The same ids of prompts, and the same 100 greedy tokens, in float32. llama.cpp also runs the others."""
    pytest.importorskip("gguf")
    model = load_model(source).eval()
    tokenizer = get_tokenizer(tokenizer_name(model.config, source))
    for kind in ("f32", "f16", "q8_0"):
        export(source, tmp_path / kind, gguf=kind)
        theirs = llama(tmp_path / kind / f"model-{kind}.gguf", PROMPTS, 100)
        for prompt, (ids, made) in zip(PROMPTS, theirs, strict=True):
            assert ids == [tokenizer.eot, *tokenizer.encode(prompt)]
            ours = [int(i) for i in model.generate(torch.tensor([ids]), 100, temperature=0)]
            assert len(made) == 100 and (kind != "f32" or made == ours)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_tensors_and_vocabulary_are_the_models(source, tmp_path, kind):
    gguf = pytest.importorskip("gguf")
    export(source, tmp_path / "out", gguf=kind)
    model, reader = load_model(source), gguf.GGUFReader(tmp_path / "out" / f"model-{kind}.gguf")
    ours = {
        gguf_name(n): p[: model.config.vocab_size]
        for n, p in model.named_parameters()
        if "wte" in n
    }
    ours |= {gguf_name(n): p for n, p in model.named_parameters() if "wte" not in n}
    assert {t.name for t in reader.tensors} == ours.keys()
    for tensor in reader.tensors:
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        p = ours[tensor.name].detach().numpy()
        if kind == "f32" or p.ndim == 1 or tensor.name == "position_embd.weight":
            assert np.array_equal(theirs, p)
        elif kind == "f16":
            assert np.array_equal(theirs, p.astype(np.float16).astype(np.float32))
        else:  # half a step of each block of 32; its scale has 11 bits
            block = np.abs(p.reshape(-1, 32)).max(axis=1, keepdims=True)
            assert (np.abs(theirs - p).reshape(-1, 32) <= block / 127 * 0.57 + 1e-7).all()
    assert reader.fields["tokenizer.ggml.bos_token_id"].contents() == model.config.end_of_text
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    names = {name: byte for byte, name in enumerate(byte_names())}
    tokenizer = get_tokenizer(tokenizer_name(model.config, source))
    assert [bytes(names[c] for c in token) for token in tokens[:-1]] == tokenizer._bytes[:-1]


def test_conversations_have_the_form_of_fine_tuning(tmp_path):
    """The template in the file writes what render_chat does; Ollama's has the same parts."""
    from jinja2 import Environment

    gguf = pytest.importorskip("gguf")
    messages = [
        {"role": "system", "content": "You are brief."}, {"role": "user", "content": " Two? "},
        {"role": "assistant", "content": "Too."}, {"role": "user", "content": "And {twice}?"},
    ]  # fmt: skip
    tokenizer = get_tokenizer("bytes")
    for add in (True, False):
        ids, _ = render_chat(messages, tokenizer, add_generation_prompt=add)
        theirs = Environment().from_string(CHAT_TEMPLATE).render(
            messages=messages, add_generation_prompt=add
        )  # fmt: skip
        assert "<|endoftext|>" + theirs == tokenizer.decode(ids)
    run = tmp_path / "log/chat"
    path = saved(tiny_gpt(257, 128), run / "model_000001.pt")
    for preset, template in (("sft", CHAT_TEMPLATE), ("laptop", None)):
        (run / "config.json").write_text(json.dumps({"train": {"preset": preset}}))
        export(path, tmp_path / "out", gguf="f32")
        fields = gguf.GGUFReader(tmp_path / "out/model-f32.gguf").fields
        found = fields.get("tokenizer.chat_template")
        assert (found and found.contents()) == template
        text = (tmp_path / "out/Modelfile").read_text()
        assert text.startswith("FROM ./model-f32.gguf\n") and "PARAMETER num_ctx 16\n" in text
        stops = re.findall(r'PARAMETER stop """(.*?)"""', text, re.DOTALL)
        roles = ["\n\nSystem:", "\n\nUser:", "\n\nAssistant:"] if template else []
        assert stops == ["<|endoftext|>", *roles]
        assert ('{{ else if eq .Role "user" }}User: ' in text) == bool(template)


def test_models_without_a_gguf_are_refused(tmp_path):
    pytest.importorskip("gguf")
    for changes, message in (
        (dict(vocab_size=257, n_embd=24), "n_embd=24 must be a multiple of 32 for --gguf q8_0"),
        (dict(vocab_size=300), "needs the model's tokenizer in the file, but it is not known"),
    ):
        source = saved(tiny_gpt(**changes), tmp_path / "model.pt")
        with pytest.raises(UserError, match=message):
            export(source, tmp_path / "out", gguf="q8_0")
        assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_without_the_package_there_is_one_sentence(tmp_path):
    try:
        import gguf  # noqa: F401
    except ImportError:
        source = saved(tiny_gpt(257), tmp_path / "model.pt")
        wrong = fail("lab", "export", source, "--out", "out", "--gguf", "f16", cwd=tmp_path)
        assert "--gguf f16 needs `pip install gguf`" in wrong
    else:
        pytest.skip("gguf is installed")
