"""bench/figures.py: it draws what was measured, says what was not, and made what stands in readme.assets/."""

import json
import sys

import pytest
from conftest import ROOT, run_python
from matplotlib.text import Text
from test_plot import RUN, Figures, hella

sys.path.insert(0, str(ROOT / "bench"))
import figures  # noqa: E402

PLACE = dict(card="H9", torch="2.11", date="2026-11-21")
STEP = PLACE | dict(bench="ladder", seed=1, sustained=False, tokens_per_step=4096, micro_steps=2, batch_size=4, peak_gib=3.0)
SPEEDS = {"gpt2": (("fp32", 40_000), ("bf16", 100_000), ("fused_loss", 90_000)), "4x256": (("fp32", 1e6), ("bf16", 2e6)),
          "gpt2-xl": (("fp32", 1e3), ("fused_loss", 7e3))}  # fmt: skip


def rung(shape, variant, tok_per_s, **more):
    kernel_ms = dict(matmul=8.0, attention=2.0, idle=1.0) if variant == "fp32" else dict(matmul=2.0, loss=1.0)
    return STEP | dict(group="rungs", shape=shape, variant=variant, tok_per_s=tok_per_s, kernel_ms=kernel_ms) | more


def part(op, ms, flops=0, moved=0):
    return PLACE | dict(bench="floor", op=op, ms=ms, flops=flops, bytes=moved)


def mode(name, tok_per_s, n=2):
    return dict(bench="parallel", mode=name, world_size=n, tok_per_s=tok_per_s, device="H9", preset="gpt2", batch_size=64,
                rank_tok_per_s=[tok_per_s / n] * n)  # fmt: skip


LADDER = [rung(shape, variant, speed) for shape, rungs in SPEEDS.items() for variant, speed in rungs]
MICRO = [rung("gpt2", str(b), s, batch_size=b, group="micro_batch") for b, s in ((4, 5e4), (8, 9e4))]
LOSS = [rung("gpt2", v, None, group="loss", seed=s, val_loss=5.0 + 0.01 * s, curve=[[10, 1.0, 7.0], [20, 2.0, 6.0]])
        for v in ("fp32", "muon") for s in (1, 2)]  # fmt: skip
PADDING = [rung("gpt2", f"{rows}_eager", speed, group="vocabulary", kernel_ms=dict(matmul=ms, loss=1.0))
           | dict(median_ms=2 * ms) for rows, speed, ms in ((50257, 2e5, 170.0), (50304, 4e5, 70.0))]  # fmt: skip
# a copy at 4 TB/s, a product at 500 TFLOP/s, one operation on either side of the edge
FLOOR = [part("copy 1 GiB", 0.5, 0, 2 * 10**9), part("8192^3", 2.0, 10**12, 10**9), part("AdamW", 1.0, 10**9, 3 * 10**9),
         part("qkv forward", 1.0, 3 * 10**11, 10**9), part("qkv wgrad", 1.0, 2 * 10**11, 10**9),
         part("floor: parts alone, GELU inside", 10.0) | dict(tok_per_s=600_000, step_ms=12.0)]  # fmt: skip
PARALLEL = [mode("alone_one", 100), mode("alone", 198), mode("ddp", 180), mode("zero1", 150)]
KERNELS = [["matmul", "gemm", 7, 0.0, 100.0], ["communication", "nccl", 9, 50.0, 100.0]]  # microseconds: begin, length
TRACE = dict(mode="ddp", world_size=2, device="H9", kernels=KERNELS)


@pytest.fixture
def runs(tmp_path):
    """A folder with measurements of everything."""
    folder = tmp_path / "runs"
    folder.mkdir()
    files = {"ladder": LADDER + MICRO + LOSS + PADDING, "floor": FLOOR, "parallel": PARALLEL}
    files |= dict.fromkeys(("laptop_builtin", *figures.DATA_OF), [*RUN, hella(400, 0.31)])
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name in ("ddp", "in_graph", "zero1_16bit"):
        (folder / f"{name}.kernels.json").write_text(json.dumps(TRACE | dict(mode=name)))
    return folder


