"""Interpretability tools for play.ipynb: attention weights, logit lens and head ablation; also tables.

They use forward hooks on train_gpt2.GPT, which are removed afterwards.
"""

import contextlib
import html
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.cli import ROOT, UserError


def laptop_run(log_dir: str | Path = "log", steps: int = 300) -> Path:
    """Path of a checkpoint of the preset laptop after `steps` updates, from run LOG_DIR/notebook_<steps>.

    Trains the run if it does not exist yet (300 steps: less than a minute on two cores). Raises
    UserError, with the trainer's output, if that fails.
    """
    run = f"notebook_{steps}"
    path = Path(log_dir, run, f"model_{steps:06d}.pt")
    if not path.exists():
        shutil.rmtree(path.parent, ignore_errors=True)  # left by an interrupted run
        flags = f"--preset laptop --max_steps {steps} --checkpoint_every {steps} --val_every 0"
        flags += f" --sample_every 0 --run_name {run} --log_dir"
        command = [sys.executable, "train_gpt2.py", *flags.split(), Path(log_dir).absolute()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise UserError(done.stderr)
    return path


@torch.no_grad()
def capture_activations(model: Any, idx: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Run the model on idx (B, T). Returns (stream, weights).

    stream: the residual stream before the first block and after each block, n_layer + 1 tensors
    (B, T, C). weights: attention weights, n_layer tensors (B, H, T, T); row t sums to 1 over the
    positions that t attends to. They are recomputed from the input of each attention layer, because
    fused kernels never store them.
    """
    stream: list[Tensor] = []
    weights: list[Tensor] = []

    def record_weights(attn: Any, args: tuple, output: Tensor) -> None:
        x, mask, _ = args
        B, T, C = x.size()
        parts = attn.c_attn(x).split(C, dim=2)
        q, k, _ = (t.view(B, T, attn.n_head, -1).transpose(1, 2) for t in parts)  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) * (C // attn.n_head) ** -0.5  # (B, H, T, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        weights.append(scores.masked_fill(~mask, float("-inf")).softmax(dim=-1))

    with contextlib.ExitStack() as hooks:  # removes the hooks at the end
        for block in model.transformer.h:
            hooks.enter_context(block.attn.register_forward_hook(record_weights))
        for module in (*model.transformer.h, model.transformer.ln_f):
            hook = module.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
            hooks.enter_context(hook)
        model.hidden(idx)
    return stream, weights


@torch.no_grad()
def logit_lens(model: Any, x: Tensor) -> Tensor:
    """Logits (B, T, vocab_size) of the residual stream x (B, T, C) at any depth, as if the last norm
    and the head came next (nostalgebraist 2020). After the last block they are the model's own."""
    return model.lm_head(model.transformer.ln_f(x))[..., : model.config.vocab_size]


def attention_mass(weights: Tensor, where: Tensor) -> Tensor:
    """Fraction of each head's attention that goes to selected positions: (H,), each from 0 to 1.

    weights (B, H, T, T) of one block. where (B, T, T) or (T, T): True at [t, s] if s is selected for
    query t. The mean is over the queries with a selected position.
    """
    where = where.expand(weights.size(0), -1, -1)
    rows = where.any(dim=2)  # (B, T)
    return (weights * where[:, None]).sum(dim=3).transpose(0, 1)[:, rows].mean(dim=1)


def ablate_head(model: Any, layer: int, head: int) -> AbstractContextManager:
    """Context manager that sets the output of one head to 0, before c_proj."""
    assert 0 <= head < model.config.n_head, (
        f"head={head} is not from 0 to {model.config.n_head - 1}"
    )
    D = model.config.n_embd // model.config.n_head

    def zero_head(c_proj: Any, args: tuple) -> tuple[Tensor]:
        y = args[0].clone()  # (B, T, C): the outputs of all heads, concatenated
        y[..., head * D : (head + 1) * D] = 0
        return (y,)

    return model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(zero_head)


class Table:
    """A table, shown as HTML in notebooks and as text elsewhere. Columns of numbers are right-aligned."""

    def __init__(self, columns: Iterable[Any], rows: Iterable[Iterable[Any]]):
        self.lines = [list(map(str, row)) for row in (columns, *rows)]
        self.align: list[str] = []  # "<" or ">" of each column, as in format strings
        for cells in zip(*self.lines[1:]):  # a column of numbers may have empty cells
            is_number = any(cells) and all(cell[:1] in "0123456789+-." for cell in cells)
            self.align.append(">" if is_number else "<")

    def __repr__(self) -> str:
        widths = [max(map(len, cells)) for cells in zip(*self.lines)]
        formats = [f"{{:{align}{width}}}" for align, width in zip(self.align, widths)]
        return "\n".join("  ".join(formats).format(*line).rstrip() for line in self.lines)

    def _repr_html_(self) -> str:
        css = {"<": "left", ">": "right"}

        def row(line: list[str], tag: str) -> str:
            cells = ""
            for cell, align in zip(line, self.align):
                style = f"text-align: {css[align]}; white-space: pre"  # keeps leading blanks
                cells += f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
            return f"<tr>{cells}</tr>"

        head, *body = self.lines
        rows = "".join(row(line, "td") for line in body)
        return f"<table><thead>{row(head, 'th')}</thead><tbody>{rows}</tbody></table>"
