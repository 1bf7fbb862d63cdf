"""bench/parallel.py, compare.py and laptop.py: shares, references, what is read of logs."""

import json
import subprocess
import sys

import pytest
import torch.distributed as dist
from conftest import ROOT, clean_env

sys.path.insert(0, str(ROOT / "bench"))

import compare  # noqa: E402
import laptop  # noqa: E402
import parallel  # noqa: E402


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available() or sys.platform == "win32", reason="needs gloo")
def test_two_processes_have_the_same_losses_in_every_mode(tmp_path):
    out = tmp_path / "parallel.jsonl"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        ROOT / "bench/parallel.py",
    ]
    flags = "--preset laptop --device cpu --batch_size 4 --steps 4 --warmup 2 --compile off"
    flags = f"{flags} --precision fp32 --out".split()
    done = subprocess.run(
        [*map(str, command), *flags, out], env=clean_env(), capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    found = {r["mode"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert list(found) == list(parallel.MODES)
    for mode in ("zero1", "zero1_16bit"):
        assert found[mode]["losses"] == pytest.approx(found["ddp"]["losses"], abs=1e-4), mode
    assert found["alone"]["losses"] == pytest.approx(found["alone_one"]["losses"], abs=1e-4)


def test_shares_of_a_mode():
    args = parallel.Config(batch_size=64, seq_len=1024)
    ranks = [
        dict(ms=[100.0, 110.0, 120.0], losses=[3.0, 1.0], first_step_s=1.0, peak_gib=2.0, gpu={}),
        dict(ms=[120.0, 90.0, 100.0], losses=[5.0, 2.0], first_step_s=3.0, peak_gib=1.0, gpu={}),
    ]
    found = parallel.summary("ddp", ranks, args)
    # of the slowest, step by step: 120, 110, 120
    assert found["step_ms"] == 120 and found["step_ms_min"] == 110
    assert found["tok_per_s"] == pytest.approx(2 * 65536 / 0.12) and found["losses"] == [4.0, 1.5]
    alone = parallel.summary("alone", ranks, args)
    assert alone["tok_per_s"] == pytest.approx(65536 / 0.11 + 65536 / 0.1) and alone["losses"] == [
        3.0,
        1.0,
    ]


def record(mode, tok_per_s, **more):
    same = dict(
        preset="gpt2",
        world_size=2,
        batch_size=64,
        seq_len=1024,
        compile="model",
        activation_checkpointing=False,
        precision="bf16",
        data="",
        device="H9",
        torch="2.11",
        date="d",
        loss=7.1,
        step_ms=100.0,
    )
    return same | dict(bench="parallel", mode=mode, tok_per_s=tok_per_s, env={}) | more


def test_a_mode_is_held_against_its_own_round_where_that_has_one_alone(capsys):
    rows = [
        record("alone_one", 1000, round=1),
        record("alone_one", 2000, round=2),
        record("alone_one", 500),
    ]
    for number, one in ((1, 1000), (2, 2000), (None, 500), (7, 500)):
        assert parallel.references(record("ddp", 900, round=number), rows)[0] == 2 * one, number
    between = record("ddp", 900, round=7)
    assert parallel.references(between, [rows[0], between, rows[1]])[0] == 2000, (
        "a later round's GPUs may be others"
    )
    older = record("alone", 1, rank_tok_per_s=[600, 400], commit="older", round=1)
    ddp = record("ddp", 900, commit="abc", round=3)
    assert parallel.references(ddp, [older]) == (None, 1000, 800)
    own = [older, record("alone_one", 500, commit="abc", round=2)]
    assert parallel.references(ddp, own) == (1000, None, None), (
        "another commit's GPUs are others than this one's"
    )
    assert parallel.references(ddp, [record("alone_one", 500, batch_size=32)])[0] is None
    parallel.print_table([*own, ddp])
    assert "90.0%" in capsys.readouterr().out


def test_overlap_of_a_made_up_step():
    kernels = [
        ["matmul", "a", 7, 0, 10],
        ["matmul", "b", 8, 5, 10],
        ["communication", "c", 20, 12, 8],
        ["communication", "d", 21, 18, 6],
        ["optimizer", "e", 7, 22, 4],
        ["communication", "f", 20, 30, 2],
    ]
    # compute 0-15 and 22-26, communication 12-24 and 30-32: hidden are 12-15 and 22-24, idle is
    # 26-30
    assert parallel.overlap(kernels) == {"step_us": 32, "nccl_us": 14, "hidden_us": 5, "idle_us": 4}


# ------------------------------------------------------------------------------------- two versions


def test_what_a_log_says_of_a_run():
    events = [dict(kind="start", time=0.0), dict(kind="first_step", seconds=9.0, time=1.0)]
    rates = {2: 100, 4: 300, 6: 200}
    for step, rate in rates.items():
        events.append(
            dict(
                kind="train",
                step=step,
                time=10.0 * step,
                loss=8 - step,
                tok_per_s=rate,
                peak_gib=step / 2,
            )
        )
        if step != 2:
            events.append(dict(kind="hella", step=step, time=10.0 * step + step, acc_norm=0.3))
    found = compare.numbers(events)
    assert found["tok_per_s"] == 200 and found["losses"] == {2: 6, 4: 4, 6: 2}
    assert found["peak_gib"] == 2, "before HellaSwag"
    assert found["hella_s"] == 6, "the second one, as the first compiles"


def test_versions_are_compared_in_pairs(tmp_path, capsys):
    def one(side, rate, gpu="G"):
        return dict(
            setting="bf16",
            nproc=1,
            gpu=gpu,
            also="",
            side=side,
            tok_per_s=rate,
            peak_gib=20.0,
            hella_s=None,
            losses={2: 1.0},
        )

    rows = [
        one("before", 100),
        one("after", 102),
        one("before", 200, "H"),
        one("before", 50),
        one("after", 49),
        one("before", 9),
    ]
    ((key, pairs),) = compare.pairs_of(rows).items()
    assert key == ("bf16", 1, "G", "") and compare.ratio(pairs, "tok_per_s") == pytest.approx(
        (1.02 + 0.98) / 2
    )
    assert compare.ratio(pairs, "hella_s") is None
    compare.print_tables(rows)
    assert "tok_per_s: median of after / before 1.0000, within 1%: True" in capsys.readouterr().out
    assert compare.flags_of(ROOT, "fp8_all") == ["--fp8", "all"]
    (tmp_path / "train_gpt2.py").write_text("zero1: bool = False")
    assert compare.flags_of(tmp_path, "zero1") == ["--zero1"]


def test_the_laptop_reads_nanogpts_own_prints(tmp_path, monkeypatch):
    (tmp_path / "nano" / "config").mkdir(parents=True)
    (tmp_path / "nano" / "data" / "shakespeare_char").mkdir(parents=True)
    (tmp_path / "nano" / "config" / "train_shakespeare_char.py").write_text("")
    (tmp_path / "nano" / "train.py").write_text(
        "import os, pickle\nmeta = pickle.load(open('data/shakespeare_char/meta.pkl', 'rb'))\n"
        "print('step 0: train loss 4.2, val loss', len(meta['itos']))\nprint('iter 0: loss 4.1')\n"
        "size = os.path.getsize('data/shakespeare_char/val.bin')\n"
        "print('step 250: train loss 1.7, val loss', size / 1000)\n"
    )
    (tmp_path / "t.txt").write_text("abcde" * 2400)
    characters, ids = laptop.encode(tmp_path / "t.txt")
    ((first, last),) = [laptop.race_nanogpt(tmp_path / "nano", characters, ids, tmp_path)]
    assert (first[1], last[1]) == (5, 2.4) and 0 < first[0] <= last[0]
    assert (
        laptop.reached([(1, 5.0), (2, 1.87), (3, 1.5)]) == (2, 1.87)
        and laptop.reached([first, last]) == last
    )
