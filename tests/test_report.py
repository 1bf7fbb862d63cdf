"""lab report: numbers, curves, comparison of two runs; the page loads nothing and runs no logged text."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from conftest import ROOT, run_python
from test_plot import CURVE, RUN, SPARSE_LOGS, hella, start, train, val, write_log

from lab.cli import UserError
from lab.tools import plot, report

pytest.importorskip("plotly", reason="needs requirements.txt")
EVIL = "</pre></script><script>document.title = 'run'</script><img src=x onerror=alert(1)>"
MODEL, TRAIN = dict(n_layer=2), dict(lr=1e-3, grad_clip=1.0, sample_prompt="The ")
VOID = ("meta", "input", "br")


def write_run(folder, lines, **changed):
    """Create a run directory with a log and a config.json."""
    write_log(folder, lines)
    (folder / "config.json").write_text(json.dumps({"model": MODEL, "train": TRAIN | changed}))
    return folder


def sample(step, *texts):
    return dict(kind="sample", step=step, time=0.0, texts=list(texts))


def timed(lines, t0=1000.0, per_step=2.0):
    """The records with times, `per_step` seconds per step."""
    return [r | {"time": t0 + per_step * r["step"]} for r in lines]


class Page(HTMLParser):
    """A page as a browser parses it: elements, visible text, figures."""

    def __init__(self, *folders):
        super().__init__()
        self.tags, self.seen, self.code, self.inside = [], [], [], []
        names = report.read_log.run_names(folders)
        self.text = report.page(list(map(report.read_run, folders, names)))
        self.feed(self.text)
        assert not self.inside, "elements left open"
        self.seen = re.sub(r"\s+", " ", " ".join(self.seen))
        self.data = json.loads(next(c for c in self.code if c.startswith("{")))
        self.figures = self.data["figures"]

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.inside.append(tag)

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        inside = self.inside[-1] if self.inside else ""
        (self.code if inside in ("script", "style") else self.seen).append(data)

    def curve(self, id, name):
        """(steps, values) of a curve; of the smoothed one if there are both."""
        found = [curve for curve in self.figures[id]["curves"] if curve["name"] == name]
        return found[-1]["positions"]["step"], found[-1]["y"]

    def shows(self, *texts):
        assert [text for text in texts if text not in self.seen] == [], self.seen


def test_contents_of_the_page(tmp_path):
    lines = timed([*RUN, hella(400, 0.301), sample(200, "The tac"), sample(400, "The cat sat")])
    page = Page(write_run(tmp_path / "r", lines))
    page.shows(
        "Validation loss 1.71 at step 400: 1.63 nats below the unigram baseline",
        "at step 400, still running or killed", "validation loss 1.7149 step 400",
        "HellaSwag acc_norm 0.3010 ± 0.0088, step 400", "tokens 3,276,800", "n_layer 2",
        "total minutes 13.33 with evaluation and saving", "tokens/s, median 9,000",
        "after 200 steps The tac after 400 steps The cat sat",
    )  # fmt: skip
    assert page.curve("loss", "validation") == ([0, 200, 400], [5.6, 2.1, 1.7149])
    losses = page.figures["loss"]
    positions = dict(
        step=[0, 200, 400], tokens=[0, 200 * 8192, 400 * 8192], time=[0, 6.6667, 13.3333]
    )
    assert losses["curves"][-1]["positions"] == positions
    end = dict(kind="end", step=500, time=9e9, reason="done")
    done = Page(write_run(tmp_path / "r", [*RUN, val(500, 1.8), end]))
    done.shows(", finished", "best validation loss 1.7149 step 400")
    # the clock was set back during the run
    set_back = [RUN[0] | {"time": 9.1e9}, *RUN[1:], val(500, 1.8), end]
    Page(write_run(tmp_path / "r", set_back)).shows(", finished")
    again = write_run(tmp_path / "r", [*RUN, val(500, 1.8), end, start(500, time=9.1e9)])
    Page(again).shows("still running or killed")


def blimp(step, acc, **phenomena):
    return dict(kind="blimp", step=step, time=0.0, acc=acc, acc_stderr=0.01) | phenomena


def test_blimp_by_phenomenon(tmp_path, drawn):
    """In the page and in the plot, against tokens; with two runs only the total."""
    lines = [blimp(0, 0.5, binding=0.45, npi_licensing=0.2), blimp(400, 0.6, binding=0.7)]
    run = write_run(tmp_path / "r", timed([*RUN, *lines]))
    page = Page(run)
    page.shows("BLiMP accuracy 0.6000 ± 0.0196, step 400")
    assert page.curve("blimp", "accuracy") == ([0, 400], [0.5, 0.6])
    assert page.figures["blimp"]["levels"] == {
        "guessing 0.5": 0.5,
        "n-gram 0.612": 0.6124,
        "LSTM 0.698": 0.6981,
    }
    curves = {curve["name"]: curve for curve in page.figures["phenomena"]["curves"]}
    assert curves.keys() == {"binding", "NPI licensing"}
    assert curves["binding"]["y"] == [0.45, 0.7]
    assert curves["binding"]["positions"]["tokens"] == [0, 400 * 8192]
    plot.draw([run], tmp_path / "x.png")
    *_, cells, _ = drawn[0].axes
    assert [text.get_text() for text in cells.get_yticklabels()] == ["binding", "NPI licensing"]
    assert cells.collections[0].get_array().filled(-1).tolist() == [[0.45, 0.7], [0.2, -1]]
    assert drawn[0].axes[-1].get_xlabel() == "tokens"
    both = Page(run, write_run(tmp_path / "s", timed([*RUN, *lines])))
    assert "blimp" in both.figures and "phenomena" not in both.figures
    plot.draw([run, tmp_path / "s"], tmp_path / "x.png")
    assert len(drawn[1].axes) == len(drawn[0].axes) - 1


def shaded(step, *texts):
    """A samples record with the probabilities of the first text's tokens."""
    likeliest = [[1, '"c"', 0.5], [2, '"d"', 0.25]]
    tokens = [dict(text=t, name=f'"{t}"', p=0.5, likeliest=likeliest) for t in texts]
    return sample(step, "The " + "".join(texts)) | {"shaded": ["The ", tokens]}


