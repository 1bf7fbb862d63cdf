"""The sentences of lab report: its headline, remarks on each run, and notes on figures and samples."""

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.cli import counted, shell_quote
from lab.tools.plot import caption, headline, last_common
from lab.tools.read_log import Record, by_tokens, column, end_reason, run_error, vocab_sizes
from lab.tools.report_runs import RunReport, mismatch
from lab.tools.verdict import loss_verdict

MISSING = "–"  # printed for a value that was not logged
SPIKES = 5  # largest number of gradient spikes that are listed, the newest ones

# --------------------------------------------------------------------------------- 1. the comparison


def title(runs: Sequence[RunReport]) -> str:
    """The main result, as a sentence: the error that stopped a run, if there was one, and the losses."""
    stopped = {run.name: short_error(run) for run in runs if short_error(run)}
    if stopped and len(runs) == 1:
        return f"Stopped: {stopped[runs[0].name]}"
    parts = [f"{name} stopped: {error}" for name, error in stopped.items()]
    return "; ".join([*parts, losses_title(runs)])


def short_error(run: RunReport) -> str:
    """The problem in the message of the error that stopped the run, without details and advice; "" without
    an error."""
    return re.split(r";| \(|\n", run_error(run.log))[0]


def losses_title(runs: Sequence[RunReport]) -> str:
    """A sentence about the losses. Those that cannot be compared are only listed."""
    differ = {"objectives": "with different objectives", "data": "on different data"}
    if (differs := mismatch(runs)) not in differ:
        return headline({run.name: run.log for run in runs})
    losses = [f"{v:.2f}" for run in runs for v in column(run.log, "val", "loss")[1][-1:]]
    shown = f": validation loss {' and '.join(losses)}" if len(losses) == len(runs) else ""
    return f"Two runs {differ[differs]}{shown}"


def warnings(runs: Sequence[RunReport]) -> list[str]:
    """Warnings about invalid comparisons."""
    if len(runs) == 1:
        return []
    logs = [run.log for run in runs]
    ids = " and ".join(f"{size:,}" for size in vocab_sizes(logs))
    texts = {
        "objectives": "One run predicts masked words, the other the next token: their losses cannot "
        "be compared.",
        "tokenizers": f"These runs have different tokenizers ({ids} ids), so their losses in nats per "
        "token cannot be compared. Bits per byte can be, on the same text.",
        "data": "These runs were validated on different tokens or data (see below), so their losses "
        "may not be comparable.",
    }
    found = [texts[differs]] if (differs := mismatch(runs)) else []
    (steps, losses), (others, other_losses) = (column(log, "val", "loss") for log in logs)
    _, common = last_common(logs) or ("", 0)
    if not differs and common and steps and others and steps[-1] != others[-1]:
        found.append(
            "The headline compares them as far as both went. At their ends, the validation losses are "
            f"{losses[-1]:.4f} after step {steps[-1]:,} and {other_losses[-1]:.4f} after step {others[-1]:,}."
        )
    seed = "These are single runs, so differences may be due to the random seed."
    return [*found, seed]


# ---------------------------------------------------------------------------------------- 2. one run


def facts(run: RunReport) -> str:
    """One line: model, device, time of the start, and how the run ended."""
    started = time.gmtime(min(run.minutes))
    parts = [caption(run.log), time.strftime("%Y-%m-%d %H:%M UTC", started)]
    parts += [f"resumed at step {r['step']:,}" for r in run.log.get("start", []) if r["step"]]
    reason = end_reason(run.log)
    known = {
        None: f"at step {run.last:,}, still running or killed",
        "done": "finished",
        "error": f"stopped by an error {'at' if run.failed else 'after'} step {run.last:,}",
    }
    parts += [known.get(reason, f"stopped by {reason}")]
    return ", ".join(filter(None, parts))


def remarks(run: RunReport) -> list[tuple[str, str]]:
    """[(class of the style sheet, sentences with commands in backticks)] on the error that stopped the run,
    its gradient spikes, and its validation loss."""
    found = []
    if error := run_error(run.log):
        found.append(("error", f"Error: {error}."))
    spikes = [record for record in run.log.get("spike", []) if "file" in record]
    found += [("spike", spike_remark(run, spike)) for spike in spikes[-SPIKES:]]
    if len(spikes) > SPIKES:
        more = counted(len(spikes) - SPIKES, "earlier gradient spike")
        found.append(("spike", f"{more}: see log.jsonl"))
    found.append(("verdict", loss_verdict(run.log, run.train)))
    return [(style, flags_as_code(text)) for style, text in found if text]


