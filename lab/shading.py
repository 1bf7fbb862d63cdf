"""Text in which each token is shaded by how likely a model found it, as a page of HTML."""

import json
from pathlib import Path

import torch


def shade(token, logits, text, tokenizer):
    """One token of the page: its id, the logits (V,) that it was drawn from, the text it
    completes."""
    probs = logits.float().softmax(-1)
    p, ids = torch.topk(probs, min(5, len(probs)))
    likeliest = [(name(i, tokenizer), round(x, 4)) for i, x in zip(ids.tolist(), p.tolist())]
    own = {"text": text, "name": name(token, tokenizer), "p": round(probs[token].item(), 6)}
    return own | {"likeliest": likeliest}


def name(token, tokenizer):
    """A token in quotes, blanks and line ends to be seen in it."""
    return json.dumps(tokenizer.decode([token]), ensure_ascii=False)


def page(title, texts):
    """The page, as text, of [(prompt, [shade(...), ...]), ...]. It loads nothing from elsewhere."""
    from jinja2 import Environment, FileSystemLoader

    jinja = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return jinja.get_template("shading.html.j2").render(title=title, texts=texts)