def test_tokens_of_each_steps_first_sample_are_shaded_by_probability(tmp_path):
    lines = [sample(100, "The old"), shaded(200, "x", " "), shaded(400, "c", "at", EVIL)]
    lines[-1]["texts"].append("Another")
    page = Page(write_run(tmp_path / "a", [*RUN, *lines]))
    assert [a["style"] for _, a in page.tags if a.get("class") == "t"] == ["--s:0.100"] * 5
    box = "“{}”: model 50.0 %, 1.0 bits of surprise c{} 50.0 % d 25.0 %"
    page.shows(
        EVIL, "after 100 steps The old after 200 steps",
        f"after 200 steps The x {box.format('x', '')} {box.format('␣', '')}",
        f"after 400 steps The c {box.format('c', ' ✓')} at {box.format('at', '')}",
        "1.0 bits of surprise c 50.0 % d 25.0 % Another", "expected surprising",
    )  # fmt: skip
    assert [tag for tag, _ in page.tags].count("pre") == 2  # the texts without probabilities


def test_verdict_and_dots_of_the_validation_loss(tmp_path):
    """The sentence that the run prints at its end, with its command as code; sparse losses have dots."""
    lines = [start(unigram=2.0), *RUN[1:]]
    page = Page(write_run(tmp_path / "a", lines, data="data/builtin"))
    assert "<code>make train</code> reaches about 1.31 nats per byte" in page.text
    page.shows("The validation loss after step 400, 1.7149, is a start (below the unigram")
    page.shows("Dots: validation; the dotted line only connects them.")
    looks = [(c["name"], c["dots"], c["dash"]) for c in page.figures["loss"]["curves"]]
    assert looks[-2:] == [("training", False, "solid"), ("validation", True, "dot")]
    page.shows("choose “all steps” to see them", "after the start")
    short = Page(write_run(tmp_path / "d", [*RUN[:9], val(8, 2.0)]))  # the axis shows all
    assert short.figures["loss"]["range"] is None and "all steps" in short.seen
    assert "after the start" not in short.seen and "“all steps”" not in short.seen
    tuned = [start(), val(0, 3.36), *CURVE[40:]]  # step 0 is within the axis
    folder = write_run(tmp_path / "e", tuned)
    assert "leaves out" not in (page := Page(folder)).seen and page.figures["loss"]["range"]
    for loss, word in ((2.0, "low"), (4.0, "high")):
        page = Page(write_run(folder, [*tuned, val(0, loss)]))
        page.shows(f"The axis leaves out the {word} losses of the first steps")
    dense = Page(write_run(tmp_path / "b", [*RUN, *[val(401 + s, 2.0) for s in range(60)]]))
    dense.shows("Thick line: validation.")
    assert dense.figures["loss"]["curves"][-1]["dash"] == "solid"
    assert (
        'class="verdict"'
        not in Page(write_run(tmp_path / "c", [start(unigram=None), *RUN[1:]])).text
    )


