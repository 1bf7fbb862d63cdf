"""What goes on inside a GPT while it reads: attention, the residual stream, heads switched off.

For play.ipynb, whose tables are here too. Nothing here is a second model: hooks on the modules of
the trainer's note what passes, and are taken off again.
"""

import contextlib
import hashlib
import html
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from lab.cli import ROOT, UserError
from lab.files import template


def laptop_run(log_dir="log", steps=300):
    """Checkpoint of the preset laptop after so many updates on its built-in text. Where
    LOG_DIR/notebook_<steps> is not there, trains it first (300: less than a minute on two cores)."""
    run = f"notebook_{steps}"
    path = Path(log_dir, run, f"model_{steps:06d}.pt")
    if not path.exists():
        shutil.rmtree(path.parent, ignore_errors=True)  # of a kernel that was interrupted
        flags = f"--preset laptop --max_steps {steps} --ckpt_every {steps} --val_every 0"
        flags += f" --sample_every 0 --run_name {run} --log_dir"
        command = [sys.executable, "train_gpt2.py", *flags.split(), Path(log_dir).absolute()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise UserError(done.stderr)
    return path


@torch.no_grad()
def watch(model, idx):
    """Let the model read idx (B, T). Returns (stream, weights).

    stream: the residual stream before the first block and after each, n_layer + 1 tensors (B, T, C).
    weights: those of attention, n_layer tensors (B, H, T, T); row t sums to 1 over the positions that
    t looks at. They are computed from the input of each attention layer, as a fused kernel never
    holds them.
    """
    stream, weights = [], []

    def note_weights(attn, args, output):
        x, mask, _ = args
        B, T, C = x.size()
        parts = attn.c_attn(x).split(C, dim=2)
        q, k, _ = (t.view(B, T, attn.n_head, -1).transpose(1, 2) for t in parts)  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) * (C // attn.n_head) ** -0.5  # (B, H, T, T)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril() if mask is None else mask
        weights.append(scores.masked_fill(~seen, float("-inf")).softmax(dim=-1))

    with contextlib.ExitStack() as hooks:  # which it takes off again
        for block in model.transformer.h:
            hooks.enter_context(block.attn.register_forward_hook(note_weights))
        for module in (*model.transformer.h, model.transformer.ln_f):
            hook = module.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
            hooks.enter_context(hook)
        model.hidden(idx)
    return stream, weights


@torch.no_grad()
def lens(model, x):
    """Logits (B, T, vocab_size) of a residual stream (B, T, C) from anywhere in the model, as if its
    last norm and head came next: the logit lens (nostalgebraist 2020). After the last block these are
    the model's own."""
    return model.lm_head(model.transformer.ln_f(x))[..., : model.config.vocab_size]


def mass(weights, where):
    """How much of its attention each head gives to chosen positions: (H,), each between 0 and 1.

    weights (B, H, T, T) of one block; where (B, T, T) or (T, T) is True at [t, s] if s is chosen for
    t. The mean is over those t for which something is chosen.
    """
    where = where.expand(weights.size(0), -1, -1)
    rows = where.any(dim=2)  # (B, T)
    return (weights * where[:, None]).sum(dim=3).transpose(0, 1)[:, rows].mean(dim=1)


def without_head(model, layer, head):
    """A context, inside which one head hands nothing over: its part of c_proj's input is 0."""
    D = model.config.n_embd // model.config.n_head

    def silence(c_proj, args):
        y = args[0].clone()  # (B, T, C), the heads side by side
        y[..., head * D : (head + 1) * D] = 0
        return (y,)

    return model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(silence)


def attention_page(pieces, weights, title="", head="0.0"):
    """HTML in which to point at a character and see where a head looks from there; for IPython.display.HTML.

    pieces: the T tokens as text; weights: as `watch` returns them, of which the first sequence is
    shown; head: the one to begin with, as "<block>.<head>". Where scripts are taken out (a page that
    only shows the notebook) the text stays, and each character's tooltip names what each head looks at
    most.
    """
    assert len(pieces) == weights[0].size(-1), "one piece of text for each token"
    heads = {f"{n}.{h}": w for n, block in enumerate(weights) for h, w in enumerate(block[0])}
    percent, characters = {}, []
    for name, w in heads.items():
        percent[name] = [(100 * row[: t + 1]).round().int().tolist() for t, row in enumerate(w)]
    for t, piece in enumerate(pieces):
        most = ((name, int(w[t].argmax()), w[t].max().item()) for name, w in heads.items())
        tip = "; ".join(f"head {name}: {pieces[s]!r} {t - s} back, {p:.2f}" for name, s, p in most)
        characters.append((tip, piece.replace("\n", "↵\n")))
    id = "attention-" + hashlib.sha256(repr((pieces, percent)).encode()).hexdigest()[:12]
    told = dict(percent=json.dumps(percent, separators=(",", ":")), characters=characters)
    return template("inside.html.j2").render(id=id, title=title, head=head, **told)


class Table:
    """A table for a notebook: HTML in a browser, text elsewhere. Columns of numbers are set right."""

    def __init__(self, columns, rows):
        self.lines = [list(map(str, row)) for row in (columns, *rows)]
        self.sides = []  # as f-strings have them
        for cells in zip(*self.lines[1:]):  # an empty cell is among numbers, and alone is none
            number = any(cells) and all(cell[:1] in "0123456789+-." for cell in cells)
            self.sides.append(">" if number else "<")

    def __repr__(self):
        widths = [max(map(len, cells)) for cells in zip(*self.lines)]
        forms = [f"{{:{side}{width}}}" for side, width in zip(self.sides, widths)]
        return "\n".join("  ".join(forms).format(*line).rstrip() for line in self.lines)

    def _repr_html_(self):
        css = {"<": "left", ">": "right"}

        def row(line, tag):
            cells = ""
            for cell, side in zip(line, self.sides):
                cells += f'<{tag} style="text-align: {css[side]}">{html.escape(cell)}</{tag}>'
            return f"<tr>{cells}</tr>"

        head, *body = self.lines
        rows = "".join(row(line, "td") for line in body)
        return f"<table><thead>{row(head, 'th')}</thead><tbody>{rows}</tbody></table>"
