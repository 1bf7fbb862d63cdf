"""A model made ready to be talked to, and its text as it comes: whole characters, up to a stop."""

import codecs

import torch

from lab import models, token_colors
from lab.cli import UserError, program
from lab.data.tokenizers import END_OF_TEXT, get_tokenizer, name_of_size
from lab.device import Precision, why_no_compile
from lab.generate import compiled, generate, read_ahead
from lab.kernels import decode_step
from lab.kernels.int8_linear import use_int8

LARGE = 20_000_000  # weights: fewer lie in a CPU's caches, and 16 bits would gain nothing


class Busy(Exception):
    """So many wait that one more is sent away."""


def ready(source, device, weights="auto"):
    """(model, tokenizer) of what models.find gave. Each new token reads every weight once, so their
    bytes decide the speed: 16 bits on a GPU, and of a large model on a CPU that multiplies them; else
    float32, or what is asked for."""
    model = models.load(source)
    if not hasattr(model, "generate"):
        raise UserError(
            f"{source} fills in hidden words and writes no text; name another model: of this one, after "
            f'`{program("lab export")}`, transformers\' pipeline("fill-mask") asks'
        )
    tokenizer = get_tokenizer(name_of_size(model.config.vocab_size))
    large = device.type == "cpu" and model.num_params() >= LARGE
    if weights == "auto" and large and torch.cpu._is_avx512_bf16_supported():
        weights = "bf16"
    precision = Precision("auto" if weights in ("auto", "int8") else weights, device)
    precision.prepare()
    if weights != "int8":
        return model.to(device, precision.dtype).eval(), tokenizer
    if device.type != "cpu":
        raise UserError(f"weights=int8 is for a CPU, not for {device}; leave the flag out")
    return use_int8(model).eval(), tokenizer


def fast_step(model, rows=1, wanted=True):
    """What a KVCache for `rows` texts is to have as its `step`: one launch a token, on a GPU; else
    None."""
    device = next(model.parameters()).device
    if not wanted or device.type != "cuda":
        return None
    if rows == 1 and decode_step.knows(model):
        return decode_step.OneTokenStep(model)
    of_one_type = Precision("fp32", device)  # weights and residual stream alike: no autocast
    return None if why_no_compile(device, model.config, of_one_type) else compiled(model)


class Text:
    """A text of token ids that come one by one. A character's bytes may be spread over several
    tokens in both vocabularies: it is added when its last byte has come, never as halves."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.count, self.ended = "", 0, False
        self.shades = []  # of the page

    def add(self, token):
        """The characters that this token completes."""
        self.count += 1
        if token == self.tokenizer.eot:
            return self.end()
        piece = self.decoder.decode(self.tokenizer.bytes_of(token))
        self.text += piece
        return piece

    def end(self):
        """What is left of a character that was begun, as U+FFFD."""
        piece = self.decoder.decode(b"", final=True)
        self.text, self.ended = self.text + piece, True
        return piece


def pieces(model, tokenizer, ids, max_new_tokens, likeliest=0, stop=(), one_window=False, **how):
    """Yield each token that follows `ids` as {"id", "text", "end"}, with `likeliest` also what
    token_colors.shade says of it. how: settings of generate.

    "end" is None but in the last: "stop" where the model ended its text or wrote one of `stop`,
    which is cut off, "window" where with `one_window` the context was full (without, it slides),
    else "length". What may be the beginning of a stop waits until it is clear.
    """
    idx = torch.tensor([ids], device=next(model.parameters()).device)
    room = model.config.block_size - len(ids) if one_window else max_new_tokens
    text, held, most = Text(tokenizer), [], min(room, max_new_tokens)
    # a character may be half there
    text.decoder.decode(b"".join(map(tokenizer.bytes_of, ids[-4:])))
    for token, logits in read_ahead(generate(model, idx, most, **how)):
        token = token.item()
        piece = {"id": token, "text": text.add(token), "end": None}
        if likeliest:
            piece = (
                token_colors.shade(token, logits[0], piece["text"], tokenizer, likeliest) | piece
            )
        if text.ended:
            piece["end"] = "stop"
        elif text.count == most:
            end = "length" if most == max_new_tokens else "window"
            piece |= {"text": piece["text"] + text.end(), "end": end}
        held.append(piece)
        joined = "".join(piece["text"] for piece in held)
        if found := [place for place in map(joined.find, stop) if place >= 0]:
            left = min(found)  # characters before the stop
            for piece in held:
                kept, left = piece["text"][:left], left - len(piece["text"])
                yield piece | {"text": kept, "end": "stop" if left <= 0 else None}
                if left <= 0:
                    return
        begun = [n for one in stop for n in range(1, len(one)) if joined.endswith(one[:n])]
        wait = 0 if piece["end"] else max(begun, default=0)  # last characters, which may be a stop
        while held and len(joined) - len(held[0]["text"]) >= wait:
            joined = joined[len(held[0]["text"]) :]
            yield held.pop(0)
        if piece["end"]:
            return


@torch.no_grad()
def scored(model, tokenizer, ids):
    """What token_colors.shade says of each of `ids`: how likely it was after those before. The first,
    an end-of-text that nothing foretells, is left out."""
    idx = torch.tensor([ids[:-1]], device=next(model.parameters()).device)
    if not idx.numel():
        return []
    logits, text = model(idx)[0][0], Text(tokenizer)
    shades = []
    for token, row in zip(ids[1:], logits):
        piece = text.add(token) or (END_OF_TEXT if token == tokenizer.eot else "")
        shades.append(token_colors.shade(token, row, piece, tokenizer))
    return shades
