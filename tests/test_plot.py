"""Reading logs, finding runs, the palette, and lab plot."""

import itertools
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from lab.cli import UserError
from lab.registry import resolve_source
from lab.tools import plot, read_log
from lab.tools.plot_style import COLORS, MEANINGS
from lab.trainer import run_dir
from lab.trainer.checkpoint import save_checkpoint


def write_log(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines) + tail)
    return folder


def start(step=0, **more):
    known = dict(device="cpu", world_size=1, precision="fp32", num_params=1_878_336)
    about = dict(kind="start", step=step, time=0.0, log_v=math.log(257), unigram=3.348)
    return about | known | more


def val(step, loss):
    return dict(kind="val", step=step, time=0.0, loss=loss)


def train(step, loss, tokens_per_step=8192):
    known = dict(lr=1e-3, tok_per_s=9000.0, tokens=step * tokens_per_step)
    return dict(kind="train", step=step, time=0.0, loss=loss) | known


def hella(step, acc_norm):
    known = dict(acc=0.28, acc_norm=acc_norm, acc_norm_stderr=0.0045)
    return dict(kind="hella", step=step, time=0.0) | known


CURVE = [train(s, 3.35 + 2 / s) for s in range(1, 401)]
RUN = [start(), val(0, 5.6), *CURVE, val(200, 2.1), val(400, 1.7149)]


def test_resuming_drops_records_of_later_steps(tmp_path):
    """Stopped after step 30, resumed from step 20 with another log_every; 20 is measured again."""
    before = [start(), *[train(s, 100 + s) for s in (5, 10, 15, 20, 25, 30)]]
    before += [val(20, 2.0), val(30, 9)]
    after = [start(20), val(20, 2.5), *[train(s, s) for s in (24, 28)], val(28, 1.0)]
    log = read_log.read_log(write_log(tmp_path, before + after))
    steps = [5, 10, 15, 20, 24, 28]
    assert read_log.column(log, "train", "loss") == (steps, [105, 110, 115, 120, 24, 28])
    assert read_log.column(log, "val", "loss") == ([20, 28], [2.5, 1.0])


def test_incomplete_lines_are_skipped(tmp_path):
    """Lines cut by a kill: at the end of the file, and in the middle, followed by the next record."""
    folder = write_log(tmp_path, [start(), val(10, 3.0)], tail='{"kind": "val", "ste')
    assert read_log.column(read_log.read_log(folder), "val", "loss") == ([10], [3.0])
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(start(10, unigram=1.5)) + "\n" + json.dumps(val(20, 2.0)) + "\n")
        file.write("\x00\x00[1]\n" + "[" * 10**5 + '\n{"kind": "val", "step": Infinity}\n')
    log = read_log.read_log(folder)
    assert read_log.column(log, "val", "loss") == ([10, 20], [3.0, 2.0])
    assert read_log.column(log, "start", "unigram") == ([0, 10], [3.348, 1.5])


def test_missing_numbers_are_null_today_and_nan_in_older_logs(tmp_path):
    lines = [start(unigram=None), val(0, None), val(1, math.nan), val(2, 2.0)]
    lines += [train(1, math.inf), train(2, -math.inf), train(3, 3.0) | dict(grad_norm=None)]
    folder = write_log(tmp_path, lines)
    text = (folder / "log.jsonl").read_text()
    assert "null" in text and "NaN" in text and "-Infinity" in text
    log = read_log.read_log(folder)
    assert read_log.column(log, "val", "loss") == ([2], [2.0])
    assert read_log.column(log, "train", "loss") == ([3], [3.0])
    assert read_log.column(log, "train", "tokens") == ([1, 2, 3], [8192, 2 * 8192, 3 * 8192])
    assert "unigram" not in log["start"][0] and "grad_norm" not in log["train"][2]
    assert (
        plot.headline({"r": log}) == "Validation loss 2.00 at step 2, training loss 3.00 at step 3"
    )


def test_losses_that_differ_by_less_than_half_a_hundredth_are_called_equal(tmp_path):
    """A small difference between single runs has a caveat."""
    caveat = "; single runs: trust only 0.05 nats or more (docs/RUNS.md#compare-ideas)"
    said = {
        1.7151: "a and b have the same validation loss at 3.28M tokens, 1.71" + caveat,
        1.725: "a has validation loss 1.71 at 3.28M tokens, 0.01 nats below b" + caveat,
        1.758: "a has validation loss 1.71 at 3.28M tokens, 0.04 nats below b" + caveat,
        1.7648: "a has validation loss 1.71 at 3.28M tokens, 0.05 nats below b",
    }
    for other, sentence in said.items():
        runs = {"a": RUN, "b": [*RUN[:-1], val(400, other)]}
        logs = {
            name: read_log.read_log(write_log(tmp_path / name, of)) for name, of in runs.items()
        }
        assert plot.headline(logs) == sentence


