"""bench/race.py: the page and the animated figure show the recorded numbers."""

import json
import re
from xml.etree import ElementTree

import pytest
import race
from browser import Tab
from conftest import ROOT, run_python

RUNS = ROOT / "readme.assets/runs"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race")
    (folder / "figures").mkdir()
    done = run_python(ROOT / "bench/race.py", "--page", "p.html", "--out", "figures", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "p.html").stat().st_size < 2_200_000, "plotly is compressed"
    return folder


def test_runners_have_the_recorded_numbers():
    minute, six, four = race.one_minute(RUNS), race.six_minutes(RUNS), race.four_passes(RUNS)
    ends = [(r.name, r.seconds[-1], r.tokens[-1], round(r.losses[-1], 2)) for r in minute.runners]
    assert ends == [
        ("GPT-2's recipe", 64.75, 44236800, 4.63),
        ("train_gpt2.py, Muon", 62.138, 39321600, 3.73),
        ("readable recipe", 63.581, 43253760, 3.54),
        ("speedrun.py", 62.808, 40140800, 3.48),
    ]
    log = [json.loads(line) for line in (RUNS / "gpt2_124m.jsonl").read_text().splitlines()]
    runner = six.runners[0]
    assert runner.losses == [r["loss"] for r in log if r["kind"] == "val"]
    assert [text for _, text in runner.samples] == [
        r["texts"][0] for r in log if r["kind"] == "sample"
    ]
    trained = [r for r in log if r["kind"] == "train"]
    assert runner.tokens[-1] == trained[-1]["tokens"] == 1682 * 131072
    seconds = trained[0]["step"] * trained[0]["dt_ms"] / 1000
    seconds += sum(10 * r["dt_ms"] / 1000 for r in trained[1:-1]) + 2 * trained[-1]["dt_ms"] / 1000
    assert runner.seconds[-1] == runner.samples[-1][0] == pytest.approx(seconds, rel=1e-6)
    assert [round(r.losses[-1], 2) for r in four.runners] == [3.44, 3.29, 3.28, 3.26, 3.2]
    assert {r.tokens[-1] for r in four.runners[1:4]} == {442499072}


@pytest.mark.parametrize("name", ["race.svg", "race_dark.svg"])
def test_the_figure_is_small_and_its_end_is_the_still_picture(written, name):
    for folder in (written / "figures", ROOT / "readme.assets"):
        svg = (folder / name).read_text()
        assert len(svg) < 200_000 and "<script" not in svg and not re.search(r'href="(?!#)', svg)
        names = {node.get("id") for node in ElementTree.fromstring(svg).iter()}
        assert {f"{part}{i}" for part in ("line", "dot", "name", "end") for i in range(4)} <= names
        assert "prefers-reduced-motion: reduce" in svg
        last = re.findall(r"100% \{([^}]*)\}", svg)  # the end of each animation is drawn without it
        ends = {"stroke-dashoffset: 1.0", "transform: translate(0.0px, 0.0px)", "opacity: 1"}
        assert len(last) == 13 and set(last) == ends


@pytest.mark.slow
def test_the_slider_shows_each_runner_at_its_second(written, chromium):
    tab = Tab(chromium, (written / "p.html").as_uri(), viewport={"width": 390, "height": 800})
    cards, losses = tab.page.locator(".card"), tab.page.locator(".loss")
    assert losses.all_text_contents() == ["4.63", "3.73", "3.54", "3.48"]
    tab.page.wait_for_function("window.Plotly")
    tab.page.get_by_label("six minutes").check()
    runner = race.six_minutes(RUNS).runners[1]
    n = 6
    move = "second => { document.getElementById('second').value = second; draw(); }"
    tab.page.evaluate(move, runner.seconds[n] + 1e-6)
    assert losses.last.text_content() == f"{runner.losses[n]:.2f}"
    sample = [text for second, text in runner.samples if second <= runner.seconds[n]][-1]
    assert cards.last.locator("pre").text_content() == sample
    assert tab.page.evaluate("plot.data[2].y.at(-1)") == pytest.approx(runner.losses[n], abs=1e-4)
    tab.page.get_by_label("tokens").check()
    assert tab.page.evaluate("plot.data[2].x.at(-1)") == pytest.approx(runner.tokens[n], rel=1e-4)
    tab.page.evaluate(move, 0)
    tab.page.click("#play")
    tab.page.wait_for_function("() => +document.getElementById('second').value > 20")
    tab.page.click("#play")
    assert tab.page.inner_text("#play") == "Play"
    tab.page.locator("#second").press("Home")
    assert tab.page.inner_text("#clock") == "0 seconds"
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390 and tab.wrong == []
