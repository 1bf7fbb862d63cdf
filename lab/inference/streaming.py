"""Load a model for text generation and stream its text. Used by sample.py, lab serve and bench/."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lab.cli import UserError, command_for
from lab.data.tokenizers import END_OF_TEXT, Tokenizer
from lab.hardware import compile_unsupported_reason
from lab.inference.decode_step import CUDAGraphDecoder, supports
from lab.inference.generate import compile_decode_step, generate, prefetch_tokens
from lab.inference.int8 import quantize_linears_
from lab.inference.token_logprobs import token_logprobs
from lab.precision import Precision
from lab.registry import load_model, load_tokenizer

# parameters; on a CPU, smaller models fit in the caches and bf16 would not be faster
LARGE_MODEL = 20_000_000


class QueueFullError(Exception):
    """The server's queue is full; it responds with status 503."""


def load_for_inference(
    source: str, device: torch.device, weights: str = "auto"
) -> tuple[Any, Tokenizer]:
    """(model in eval mode on the device, its tokenizer). source: as resolve_source returns it.

    weights: auto, fp32, bf16, fp16 or int8. Each new token reads every weight once, so the size of
    weights limits the speed. auto: 16 bits on a GPU, bf16 for a large model on a CPU that supports it,
    else fp32. Raises UserError for a model that generates no text, and for int8 on a GPU.
    """
    if weights == "int8" and device.type != "cpu":
        raise UserError(f"weights=int8 needs a CPU, not {device}; leave the flag out")
    model = load_model(source)
    if not hasattr(model, "generate"):
        raise UserError(
            f"{source} is a masked language model, which cannot generate text; choose another, or "
            f'export this one with `{command_for("lab export")}` for transformers\' pipeline("fill-mask")'
        )
    tokenizer = load_tokenizer(model.config, source)
    tokenizer.token_bytes()  # raises UserError for a WordPiece, whose tokens are not bytes of text
    large = device.type == "cpu" and model.num_params() >= LARGE_MODEL
    if weights == "auto" and large and torch.cpu._is_avx512_bf16_supported():
        weights = "bf16"
    precision = Precision("auto" if weights in ("auto", "int8") else weights, device)
    precision.set_matmul_precision()
    if weights == "int8":
        return quantize_linears_(model).eval(), tokenizer
    return model.to(device, precision.dtype).eval(), tokenizer


def make_decode_step(model: Any, rows: int = 1, enabled: bool = True) -> Callable | None:
    """The `step` for a KVCache of `rows` texts: one CUDA graph launch per token. None if it is not enabled,
    if there is no GPU, or if torch.compile does not work on it."""
    device = next(model.parameters()).device
    if not enabled or device.type != "cuda":
        return None
    if rows == 1 and supports(model):
        return CUDAGraphDecoder(model)
    no_autocast = Precision("fp32", device)  # weights and residual stream have the same dtype
    if compile_unsupported_reason(device, model.config, no_autocast):
        return None
    return compile_decode_step(model)


class IncrementalDetokenizer:
    """Converts token ids to text, one by one. A character may span several tokens; it is returned with
    the token that completes it.

    Attributes: text (so far), count (of tokens added), ended (after end-of-text or end()).
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        """context: ids before the first one added, which may end inside a character."""
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.decoder.decode(b"".join(map(tokenizer.bytes_of, context)))
        self.text, self.count, self.ended = "", 0, False

    def add(self, token: int) -> str:
        """The characters that this token completes."""
        self.count += 1
        if token == self.tokenizer.eot:
            return self.end()
        new = self.decoder.decode(self.tokenizer.bytes_of(token))
        self.text += new
        return new

    def end(self) -> str:
        """End the text. Returns U+FFFD for an incomplete last character, else ""."""
        new = self.decoder.decode(b"", final=True)
        self.text, self.ended = self.text + new, True
        return new


def stream_generate(
    model: Any, tokenizer: Tokenizer, ids: list[int], max_new_tokens: int, top_logprobs: int = 0,
    stop: Sequence[str] = (), no_sliding_window: bool = False, **gen_kwargs: Any,
) -> Iterator[dict]:  # fmt: skip
    """Yield a piece for each token after `ids`: {"id", "text", "end"}, and with top_logprobs also the
    other fields of token_logprobs. gen_kwargs: arguments of generate.

    "end" is None except in the last piece. There it is "stop" after end-of-text or one of the strings
    `stop`, which is removed (the piece then has it as "stop_string"); "window" if no_sliding_window and
    the context is full; otherwise "length".
    Text that may be the beginning of a stop string is held back until this is known.
    """
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    room = model.config.block_size - len(ids) if no_sliding_window else max_new_tokens
    limit = min(room, max_new_tokens)
    detokenizer = IncrementalDetokenizer(tokenizer, ids[-4:])  # a character has at most 4 bytes
    held: list[dict] = []  # pieces that are not yielded yet
    for new, logits in prefetch_tokens(generate(model, idx, limit, **gen_kwargs)):
        token = int(new.item())
        text, end = detokenizer.add(token), None
        if detokenizer.ended:
            end = "stop"
        elif detokenizer.count == limit:
            text += detokenizer.end()
            end = "length" if limit == max_new_tokens else "window"
        piece = {"id": token, "text": text, "end": end}
        if top_logprobs:
            piece = token_logprobs(token, logits[0], text, tokenizer, top_logprobs) | piece
        held.append(piece)
        joined = "".join(piece["text"] for piece in held)
        if found := [(start, s) for s in stop if (start := joined.find(s)) >= 0]:
            left, stop_string = min(found)  # left: characters before the stop string
            for piece in held:
                kept, left = piece["text"][:left], left - len(piece["text"])
                if left <= 0:
                    yield piece | {"text": kept, "end": "stop", "stop_string": stop_string}
                    return
                yield piece | {"text": kept, "end": None}
        prefixes = [n for s in stop for n in range(1, len(s)) if joined.endswith(s[:n])]
        wait = 0 if end else max(prefixes, default=0)  # characters that may begin a stop string
        while held and len(joined) - len(held[0]["text"]) >= wait:
            joined = joined[len(held[0]["text"]) :]
            yield held.pop(0)
        if end:
            return


@torch.no_grad()
def score_tokens(model: Any, tokenizer: Tokenizer, ids: list[int]) -> list[dict]:
    """token_logprobs of all `ids` except the first, each given the ids before it."""
    idx = torch.tensor([ids[:-1]], device=next(model.parameters()).device)
    if not idx.numel():
        return []
    logits, detokenizer = model(idx)[0][0], IncrementalDetokenizer(tokenizer)
    records = []
    for token, row in zip(ids[1:], logits):
        text = detokenizer.add(token) or (END_OF_TEXT if token == tokenizer.eot else "")
        records.append(token_logprobs(token, row, text, tokenizer))
    return records