def test_losses_on_different_texts_are_drawn_but_not_compared(tmp_path, drawn, capsys):
    """The data is that of config.json, or recognized by its size in copied logs."""
    runs = [write_log(tmp_path / name, RUN) for name in "abc"]
    for run, data in zip(runs, ("data/own", "data/x", "data/own/")):
        (run / "config.json").write_text(json.dumps({"train": {"data": data}}))
    plot.main(list(map(str, runs[:2])))
    sentence = (
        "different data (data/own, data/x): losses can be compared only on the same validation text"
    )
    assert capsys.readouterr().out.replace("\n", " ").startswith(f"{sentence} ")
    assert (
        drawn[0].get_suptitle().replace("\n", " ") == sentence
        and len(curves(drawn[0].axes[0])) == 6
    )
    plot.main([str(runs[0] / "log.jsonl"), str(runs[2])])
    assert "a and c have the same validation loss" in capsys.readouterr().out
    (runs[0] / "config.json").write_text("{")
    plot.main([str(runs[0]), str(runs[1])])
    assert "a and b have the same validation loss" in capsys.readouterr().out
    for size in ("val_tokens", "val_targets"):
        logs = {str(n): {"start": [start(**{size: n})], "val": [val(1, 2.0)]} for n in (8, 9)}
        assert (
            plot.headline(logs)
            == "different data: losses can be compared only on the same validation text"
        )


def test_losses_of_masked_and_of_next_tokens_are_not_compared():
    masked = {"start": [start()], "val": [val(1, 6.7) | {"accuracy": 0.3}]}
    logs = {"gpt": {"start": [start()], "val": [val(1, 6.3)]}, "bert": masked}
    assert plot.headline(logs).startswith("different objectives")


def test_runs_that_differ_in_the_seed_are_compared_by_their_mean(tmp_path):
    losses = {"old-1": 1.72, "old-2": 1.74, "new-1": 1.66, "new-2": 1.76}
    logs = {}
    for name, loss in losses.items():
        kind, seed = name.split("-")
        command = f"python {kind}.py --lr 1 --seed {seed} --run_name 'a {name}'"
        of = [start() | dict(command=command), *RUN[1:-1], val(400, loss)]
        logs[name] = read_log.read_log(write_log(tmp_path / name, of))
    at = "at 3.28M tokens, the mean of new-1 and new-2 has validation loss 1.710"
    # 4.30 * sqrt(0.0052 / 2 * (1 / 2 + 1 / 2))
    gap = "0.020 ± 0.219 nats below the mean of old-1 and old-2"
    assert plot.headline(logs) == f"No clear difference: {at}, {gap}"
    logs["new-1"]["start"].append(start() | dict(step=9, command="python new.py --resume"))
    assert plot.headline(logs) == f"No clear difference: {at}, {gap}", "a resumed run stays a seed"
    logs["new-1"]["start"][-1]["changed"] = {"lr": [1, 2]}
    assert "new-1 has" in plot.headline(logs) and plot.headline(logs).endswith(
        "; 1 other is higher"
    )
    logs["new-1"]["start"].pop()
    logs["new-1"]["start"][0]["code"] = "edited"
    assert "new-1 has" in plot.headline(logs), "other code is not another seed"
    logs.pop("new-2")
    assert "new-1 has validation loss 1.660" in plot.headline(logs)
    logs.pop("new-1")
    assert plot.headline(logs).startswith("old-1 has validation loss 1.72"), "two runs stay alone"


def test_a_run_that_was_resumed_with_other_code_is_named(tmp_path):
    codes = {"a": ["1", None, "1"], "b": ["1", None, "2"]}  # None: from a notebook, or an older log
    logs = {}
    for name, hashes in codes.items():
        starts = [start(i, **({"code": code} if code else {})) for i, code in enumerate(hashes)]
        lines = [*starts, val(9, 2.0 if name == "a" else 1.9)]
        logs[name] = read_log.read_log(write_log(tmp_path / name, lines))
    said = "b has validation loss 1.90 at step 9, 0.10 nats below a; b was resumed with other code"
    assert plot.headline(logs) == said


