"""bench/parallel.py, compare.py and laptop.py: what a mode is held against, what is read of logs."""

import json
import subprocess
import sys

import compare
import laptop
import parallel
import pytest
import torch.distributed as dist
from conftest import ROOT, clean_env


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available() or sys.platform == "win32", reason="needs gloo")
def test_two_processes_have_the_same_losses_in_every_mode(tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    words += [str(ROOT / "bench/parallel.py"), "--out", str(out)]
    words += "--preset laptop --device cpu --batch_size 4 --steps 4 --warmup 2".split()
    words += "--compile off --precision fp32".split()
    how = dict(env=clean_env(), capture_output=True, text=True)
    done = subprocess.run([sys.executable, *words], **how)
    assert not done.returncode, done.stderr
    records = list(map(json.loads, out.read_text().splitlines()))
    losses = {r["mode"]: r["losses"] for r in records}
    assert list(losses) == list(parallel.MODES)
    for mode in ("zero1_16bit", "fsdp2", "fsdp2_kept"):
        assert losses[mode] == pytest.approx(losses["ddp"], abs=1e-4)
    # of other tokens, but of the same weights at first
    assert losses["alone_one"][0] == pytest.approx(losses["ddp"][0], abs=0.1)


def test_speed_of_several_gpus():
    ranks = [
        dict(ms=[100.0, 110.0, 120.0], losses=[3.0, 1.0], peak_gib=2.0, gpu={}),
        dict(ms=[120.0, 90.0, 100.0], losses=[5.0, 2.0], peak_gib=1.0, gpu={}),
    ]
    found = parallel.summary(ranks, parallel.Config())
    # of the slowest, step by step: 120, 110, 120
    assert (found["step_ms"], found["step_ms_min"], found["peak_gib"]) == (120, 110, 2)
    assert found["tok_per_s"] == pytest.approx(2 * 65536 / 0.12) and found["losses"] == [4.0, 1.5]


def record(mode, tok_per_s, **more):
    found = dict(mode=mode, tok_per_s=tok_per_s, world_size=2, round=None)
    return dict.fromkeys(parallel.SAME) | found | more


def test_a_mode_is_held_against_its_own_round_where_that_has_one_alone():
    rows = [record("alone_one", 1000, round=1), record("alone_one", 2000, round=2)]
    rows.append(record("alone_one", 500))
    for number, one in ((1, 1000), (2, 2000), (None, 500), (7, 500)):
        assert parallel.reference(record("ddp", 900, round=number), rows) == 2 * one, number
    between = record("ddp", 900, round=7)
    later = "a later round's GPUs may be others"
    assert parallel.reference(between, [rows[0], between, rows[1]]) == 2000, later
    older = record("alone_one", 600, commit="older", round=1)
    ddp = record("ddp", 900, commit="abc", round=3)
    assert parallel.reference(ddp, [older]) == 1200
    own = [record("alone_one", 500, commit="abc", round=2), older]
    assert parallel.reference(ddp, own) == 1000, "another commit's GPUs are others than this one's"
    assert parallel.reference(ddp, [record("alone_one", 500, batch_size=32)]) is None


# ------------------------------------------------------------------------------------- two versions


def test_versions_are_compared_in_pairs():
    events = [dict(kind="start", time=0.0)]
    for step, rate in {2: 100, 4: 300, 6: 200}.items():
        events.append(dict(kind="train", step=step, loss=8 - step, tok_per_s=rate, peak_gib=step))
    found = compare.numbers(events)
    assert found == dict(tok_per_s=200, losses={2: 6, 4: 4, 6: 2}, peak_gib=6)

    def one(side, rate, gpu="G"):
        about = dict(setting="bf16", nproc=1, gpu=gpu, also="", side=side)
        return about | dict(tok_per_s=rate, peak_gib=20.0, losses={2: 1.0})

    rows = [one("before", 100), one("after", 102), one("before", 200, "H")]
    rows += [one("before", 50), one("after", 49), one("before", 9)]
    ((key, pairs),) = compare.pairs_of(rows).items()
    assert key == ("bf16", 1, "G", "")
    assert compare.ratio(pairs, "tok_per_s") == pytest.approx((1.02 + 0.98) / 2)


def test_the_laptop_reads_nanogpts_own_prints(tmp_path):
    """Of a program that prints as its train.py does, with the text where that looks for it."""
    for folder in ("config", "data/shakespeare_char"):
        (tmp_path / "nano" / folder).mkdir(parents=True)
    (tmp_path / "nano" / "config" / "train_shakespeare_char.py").write_text("")
    (tmp_path / "nano" / "train.py").write_text(
        "import os, pickle\nmeta = pickle.load(open('data/shakespeare_char/meta.pkl', 'rb'))\n"
        "print('step 0: train loss 4.2, val loss', len(meta['itos']))\nprint('iter 0: loss 4.1')\n"
        "size = os.path.getsize('data/shakespeare_char/val.bin')\n"
        "print('step 250: train loss 1.7, val loss', size / 1000)\n"
    )
    (tmp_path / "t.txt").write_text("abcde" * 2400)
    characters, ids = laptop.encode(tmp_path / "t.txt")
    first, last = laptop.race_nanogpt(tmp_path / "nano", characters, ids, tmp_path)
    assert (first[1], last[1]) == (5, 2.4) and 0 < first[0] <= last[0]
