"""bench/peers.py: the comparison with other trainers, which are replaced by small scripts."""

import json
import math

import peers
import pytest
from conftest import fork_program

from lab.cli import UserError

# torch in these scripts reports 3 GiB. The first step is slow, like one that compiles.
TORCH = """
import os, sys, numpy
class torch:
    class cuda:
        max_memory_allocated = lambda: 3 * 2**30
    compile = lambda model, disable: model if disable else sys.exit("compiled")
ddp = False
"""
END = "if ddp:\n    destroy_process_group()\n"
NANOGPT = f"""{TORCH}
flags = dict(word[2:].split("=") for word in sys.argv[1:])
tokens = numpy.fromfile("data/openwebtext/train.bin", numpy.uint16)
assert len(tokens) >= 256 * 4 and 1000 < tokens.max() < 50257, tokens
assert flags["compile"] == "False" and flags["device"] == "cpu" and flags["n_layer"] == "2", flags
assert flags["gradient_accumulation_steps"] == "2" and flags["block_size"] == "64", flags
print("step 0: train loss nan, val loss nan")
for n, ms in zip(range(int(flags["max_iters"]) + 1), (9000, 100, 300, 200)):
    print(f"iter {{n}}: loss 10.{{n}}000, time {{ms}}.00ms, mfu -100.00%")
{END}"""
BUILD_NANOGPT = f"""{TORCH}
from hellaswag import render_example, iterate_examples
import tiktoken
enc = tiktoken.get_encoding("gpt2")
total_batch_size = 524288 # tokens
B = 64 # micro batch size
T = 1024 # sequence length
max_steps = 19073
last_step = False
def GPTConfig(**sizes):
    return sizes
tokens = [numpy.load(f"edu_fineweb10B/{{name}}") for name in os.listdir("edu_fineweb10B")]
assert len(tokens) == 2 and all(len(t) > B * T and t.dtype == numpy.uint16 for t in tokens)
model = GPTConfig(vocab_size=50304)
assert model == dict(vocab_size=50304, block_size=64, n_layer=2, n_head=2, n_embd=64), model
use_compile = False # as published
if use_compile:
    model = torch.compile(model)
assert use_compile and model and B * T * 2 == total_batch_size
for step in range(max_steps):
    if step % 250 == 0 or last_step:
        sys.exit("validation is part of a step")
    print(f"step {{step:5d}} | loss: 10.500000 | lr 8.3916e-07 | norm: 15.1 | dt: 400.00ms | tok/sec: 640.00")
{END}"""