def test_fields_that_no_run_writes_are_ignored(tmp_path):
    wrong = [dict(loss="x"), dict(loss=10**400), dict(time=10**300), dict(time="x"), dict(kind=3)]
    wrong += [dict(step="5"), dict(step=-1), dict(step=2**60), dict(lr=[1]), dict(tokens={})]
    odd = [val(10, 3.0) | fields for fields in wrong]
    odd = [start() | dict(device=5, num_params="x", log_v=1000), *odd]
    shaded = ["", [dict(text="", name="", p=None, likeliest=[])]]  # of a model whose logits are nan
    odd += [val(20, 2.0), val(30, 1.0) | dict(time=10**300), val(40, 1.0) | dict(shaded=[1, 2])]
    odd += [val(41, 1.5) | dict(shaded=shaded)]
    log = read_log.read_log(folder := write_log(tmp_path, odd))
    assert read_log.column(log, "val", "loss") == ([10, 20, 40, 41], [3.0, 2.0, 1.0, 1.5])
    assert not any("shaded" in record for record in log["val"])
    assert "device" not in log["start"][0]
    assert read_log.comparable([log, log])
    # a value that matplotlib cannot scale, and a negative error bar
    huge, below = train(50, 2.0) | dict(lr=1e308), hella(50, 0.3) | dict(acc_norm_stderr=-0.01)
    write_log(tmp_path, [*odd, train(45, 3.0), huge, below])
    plot.draw([folder], tmp_path / "it.png")


def test_find_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run with a log in log/"):
        read_log.find_runs([])
    for i, name in enumerate(("new", "old")):
        log = write_log(tmp_path / "log" / name, RUN) / "log.jsonl"
        os.utime(log, (time.time(), time.time() - 100 * i))
    assert list(map(str, read_log.find_runs([]))) == ["log/new"]
    assert list(map(str, read_log.find_runs(["old"]))) == ["log/old"]
    for file in ("model_000005.pt", "log.jsonl"):
        assert list(map(str, read_log.find_runs([f"log/old/{file}"]))) == ["log/old"]
    paths = ["log/old", "log/new/log.jsonl", "kept.jsonl"]
    assert read_log.run_names(paths) == ["old", "new", "kept"]
    assert read_log.run_names(["log/old", "x/old"]) == ["log/old", "x/old"]


def test_sample_and_report_choose_the_same_newest_run(tmp_path, monkeypatch):
    """The most recently written run: its log or a checkpoint, whichever is newer."""
    monkeypatch.chdir(tmp_path)
    times = {"a": (400, 100), "b": (200, 500), "c": (300, 300)}  # of the log, of the checkpoint
    for name, (log, saved) in times.items():
        folder = tmp_path / "log" / name
        folder.mkdir(parents=True)
        (folder / "log.jsonl").write_text("")
        os.utime(folder / "log.jsonl", (log, log))
        os.utime(save_checkpoint(folder, 5, {}, keep_last=1), (saved, saved))
    for newest in "bac":
        assert resolve_source("") == f"log/{newest}/model_000005.pt"
        assert read_log.find_runs([]) == [Path("log", newest)]
        (tmp_path / "log" / newest).rename(tmp_path / newest)


def test_dangling_links_are_no_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("kept", "links"):
        (tmp_path / "log" / name).mkdir(parents=True)
    (tmp_path / "log/dangling").symlink_to("nowhere")
    (tmp_path / "log/links/log.jsonl").symlink_to("nowhere")
    (tmp_path / "log/links/model_000005.pt").symlink_to("nowhere")
    (tmp_path / "log/kept/log.jsonl").write_text("")
    save_checkpoint(tmp_path / "log/kept", 5, {}, keep_last=1)
    assert run_dir.newest_run("log", lambda run: True) == Path("log/kept")
    assert read_log.find_runs([]) == [Path("log/kept")]


SEEN_BY = {  # linear RGB as seen with all types of cones, or without one type (Machado et al. 2009)
    "all": "1 0 0 0 1 0 0 0 1",
    "protanopes": ".152286 1.052583 -.204868 .114503 .786281 .099216 -.003882 -.048116 1.051998",
    "deuteranopes": ".367322 .860646 -.227968 .280085 .672501 .047413 -.01182 .04294 .968881",
    "tritanopes": "1.255528 -.076749 -.178779 -.078411 .930809 .147602 .004733 .691367 .3039",
}
TO_XYZ = "0.4124564 0.3575761 0.1804375 0.2126729 0.7151522 0.072175 0.0193339 0.119192 0.9503041"


