"""Write a model as one HTML page that runs it: python -m lab export log/RUN --html my-model.html

The page needs no server and no network, and opens from disk. gpt.js is the forward pass of GPT-2 in
plain JavaScript, tokenizers.js encodes text, model.html.j2 is the page. lab/hf/export.py calls
write_html after checking that the model has the same logits as GPT-2.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

import torch

from lab.cli import UserError, counted
from lab.config import SFT
from lab.data.tokenizers import get_tokenizer
from lab.files import atomic_write, write_errors
from lab.registry import is_tuned, tokenizer_name, training_data
from lab.templates import load_template
from lab.tools.read_log import short

MAX_BYTES = 30_000_000  # of the weights in 16 bits; a phone should still open the page


def write_html(model: Any, source: str, out: Path) -> None:
    """Write the page of a train_gpt2.py GPT. source: where it was loaded from; its last parts are in the
    page's title.

    Raises UserError if the weights are too large for a page or for float16, or if the page cannot encode
    text for this model.
    """
    tokens = token_strings(model.config, source)
    state = half_precision(model, source)
    size = sum(2 * p.numel() for p in state.values())
    if size > MAX_BYTES:
        raise UserError(
            f"{source} has {size / 1e6:,.1f} MB of 16-bit weights, and a page holds at most "
            f"{MAX_BYTES / 1e6:.0f} MB; use `python -m lab serve`, or train a smaller model"
        )
    html = page(model.config, source, state, tokens)
    with write_errors(out, "choose another place with --html"):
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, html.encode(errors="replace"))


def token_strings(config: Any, source: str) -> list[str] | None:
    """GPT-2's tokens without end-of-text, each as a string with one character per byte; None for bytes.

    Raises UserError for another tokenizer.
    """
    name = tokenizer_name(config, source)
    if name not in ("gpt2", "bytes"):
        raise UserError(
            f"tokenizer={name} must be gpt2 or bytes, because a page supports no other; train on data "
            "made with one of these"
        )
    tokenizer = get_tokenizer(name)
    if (tokenizer.vocab_size, tokenizer.eot) != (config.vocab_size, config.end_of_text):
        raise UserError(
            f"vocab_size={config.vocab_size} must be {tokenizer.vocab_size} for the tokenizer {name}, with "
            f"end-of-text as the last id; choose another model than {source}"
        )
    if name == "bytes":
        return None
    return [tokenizer.bytes_of(i).decode("latin-1") for i in range(tokenizer.eot)]


def half_precision(model: Any, source: str) -> dict[str, torch.Tensor]:
    """{name: float16 tensor} of all parameters, without padding rows. Raises UserError for a weight that
    float16 cannot represent."""
    state = {}
    for name, p in model.named_parameters():
        rows = p[: model.config.vocab_size] if name in model.vocab_rows else p
        state[name] = rows.detach().half()
        if not state[name].isfinite().all():
            raise UserError(
                f"{name} of {source} has a weight of {rows.abs().max():.3g}, above 65504, the largest "
                "float16; use it with sample.py"
            )
    return state


def page(config: Any, source: str, state: dict[str, torch.Tensor], tokens: list[str] | None) -> str:
    """The HTML. The same model gives the same page."""
    weights = b"".join(p.contiguous().numpy().tobytes() for p in state.values())
    fields = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "document_mask")
    shape = {name: getattr(config, name) for name in fields}
    path = Path(source)  # do not reveal all of it
    name = path.resolve().name if path.is_dir() else "/".join(path.parts[-2:]).removesuffix(".pt")
    facts = (
        f"{counted(config.n_layer, 'layer')}, {counted(config.n_head, 'head')}, {config.n_embd} channels, "
        f"a context of {config.block_size} {'tokens' if tokens else 'bytes'}"
    )
    tuned = is_tuned(source)
    prompt = "The" if tokens else "The "  # a token of GPT-2 includes the space before a word
    return load_template("model.html.j2").render(
        title=f"{name}, a GPT-2 with {short(sum(p.numel() for p in state.values()))} parameters",
        data=training_data(source),
        facts=facts,
        prompt=SFT["sample_prompt"] if tuned else prompt,
        tuned=tuned,
        longest=10_000,
        about={
            "config": shape | {"end_of_text": config.end_of_text},
            "shapes": [(name, p.numel()) for name, p in state.items()],
            "tokens": tokens,
        },
        weights=base64.b64encode(weights).decode(),
        # Scripts without it do not run. Injected text cannot contain it, because it is a hash of the model.
        nonce=hashlib.sha256(weights + f"{source}{shape}".encode(errors="replace")).hexdigest()[
            :32
        ],
    )