def test_time_between_a_stop_and_resume_is_not_counted(tmp_path):
    """Killed after step 30, resumed a day later from the checkpoint of step 20."""
    before = timed([start(), *[train(s, 3.0) for s in (10, 20, 30)], val(20, 2.0)])
    after = timed([start(20), *[train(s, 2.0) for s in (30, 40)], val(40, 1.0)], t0=1e6)
    page = Page(write_run(tmp_path, before + after))
    positions = page.figures["loss"]["curves"][0]["positions"]
    assert positions["step"] == [10, 20, 30, 40]
    assert positions["time"] == [0.3333, 0.6667, 1.0, 1.3333]
    page.shows("resumed at step 20")


def test_two_programs_with_equal_settings_are_named(tmp_path):
    for name, code in (("a", "12345678"), ("b", "abcdefgh")):
        config = json.loads((write_run(tmp_path / name, RUN) / "config.json").read_text())
        config["program"] = {"trainer": f"{name}.py:Trainer", "code": code * 8}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    page = Page(tmp_path / "a", tmp_path / "b")
    page.shows("program a b file a.py b.py hash of the model's code 12345678 abcdefgh")


def test_a_log_alone_and_a_damaged_configuration(tmp_path):
    """A copied log, like those in readme.assets/runs, is shown under its file's name."""
    log = write_log(tmp_path, [*RUN, sample(400, "alone")]) / "log.jsonl"
    page = Page(log.rename(tmp_path / "kept.jsonl"))
    page.shows("no config.json for the log of kept", "alone")
    run = write_run(tmp_path / "r", RUN)
    # the config.json beside a log.jsonl belongs to it
    assert report.read_run(run / "log.jsonl", "r").train == TRAIN
    (run / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is damaged"):
        report.read_run(run, "r")


@pytest.mark.parametrize("name", SPARSE_LOGS)
def test_sparse_logs_make_a_page_and_a_figure(tmp_path, name, capfd):
    a, b = (write_log(tmp_path / run, SPARSE_LOGS[name]) for run in "ab")
    for folders in ([a], [a, b]):
        curves = [c for figure in Page(*folders).figures.values() for c in figure["curves"]]
        assert curves and all(math.isfinite(v) for curve in curves for v in curve["y"])
    plot.draw([a], tmp_path / "loss.png")
    assert capfd.readouterr() == ("", "")


def test_the_page_fetches_nothing(tmp_path):
    page = Page(write_run(tmp_path, [*RUN, sample(400, EVIL)]))
    foreign = {"link", "iframe", "object", "embed", "base", "img", "source", "video", "form"}
    assert not {tag for tag, _ in page.tags} & foreign
    for tag, attributes in page.tags:
        if attributes.get("href", "").startswith("#"):
            continue  # a link within the page
        assert not attributes.keys() & {"src", "href", "srcset", "action", "data", "poster"}, tag
    (rules,) = [a["content"] for _, a in page.tags if "http-equiv" in a]
    assert rules.startswith("default-src 'none';") and "http" not in rules
    nonces = [a["nonce"] for tag, a in page.tags if tag == "script" and "type" not in a]
    assert len(nonces) == 1 and f"'nonce-{nonces[0]}'" in rules
    assert nonces[0] not in Page(write_run(tmp_path, RUN)).text, "each page has a new one"


def test_text_from_a_log_is_never_code(tmp_path):
    lines = [start(device=EVIL, torch=EVIL), *RUN[1:], sample(400, EVIL, "The " + EVIL)]
    lines += [dict(kind="end", step=400, time=0.0, reason=EVIL)]
    lines += [train(402, 2.0) | {f"{EVIL}_ms": 3.0}]  # a phase's name
    folder = write_run(tmp_path / "<b>&amp;'", lines, data=EVIL)
    other = write_run(tmp_path / "other", RUN)
    for page in (Page(folder), Page(folder, other)):
        assert page.seen.count(EVIL) >= 5 and "onerror" not in str(page.tags)
        assert f"{EVIL}, ms per step, median" in page.seen
        assert sum(tag == "script" for tag, _ in page.tags) == 3 and "<b>&amp;'" in page.seen


def test_two_runs(tmp_path):
    lines = [start(device="cuda"), val(0, 5.6), val(200, 2.5), val(400, 1.5)]
    lines += [train(s, 3.0 + 2 / s) for s in range(2, 401, 2)]
    a = write_run(tmp_path / "a", [*RUN, sample(0, "?"), sample(400, "The one")])
    lines += [sample(0, "?"), sample(200, "two")]
    page = Page(a, write_run(tmp_path / "b", lines, lr=2e-3))
    # the slider's position: the last step, because the only common one is before training
    assert [a["value"] for _, a in page.tags if a.get("id") == "step"] == ["2"]
    assert page.curve("loss", "b, validation") == ([0, 200, 400], [5.6, 2.5, 1.5])
    steps, gaps = page.curve("difference", "validation")
    assert steps == [0, 200, 400] and gaps == pytest.approx([0, 0.4, -0.2149])
    page.shows(
        "b has validation loss 1.50 at 3.28M tokens, 0.21 nats below a",
        "These are single runs",
        "validation loss 1.7149 step 400 1.5000 step 400 -0.2149",
        "after 200 steps a (last sample so far: after 0 steps) The weights are random",
        "b two after 400 steps a The one b (last sample so far: after 200 steps) two",
    )  # fmt: skip


def test_runs_of_different_length(tmp_path):
    b = write_run(
        tmp_path / "b", [start(), val(0, 5.6), *(train(s, 4.0) for s in (2, 40)), val(40, 3.5)]
    )
    Page(write_run(tmp_path / "a", RUN), b).shows(
        "At their ends, the validation losses are 1.7149 after step 400 and 3.5000 after step 40.",
        "validation loss 1.7149 step 400 3.5000 step 40 at other steps",
    )
    page = Page(tmp_path / "a", write_run(tmp_path / "c", [start(), val(0, 5.6)]))
    page.shows("the runs can only be compared at step 0, before training")
    assert "The headline compares" not in page.seen
    page = Page(tmp_path / "a", write_run(tmp_path / "d", [start(), val(401, 1.8)]))
    page.shows("the runs have no measured step in common")
    assert "The headline compares" not in page.seen


def test_losses_of_different_tokenizers_are_not_compared(tmp_path):
    """The page warns, subtracts no losses, and draws bits per byte if they were logged."""
    words = [val(s, 6.0) | {"bits_per_byte": 2.0} for s in (0, 400)]
    b = write_log(tmp_path / "b", [start(log_v=math.log(50257)), *words, train(400, 6.0)])
    page = Page(write_run(tmp_path / "a", [*RUN, val(401, 1.7) | {"bits_per_byte": 2.5}]), b)
    page.shows("different tokenizers (257 and 50,257 ids)")
    page.shows("Bits per byte: the loss in bits per byte of text, comparable between tokenizers.")
    assert "nats below" not in page.seen and "difference" not in page.figures


@pytest.mark.parametrize("other", ["data", "val_tokens", "objective"])
def test_losses_on_different_data_or_of_different_objectives_are_not_compared(tmp_path, other):
    """The title lists them, and nothing subtracts them, nor the bits per byte."""
    first, second = (val(400, loss) | {"bits_per_byte": loss} for loss in (1.31, 2.79))
    if other == "objective":
        second["accuracy"] = 0.3
    b = [start(val_tokens=2 if other == "val_tokens" else 1), train(400, 2.9), second]
    b = write_run(tmp_path / "b", b, data="b" if other == "data" else "a")
    a = [start(val_tokens=1), train(400, 1.2), first]
    page = Page(write_run(tmp_path / "a", a, data="a"), b)
    differs = "with different objectives" if other == "objective" else "on different data"
    page.shows(
        f"Two runs {differs}: validation loss 1.31 and 2.79 a",
        "validation loss 1.3100 step 400 2.7900 step 400 bits per byte",
        "bits per byte 1.3100 step 400 2.7900 step 400 training loss",
        "training loss 1.2000 step 400 2.9000 step 400 steps",
    )
    assert "nats below" not in page.seen and "difference" not in page.figures
    unmeasured = write_run(tmp_path / "c", [start(val_tokens=3), train(400, 2.9)], data="c")
    Page(tmp_path / "a", unmeasured).shows("Two runs on different data a")


def test_watch_updates_the_page_until_the_run_ends(tmp_path, monkeypatch, capsys):
    run, seen = write_run(tmp_path / "r", RUN), []

    def sleep(seconds):
        seen.append((run / "report.html").read_text())
        more = [dict(kind="end", step=600, time=9e9, reason="done") if seen[1:] else val(600, 1.5)]
        with (run / "log.jsonl").open("a") as file:
            file.write("".join(json.dumps(r) + "\n" for r in more))

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(run), "--watch"])
    pages = [*seen, (run / "report.html").read_text()]
    losses = [re.search(r"<h1>(.*?)[:,]", page)[1] for page in pages]
    assert losses == ["Validation loss 1.71 at step 400", *["Validation loss 1.50 at step 600"] * 2]
    assert ['"renew": 10' in page for page in pages] == [True, True, False]
    assert "updated until the run ends" in capsys.readouterr().out


