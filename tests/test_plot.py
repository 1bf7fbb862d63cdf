"""The figure of a run: what is read from log.jsonl, what stands in it, and that it never ends a run."""

import json
import math
import os

import pytest
from conftest import ROOT, run_python

from lab.tools import plot


def write_log(folder, records, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return folder


def start(step=0, **more):
    return dict(kind="start", step=step, time=0.0, device="cpu", world_size=1, precision="fp32", num_params=1_878_336,
                log_v=math.log(257), unigram=3.348) | more  # fmt: skip


def val(step, loss):
    return dict(kind="val", step=step, time=0.0, loss=loss)


def train(step, loss, tokens_per_step=8192):
    return dict(kind="train", step=step, time=0.0, loss=loss, lr=1e-3, tok_per_s=9000.0, tokens=step * tokens_per_step)


def hella(step, acc_norm):
    return dict(kind="hella", step=step, time=0.0, acc=0.28, acc_norm=acc_norm, acc_norm_stderr=0.0045)


RUN = [start(), val(0, 5.6), *[train(s, 3.35 + 2 / s) for s in range(1, 401)], val(200, 2.1), val(400, 1.7149)]


class Figures:
    """Collects the figures that are saved, so that tests can look at what stands in them."""

    def __init__(self, monkeypatch):
        from matplotlib.figure import Figure

        self.all, save = [], Figure.savefig

        def savefig(figure, *args, **kwargs):
            self.all.append(figure)
            save(figure, *args, **kwargs)

        monkeypatch.setattr(Figure, "savefig", savefig)

    def texts(self, figure=-1):
        import matplotlib.text

        return [t.get_text() for t in self.all[figure].findobj(matplotlib.text.Text) if t.get_text()]

    def lines(self, panel=0, figure=-1):
        """{label: (x, y)} of the curves in a panel."""
        found = self.all[figure].axes[panel].lines
        return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in found}


@pytest.fixture
def figures(monkeypatch):
    return Figures(monkeypatch)


# ----------------------------------------------------------------------------------------------------- reading the log


def test_of_two_records_for_a_step_the_last_counts(tmp_path):
    log = plot.read_log(write_log(tmp_path, [start(), val(10, 3.0), val(20, 2.0), val(10, 2.5)]))
    assert plot.column(log, "val", "loss") == ([10, 20], [2.5, 2.0])


def test_a_resumed_run_drops_what_it_went_back_behind(tmp_path):
    """Stopped after step 30, resumed from the checkpoint of step 20, with another log_every."""
    before = [start(), *[train(s, 100 + s) for s in (5, 10, 15, 20, 25, 30)], val(20, 2.0), val(30, 9.0)]
    after = [start(20), *[train(s, s) for s in (24, 28)], val(28, 1.0)]
    log = plot.read_log(write_log(tmp_path, before + after))
    assert plot.column(log, "train", "loss") == ([5, 10, 15, 20, 24, 28], [105, 110, 115, 120, 24, 28])
    assert plot.column(log, "val", "loss") == ([20, 28], [2.0, 1.0])


def test_lines_cut_by_a_kill(tmp_path):
    """At the end of the file, and in its middle, where the record of the resumed run stands on the same line."""
    folder = write_log(tmp_path, [start(), val(10, 3.0)], tail='{"kind": "val", "ste')
    assert plot.column(plot.read_log(folder), "val", "loss") == ([10], [3.0])
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(start(10, unigram=1.5)) + "\n" + json.dumps(val(20, 2.0)) + "\n\x00\x00[1]\n")
    log = plot.read_log(folder)
    assert plot.column(log, "val", "loss") == ([10, 20], [3.0, 2.0])
    assert plot.column(log, "start", "unigram") == ([0, 10], [3.348, 1.5])


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    log = plot.read_log(write_log(tmp_path, [val(1, 3.0), val(2, math.nan), val(3, math.inf), val(4, None)]))
    assert plot.column(log, "val", "loss") == ([1], [3.0])


def test_smoothing():
    assert plot.smooth([5.0, 1.0, 3.0]) == [5.0, 1.0, 3.0]  # too few to smooth
    line = [0.5 * i for i in range(400)]
    assert plot.smooth(line) == pytest.approx(line)  # a straight line stays: no lag, no bend at the ends
    saw = [float(i % 2) for i in range(400)]
    assert all(abs(v - 0.5) < 0.1 for v in plot.smooth(saw)[5:-5])


# ----------------------------------------------------------------------------------------------------------- the figure


