"""Write a GPT-2 as a GGUF file for llama.cpp, and a Modelfile for Ollama: python -m lab export --gguf f16.

Names and layout: llama.cpp's architecture "gpt2" (src/llama-arch.cpp and gguf-py/gguf/constants.py).
"""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import torch

from lab.cli import UserError
from lab.data.chat import CHAT_TEMPLATE, ROLES
from lab.data.tokenizers import END_OF_TEXT, TOKENIZER_FILE
from lab.inference.generate import CHAT_TEMPERATURE, TEMPERATURE

GgufType = Literal["off", "f32", "f16", "q8_0"]
NAMES = {  # our name of a module: llama.cpp's
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
OLLAMA_TEMPLATE = """{{- range $i, $m := .Messages }}{{ if $i }}

{{ end }}{{ if eq .Role "system" }}System: {{ else if eq .Role "user" }}User: {{ else }}Assistant: {{ end }}\
{{ .Content }}{{ if eq .Role "assistant" }}<|endoftext|>{{ end }}{{ end }}

Assistant:"""


def check_gguf(kind: GgufType, config: Any) -> None:
    """Raise UserError if a model with this config cannot be written as GGUF of this type."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"--gguf {kind} needs the package gguf; run `pip install gguf`, or leave the flag out"
        )
    if hasattr(config, "segments"):
        raise UserError(
            f"--gguf {kind} is for models that generate text, not for BERT; leave it out"
        )
    if kind == "q8_0" and config.n_embd % 32:
        raise UserError(
            f"n_embd={config.n_embd} must be a multiple of 32 for --gguf q8_0, whose blocks have 32 "
            "weights; pass --gguf f16"
        )


def gguf_name(name: str) -> str:
    """llama.cpp's name of one of our parameters: transformer.h.3.ln_1.bias -> blk.3.attn_norm.bias."""
    module, _, kind = name.rpartition(".")
    block = ""
    if module.startswith("transformer.h."):
        _, _, layer, module = module.split(".", 3)
        block = f"blk.{layer}."
    return f"{block}{NAMES[module]}.{kind}"


@torch.no_grad()
def write_gguf(folder: Path, model: Any, kind: GgufType, chat: bool) -> str:
    """Write model-<kind>.gguf and a Modelfile to an export's folder, which already has the tokenizer's files.

    Matrices have the given type: q8_0 is 8 bits with a scale per 32 weights. Vectors and position
    embeddings stay in float32, as llama.cpp's own converter keeps them. chat: the model was fine-tuned
    on conversations. Returns the name of the file. Raises UserError without a tokenizer.
    """
    import gguf  # pyright: ignore[reportMissingImports]  # optional

    c, path = model.config, folder / f"model-{kind}.gguf"
    tokens, merges = read_vocabulary(folder, c)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(c.block_size)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(4 * c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_head_count(c.n_head)
    writer.add_layer_norm_eps(1e-5)
    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[types[kind]])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([control if i == c.end_of_text else normal for i in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(c.end_of_text)
    writer.add_eos_token_id(c.end_of_text)
    writer.add_add_bos_token(True)  # documents begin with end-of-text, as in training
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)
    for name, p in model.named_parameters():  # the tied matrix once: llama.cpp ties it as well
        p = p[: c.vocab_size] if name in model.vocab_rows else p
        matrix = p.dim() == 2 and not name.endswith("wpe.weight")
        dtype = gguf.GGMLQuantizationType[kind.upper() if matrix else "F32"]
        data = gguf.quants.quantize(p.float().cpu().numpy(), dtype)
        writer.add_tensor(gguf_name(name), data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "Modelfile").write_text(modelfile(path.name, c.block_size, chat), encoding="utf-8")
    return path.name


def read_vocabulary(folder: Path, config: Any) -> tuple[list[str], list[str]]:
    """(token of each id, merges) in the byte names of tokenizer.json. Raises UserError if it is missing."""
    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise UserError(
            "--gguf puts the model's tokenizer into the file, but it is unknown or not a byte-level BPE; "
            "leave --gguf out"
        )
    parts = json.loads(path.read_text(encoding="utf-8"))
    vocab, pairs = parts["model"]["vocab"], parts["model"]["merges"]
    vocab = vocab | {token["content"]: token["id"] for token in parts["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert [vocab[token] for token in tokens] == list(range(config.vocab_size)), "ids without gaps"
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    # llama.cpp requires at least one merge, and a byte-level model has none; this one is never applied,
    # because UTF-8 does not contain the byte 255 ("ÿ")
    return tokens, merges or ["ÿ ÿ"]


def modelfile(name: str, block_size: int, chat: bool) -> str:
    """Ollama's description of the model: `ollama create my-gpt2 -f Modelfile` reads it.

    Text in triple quotes is taken literally, with its line breaks; there are no escapes.
    """
    template, stops = "{{ .Prompt }}", [END_OF_TEXT]
    if chat:
        template, stops = (
            OLLAMA_TEMPLATE,
            [END_OF_TEXT, *(f"\n\n{role}" for role in ROLES.values())],
        )
    lines = [f"FROM ./{name}", f'TEMPLATE """{template}"""', f"PARAMETER num_ctx {block_size}"]
    temperature = CHAT_TEMPERATURE if chat else TEMPERATURE
    lines += [f"PARAMETER temperature {temperature}", "PARAMETER top_k 50"]  # as in sample.py
    return "\n".join(lines + [f'PARAMETER stop """{stop}"""' for stop in stops]) + "\n"