def test_links_lead_to_each_section_and_the_command_is_shown(tmp_path):
    lines = [start(command="python train_gpt2.py --lr 1e-3 --data 'my data'"), *RUN[1:]]
    a = write_run(tmp_path / "a", [*lines, sample(400, "x")])
    for page in (Page(a), Page(a, write_run(tmp_path / "b", RUN))):
        page.shows("python train_gpt2.py --lr 1e-3 --data 'my data'")
        ids = {attributes.get("id") for _, attributes in page.tags}
        links = [a["href"][1:] for tag, a in page.tags if tag == "a"]
        assert {"figure-loss", "samples", "figure-lr", "settings"} <= {*links} <= ids
        assert len(page.text) < 2_200_000, "plotly is compressed"


def test_a_run_that_died_of_nan_says_so_and_how_to_go_on(tmp_path, run_train, monkeypatch):
    """The sentence of the terminal, the spike and the command that replays it. A step is checked while the
    next one runs, so there is one more."""
    done = run_train("--lr", "1e30", "--grad_clip", 0, "--max_steps", 30, "--val_every", 10)
    error = done.stderr.partition("error: ")[2].strip()
    assert done.returncode == 1 and "try a lower --lr" in error
    monkeypatch.chdir(tmp_path)
    records = [json.loads(line) for line in open("log/r/log.jsonl")]
    end = dict(kind="end", step=3, time=0, reason="error", error=error, failed_step=2)
    assert records[-1] | {"time": 0} == end
    page = Page(report.Path("log/r"))
    shown = re.sub(r"(--\w+) ?", r"\1 ", f"Error: {error}.")  # a flag is an element of its own
    page.shows(
        "Stopped: the loss is nan at step 2 r",
        "stopped by an error at step 2",
        "steps 2 tokens",
        shown,
        "Gradient spike at step 2: norm not finite, median of the steps before",
        "To repeat that step: python -m lab replay log/r/spike_000002.json",
    )
    assert "still running" not in page.seen
    replayed = run_python(ROOT / "lab", "replay", "log/r/spike_000002.json", cwd=tmp_path)
    assert replayed.returncode == 0 and "nan" in replayed.stdout
    assert not report.write_page([report.Path("log/r")], tmp_path / "r.html", watch=True)
    # two runs: the headline also compares them
    both = Page(report.Path("log/r"), write_run(tmp_path / "b", RUN))
    both.shows(
        "r stopped: the loss is nan at step 2; the runs can only be compared at step 0, before training r",
        shown,
    )