def test_what_stands_in_the_figure(tmp_path, figures):
    out = tmp_path / "pictures" / "loss.png"
    assert plot.loss_curve([write_log(tmp_path / "r", RUN)], out) == out
    assert out.read_bytes().startswith(b"\x89PNG")
    width, height = (int.from_bytes(out.read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert width == 1200 and 600 <= height <= 1200
    texts = figures.texts()
    assert "validation loss 1.71 after 400 steps: 1.63 nats under the unigram baseline" in texts
    for text in ("loss (nats per token)", "step", "tokens", "uniform guess, log V = 5.55", "unigram entropy, 3.35",
                 "training", "validation", "1.71", "1M", "1.88M parameters, cpu, fp32, median 9k tokens/s"):  # fmt: skip
        assert text in texts, text
    lines = figures.lines()
    assert lines["validation"] == ([0, 200, 400], [5.6, 2.1, 1.7149])
    assert lines["training"][0] == list(range(1, 401))
    levels = {round(y[0], 3) for _, y in lines.values() if len(y) == 2 and y[0] == y[1]}
    assert levels == {5.549, 3.348}
    assert [ax.get_ylabel() for ax in figures.all[-1].axes] == ["loss (nats per token)", "learning\nrate"]


def test_above_the_baseline_is_said(tmp_path, figures):
    plot.loss_curve([write_log(tmp_path, [start(), val(0, 5.6)])], tmp_path / "a.png")
    assert "validation loss 5.60 after 0 steps: 2.25 nats above the unigram baseline" in figures.texts()


def test_tokens_axis_follows_the_steps(tmp_path, figures):
    plot.loss_curve([write_log(tmp_path, RUN)], tmp_path / "a.png")
    (top,) = figures.all[-1].axes[0].child_axes
    low, high = figures.all[-1].axes[0].get_xlim()
    assert top.get_xlim() == pytest.approx((low * 8192, high * 8192))


def test_hellaswag_panel(tmp_path, figures):
    run = write_log(tmp_path / "r", [*RUN, hella(200, 0.26), hella(400, 0.301)])
    plot.loss_curve([run], tmp_path / "a.png")
    texts = figures.texts()
    assert "HellaSwag\nacc_norm" in texts and "GPT-2 124M 0.2955" in texts and "chance 0.25" in texts
    assert "GPT-2 1558M 0.4893" not in texts  # far above: it would press the curve flat
    (bars,) = figures.all[-1].axes[1].containers
    segments = bars.lines[2][0].get_segments()
    assert segments[1][:, 1] == pytest.approx([0.301 - 1.96 * 0.0045, 0.301 + 1.96 * 0.0045])
    run = write_log(tmp_path / "large", [*RUN, hella(400, 0.45)])
    plot.loss_curve([run], tmp_path / "a.png")
    assert "GPT-2 1558M 0.4893" in figures.texts()


def test_several_runs(tmp_path, figures):
    """Named after their folders; against tokens where their steps are of different size."""
    a, b = write_log(tmp_path / "a", RUN), write_log(tmp_path / "b", [*RUN[:-1], val(400, 1.9)])
    assert plot.loss_curve([a, b], tmp_path / "ab.png")
    assert "a ends at validation loss 1.71, 0.19 nats under b" in figures.texts() and "step" in figures.texts()
    assert figures.lines()["b"] == ([0, 200, 400], [5.6, 2.1, 1.9])
    c = write_log(tmp_path / "c", [start(), *[train(s, 3.0, 16384) for s in range(1, 5)], val(4, 2.0)])
    assert plot.loss_curve([a, c], tmp_path / "ac.png")
    assert "step" not in figures.texts()
    assert figures.lines()["c"][0] == [4 * 16384] and figures.lines()["a"][0] == [0, 200 * 8192, 400 * 8192]
    after = [start(4, tokens=4 * 8192), *[train(s, 2.0) | {"tokens": (s - 4) * 100 + 4 * 8192} for s in (6, 8)], val(7, 1.9)]
    d = write_log(tmp_path / "d", [start(), *[train(s, 3.0) for s in (2, 4)], val(3, 2.0), *after])
    plot.draw([d], tmp_path / "d.png")
    assert "tokens" in figures.texts() and "step" not in figures.texts()
    assert figures.lines()["validation"][0] == [3 * 8192, 4 * 8192 + 300], "resumed with smaller steps"


def test_dark_variant(tmp_path, figures):
    assert plot.loss_curve([write_log(tmp_path, RUN)], tmp_path / "x.png", dark=True)
    assert (tmp_path / "x.png").exists() and (tmp_path / "x_dark.png").exists()
    light, dark = (sum(f.get_facecolor()[:3]) for f in figures.all)
    assert light == 3 and dark < 0.5


def test_style_is_left_as_it_was(tmp_path):
    import matplotlib

    matplotlib.rcdefaults()
    before = dict(matplotlib.rcParams)
    plot.loss_curve([write_log(tmp_path, RUN)], tmp_path / "x.png", dark=True)
    assert dict(matplotlib.rcParams) == before


# --------------------------------------------------------------------------------------------------- never ends a run

SCANT = {
    "one validation": [start(), val(0, 5.6)],
    "one training step": [start(), train(1, 5.6)],
    "no start": [train(1, 3.0), train(2, 2.0), val(2, 2.0)],
    "start without numbers": [dict(kind="start", step=0), val(1, 3.0)],
    "only HellaSwag": [start(), hella(10, 0.25)],
    "HellaSwag without error": [start(), dict(kind="hella", step=1, acc_norm=0.3)],
    "all not finite": [start(), val(0, math.nan), train(1, math.inf)],
    "training without tokens": [start(), dict(kind="train", step=1, loss=2.0), dict(kind="train", step=2, loss=1.0)],
    "unigram unknown": [start(unigram=None), val(1, 2.0)],
    "foreign kinds": [start(), dict(kind="thought", step=3), val(1, 2.0), dict(kind="sample", step=1, texts=["a"])],
}


@pytest.mark.parametrize("name", SCANT)
def test_scant_logs_are_drawn(tmp_path, name, capfd):
    assert plot.loss_curve([write_log(tmp_path, SCANT[name])], tmp_path / "loss.png"), capfd.readouterr().err
    assert (tmp_path / "loss.png").stat().st_size > 5000
    out, err = capfd.readouterr()
    assert out == err == ""


@pytest.mark.parametrize("records", [None, [], [start()]], ids=["no log", "empty log", "only start"])
def test_what_cannot_be_drawn_is_said(tmp_path, records, capfd):
    if records is not None:
        write_log(tmp_path, records)
    assert plot.loss_curve([tmp_path], tmp_path / "loss.png") is None
    assert plot.loss_curve([tmp_path], tmp_path / "loss.strange") is None
    assert capfd.readouterr().err.count("no loss curve: ") == 2
    assert not (tmp_path / "loss.png").exists()


def test_an_unwritable_place_is_said(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert plot.loss_curve([write_log(tmp_path, RUN)], tmp_path / "file" / "loss.png") is None
    assert "no loss curve: " in capfd.readouterr().err


def test_a_real_run_draws_its_curve(tmp_path, run_train, figures):
    done = run_train("--max_steps", 6, "--val_every", 3)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log/r/loss.png").stat().st_size > 20_000
    assert "no loss curve" not in done.stderr
    assert plot.loss_curve([tmp_path / "log/r"], tmp_path / "again.png")
    assert figures.lines()["validation"][0] == [0, 3, 6] and figures.lines()["training"][0] == [1, 2, 3, 4, 5, 6]
    assert "uniform guess, log V = 5.55" in figures.texts()


def test_command(tmp_path):
    write_log(tmp_path / "log/r", RUN)
    done = run_python(ROOT / "lab", "plot", "log/r", "--dark", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines() == ["log/r/loss.png", "log/r/loss_dark.png"], done.stderr
    write_log(tmp_path / "log/s", RUN)
    done = run_python(ROOT / "lab", "plot", "log/r", "log/s", cwd=tmp_path)
    assert done.stdout == "log/r/loss_with_s.png\n", "the picture that training made stays"
    (tmp_path / "noise.jsonl").write_bytes(os.urandom(300))
    for args, message in [(["log/none"], "log/none"), ([], "name at least one"), (["noise.jsonl"], "no log of training"),
                          (["log/r", "log/../log/r"], "a run was named twice"), (["log/r", "--out", "x.abc"], "abc"),
                          (["log/r", "--out", "x"], "error: out=x must end in .png, .svg or .pdf"),
                          (["log/r", "--out", "log/r/log.jsonl/x.png"], "x.png cannot be written (File exists); name")]:
        done = run_python(ROOT / "lab", "plot", *args, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, args
    assert "--out" in run_python(ROOT / "lab", "plot", "--help", cwd=tmp_path).stdout
