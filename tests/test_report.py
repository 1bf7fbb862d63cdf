"""The page of a run: its numbers and curves, the difference of two runs, nothing fetched, nothing from a log run as code."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT, run_python
from test_plot import RUN, SCANT, hella, start, train, val, write_log

from lab.tools import report

pytest.importorskip("plotly", reason="needs requirements.txt")
EVIL = "</pre></script><script>document.title = 'run'</script><img src=x onerror=alert(1)>"
CONFIG = {"model": {"n_layer": 2, "vocab_size": 257}, "train": {"lr": 1e-3, "grad_clip": 1.0, "sample_prompt": "The "}}


def write_run(folder, records, **changed):
    """A run folder with a log and a configuration."""
    write_log(folder, records)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"train": CONFIG["train"] | changed}))
    return folder


def sample(step, *texts):
    return dict(kind="sample", step=step, time=0.0, texts=list(texts))


def timed(records, t0=1000.0, per_step=2.0):
    """The records with times, `per_step` seconds to a step."""
    return [r | {"time": t0 + per_step * r["step"]} for r in records]


class Page(HTMLParser):
    """A page as a browser would take it apart: elements, the text that is seen, scripts."""

    def __init__(self, *folders):
        super().__init__()
        self.tags, self.seen, self.scripts, self.inside = [], [], [], []
        self.text = report.page([report.read_run(folder) for folder in folders])
        self.feed(self.text)
        assert not [tag for tag in self.inside if tag not in ("meta", "input", "br")], "elements left open"
        self.seen = re.sub(r"\s+", " ", " ".join(self.seen))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.scripts.append([dict(attributes), ""])
        if tag not in ("meta", "input"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.inside and self.inside[-1] in ("script", "style"):
            self.scripts[-1][1] += data
        else:
            self.seen.append(data)

    def data(self):
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("type") == "application/json")

    def panel(self, id):
        return next((p for p in self.data()["panels"] if p["id"] == id), None)

    def curve(self, id, name, run=0):
        """(steps, values) of a curve; of the smoothed one where there are both."""
        found = [t for t in self.panel(id)["traces"] if t["name"] == name and t["run"] == run]
        return found[-1]["step"], found[-1]["y"]


# ------------------------------------------------------------------------------------------------------------- one run


def test_what_stands_on_the_page(tmp_path):
    page = Page(write_run(tmp_path / "r", [*timed(RUN), *timed([hella(400, 0.301), sample(400, "The cat sat")])]))
    for text in ("Validation loss 1.71 after 400 steps: 1.63 nats under the unigram baseline", "still running, or killed",
                 "validation loss 1.7149 step 400", "HellaSwag acc_norm 0.3010 ± 0.0088, step 400", "tokens 3,276,800",
                 "seconds in all 800.0 0:13:20, with evaluation and saving", "tokens/s, median 9,000",
                 "The cat sat", "n_layer 2", "grad_clip 1.0"):  # fmt: skip
        assert text in page.seen, text
    assert page.curve("loss", "validation") == ([0, 200, 400], [5.6, 2.1, 1.7149])
    steps, raw = page.panel("loss")["traces"][0]["step"], page.panel("loss")["traces"][0]["y"]
    assert steps == list(range(1, 401)) and raw[0] == 5.35 and len(page.panel("loss")["traces"]) == 3
    assert set(page.panel("loss")["levels"]) == {"uniform guess, log V = 5.55", "unigram entropy, 3.35"}
    assert page.panel("hellaswag")["traces"][0]["error"] == [pytest.approx(1.96 * 0.0045, abs=1e-5)]
    assert {"chance 0.25", "GPT-2 124M 0.2955"} == set(page.panel("hellaswag")["levels"])
    assert [p["id"] for p in page.data()["panels"]] == ["loss", "hellaswag", "lr", "speed"]
    drawn = [attributes["id"] for tag, attributes in page.tags if attributes.get("class") == "plot"]
    assert drawn == [p["id"] for p in page.data()["panels"]]
    assert "no config.json" not in page.seen
    done = Page(write_run(tmp_path / "r", [*RUN, dict(kind="end", step=400, reason="done")]))
    assert ", finished" in done.seen and "still running" not in done.seen
    assert "best validation loss" not in done.seen
    assert "best validation loss 1.7149 step 400" in Page(write_run(tmp_path / "r", [*RUN, val(500, 1.8)])).seen


def test_steps_tokens_and_seconds(tmp_path):
    page = Page(write_run(tmp_path, timed(RUN)))
    assert page.data()["axes"] == {"step": "steps", "tokens": "tokens", "seconds": "seconds"}
    assert page.panel("loss")["traces"][-1]["seconds"] == [0, 400, 800]
    assert page.panel("loss")["traces"][-1]["tokens"] == [0, 200 * 8192, 400 * 8192]
    hours = Page(write_run(tmp_path, timed(RUN, per_step=60.0))).data()
    assert hours["axes"]["seconds"] == "hours" and hours["unit"] == {"seconds": 3600}
    assert Page(write_run(tmp_path, RUN)).data()["axes"] == {"step": "steps", "tokens": "tokens"}  # all at one moment
    scant = [start(), dict(kind="train", step=1, loss=2.0), dict(kind="train", step=2, loss=1.0)]
    assert Page(write_run(tmp_path, scant)).data()["axes"] == {"step": "steps"}


def test_the_night_between_a_stop_and_resume_is_not_counted(tmp_path):
    """Killed after step 30, resumed a day later from the checkpoint of step 20."""
    before = timed([start(), *[train(s, 3.0) for s in (10, 20, 30)], val(20, 2.0)])
    after = timed([start(20), *[train(s, 2.0) for s in (30, 40)], val(40, 1.0)], t0=1e6)
    page = Page(write_run(tmp_path, before + after))
    assert page.panel("loss")["traces"][0]["step"] == [10, 20, 30, 40]
    assert page.panel("loss")["traces"][0]["seconds"] == [20, 40, 60, 80]
    assert "resumed at step 20" in page.seen


def test_phases_memory_and_clipping(tmp_path):
    records = [start()]
    for s in range(1, 5):
        more = dict(dt_ms=10.0, data_ms=1.0, forward_ms=3.0 + s, backward_ms=5.0, mfu=0.47, peak_gib=22.2, grad_norm=4.0 / s)
        records.append(train(s, 2.0) | more)
    page = Page(write_run(tmp_path, records))
    assert [t["name"] for t in page.panel("phases0")["traces"]] == ["data", "forward", "backward"]
    assert page.curve("phases0", "forward") == ([1, 2, 3, 4], [4.0, 5.0, 6.0, 7.0])
    assert page.panel("phases0")["top"] == pytest.approx(1.05 * 13)
    assert page.curve("mfu", tmp_path.name)[1] == [0.47] * 4 and page.curve("memory", tmp_path.name)[1] == [22.2] * 4
    assert page.panel("grad_norm")["levels"] == {"clipped at 1": 1.0}
    for text in ("forward, ms a step, median", "47.0%", "22.20"):
        assert text in page.seen, text
    small = [r | ({"grad_norm": 0.1} if "grad_norm" in r else {}) for r in records]
    assert Page(write_run(tmp_path, small)).panel("grad_norm")["levels"] == {}  # far above, it would press the curve flat


def test_a_log_alone(tmp_path):
    """Without config.json, and as a file of its own: how logs are kept in readme.assets/runs."""
    log = write_log(tmp_path, [*RUN, sample(400, "alone")]) / "log.jsonl"
    page = Page(log.rename(tmp_path / "kept.jsonl"))
    assert "no config.json" in page.seen and "kept" in page.seen and "alone" in page.seen
    run = report.read_run(write_run(tmp_path / "r", RUN) / "log.jsonl")  # but a log in its folder is that folder's run
    assert run.name == "r" and run.config == CONFIG
    (tmp_path / "log.jsonl").write_text((tmp_path / "kept.jsonl").read_text())
    for text in ("{", "[]", '{"model": 3}', "\x00"):
        (tmp_path / "config.json").write_text(text)
        assert "no config.json that can be read" in Page(tmp_path).seen, text


@pytest.mark.parametrize("name", SCANT)
def test_scant_logs_make_a_page(tmp_path, name):
    write_log(tmp_path, SCANT[name])
    for folders in ([tmp_path], [tmp_path, tmp_path]):
        page = Page(*folders)
        finite = [v for p in page.data()["panels"] for t in p["traces"] for v in t["y"]]
        assert finite and all(map(math.isfinite, finite))


# ---------------------------------------------------------------------------------------------- nothing gets in or out


def test_the_page_fetches_nothing(tmp_path):
    page = Page(write_run(tmp_path, [*RUN, sample(400, EVIL)]))
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "embed", "base", "img", "source", "video", "form"}
    for tag, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "data", "poster", "background"}, tag
    for attributes, text in page.scripts:
        if "type" not in attributes and "plotly.js" not in text[:50]:
            assert "http" not in text and "url(" not in text and "@import" not in text
    rules = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert rules.startswith("default-src 'none';") and "http" not in rules and "script-src 'sha256-" in rules
    allowed = set(re.findall(r"'sha256-(.+?)'", rules))
    ours = [text for attributes, text in page.scripts if "type" not in attributes and not text.startswith("\n:root")]
    assert len(ours) == 2 and "unsafe" not in rules.split("script-src")[1]
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in ours} == allowed


def test_text_from_a_log_is_never_code(tmp_path):
    end = dict(kind="end", step=400, reason=EVIL)
    records = [*RUN[1:], start(device=EVIL, torch=EVIL), sample(400, EVIL, "The " + EVIL), end]
    folder = write_run(tmp_path / "<b>&amp;'", records, data=EVIL)
    for page in (Page(folder), Page(folder, write_run(tmp_path / "other", RUN))):
        assert page.seen.count(EVIL) >= 5 and "onerror" not in str(page.tags)
        assert [a for tag, a in page.tags if tag == "script"] == [{"type": "application/json", "id": "data"}, {}, {}]
        assert "<" not in next(text for attributes, text in page.scripts if attributes.get("id") == "data")
        assert "<b>&amp;'" in page.seen and not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data()["runs"][0]["name"] == "&lt;b&gt;&amp;amp;'"  # plotly reads names as its own small HTML


def test_what_a_young_model_writes_can_be_shown(tmp_path):
    """Control characters, and half of a character that takes two."""
    run = write_run(tmp_path / "r", [*RUN, sample(400, "The \x00\x1b[1m\r\n\ttab", "\ud83d")])
    report.write([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "</span>␀␛[1m␍\n\ttab</pre><pre>?</pre>" in page


# ------------------------------------------------------------------------------------------------------------ two runs


def test_two_runs(tmp_path):
    a = write_run(tmp_path / "a", RUN)
    b = write_run(tmp_path / "b", [start(device="cuda"), val(0, 5.6), *[train(s, 3.0 + 2 / s) | {"tok_per_s": 18000.0}
                                   for s in range(2, 401, 2)], val(200, 2.5), val(400, 1.5)], lr=2e-3)  # fmt: skip
    page = Page(a, b)
    assert "b ends at validation loss 1.50, 0.21 nats under a" in page.seen
    assert page.curve("loss", "validation", run=1) == ([0, 200, 400], [5.6, 2.5, 1.5])
    assert page.curve("difference", "validation") == ([0, 200, 400], [0, 0.4, pytest.approx(-0.2149)])
    steps, gaps = page.curve("difference", "training")
    assert steps == list(range(2, 401, 2)) and gaps == pytest.approx([-0.35] * 200)  # where both were logged
    assert "b minus a, at equal steps. Below zero, b is better." in page.seen
    for row in ("validation loss 1.7149 step 400 1.5000 step 400 -0.2149", "tokens/s, median 9,000 18,000 +9,000 +100.0%"):
        assert row in page.seen, row
    first, everything = page.seen.split("What was set differently")[1].split(" everything ")
    assert "lr 0.001 0.002" in first and "device cpu cuda" in first and "n_layer" not in first
    assert "n_layer 2 2" in everything and "lr 0.001 0.002" in everything
    assert ("tr", {"class": "differs"}) in page.tags
    same = Page(a, write_run(tmp_path / "c", RUN))
    assert "Nothing that is known of both." in same.seen and "a and c end at the same validation loss, 1.71" in same.seen
    assert "validation loss 1.7149 step 400 1.7149 step 400 0" in same.seen


def test_steps_of_different_size_compare_at_equal_tokens(tmp_path):
    a = write_run(tmp_path / "a", RUN)
    b = write_run(tmp_path / "b", [start(), *[train(s, 3.0, 16384) for s in range(1, 201)], val(0, 5.5), val(100, 2.0)])
    page = Page(a, b)
    assert page.data()["axis"] == "tokens" and page.curve("difference", "validation") == ([0, 200], [-0.1, -0.1])
    assert "steps are of different size, 8,192 and 16,384 tokens" in page.seen
    assert "validation loss at 1,638,400 tokens, the last place measured in both 2.1000 2.0000 -0.1000" in page.seen


def test_a_run_that_was_resumed_with_larger_steps(tmp_path):
    """Ten steps of 100 tokens, then ten of 300, logged at every fourth: 4,000 tokens, not 20 times the mean of some steps."""
    def at(step):
        return 100 * step if step <= 10 else 300 * step - 2000

    def changed(more):
        logged = [train(s, 3.0) | {"tokens": at(s)} for s in range(4, 21, 4)]
        return [start(train_tokens=2000), start(10, train_tokens=2000) | more, *logged, val(10, 2.5), val(20, 2.0)]

    a = write_run(tmp_path / "a", changed({"tokens": 1000}))
    b = write_run(tmp_path / "b", [start(), *[train(s, 3.0, 500) for s in range(1, 9)], val(2, 2.4), val(8, 1.8)])
    page = Page(a)
    assert "tokens 4,000 2.00 epochs" in page.seen and page.data()["axis"] == "tokens"
    assert page.panel("loss")["traces"][-1]["tokens"] == [1000, 4000]
    assert page.panel("loss")["traces"][0]["tokens"] == [400, 800, 1600, 2800, 4000]
    assert "a was resumed with steps of another size: 100 then 300 tokens." in page.seen
    both = Page(a, b)
    assert both.curve("difference", "validation") == ([10, 20], pytest.approx([-0.1, -0.2]))
    assert "steps are of different size, 100 then 300 and 500 tokens" in both.seen
    old = Page(write_run(tmp_path / "old", changed({})))  # whose start says nothing: right but around the change
    assert old.panel("loss")["traces"][0]["tokens"] == [400, 800, 1600, 2800, 4000]
    assert "tokens 4,000" in old.seen


def test_runs_that_end_apart_are_held_at_one_place(tmp_path):
    page = Page(write_run(tmp_path / "a", RUN), write_run(tmp_path / "b", [start(), val(0, 5.7), val(200, 2.0), val(300, 1.9)]))
    assert "validation loss at step 200, the last place measured in both 2.1000 2.0000 -0.1000" in page.seen
    assert "last validations lie at different places" in page.seen


def test_different_tokenizers_are_said(tmp_path):
    """Their losses are then not subtracted; bits per byte are, where there are any."""
    bpe = [start(log_v=math.log(50257)), *[val(s, 6.0) | {"bits_per_byte": 2.0} for s in (0, 400)], train(400, 6.0)]
    letters = [r | ({"bits_per_byte": 2.5} if r["kind"] == "val" else {}) for r in RUN]
    a, b = write_run(tmp_path / "a", letters), write_log(tmp_path / "b", bpe)
    page = Page(a, b)
    assert "different tokenizers (257 and 50,257 ids)" in page.seen and "nats under" not in page.seen
    assert page.panel("difference")["unit"] == "bits per byte"
    assert page.curve("difference", "validation") == ([0, 400], [-0.5, -0.5])
    assert page.curve("bits", "b", run=1) == ([0, 400], [2.0, 2.0])
    assert "validation loss 1.7149 step 400 6.0000 step 400 bits per byte 2.5000 step 400 2.0000 step 400 -0.5000" in page.seen
    assert Page(write_run(tmp_path / "a", RUN), b).panel("difference") is None


def test_different_validation_is_said(tmp_path):
    a, b = write_run(tmp_path / "a", RUN, data="x"), write_run(tmp_path / "b", RUN, data="y")
    assert "validated on different tokens" in Page(a, b).seen
    b = write_run(tmp_path / "b", [start(val_tokens=5), *RUN[1:]], data="x")
    assert "validated on different tokens" not in Page(a, b).seen  # of one nothing is known
    a = write_run(tmp_path / "a", [start(val_tokens=6), *RUN[1:]], data="x")
    assert "validated on different tokens" in Page(a, b).seen


def test_samples_of_two_runs_stand_beside_each_other(tmp_path):
    a = write_run(tmp_path / "a", [*RUN, sample(200, "The one"), sample(400, "The two")])
    page = Page(a, write_run(tmp_path / "b", [*RUN, sample(200, "three")]))
    assert "after 200 steps a The one b three after 400 steps a The two b none at this step" in page.seen.replace("  ", " ")
    assert page.text.count("<span class='prompt'>The </span>") == 2
    assert [a for tag, a in page.tags if tag == "details"][:2] == [{"open": None}] * 2  # the newest of each


# ---------------------------------------------------------------------------------------------------------- the command


def test_importing_is_silent_and_light(tmp_path):
    """Neither torch nor plotly nor matplotlib, which take seconds."""
    code = "import sys; sys.path[0] = sys.argv[1]; import report; print({'torch', 'plotly', 'matplotlib'} & {*sys.modules})"
    done = run_python("-c", code, ROOT, cwd=tmp_path)
    assert done.stdout == "set()\n" and done.stderr == "" and done.returncode == 0
    assert not list(tmp_path.iterdir())


def test_command(tmp_path):
    a, b = write_run(tmp_path / "log/a", RUN), write_run(tmp_path / "log/b", RUN)
    done = run_python(ROOT / "lab", "report", "log/a", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "log/a/report.html\n" and done.stderr == ""
    assert (a / "report.html").read_text() == report.page([report.read_run(a)])
    page = (a / "report.html").read_text()
    done = run_python(ROOT / "lab", "report", "log/a", "log/b", cwd=tmp_path)
    assert done.stdout == "log/a/report_with_b.html\n" and (a / "report.html").read_text() == page
    browser = tmp_path / "browser"  # --open asks the browser of the environment
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    args = ("log/a", "log/b", "--out", "new/ab.html", "--open")
    done = run_python(ROOT / "lab", "report", *args, cwd=tmp_path, BROWSER=f"{browser} %s")
    assert done.returncode == 0 and (tmp_path / "new/ab.html").read_text() == report.page(list(map(report.read_run, (a, b))))
    assert (tmp_path / "opened").read_text() == (tmp_path / "new/ab.html").as_uri() + "\n"
    assert "--open" in run_python(ROOT / "lab", "report", "--help", cwd=tmp_path).stdout


def test_bad_input_is_one_sentence(tmp_path):
    a = write_run(tmp_path / "a", RUN)
    write_run(tmp_path / "b", RUN), write_log(tmp_path / "young", [start()]), (tmp_path / "bare").mkdir()
    (tmp_path / "page.html").mkdir()
    write_run(tmp_path / "log" / "named", RUN)
    wrong = [([], "name one run folder or two"), (["a", "b", "young"], "not 3"), (["a", str(a)], "twice"),
             (["none"], "no log none; name a run folder"), (["named"], f"did you mean {Path('log/named')}?"),
             (["bare"], "no log bare"), (["a", "young"], "nothing to draw"),
             (["a", "--out", "a/log.jsonl"], "must end in .html"), (["a", "--out", "page.html"], "directory")]  # fmt: skip
    for args, message in wrong:
        done = run_python(ROOT / "lab", "report", *args, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, (args, done.stderr)
    assert not [path for path in tmp_path.rglob("*.html") if path.is_file()]
    code = f"import sys; sys.modules['plotly'] = None; sys.path.insert(0, {str(ROOT)!r}); import report; report.main()"
    done = run_python("-c", code, a, cwd=tmp_path)
    assert done.returncode == 2 and "pip install plotly" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="a place where nobody, root either, may write")
def test_a_place_where_nobody_may_write_is_named(tmp_path):
    with pytest.raises(OSError, match=r"/sys/r.html cannot be written \(Permission denied\); name another place with --out"):
        report.write([write_run(tmp_path / "a", RUN)], Path("/sys/r.html"))


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    a = write_run(tmp_path / "a", RUN)
    report.write([a], tmp_path / "r.html")
    before = (tmp_path / "r.html").read_bytes()

    def full(self, text, **_):
        with self.open("w") as f:
            f.write(text[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # a disk that fills up on the way
    with pytest.raises(OSError, match=r"r.html cannot be written \(No space left on device\); name another place with --out"):
        report.write([a], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {"a", "r.html"}


def test_runs_of_one_name_are_told_apart(tmp_path):
    a, b = write_run(tmp_path / "x/r", RUN), write_run(tmp_path / "y/r", RUN)
    report.write([a, b], tmp_path / "both.html")
    assert f"<title>{a} and {b}</title>" in (tmp_path / "both.html").read_text()