def test_errors_in_logs_without_measurements_and_of_older_versions(tmp_path):
    """Without an end record, a spike that is not finite tells that the run stopped."""
    end = dict(
        kind="end", step=1, time=1.0, reason="error", error="CUDA is out of memory; try less"
    )
    page = Page(write_run(tmp_path / "a", [start(), end]))
    page.shows("Stopped: CUDA is out of memory a", "Error: CUDA is out of memory; try less.")
    page.shows("stopped by an error after step 1")
    assert page.figures == {} and "x axis" not in page.seen
    failed = end | {"step": 401, "failed_step": 400}
    for change in (
        {},
        {"failed_step": None, "error": "the loss is nan at step 400 (sequences at x:5)"},
    ):
        page = Page(write_run(tmp_path / "e", [*RUN, failed | change]))
        page.shows("stopped by an error at step 400", "steps 400 tokens")
    for wrong in (402, -1, 1e300, "two"):
        page = Page(write_run(tmp_path / "e", [*RUN, failed | {"failed_step": wrong}]))
        page.shows("stopped by an error after step 401")
    spike = dict(
        kind="spike", step=401, time=0.0, norm=None, usual=0.5, skipped=False, file="x.json"
    )
    stopped = "Stopped: the gradient norm is not finite at step 401"
    page = Page(write_run(tmp_path / "b", [*RUN, spike]))
    page.shows(stopped, "median of the steps before 0.5 ", "--warmup_steps .")
    assert "lab replay" not in page.seen, "there is no spike file"
    for more in ([start(401, time=1.0)], [spike | {"skipped": True}], [spike | {"norm": 90.0}]):
        page = Page(write_run(tmp_path / "c", [*RUN, spike, *more]))
        assert "Stopped" not in page.seen
        page.shows("still running or killed")
    page.shows("Gradient spike at step 401: norm 90, median of the steps before 0.5")
    many = [spike | {"step": 401 + i, "norm": 90.0} for i in range(7)]
    Page(write_run(tmp_path / "d", [*RUN, *many])).shows(
        "norm 90, median of the steps before 0.5 2 earlier gradient spikes: see log.jsonl"
    )


