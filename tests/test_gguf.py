"""GGUF files: the tensors and the vocabulary in them, llama.cpp's tokens, and the format of conversations."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_RUN, fail, succeed
from models import saved, tiny_gpt
from test_tokenizer import write_texts

from lab.cli import UserError
from lab.data.chat import render_chat
from lab.data.tokenizers import byte_names, get_tokenizer
from lab.hf.export import export
from lab.hf.gguf_file import CHAT_TEMPLATE, gguf_name, modelfile
from lab.registry import load_model, tokenizer_name

EXAMPLE = ROOT / "examples" / "laptop_model"
PROMPTS = ["The import statement", "Return a list of", 'def add(a): """Naïve']
# in a python that has xllamacpp, which is llama.cpp's server as a wheel: for each prompt [number of its
# ids, greedy tokens]
LLAMA = """
import json, sys
import xllamacpp

path, prompts, count = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 0, 1, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # instead of 16 bits
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server, found = xllamacpp.Server(params), []
how = dict(n_predict=count, temperature=0, logprobs=1, cache_prompt=False)
for prompt in prompts:
    made = server.handle_completions(dict(prompt=prompt, **how))
    made = json.loads(made) if isinstance(made, (str, bytes)) else made
    ids = [each["id"] for each in made["choices"][0]["logprobs"]["content"]]
    found.append([made["usage"]["prompt_tokens"], ids])
print(json.dumps(found))
"""
# its ids of conversations, which the chat template in the file makes a text
LLAMA_CHATS = """
import json, sys, urllib.request
import xllamacpp

path, chats = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 0, 1, False
server = xllamacpp.Server(params)

def ask(what, **body):
    headers = {"Content-Type": "application/json"}
    url = f"{server.listening_address}/{what}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

how, found = dict(add_special=True, parse_special=True), []
for messages in chats:
    text = ask("apply-template", messages=messages)["prompt"]
    found.append(ask("tokenize", content=text, **how)["tokens"])
print(json.dumps(found))
"""
# the text of each conversation by an Ollama template, which is one of Go's package text/template with
# these fields (github.com/ollama/ollama/blob/main/docs/template.md)
OLLAMA = """package main

import (
	"encoding/json"
	"os"
	"text/template"
)

type Message struct{ Role, Content string }

func main() {
	var chats [][]Message
	if err := json.Unmarshal([]byte(os.Args[2]), &chats); err != nil {
		panic(err)
	}
	made := template.Must(template.New("").Parse(os.Args[1]))
	for _, messages := range chats {
		if err := made.Execute(os.Stdout, map[string]any{"Messages": messages}); err != nil {
			panic(err)
		}
		os.Stdout.WriteString("\\x00")
	}
}
"""
CHATS = [
    [{"role": "user", "content": "What is two and two?"}],
    [
        {"role": "system", "content": "You are brief."}, {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Too."}, {"role": "user", "content": "And {twice}?"},
    ],
    [
        {"role": "user", "content": "Naïve:\n\n    def add(a):\n        return a + 12\n\nExplain 'it'."},
        {"role": "assistant", "content": "It's \"x\" \\ 日本.\n\n- one\n- two"},
        {"role": "user", "content": "\\{{ .Role }} {% raw %} 😀"},
    ],
]  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    """llama(LLAMA, path, prompts, count): [number of ids, greedy tokens] of each prompt, from llama.cpp;
    llama(LLAMA_CHATS, path, chats): ids of each conversation."""
    python = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import xllamacpp"], capture_output=True).returncode:
        pytest.skip("pip install xllamacpp; LLAMA_CPP_PYTHON names the python that has it")

    def ask(program, path, *values):
        words = [python, "-c", program, json.dumps([str(path), *values])]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.fixture(params=["bytes", "gpt2", "bpe:290"], scope="module")
def source(request, tmp_path_factory):
    """The example model, which has byte tokens, and a model trained for seconds with each other tokenizer.
    Random weights would not do: llama.cpp's server leaves out tokens that are not valid UTF-8."""
    if request.param == "bytes":
        return str(EXAMPLE)
    folder = tmp_path_factory.mktemp("runs")
    if request.param == "gpt2" and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("set TIKTOKEN_CACHE_DIR to a folder with the files of GPT-2's tokenizer")
    path = write_texts(folder / "texts") / "a.jsonl"
    sentences = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    path.write_text(json.dumps({"text": " ".join(sentences)}))  # a single document: it does not end
    flags = f"--source texts --tokenizer {request.param} --workers 0 --out data"
    succeed("fineweb.py", *flags.split(), cwd=folder)
    flags = (
        "--data data --max_steps 60 --lr 1e-2 --block_size 128 --seq_len 128 --total_batch_size 512"
    )
    succeed("train_gpt2.py", *TINY_RUN, *flags.split(), cwd=folder)
    return str(folder / "log/r/model_000060.pt")


def test_llama_cpp_gives_the_same_tokens(source, llama, tmp_path):
    """The same ids of prompts and, in float32, the same 100 greedy tokens."""
    pytest.importorskip("gguf")
    model = load_model(source).eval()
    tokenizer = get_tokenizer(tokenizer_name(model.config, source))
    for kind in ("f32", "f16", "q8_0"):
        export(source, tmp_path / kind, gguf=kind)
        theirs = llama(LLAMA, tmp_path / kind / f"model-{kind}.gguf", PROMPTS, 100)
        for prompt, (count, made) in zip(PROMPTS, theirs, strict=True):
            ids = [tokenizer.eot, *tokenizer.encode(prompt)]
            ours = [int(i) for i in model.generate(torch.tensor([ids]), 100, temperature=0)]
            assert count == len(ids) and len(made) == 100
            assert kind != "f32" or made == ours


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


def test_conversations_have_the_format_of_fine_tuning(tmp_path):
    """The template in the file gives the same text as render_chat; Ollama's has the same parts."""
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


def tuned(source, folder):
    """A checkpoint with the weights and tokenizer of `source`, in a run that says it was fine-tuned."""
    model, run = load_model(source), folder / "log/chat"
    run.mkdir(parents=True)
    tokenizer = Path(source).parent / "tokenizer.json"
    if tokenizer.exists():
        shutil.copy(tokenizer, run)
    (run / "config.json").write_text(json.dumps({"train": {"preset": "sft"}}))
    return saved(model, run / "model_000001.pt")


def test_llama_cpp_gives_conversations_the_tokens_of_fine_tuning(source, llama, tmp_path):
    pytest.importorskip("gguf")
    export(path := tuned(source, tmp_path), tmp_path / "out", gguf="f32")
    tokenizer = get_tokenizer(tokenizer_name(load_model(path).config, path))
    ours = [render_chat(chat, tokenizer, add_generation_prompt=True)[0].tolist() for chat in CHATS]
    assert llama(LLAMA_CHATS, tmp_path / "out/model-f32.gguf", CHATS) == ours


def test_ollamas_template_gives_the_text_of_fine_tuning(tmp_path):
    """By Go's text/template, which Ollama uses. It does not strip messages, as render_chat does."""
    if not shutil.which("go"):
        pytest.skip("needs Go")
    (tmp_path / "main.go").write_text(OLLAMA)
    lines = modelfile("model.gguf", 128, chat=True)
    template = re.search(r'^TEMPLATE """(.*?)"""$', lines, re.DOTALL | re.MULTILINE)[1]
    words = ["go", "run", "main.go", template, json.dumps(CHATS)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    tokenizer = get_tokenizer("bytes")
    ours = [render_chat(chat, tokenizer, add_generation_prompt=True)[0] for chat in CHATS]
    found = done.stdout.decode().split("\0")[:-1]
    assert ["<|endoftext|>" + text for text in found] == [tokenizer.decode(ids) for ids in ours]


def test_models_without_a_gguf_are_refused(tmp_path):
    pytest.importorskip("gguf")
    for changes, message in (
        (dict(vocab_size=257, n_embd=24), "n_embd=24 must be a multiple of 32 for --gguf q8_0"),
        (dict(vocab_size=300), "puts the model's tokenizer into the file, but it is unknown"),
    ):
        source = saved(tiny_gpt(**changes), tmp_path / "model.pt")
        with pytest.raises(UserError, match=message):
            export(source, tmp_path / "out", gguf="q8_0")
        assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_a_missing_package_gives_one_sentence(tmp_path):
    try:
        import gguf  # noqa: F401
    except ImportError:
        source = saved(tiny_gpt(257), tmp_path / "model.pt")
        wrong = fail("lab", "export", source, "--out", "out", "--gguf", "f16", cwd=tmp_path)
        assert "--gguf f16 needs the package gguf; run `pip install gguf`" in wrong
    else:
        pytest.skip("gguf is installed")