def spike_remark(run: RunReport, spike: Record) -> str:
    """A sentence on a gradient spike, with the command that repeats its step if its file is there, which it
    is not beside a copied log."""
    norms = [format(spike[n], ".4g") if n in spike else "not finite" for n in ("norm", "usual")]
    text = f"Gradient spike at step {spike['step']:,}: norm {norms[0]}, "
    text += f"median of the steps before {norms[1]}"
    text += ", update skipped" * bool(spike.get("skipped"))
    file = run.folder / Path(spike["file"]).name
    repeat = f". To repeat that step: `python -m lab replay {shell_quote(file)}`"
    return text + repeat * file.is_file()


def flags_as_code(text: str) -> str:
    """The text with backticks around its flags, except in commands that have them already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"--\w+", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def changes(run: RunReport) -> list[str]:
    """A sentence for each resume, on the settings that it changed."""
    found = []
    for record in run.log.get("start", []):
        if not record["step"]:
            continue
        pairs = record.get("changed", {}).items()
        texts = [f"{name} from {setting_text(a)} to {setting_text(b)}" for name, (a, b) in pairs]
        text = ", ".join(texts) or ("no setting" if "changed" in record else "not logged")
        found.append(f"Changed when the run was resumed at step {record['step']:,}: {text}.")
    return found


def setting_text(value: Any) -> str:
    """A setting as text: JSON, except that strings have no quotes, floats at most six digits, and missing
    values are a dash, also in lists."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, list):
        return ", ".join(map(setting_text, value)) or MISSING
    if isinstance(value, float) and math.isfinite(value):
        value = float(f"{value:.6g}")
    return value if isinstance(value, str) else json.dumps(value)


# ----------------------------------------------------------------------- 3. notes on figures and samples


def loss_note(training: list[dict], validation: list[dict]) -> str:
    """Sentences that say which lines and dots of the loss figure are training and validation losses."""

    def single(curves: list[dict]) -> bool:
        return all(len(curve["y"]) == 1 for curve in curves)

    dots = [curve["dots"] for curve in validation]
    faint = [curve for curve in training if curve.get("faint")]
    parts = []
    if validation and single(validation):
        parts.append("Large dot: validation." if training else "Dot: validation.")
    elif validation and all(dots):
        parts.append("Dots: validation; the dotted line only connects them.")
    elif validation:
        parts.append("Thick line, or dots: validation." if any(dots) else "Thick line: validation.")
    if not training:
        parts.append("No training loss was logged.")
    elif single(training):
        parts.append("Small dot: training.")
    elif not faint:
        parts.append("Thin line: training.")
    elif 2 * len(faint) == len(training):  # each run has both
        parts.append("Thin line: training, smoothed; the faint line shows the raw values.")
    else:
        parts.append("Thin line: training, smoothed where a faint line shows the raw values.")
    return " ".join(parts)


def lr_note(runs: Sequence[RunReport]) -> str:
    """Sentences that say which learning rate is drawn, and how the others are related to it."""
    notes = {}
    for run in runs:
        train, muon = run.train, run.train.get("optimizer") in ("muon", "normuon")
        shown = "AdamW's learning rate" if muon else "The learning rate"
        shown += " of the output layer" * ("embed_lr" in train)
        note = f"{shown}, determined by the settings lr, warmup_steps and schedule."
        if muon:
            peak = setting_text(train.get("muon_lr"))
            note += " The matrices of the blocks, which are most of the weights, are trained by Muon, whose "
            note += f"learning rate follows the same curve up to muon_lr = {peak}."
        if "embed_lr" in train:
            peak = setting_text(train["embed_lr"])
            note += f" That of the embeddings goes up to embed_lr = {peak}."
        notes[run.name] = note
    if len({*notes.values()}) == 1:
        return next(iter(notes.values()))
    return " ".join(f"{name}: {note}" for name, note in notes.items())


def difference_note(first: RunReport, second: RunReport) -> str:
    """Sentences that say how to read the figure of the difference of two runs' losses."""
    equal = "tokens" if by_tokens([first.log, second.log]) else "steps"
    return (
        f"{second.name} minus {first.name}, at equal {equal}. Below zero, {second.name} is better. "
        f"With time on the x axis, each point is at the time of {first.name}."
    )


def samples_note(run: RunReport, step: int, texts: Sequence[str]) -> str:
    """A remark on texts that random weights generated; "" on others."""
    if step or not starts_random(run):
        return ""
    note = "The weights are random before the first step, so this text is too."
    if "\ufffd" in "".join(texts):
        note += " � stands for bytes that are not valid UTF-8, and symbols such as ␀ for "
        note += "control characters."
    return note


def starts_random(run: RunReport) -> bool:
    """Whether the weights were random at step 0: by the configuration, or by the loss, which is then that
    of a uniform guess."""
    if run.train:
        return not run.train.get("init_from")
    first = dict(zip(*column(run.log, "val", "loss"))).get(0, 0)
    return first > run.start.get("log_v", math.inf) - 0.5