def test_a_run_without_measurements_that_has_ended_is_not_waited_for(tmp_path):
    end = dict(kind="end", step=0, time=1.0)
    for records, message in (
        ([], "has no measurement; wait for the first one, or choose another run"),
        ([end | {"reason": "SIGINT"}], ": the run was stopped by SIGINT before its first meas"),
        (
            [end | {"reason": "done"}],
            ": the run ended before its first measurement; choose another",
        ),
    ):
        with pytest.raises(UserError, match=message):
            Page(write_run(tmp_path / "r", [start(), *records]))


def test_each_resume_is_shown_with_its_command_and_what_it_changed(tmp_path, run_train):
    for flags in (["--max_steps", 4], ["--resume", "--max_steps", 8, "--lr", 0.5], ["--resume"]):
        more = ["--max_steps", 9] if flags == ["--resume"] else []
        done = run_train(*flags, *more)
        assert done.returncode == 0, done.stderr
    page = Page(tmp_path / "log/r")
    assert page.seen.count("python train_gpt2.py") == 3
    page.shows(
        "resumed at step 4: python train_gpt2.py --resume --max_steps 8 --lr 0.5 resumed at step 8:",
        "Changed when the run was resumed at step 4: max_steps from 4 to 8, lr from 0.001 to 0.5.",
        "Changed when the run was resumed at step 8: max_steps from 8 to 9.",
        "The table has the final values.",
        "max_steps 9",
    )
    old = [*RUN, start(400, command="python train_gpt2.py --resume")]
    old += [
        start(400 + i, changed={}, command=f"python train_gpt2.py --resume {i}") for i in (1, 2)
    ]
    page = Page(write_run(tmp_path / "old", old))
    page.shows("resumed at step 400: not logged.", "resumed at step 402: no setting.")
    assert "more commands" not in page.seen
    old += [start(402 + i, changed={"lr": 1}, command="again") for i in (1, 2)]  # a damaged record
    Page(write_run(tmp_path / "old", [RUN[0] | {"command": "c"}, *old[1:]])).shows(
        "3 more commands that resumed the run", "resumed at step 404: not logged."
    )