@pytest.fixture
def drawn(monkeypatch, tmp_path, runs):
    """drawn(name): the texts of a picture, light and dark, as lists."""
    saved = Figures(monkeypatch)

    def draw(name):
        for dark in (False, True):
            figures.PICTURES[name][0](runs, tmp_path / f"{name}.png", dark)
        assert saved.texts(-1) == saved.texts(-2)
        return saved.texts()

    return draw


def test_every_picture_is_drawn_light_and_dark(tmp_path, runs):
    done = run_python(ROOT / "bench" / "figures.py", "--runs", runs, "--out", tmp_path / "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = {f"{name}{dark}.png" for name in figures.PICTURES for dark in ("", "_dark")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    for name in figures.PICTURES:
        light, dark = ((tmp_path / "out" / f"{name}{d}.png").read_bytes() for d in ("", "_dark"))
        assert light[:4] == dark[:4] == b"\x89PNG" and light != dark


def test_of_loss_runs_of_two_lengths_the_one_with_more_rungs_is_shown(drawn, runs):
    long = [row | {"max_steps": 300} for row in LOSS]
    short = [row | {"max_steps": 200, "val_loss": 9.0} for row in LOSS[:2]]
    (runs / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long + short))
    assert {"fp32", "muon"} <= set(drawn("ladder_loss"))


def test_of_two_versions_of_torch_the_one_with_more_rungs_is_shown(drawn, runs):
    newer = [row | {"torch": "2.14.1", "tok_per_s": 1} for row in LADDER if row["shape"] == "gpt2"][:2]
    (runs / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LADDER + newer))
    assert "gpt2: 40k to 90k tokens/s, 2 times, rung by rung" in drawn("ladder")


def test_the_ladder_shows_rates_and_factors(drawn):
    texts = drawn("ladder")
    assert "gpt2: 40k to 90k tokens/s, 2 times, rung by rung" in texts
    assert {"40k  ", "100k  x2.50", "90k  x0.90", "fused loss", "4x256", "x2.00", "H9, torch 2.11, 2026-11-21"} <= set(texts)
    assert {"xl", "7k", "not measured"} <= set(texts) and "x7.00" not in texts, "no step up where the rung before is missing"