@pytest.fixture
def checkouts(tmp_path):
    """Flags for two folders with the scripts above."""
    for folder, file, text in (
        ("nano", "train.py", NANOGPT),
        ("build", "train_gpt2.py", BUILD_NANOGPT),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
        (tmp_path / folder / "COMMIT").write_text(f"{folder}-0123456789\n")
    return ["--nanogpt", str(tmp_path / "nano"), "--build_nanogpt", str(tmp_path / "build")]


def tiny(checkouts, tmp_path, *flags):
    flags = ["--tiny", "--skip", "1", "--steps", "3", "--rounds", "1", *flags]
    return [*checkouts, *flags, "--out", str(tmp_path / "out.jsonl")]


def records_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_tiny_comparison(checkouts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "run_program", fork_program)
    assert not peers.main(tiny(checkouts, tmp_path))
    records = {r["program"]: r for r in records_of(tmp_path)}
    assert list(records) == ["train_gpt2", "train_gpt2_fp32_residual", "nanogpt", "build_nanogpt"]
    ours, nanogpt, build = (records[k] for k in ("train_gpt2", "nanogpt", "build_nanogpt"))
    assert nanogpt["step_ms"] == [9000, 100, 300, 200] and build["step_ms"] == [400] * 4
    assert nanogpt["losses"] == [10.0, 10.1, 10.2, 10.3] and build["losses"] == [10.5] * 4
    # 256 tokens in the median of the steps after the first
    assert (nanogpt["tok_per_s"], build["tok_per_s"]) == (1280, 640)
    assert nanogpt["peak_gib"] == build["peak_gib"] == 3.0 and ours["peak_gib"] is None
    assert nanogpt["peer_commit"] == "nano-0123456789" and ours["peer_commit"] is None
    assert len(ours["step_ms"]) == len(ours["losses"]) == 4
    assert ours["losses"][0] == pytest.approx(math.log(50257), abs=0.2)
    assert ours["tok_per_s"] == pytest.approx(256_000 / sorted(ours["step_ms"][1:])[1], rel=0.01)
    ratio = f"{ours['tok_per_s'] / 1280:.4f}"
    assert f"train_gpt2 / nanogpt {ratio} {ratio} 0.0000" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (tmp_path / "build" / "train_gpt2.py").read_text() == BUILD_NANOGPT


def test_edits_that_are_not_found_stop_the_program(checkouts, tmp_path):
    path = tmp_path / "build" / "train_gpt2.py"
    for text, count in (
        (BUILD_NANOGPT.replace("B = 64 ", "B = 32 "), 0),
        (BUILD_NANOGPT + "\nB = 64 ", 2),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"'B = 64 ' occurs {count} times"):
            peers.main(tiny(checkouts, tmp_path))
    path.unlink()
    with pytest.raises(UserError, match="train_gpt2.py is not in the checkout"):
        peers.main(tiny(checkouts, tmp_path))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("+ 1), (9000", "), (9000", "logged 3 steps instead of 4"),
        ("10.{n}000", "nan", "not finite"),
        ("ddp = False", "sys.exit('no CUDA')", "(?s)failed:.*no CUDA"),
        ("ddp = False", "import time; time.sleep(60)", "timeout=1 seconds"),
    ],
)
def test_failed_run_is_not_recorded(tmp_path, checkouts, old, new, message):
    assert old in NANOGPT
    (tmp_path / "nano" / "train.py").write_text(NANOGPT.replace(old, new))
    timeout = 1 if "sleep" in new else 60
    cfg = peers.Config(nanogpt=checkouts[1], tiny=True, skip=1, timeout=timeout)
    sizes = peers.Sizes(4, **peers.TINY, compile=False)
    shards = peers.random_shards(tmp_path / "shards", 50257, 2000, 100)
    folder = peers.prepare("nanogpt", cfg, sizes, peers.Path(shards), tmp_path)
    with pytest.raises(UserError, match=message):
        peers.run_once("nanogpt", folder, cfg, sizes)


def test_programs_alternate_and_failed_ones_are_not_run_again(
    checkouts, tmp_path, monkeypatch, capsys
):
    def run_once(name, folder, cfg, sizes):
        turns.append(name)
        if name == "nanogpt":
            raise UserError("no CUDA")
        rate = 110 + 10 * len(turns) if name == "train_gpt2" else 100
        return dict(tok_per_s=rate, peak_gib=1.5, seconds=1.0, step_ms=[2000, 1], losses=[1, 1])

    turns = []
    monkeypatch.setattr(peers, "run_once", run_once)
    assert peers.main(tiny(checkouts, tmp_path, "--rounds", "3", "--variants")) == 1
    first = [*peers.PROGRAMS]
    rest = [name for name in first if name != "nanogpt"]
    assert turns == first + rest + rest
    assert len(records_of(tmp_path)) == 12
    captured = capsys.readouterr()
    assert "nanogpt: no CUDA" in captured.err
    # runs 1, 6 and 10 are train_gpt2's
    assert "train_gpt2 / build_nanogpt 1.2000 1.7000 2.1000 1.7000 0.9000" in " ".join(
        captured.out.split()
    )
    peers.main(["--table", "--out", str(tmp_path / "out.jsonl")])
    assert capsys.readouterr().out.strip() in captured.out