def test_the_text_about_the_loss_names_only_what_is_drawn(tmp_path):
    vals = [val(0, 5.6), val(200, 2.1)]
    cases = {
        "Dot: validation. No training loss was logged.": [vals[0]],
        "Small dot: training.": [train(1, 5.0)],
        "Large dot: validation. Small dot: training.": [vals[0], train(1, 5.0)],
        "only connects them. Thin line: training. The axis": [*vals, *CURVE[:79]],
        "Thin line: training, smoothed; the faint line shows the raw values. The axis": RUN[1:],
    }
    for i, (text, lines) in enumerate(cases.items()):
        page = Page(write_run(tmp_path / f"{i}", [start(), *lines]))
        page.shows(text)
        assert ("faint" in page.seen) == ("faint" in text)
    Page(tmp_path / "3", tmp_path / "4").shows("smoothed where a faint line shows the raw values.")
    norms = [record | {"grad_norm": 1.0} for record in CURVE]
    Page(write_run(tmp_path / "n", [start(), *norms])).shows(
        "The faint line shows the raw values, the other one is smoothed."
    )


def test_the_text_about_the_learning_rate_names_the_other_optimizers_rate(tmp_path):
    rule = "determined by the settings lr, warmup_steps and schedule."
    adamw = Page(write_run(tmp_path / "a", RUN, optimizer="adamw", muon_lr=0.02))
    adamw.shows(f"The learning rate, {rule}")
    assert "Muon" not in adamw.seen
    muon = "are trained by Muon, whose learning rate follows the same curve up to muon_lr = 0.02."
    b = write_run(tmp_path / "b", RUN, optimizer="muon", muon_lr=0.02)
    Page(b).shows(f"AdamW's learning rate, {rule}", muon)
    Page(tmp_path / "a", b).shows(f"a: The learning rate, {rule} b: AdamW's learning rate, {rule}")
    c = write_run(tmp_path / "c", RUN, optimizer="normuon", muon_lr=0.02, embed_lr=0.3)
    embeddings = "That of the embeddings goes up to embed_lr = 0.3."
    Page(c).shows("AdamW's learning rate of the output layer, ", f"{muon} {embeddings}")


def test_samples_of_random_weights_have_a_remark(tmp_path):
    remark = "The weights are random before the first step, so this text is too."
    invalid = f"{remark} � stands for bytes that are not valid UTF-8"
    lines = [*RUN, sample(0, "q�"), sample(200, "�")]
    page = Page(write_run(tmp_path / "a", lines))
    page.shows(f"after 0 steps {invalid}")
    assert page.seen.count(remark) == 1
    assert "UTF-8" not in Page(write_run(tmp_path / "b", [*RUN, sample(0, "q")])).seen
    assert remark not in Page(write_run(tmp_path / "c", lines, init_from="gpt2")).seen
    log = write_log(tmp_path / "d", lines)
    Page(log).shows(invalid)  # without config.json: by the loss at step 0
    assert remark not in Page(write_log(log, [start(), val(0, 3.0), *lines[2:]])).seen


def test_values_of_the_log_have_names(tmp_path):
    page = Page(write_run(tmp_path / "a", RUN))
    page.shows("uniform guess (nats) 5.54908 unigram baseline (nats) 3.348")
    assert "log_v" not in page.seen
    (details,) = [attributes for tag, attributes in page.tags if tag == "details"]
    assert "open" in details, "the link to the settings leads to open ones"


def test_missing_values_are_a_dash(tmp_path):
    """Values missing in one of two runs, null, and NaN in an older log."""
    a = [start(unigram=None), *RUN[1:], hella(400, 0.301)]
    a = write_run(tmp_path / "a", a, seed=None, betas=[0.9, None], stop=[])
    older = [start(unigram=math.nan), val(400, 1.5), val(401, math.nan), train(400, 2.0)]
    page = Page(a, write_run(tmp_path / "b", older, seed=5))
    page.shows("seed – 5", "validation loss 1.7149 step 400 1.5000 step 400 -0.2149")
    page.shows("HellaSwag acc_norm 0.3010 ± 0.0088, step 400 –", "betas 0.9, – –", "stop – –")
    assert "null" not in page.seen and "NaN" not in page.seen and "unigram" not in page.seen


def test_numbers_of_the_settings_are_short():
    texts = {5.54907608489522: "5.54908", 1e-8: "1e-08", 0.0: "0.0", 131072: "131072"}
    assert {value: report.setting_text(value) for value in texts} == texts
    assert report.setting_text([0.1 + 0.2, float("nan"), True, None]) == "0.3, NaN, true, –"
