"""Text in which each token is shaded by how likely a model found it, as a page of HTML."""

import json

import torch

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  :root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --line: #d0d7de; }
  @media (prefers-color-scheme: dark) {
    :root { --paper: #0d1117; --ink: #e6edf3; --line: #30363d; }
  }
  body { background: var(--paper); color: var(--ink); font: 17px/2 system-ui, sans-serif;
         max-width: 46rem; margin: 2.5rem auto; padding: 0 1rem 9rem; }
  h1 { font-size: 1.2rem; line-height: 1.4; margin: 0; }
  .note { font-size: .85rem; line-height: 1.5; opacity: .8; }
  .text { white-space: break-spaces; overflow-wrap: anywhere; margin: 1.5rem 0; padding-top: 1rem;
          border-top: 1px solid var(--line); }
  .t { position: relative; border-radius: 3px; padding: .15em 0;
       background: rgb(213 94 0 / calc(60% - 60% * var(--p))); }
  .t:hover, .t:focus { outline: 2px solid #d55e00; }
  .box { display: none; position: absolute; top: 1.7em; left: 0; z-index: 1;
         padding: .4rem .7rem; font: 13px/1.6 ui-monospace, monospace; white-space: pre;
         background: var(--paper); border: 1px solid var(--line); border-radius: 6px; }
  .t:hover .box, .t:focus .box { display: block; }
</style>
<h1>{{ title }}</h1>
<p class="note">The stronger a token's colour, the less likely the model found it. Point at one for
its probability and the five likeliest, before temperature, top_k and top_p. Bold: the prompt.</p>
{% for prompt, tokens in texts %}<div class="text"><b>{{ prompt }}</b>
{%- for t in tokens %}<span class="t" tabindex="0" style="--p:{{ '%.3f' % t.p }}">{{ t.text -}}
<span class="box">{{ t.name }}  {{ '%.2f' % (100 * t.p) }} %
{% for name, p in t.likeliest %}
{{ '%5.1f' % (100 * p) }} %  {{ name }}{% endfor %}</span></span>
{%- endfor %}</div>
{% endfor %}</html>
"""


def shade(token, logits, text, tokenizer):
    """One token of the page: its id, the logits (V,) that it was drawn from, the text it
    completes."""
    probs = logits.softmax(-1)
    p, ids = torch.topk(probs, min(5, len(probs)))
    likeliest = [(name(i, tokenizer), x) for i, x in zip(ids.tolist(), p.tolist())]
    own = {"text": text, "name": name(token, tokenizer), "p": probs[token].item()}
    return own | {"likeliest": likeliest}


def name(token, tokenizer):
    """A token in quotes, blanks and line ends to be seen in it."""
    return json.dumps(tokenizer.decode([token]), ensure_ascii=False)


def page(title, texts):
    """The page, as text, of [(prompt, [shade(...), ...]), ...]. It loads nothing from elsewhere."""
    import jinja2

    return jinja2.Environment(autoescape=True).from_string(PAGE).render(title=title, texts=texts)
