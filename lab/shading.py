"""Text in which each token is shaded by how likely a model found it, as a page of HTML."""

import json
from pathlib import Path

import torch


def shade(token, logits, text, tokenizer, count=5):
    """One token of the page: its id, the logits (V,) that it was drawn from, the text it
    completes; and the `count` likeliest."""
    probs = logits.softmax(-1)
    p, ids = torch.topk(probs, min(count, len(probs)))
    likeliest = [(i, name(i, tokenizer), x) for i, x in zip(ids.tolist(), p.tolist())]
    own = {"id": token, "text": text, "name": name(token, tokenizer), "p": probs[token].item()}
    return own | {"likeliest": likeliest}


def name(token, tokenizer):
    """A token in quotes, blanks, line ends and bytes of half a character to be seen in it."""
    text = tokenizer.bytes_of(token).decode("utf-8", errors="backslashreplace")
    return json.dumps(text, ensure_ascii=False)


def page(title, texts):
    """The page, as text, of [(prompt, [shade(...), ...]), ...]. It loads nothing from elsewhere."""
    import jinja2

    template = Path(__file__).with_suffix(".html.j2").read_text(encoding="utf-8")
    return jinja2.Template(template, autoescape=True).render(title=title, texts=texts)