def matrix(numbers):
    return np.array(numbers.split(), float).reshape(3, 3)


def linear(color):
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def cielab(color, who):
    """CIELAB coordinates of a color as seen with this color vision."""
    xyz = matrix(TO_XYZ)
    t = xyz @ np.clip(matrix(SEEN_BY[who]) @ linear(color), 0, 1) / xyz.sum(1)
    x, y, z = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("who", SEEN_BY)
def test_colors_are_distinct_to_color_blind_readers(who, dark):
    """The smallest visible CIELAB distance of adjacent areas is 2.3; thin lines need more."""
    for (a, one), (b, other) in itertools.combinations(zip(MEANINGS, COLORS[dark]), 2):
        distance = np.linalg.norm(cielab(one, who) - cielab(other, who))
        assert distance > 15, f"{a} and {b} to {who}: {distance}"


def curves(axes):
    """[(x, y)] of the curves in a panel, without reference lines."""
    found = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    return [(x, y) for x, y in found if len(x) and not (len(y) == 2 and y[0] == y[1])]


def test_drawn_curves(tmp_path, drawn):
    """Losses and scores of one run; losses of two, against tokens because their steps differ."""
    run = write_log(tmp_path / "r", [*RUN, hella(200, 0.26), hella(400, 0.301)])
    plot.loss_curve([run], tmp_path / "pictures" / "loss.png")
    losses, scores, _ = drawn[0].axes
    assert curves(losses)[-1] == ([0, 200, 400], [5.6, 2.1, 1.7149])
    segment = scores.containers[0].lines[2][0].get_segments()[1][:, 1]
    assert segment == pytest.approx([0.301 - 1.96 * 0.0045, 0.301 + 1.96 * 0.0045])
    larger = [train(s, 3.0, 16384) for s in range(1, 101)]
    other = write_log(tmp_path / "s", [start(), *larger, val(100, 2.0)])
    plot.draw([run, other], tmp_path / "both.png")
    assert curves(drawn[1].axes[0])[-1] == ([100 * 16384], [2.0])


SPARSE_LOGS = {
    "no start": [train(1, 3.0), train(2, 2.0), val(2, 2.0)],
    "all not finite": [start(unigram=None), val(0, math.nan), train(1, math.inf), hella(1, 0.25)],
    "without tokens": [start(), *(dict(kind="train", step=s, time=0.0, loss=2.0) for s in (1, 2))],
}


def test_a_failing_loss_curve_does_not_end_a_run(tmp_path, capfd):
    run = write_log(tmp_path / "r", RUN)
    for folder, out in ((tmp_path / "none", "x.png"), (run, "x.odd"), (run, "r/log.jsonl/x.png")):
        plot.loss_curve([folder], tmp_path / out)
        # an error is printed, but not that a run has no measurements
        reported = "no loss curve: " in capfd.readouterr().err
        assert reported == (folder == run) and not (tmp_path / out).exists()


def test_more_than_five_runs_are_distinguished_by_line_style():
    looks = [
        tuple(look.values())
        for *_, look in plot.run_looks({str(n): {} for n in range(12)}, "loss", False)
    ]
    assert len(set(looks)) == 12 and {style for _, style in looks[:5]} == {"-"}


def test_the_default_file_has_the_whole_names_of_runs(tmp_path):
    """A stem of 0.1 would let the comparison with 0.2 overwrite the one with 0.3."""
    runs = [write_log(tmp_path / f"lr_0.{i}", RUN) for i in (1, 2)]
    plot.main(list(map(str, runs)))
    assert (runs[0] / "loss_with_lr_0.2.png").exists()


def test_twenty_runs_fit_into_the_file_name_and_the_legend(tmp_path, drawn):
    runs = [write_log(tmp_path / f"2026-11-28_{i:06}", RUN) for i in range(20)]
    plot.main(list(map(str, runs)))
    assert (runs[0] / "loss_with_19_others.png").exists()
    losses = drawn[0].axes[0]
    legend, panel = losses.get_legend().get_window_extent(), losses.get_window_extent()
    assert panel.y0 < legend.y0 and legend.y1 < panel.y1


def test_close_baselines_of_two_runs_share_one_line():
    logs = [{"start": [{"step": 0, "unigram": value}]} for value in (3.31, 3.30)]
    assert plot.loss_levels(logs) == {"unigram baselines 3.30 to 3.31": 3.30}
    assert plot.loss_levels(logs[:1] * 2) == {"unigram baseline 3.31": 3.31}
