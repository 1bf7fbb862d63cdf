"""Text in which each token is shaded by how likely a model found it, as pages show it."""

import json

import torch


def shade(token, logits, text, tokenizer, count=5):
    """One token of the page: its id, the logits (V,) that it was drawn from, the text it
    completes; and the `count` likeliest."""

    def short(p):  # five digits are enough for a log
        return float(f"{p:.5g}")

    probs = logits.float().softmax(-1)
    p, ids = torch.topk(probs, min(count, len(probs)))
    likeliest = [(i, name(i, tokenizer), short(x)) for i, x in zip(ids.tolist(), p.tolist())]
    own = {"id": token, "text": text, "name": name(token, tokenizer)}
    return own | {"p": short(probs[token].item()), "likeliest": likeliest}


def name(token, tokenizer):
    """A token in quotes, blanks, line ends and bytes of half a character to be seen in it."""
    text = tokenizer.bytes_of(token).decode("utf-8", errors="backslashreplace")
    return json.dumps(text, ensure_ascii=False)