def test_the_ladder_marks_what_is_wrong_and_what_is_not_used(drawn, runs):
    race = dict(precision="bf16", compile_mode="default", bf16_residual=False, fused_mlp=False)
    rows = [row | dict(settings=race) if row["shape"] == "gpt2-xl" else row for row in LADDER]
    (runs / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = drawn("ladder")
    assert any(text.startswith("*: compiled with a race") for text in texts) and "7k*" in texts and "x2.50*" not in texts
    assert "not used" in texts, "4x256 has no fused loss here, and micro-steps too short for what comes after it"
    assert not any("line: without" in text for text in texts)
    again = next(row for row in rows if row["shape"] == "gpt2-xl") | {"torch": "2.14.1+cu130"}
    other = again | {"tokens_per_step": 1, "torch": "2.15"}
    (runs / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, other]))
    assert not any("line: without" in text for text in drawn("ladder")), "another step is another measurement"
    (runs / "ladder.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, other, again]))
    assert any("; line: without one, torch 2.14.1" in text for text in drawn("ladder"))


def test_kernel_times_of_a_smaller_micro_batch_are_scaled(drawn, runs):
    with (runs / "ladder.jsonl").open("a") as f:  # measured again, with half the tokens a micro-step: this one counts
        f.write(json.dumps(rung("gpt2", "fp32", 40_000, micro_steps=4)) + "\n")
    texts = drawn("kernels")
    assert "gpt2: matmul is 67% of the last rung's 3 ms" in texts
    assert "22" in texts and "11" not in texts


def test_the_others_say_what_they_show(drawn):
    assert "gpt2: 8 sequences a micro-step are fastest, 90k tokens/s" in drawn("micro_batch")
    assert "gpt2: the rungs' means lie within 0.000 nats, seeds of one rung differ by up to 0.010" in drawn("ladder_loss")
    roof = drawn("roofline")
    assert "Memory gives 4.00 TB/s, the best bf16 product 500 TFLOP/s" in roof
    assert {"qkv", "8192^3", "AdamW", "forward", "wgrad"} <= set(roof)
    assert "Our step runs at 83% of what its parts add up to" in drawn("floor")
    parallel = drawn("parallel")
    assert {"gpt2: ddp on 2 GPUs reaches 90.0% of 2 times one GPU", "zero1  75.0%", "alone  99.0%"} <= set(parallel)
    assert "ddp: 50% of 0.1 ms of communication hidden under computation" in drawn("overlap")
    assert "in_graph: 50% of 0.1 ms of communication hidden under computation" in drawn("overlap_in_graph")
    assert "zero1_16bit: 50% of 0.1 ms of communication hidden under computation" in drawn("overlap_zero1")
    assert {"gpt2: 47 rows of padding save 100 ms eager", "200k tokens/s", "50304 eager"} <= set(drawn("vocabulary"))


def test_a_floor_is_of_one_card_and_has_the_step_of_its_bits(drawn, runs):
    def total(card, what, ms, step_ms):
        return part(f"floor: parts alone, {what}", ms) | dict(card=card, tok_per_s=1e6 / ms, step_ms=step_ms)

    rows = [total("H9", "GELU inside the products", 80, 100), total("H8", "GELU inside the products", 200, 400)]
    rows.append(total("H8", "GELU in the casts to 8 bits", 100, 250))
    (runs / "floor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = drawn("floor")
    assert "Our step runs at 40% to 50% of what its parts add up to" in texts and "H8, torch 2.11, 2026-11-21" in texts
    assert {"2.5k", "4k", "5k", "10k", "our step", "our step, 8 bits in head and MLP"} <= set(texts) and "12.5k" not in texts


def test_the_floors_of_larger_models_stand_beside_the_first(drawn, runs):
    def total(preset, what, ms, step_ms):
        row = part(f"floor: back to back, {what}", ms) | dict(preset=preset, batch_size=4, tok_per_s=1e6 / ms, step_ms=step_ms)
        return row | dict(card="H9")

    rows = [part("fc forward", 1, 700e9, 1e9) | dict(preset=preset) for preset in ("gpt2", "gpt2-xl")]
    rows[1]["op"] = "fc forward of another model"
    rows.insert(0, part("copy 4 GiB", 2, 0, 8e9) | dict(preset="gpt2"))
    rows += [total("gpt2", "GELU inside the products", 80, 100), total("gpt2-xl", "GELU inside the products", 810, 900),
             total("gpt2-xl", "GELU in the casts to 8 bits", 660, 800)]  # fmt: skip
    (runs / "floor.jsonl").write_text("".join(json.dumps({"batch_size": 4} | row) + "\n" for row in rows))
    texts = drawn("floor")
    assert "Our step runs at 80% of what its parts add up to" in texts, "the title is of the first model"
    assert {"gpt2, B = 4", "gpt2-xl, B = 4", "80%", "90%", "82%", "16 bits", "8 bits"} <= set(texts)
    assert "fc" in (texts := drawn("roofline")) and not any("another model" in text for text in texts)


def test_modes_of_many_settings_stand_in_panels_of_their_own(drawn, runs):
    rows = [row | {"batch_size": size} for size in range(1, 10) for row in (mode("alone_one", 100), mode("ddp", 100 + size))]
    rows += [row | {"preset": "gpt2-xl", "batch_size": 9} for row in (mode("alone_one", 100, 8), mode("ddp", 640, 8))]
    (runs / "parallel.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    texts = drawn("parallel")
    assert "gpt2: ddp on 2 GPUs reaches 50.5% of 2 times one GPU" in texts, "the smaller model first, and its smaller batch"
    assert {"gpt2 on 2, B = 9", "ddp  54.5%", "gpt2-xl on 8", "ddp  80.0%"} <= set(texts)
    rows += [row | {"batch_size": 9, "grad_accum_steps": 4} for row in (mode("alone_one", 50), mode("ddp", 99))]
    (runs / "parallel.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {"gpt2 on 2, B = 9", "ddp  54.5%", "gpt2 on 2, B = 9 x 4", "ddp  99.0%"} <= set(drawn("parallel"))


def test_runs_of_a_mode_are_dots_against_their_own_round(drawn, runs):
    rows = [mode("alone_one", 100), mode("ddp", 160), mode("ddp", 120) | {"bucket_mb": 25}]
    rows += [row | {"round": 2} for row in (mode("alone_one", 50), mode("ddp", 90))]
    (runs / "parallel.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = drawn("parallel")
    assert "gpt2: ddp on 2 GPUs reaches 80.0% to 90.0% of 2 times one GPU" in texts
    assert {"ddp  85.0%", "ddp, 25 MB  60.0%"} <= set(texts)
    rows = [mode("alone_one", 100), mode("flat", 160) | {"round": 1}, mode("alone_one", 50) | {"round": 2}, mode("loop", 190)]
    rows += [mode("flat", 90) | {"round": 2, "env": {"NCCL_VERSION": "2", "NCCL_MAX_CTAS": "8"}}, mode("given_up", 170)]
    (runs / "parallel.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = drawn("parallel")
    assert "flat  80.0%" in texts, "a later round's cards may be others, and NCCL's settings an experiment"
    assert "gpt2: flat on 2 GPUs reaches 80.0% of 2 times one GPU" in texts, "the loop is another kind of work"
    assert not any("given" in text for text in texts)


def test_published_losses_name_their_text_and_stay_apart(drawn):
    texts = drawn("tokens")
    assert {"OpenAI's GPT-2 124M on FineWeb, 3.42", "OpenAI's GPT-2 124M on FineWeb-Edu, 3.29"} <= set(texts)
    for data in figures.DATA_OF.values():
        assert any(data in text for text in texts)


@pytest.mark.parametrize("name", figures.PICTURES)
def test_a_missing_or_incomplete_file_is_one_sentence_that_names_the_command(name, tmp_path, capsys, monkeypatch):
    draw, command = figures.PICTURES[name]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(figures.NoData):
        draw(empty, tmp_path / "p.png", False)
    for file in ("ladder", "floor", "parallel"):  # a failed measurement, another group, and a line that a kill has cut
        (empty / f"{file}.jsonl").write_text('{"group": "rungs", "shape": "gpt2", "error": "no"}\n{"group": "ru')
    monkeypatch.setattr(sys, "argv", ["figures.py", name, "--runs", str(empty), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:  # nothing was drawn
        figures.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1
    assert f"{name}: left out, " in err and f"`{command}` makes it" in err
    assert not list(tmp_path.glob("*.png"))


def test_an_unknown_picture_is_refused(tmp_path):
    done = run_python(ROOT / "bench" / "figures.py", "stairs", cwd=tmp_path)
    assert done.returncode == 2 and "stairs is no picture of this project; there are laptop" in done.stderr


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_python(ROOT / "bench" / "figures.py", "--out", "file", cwd=tmp_path)
    assert done.returncode == 2 and "out=file/loss.png cannot be written (" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    done = run_python(ROOT / "bench" / "figures.py", "--runs", "none", "--out", "o", cwd=tmp_path)
    assert done.returncode == 2 and "there is no folder none" in done.stderr and not (tmp_path / "o").exists()


def test_labels_keep_apart():
    figure = figures.Figure(figsize=(6, 4))
    ax = figure.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    figures.label_points(ax, [(0.5, 0.5 + 0.01 * i, f"operation {i}", "0.5") for i in range(8)], [(0.52, 0.52)])
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the thin lines
    assert len(boxes) == 8
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_readme_assets_holds_these_pictures_alone():
    there = {path.stem for path in (ROOT / "readme.assets").glob("*.png")}
    assert there <= {f"{name}{dark}" for name in figures.PICTURES for dark in ("", "_dark")}


def test_the_table_of_the_ladder_is_that_of_the_records(capsys):
    import ladder

    ladder.print_tables(ladder.OUT)
    printed = capsys.readouterr().out
    assert (ROOT / "readme.assets" / "ladder.txt").read_text() == printed, "bench/ladder.py --table > readme.assets/ladder.txt"
