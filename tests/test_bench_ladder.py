"""bench/ladder.py and bench/floor.py on the CPU at a tiny shape: what is written, what is not measured twice, arithmetic."""

import copy
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, run_python, write_shards

sys.path.insert(0, str(ROOT / "bench"))

import floor  # noqa: E402
import kernels  # noqa: E402
import ladder  # noqa: E402
import rungs  # noqa: E402
from records import append_record, card_name, origin, random_shards, read_records  # noqa: E402
from test_train import compiler_that_errs  # noqa: E402

from lab.data.loader import TokenLoader
from train_gpt2 import GPT, GPTConfig, TrainConfig, World, make_optimizer  # noqa: E402

TINY = ["--shapes", "tiny", "--device", "cpu", "--steps", "6"]


def measure(out, *flags):
    """ladder.run on the tiny shape; the lines of its file."""
    ladder.run([*TINY, "--out", str(out), *flags])
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def two_rungs(tmp_path_factory):
    """A file with two measurements; tests copy it."""
    out = tmp_path_factory.mktemp("ladder") / "ladder.jsonl"
    measure(out, "--variants", "fp32,bf16")
    return out.read_text()


@pytest.fixture
def out(tmp_path, two_rungs):
    path = tmp_path / "ladder.jsonl"
    path.write_text(two_rungs)
    return path


# ---------------------------------------------------------------------------------------------------- the records


def test_records_hold_what_was_measured(two_rungs):
    records = [json.loads(line) for line in two_rungs.splitlines()]
    assert [r["variant"] for r in records] == ["fp32", "bf16"]
    for r in records:
        assert (r["bench"], r["group"], r["shape"], r["seed"], r["sustained"]) == ("ladder", "rungs", "tiny", 1337, False)
        assert r["error"] is None and r["torch"] == torch.__version__ and len(r["date"]) == 10 and r["card"]
        words = f"--shapes tiny --groups rungs --variants {r['variant']} --steps 6 --device cpu"
        assert r["command"] == f"python bench/ladder.py {words}"
        assert (r["batch_size"], r["seq_len"], r["micro_steps"], r["tokens_per_step"]) == (4, 16, 2, 128)
        assert len(r["step_ms"]) == r["steps"] == 6 and r["precision"] == r["variant"]
        assert r["median_ms"] == pytest.approx(np.median(r["step_ms"]), abs=0.006)
        assert (r["min_ms"], r["max_ms"]) == (min(r["step_ms"]), max(r["step_ms"]))
        assert r["iqr_ms"] == pytest.approx(np.subtract(*np.percentile(r["step_ms"], [75, 25])), abs=0.011)
        assert r["tok_per_s"] == pytest.approx(128 * 1000 / r["median_ms"], rel=1e-3)
        # weights that multiply: 2 layers of 12 C^2 and 13 C, last norm, head of 257 rows; and attention's 12 L C T
        assert r["flops_per_token"] == 6 * (2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 257 * 32) + 12 * 2 * 32 * 16
        assert r["compile_s"] >= 0 and abs(r["first_loss"] - np.log(257)) < 0.3
        assert {"mfu", "peak_gib", "kernel_ms", "commit", "power_w", "sm_mhz", "temperature_c", "uuid"} <= r.keys()
    # the settings reached the model: other products give another loss, though not much of another
    assert 0 < abs(records[0]["first_loss"] - records[1]["first_loss"]) < 0.01


def test_the_command_of_a_record_repeats_it(tmp_path):
    for flags in (["--seed", "7"], ["--groups", "loss", "--seeds", "2", "--val_tokens", "999", "--data", str(tmp_path)]):
        args = ladder.parse_args([*TINY, "--variants", "fp32", *flags])
        for case in rungs.cases(args):
            again = ladder.parse_args([*case.flags(args), "--data", args.data])
            (same,) = rungs.cases(again)
            assert same == case and (again.val_tokens, again.steps) == (args.val_tokens, 20 if case.group == "loss" else 6)


def test_the_timed_steps_are_updates_of_the_trainer(two_rungs, tmp_path):
    """Eleven updates, the five dropped ones among them, lead to the loss in the record."""
    record = json.loads(two_rungs.splitlines()[0])
    random_shards(tmp_path, 257)
    args = ladder.parse_args([*TINY, "--variants", "fp32", "--data", str(tmp_path)])
    (case,) = rungs.cases(args)
    with ladder.Run(case, 4, args, World("cpu")) as run:
        losses = [run.step().item() for _ in range(11)]
    assert [round(losses[0], 4), round(losses[-1], 4)] == [record["first_loss"], record["last_loss"]]
    assert round(losses[-2], 4) != round(losses[-1], 4)


def test_what_is_done_is_not_measured_again(out, capsys):
    before = out.read_bytes()
    measure(out, "--variants", "fp32,bf16")
    assert out.read_bytes() == before
    assert "0 of 2 measurements to do" in capsys.readouterr().out


def test_what_another_torch_did_is_measured_again_and_stays_in_the_table(out, capsys):
    append_record(out, read_records(out)[0] | dict(torch="2.8.0", tok_per_s=123))
    lines = out.read_text().splitlines()
    out.write_text(lines[1] + "\n" + lines[2] + "\n")  # fp32 is of the other torch alone
    measure(out, "--variants", "fp32,bf16")
    assert "1 of 2 measurements to do" in capsys.readouterr().out
    ladder.run(["--table", "--out", str(out)])
    here, other = capsys.readouterr().out.strip().split("\n\n")
    assert f"torch {torch.__version__}," in here and "torch 2.8.0," in other
    assert [line.split()[0] for line in here.splitlines()[2:4]] == ["fp32", "bf16"] and " 123 " in other


def test_a_line_cut_short_is_measured_again(out):
    first = out.read_text().splitlines()[0]
    out.write_bytes(out.read_bytes()[:-100])
    records = measure(out, "--variants", "fp32,bf16")
    assert out.read_text().splitlines()[0] == first
    assert [r["variant"] for r in records] == ["fp32", "bf16"] and records[1]["steps"] == 6


def test_a_line_without_its_newline_stays(out):
    out.write_bytes(out.read_bytes()[:-1])
    append_record(out, {"variant": "third"})
    assert [r["variant"] for r in read_records(out)] == ["fp32", "bf16", "third"]


def test_a_broken_line_in_the_middle_is_named(out):
    out.write_text('{"a": \n' + out.read_text())
    with pytest.raises(ValueError, match="line 1 of .*; delete that line"):
        read_records(out)
    out.write_text("# A text\nand no measurement\n")
    with pytest.raises(ValueError, match="line 1 of .*; name a file of measurements"):
        read_records(out)


def test_threads_share_a_file(tmp_path):
    def write(n):
        for i in range(20):
            append_record(tmp_path / "f", {"writer": n, "i": i, "long": "x" * 20_000})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = [(r["writer"], r["i"]) for r in read_records(tmp_path / "f")]
    assert sorted(found) == [(n, i) for n in range(4) for i in range(20)]


def test_a_record_says_where_it_comes_from(monkeypatch):
    here = origin("python a.py")
    assert here["command"] == "python a.py" and here["torch"] == torch.__version__ and here["commit"]
    assert origin(commit="abc")["commit"] == "abc"
    monkeypatch.setenv("PATH", "")
    assert origin()["commit"] == "unknown" and origin()["command"]
    assert card_name("cpu") and (torch.cuda.is_available() or card_name() == card_name("cpu"))


def test_cards_share_the_work(out, capfd):
    """What is done is left alone, a failure is a record, and the processes' records are those of one."""
    records = measure(out, "--cards", "2", "--variants", "fp32,tf32,fp8_head", "--seed", "1337", "--commit", "abc")
    found = {r["variant"]: r for r in records}
    assert [len(records), *found] == [4, "fp32", "bf16", *list(found)[2:]] and found.keys() >= {"tf32", "fp8_head"}
    tf32 = found["tf32"]
    assert tf32.keys() == records[0].keys() and tf32["commit"] == "abc" and tf32["command"].endswith("--device cpu")
    assert "8 bits need an NVIDIA GPU" in found["fp8_head"]["error"] and not tf32["error"]
    said = capfd.readouterr().out
    assert "[2/2]" in said and "rungs tiny tf32 seed 1337, card " in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals are for Linux and macOS")
def test_ctrl_c_ends_all_cards_and_the_same_command_goes_on(out):
    command = [sys.executable, ROOT / "bench" / "ladder.py", *TINY, "--out", out, "--cards", 2, "--groups", "micro_batch"]
    command = list(map(str, command))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline().startswith("6 of 6") and process.stdout.readline().startswith("[1/6]")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped; the same command goes on" in err and "Traceback" not in err
    found = len(read_records(out))
    assert 3 <= found < 8 and not any(r["error"] for r in read_records(out))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{8 - found} of 6 measurements to do" in done.stdout and len(read_records(out)) == 8


def test_a_failure_is_a_record_and_is_left_alone_until_retry(out, capsys):
    flags = ("--groups", "precision", "--variants", "fp16")
    failed = measure(out, *flags)[-1]
    assert "fp16 needs a GPU" in failed["error"] and failed["variant"] == "fp16" and "step_ms" not in failed
    assert len(measure(out, *flags)) == 3
    done = run_python(ROOT / "bench" / "ladder.py", *TINY, "--out", out, *flags, "--retry", cwd=out.parent)
    assert done.returncode == 1 and "fp16 needs a GPU" in done.stdout
    out.write_text("".join(line + "\n" for line in out.read_text().splitlines()[:3]))
    assert len(measure(out, *flags, "--retry")) == 4
    ladder.run(["--table", "--out", str(out)])
    assert "fp16: ValueError" in capsys.readouterr().out


def test_what_does_not_fit_gets_half_the_micro_batch(out, monkeypatch):
    real = ladder.time_steps

    def only_small(run, case, args):
        if run.cfg.batch_size > 2:
            raise MemoryError("no room")
        return real(run, case, args)

    monkeypatch.setattr(ladder, "time_steps", only_small)
    record = measure(out, "--variants", "tf32", "--batch_size", "8")[-1]
    assert record["command"].endswith("--batch_size 8 --device cpu")
    assert (record["batch_size"], record["micro_steps"], record["tokens_per_step"]) == (2, 4, 128)
    monkeypatch.setattr(ladder, "time_steps", lambda *_: torch.ones(2**60))
    record = measure(out, "--groups", "precision", "--variants", "tf32")[-1]
    assert "RuntimeError" in record["error"]


def test_a_measurement_that_takes_too_long_is_stopped():
    with pytest.raises(TimeoutError, match="--limit"):
        with ladder.time_limit(1):
            time.sleep(20)
    with ladder.time_limit(1):
        pass
    time.sleep(1.1)  # the alarm of a body that was in time does not ring


def test_what_has_failed_is_left_out_aloud(out, capsys):
    append_record(out, read_records(out)[0] | dict(error="no"))
    assert ladder.run([*TINY, "--variants", "fp32,bf16", "--out", str(out)]) == 0
    assert "1 failed before and left out; --retry tries again" in capsys.readouterr().out


def test_table_passes_over_records_of_other_programs(out, capsys):
    append_record(out, dict(bench="floor", op="copy", ms=1.0))
    ladder.run(["--table", "--out", str(out)])
    assert "copy" not in capsys.readouterr().out


def test_table_needs_no_gpu_and_no_data(out, capsys):
    ladder.run(["--table", "--out", str(out)])
    text = capsys.readouterr().out
    rates = [json.loads(line)["tok_per_s"] for line in out.read_text().splitlines()]
    assert "rungs, tiny: a step of 128 tokens" in text
    assert all(f"{rate:,}" in text for rate in rates) and f"{rates[1] / rates[0]:.2f}" in text
    with pytest.raises(FileNotFoundError, match="no measurements"):
        ladder.run(["--table", "--out", str(out.with_name("none.jsonl"))])


def test_the_table_says_of_which_step_the_kernel_times_are_not_typical(out, capsys):
    fp32, bf16 = read_records(out)
    for r, more in ((fp32, 1.05), (bf16, 1.5)):
        append_record(out, r | dict(median_ms=100.0, profiled_ms=100 * more, kernel_ms=dict(matmul=1.0), tokens_per_step=1024))
    ladder.run(["--table", "--out", str(out)])
    notes = [line for line in capsys.readouterr().out.splitlines() if "of one profiled step" in line]
    assert len(notes) == 1 and notes[0].endswith(", with more idling: bf16 150.0 ms")


def test_table_keeps_step_sizes_apart_and_variants_in_order(out, capsys):
    fp32, bf16 = read_records(out)
    for r, rate in ((bf16, 600), (fp32, 400)):  # the later rung was measured first
        append_record(out, r | dict(tokens_per_step=1024, tok_per_s=rate))
    ladder.run(["--table", "--out", str(out)])
    small, large = capsys.readouterr().out.strip().split("\n\n")
    assert ": a step of 128 tokens," in small and f"{bf16['tok_per_s']:,}" in small and len(small.splitlines()) == 4
    assert ": a step of 1,024 tokens," in large
    rows = [line.split() for line in large.splitlines()[2:]]
    assert [(row[0], *row[4:7]) for row in rows] == [("fp32", "400", "1.00", "1.00"), ("bf16", "600", "1.50", "1.50")]


RACE = dict(precision="bf16", compile_mode="default", bf16_residual=False, fused_mlp=False)


@pytest.mark.parametrize("more, wrong", [
    (dict(), True), (dict(shape="gpt2-medium"), False), (dict(torch="2.14.0"), False), (dict(torch="2.9.1+cu128"), True),
    (dict(settings=RACE | dict(precision="tf32")), False), (dict(settings=RACE | dict(compile_mode="none")), False),
    (dict(settings=RACE | dict(bf16_residual=True)), False), (dict(settings=RACE | dict(fused_mlp=True)), False),
    (dict(settings={}), False),
])  # fmt: skip
def test_rungs_compiled_with_a_race_have_a_star(out, more, wrong, capsys):
    record = read_records(out)[0] | dict(shape="gpt2-xl", variant="flash", settings=RACE, torch="2.11.0+cu130") | more
    append_record(out, record)
    append_record(out, record | dict(group="loss", seconds=1.0, val_loss=7.0, curve=[[10, 1.0, 7.0]], max_steps=10))
    ladder.run(["--table", "--out", str(out)])
    timed, trained = capsys.readouterr().out.strip().split("\n\n")[1:]
    for table in (timed, trained):
        assert ("flash*" in table) == ("*: compiled with a race" in table) == wrong


def test_all_are_all_but_the_shape_for_tries():
    args = ladder.parse_args(["--shapes", "all", "--groups", "all"])
    assert args.shapes == [name for name in rungs.SHAPES if name != "tiny"] and args.groups == rungs.GROUPS


def test_list_measures_nothing(out, capsys):
    before = out.read_bytes()
    ladder.run([*TINY, "--out", str(out), "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert out.read_bytes() == before
    states = {line.split()[2]: line.split("1337")[1].strip() for line in lines if "seed 1337" in line}
    assert states["fp32"] == states["bf16"] == "done" and states["tf32"] == states["flash"] == "to do"


def test_8_bits_are_left_out_where_there_are_none(out, capsys):
    done = json.loads(out.read_text().splitlines()[-1])
    for variant in rungs.variants("rungs"):
        if not variant.startswith("fp8"):
            append_record(out, done | dict(variant=variant))
    assert ladder.run([*TINY, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "has no 8-bit products: fp8_head, fp8_mlp\n0 of 10 measurements to do" in text


def test_wrong_input_is_one_sentence(tmp_path):
    for flags, words in (
        (["--variants", "fp31"], "fp31"),
        (["--groups", "rung"], "rung is not one of"),
        (["--shapes", "gpt3"], "gpt3 is not one of"),
        (["--steps", "0"], "steps=0"),
        (["--cards", "0"], "cards=0"),
        (["--groups", "loss"], "--data"),
        (["--data", "nowhere"], "data=nowhere is no folder"),
        (["--batch_size", "-1"], "batch_size=-1 must be 0"),
    ):
        with pytest.raises(ValueError, match=words):
            ladder.run([*TINY, "--out", str(tmp_path / "o"), *flags])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["ladder.py", "floor.py"])
def test_without_a_gpu_it_says_what_it_needs(script, tmp_path):
    done = run_python(ROOT / "bench" / script, "--out", "o.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs a CUDA GPU" in done.stderr and "tiny --device cpu" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_text_too_short_to_train_on_is_named(tmp_path):
    (tmp_path / "t.txt").write_text("a" * 99)
    done = run_python("bench/laptop.py", tmp_path / "t.txt", cwd=ROOT)
    assert done.returncode == 2 and "t.txt has 99 bytes, too few to train on" in done.stderr and "Traceback" not in done.stderr


def test_algorithms_are_those_of_a_gpu(tmp_path):
    done = run_python(ROOT / "bench" / "gelu_algorithms.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needs an NVIDIA GPU" in done.stderr


@pytest.mark.parametrize("run, flags", [(ladder.run, TINY), (floor.run, ["--preset", "tiny", "--device", "cpu"])])
def test_a_file_that_cannot_be_written_is_named_before_measuring(run, flags, tmp_path, capsys):
    (tmp_path / "f").write_text("")
    for out, why in ((tmp_path / "f" / "o.jsonl", "(Not a directory|File exists)"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=rf"^out={out} cannot be written \({why}\); name another place with --out$"):
            run([*flags, "--out", str(out)])
    assert "measurements to do" not in capsys.readouterr().out, "nothing was measured"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_floor_refuses_times_that_are_none():
    for flag, value in (("--seconds", "0"), ("--seconds", "inf"), ("--pause", "-1"), ("--seconds", "nan")):
        with pytest.raises(ValueError, match=f"{flag[2:]}={float(value)} must be a finite number"):
            floor.parse_args(["--preset", "tiny", "--device", "cpu", flag, value])


def test_a_cpu_writes_nothing_into_the_records(monkeypatch):
    before = Path(ladder.OUT).read_bytes(), Path(floor.OUT).read_bytes()
    for run, words in ((ladder.run, TINY), (floor.run, ["--preset", "tiny", "--device", "cpu"])):
        with pytest.raises(ValueError, match="jsonl is README's, and of GPUs; for a try on a CPU add --out try.jsonl"):
            run(words)
    assert (Path(ladder.OUT).read_bytes(), Path(floor.OUT).read_bytes()) == before


# -------------------------------------------------------------------------------------------------- what is varied


def test_rungs_add_up_and_leave_out_what_the_trainer_does_not_have(monkeypatch):
    found = rungs.variants("rungs")
    fields = {f.name for config in (GPTConfig, TrainConfig) for f in dataclasses.fields(config)} | set(rungs.BENCH)
    assert list(found)[:9] == ["fp32", "tf32", "bf16", "compile", "flash", "vocab_50304", "fused_adamw", "fused_loss",
                               "bf16_residual"]  # fmt: skip
    assert all(set(settings) <= fields for settings in found.values())
    last = ["fp8_head"] + ["fp8_mlp"] * ("fp8_mlp" in fields)
    assert list(found)[-len(last) :] == last and list(rungs.variants("loss")) == [*found, "muon", "fp8_attention"]
    for before, after in zip(list(found.values()), list(found.values())[1:]):
        assert sum(before[k] != after[k] for k in after) == 1
    monkeypatch.setattr(rungs, "RUNGS", [*rungs.RUNGS[:2], ("teleport", dict(teleport=True)), *rungs.RUNGS[2:]])
    assert rungs.variants("rungs") == found


def test_every_variant_of_every_shape_is_a_valid_run(tmp_path):
    everything = ["--shapes", ",".join(rungs.SHAPES), "--groups", ",".join(rungs.GROUPS)]
    args = ladder.parse_args([*everything, "--data", str(tmp_path)])
    for case in rungs.cases(args):
        model, cfg, _ = case.configs(args)
        assert cfg.total_batch_size % (cfg.batch_size * cfg.seq_len) == 0
        if case.group == "loss":
            assert cfg.total_batch_size == 65536 and cfg.max_steps == 300 and cfg.warmup_steps == 30
        elif case.shape.startswith("gpt2"):
            assert cfg.total_batch_size == 524288


def test_loaders_differ_in_time_alone(shards, one_process):
    cfg = TrainConfig(data=str(shards), seq_len=16, total_batch_size=128, batch_size=4)
    from lab.data.shards import TokenShards

    def batches(kind):
        loader = TokenLoader(TokenShards(shards, "train", 257), cfg, one_process, 4)
        loader = ladder.change_loader(loader, kind, cfg, one_process)
        got = [loader.next_batch() for _ in range(5)]
        loader.worker.shutdown()
        return torch.stack([torch.stack([x, y]) for x, y, _ in got]), loader.sequence

    expected, sequence = batches("as built")
    for kind in ("not pinned", "not ahead"):
        got, at = batches(kind)
        assert torch.equal(got, expected) and at == sequence == 16


def test_adamw_is_the_same_in_all_three_ways(tiny_config):
    model = GPT(tiny_config)
    cfg, results = TrainConfig(lr=1e-2), {}
    for kind in ("fused", "foreach", "loop"):
        torch.manual_seed(1)
        ours = copy.deepcopy(model)
        optimizer = make_optimizer(ours, cfg, torch.device("cpu"))
        ladder.change_adamw(optimizer, kind)
        switches = {"fused": (True, None), "foreach": (False, True), "loop": (False, False)}[kind]
        assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [switches] * 2
        for _ in range(3):
            for p in ours.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        results[kind] = torch.cat([p.detach().flatten() for p in ours.parameters()])
    assert (results["fused"] - torch.cat([p.detach().flatten() for p in model.parameters()])).abs().max() > 0.01
    for kind in ("foreach", "loop"):
        assert (results[kind] - results["fused"]).abs().max() < 1e-5


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replayed, *params):
        ctx.replayed = replayed
        return replayed.loss.detach()

    @staticmethod
    def backward(ctx, grad_loss):
        for out, grad in zip(ctx.replayed.out, ctx.replayed.grads):
            torch.mul(grad, grad_loss, out=out)
        return None, *(out.detach() for out in ctx.replayed.out)


class Replayed(torch.nn.Module):
    """What CUDA graphs do, without a card: each call writes its loss and gradients over those of the call before."""

    def __init__(self, model):
        super().__init__()
        self.model, self.loss = model, torch.zeros(())
        self.out = [torch.zeros_like(p) for p in model.parameters()]

    def forward(self, x, y, reduction):
        loss, params = self.model(x, y, reduction=reduction)[1], list(self.model.parameters())
        self.grads = torch.autograd.grad(loss, params)
        self.loss.copy_(loss.detach())
        return None, Replay.apply(self, *params)


def weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def few_losses(shards, batch_size, change, device="cpu", **settings):
    """Losses of six updates of the tiny shape, 128 tokens each, whose model has gone through change()."""
    args = ladder.parse_args(["--shapes", "tiny", "--device", device, "--data", str(shards)])
    settings = dict(compile_mode="none", precision="fp32", lr=1e-2, warmup_steps=0) | settings
    case = rungs.Case("rungs", "tiny", "", settings, 1337)
    with ladder.Run(case, batch_size, args, World(device)) as run:
        assert run.loader.grad_accum_steps == 8 // batch_size
        run.model = change(run.model)
        return [run.step().item() for _ in range(6)]


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("group", ["rungs", "loss"])
def test_a_rung_that_is_compiled_wrongly_is_a_failure(shards, tmp_path, monkeypatch, group, factor):
    compiler_that_errs(monkeypatch, factor)
    flags = f"--data {shards} --variants bf16,compile --groups {group} --seeds 1 --loss_steps 2 --loss_tokens 64 --val_tokens 9"
    plain, compiled = measure(tmp_path / "out.jsonl", *flags.split())
    assert plain["error"] is None
    if factor == 1:
        assert compiled["error"] is None
    else:
        assert "a time of wrong results is none; torch.compile is off: for the first micro-batch" in compiled["error"]


def test_the_compiler_is_checked_before_the_first_update(shards, monkeypatch):
    args = ladder.parse_args([*TINY, "--variants", "fp32", "--data", str(shards)])
    (case,) = rungs.cases(args)
    checked = []
    monkeypatch.setattr(ladder, "check_compiled", lambda model, raw_model, *_: checked.append(weights(raw_model)) or model)
    with ladder.Run(case, 4, args, World("cpu")) as run:
        before = weights(run.raw_model)
        run.first_step()
        assert len(checked) == 1 and torch.equal(checked[0], before) and not torch.equal(weights(run.raw_model), before)


def test_logits_beside_the_loss_change_no_loss(shards):
    dropped, returned = (
        few_losses(shards, 4, lambda model: model, cross_entropy="plain", returns=what) for what in ("loss", "loss and logits")
    )
    assert returned == pytest.approx(dropped, abs=1e-5) and len(set(returned)) == 6


@pytest.mark.parametrize("batch_size", [8, 4, 2])
def test_gradients_add_up_over_replays_of_a_graph(shards, batch_size):
    plain = few_losses(shards, batch_size, lambda model: model)
    graphs = few_losses(shards, batch_size, lambda model: ladder.CudaGraphs(Replayed(model)))
    assert graphs == pytest.approx(plain, abs=1e-5)
    bare = few_losses(shards, batch_size, Replayed)
    assert (bare == pytest.approx(plain, abs=1e-3)) == (batch_size == 8), "with several micro-steps they would not add up"


def test_a_loss_of_graphs_may_be_kept(tiny_config):
    model = ladder.CudaGraphs(Replayed(GPT(tiny_config)))
    x, y, z = torch.randint(0, 257, (3, 2, 8))
    (_, first), (_, second) = (model(x, targets, reduction="sum") for targets in (y, z))
    assert first.item() != second.item() and first.item() == GPT.forward(model.model.model, x, y, "sum")[1].item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("batch_size", [8, 2])
def test_cuda_graphs_train_like_the_plain_model(shards, batch_size):
    """The first two micro-steps warm up and record, the others replay."""
    modes = ("none", "reduce-overhead")
    plain, graphs = (few_losses(shards, batch_size, lambda model: model, "cuda", compile_mode=mode) for mode in modes)
    assert graphs == pytest.approx(plain, abs=1e-3)


# ------------------------------------------------------------------------------------------------------- profiles


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matmul"),
        ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", "matmul"),
        ("nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(...)", "matmul"),
        ("ampere_sgemm_128x64_tn", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>(...)", "matmul"),
        ("triton_tem_fused_addmm_2", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 4, cutlass::bfloat16_t>>(...)", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<...>)", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, float*, ...)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, ...)", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(...)", "attention"),
        ("triton_per_fused__softmax_masked_fill_mul_4", "attention"),
        ("loss", "loss"),
        ("row", "loss"),
        ("tile", "loss"),
        ("liger_cross_entropy_kernel", "loss"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, "
         "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(...)", "loss"),
        ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)", "loss"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_7", "loss"),
        ("triton_red_fused_native_layer_norm_3", "elementwise"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_clone_transpose_5", "elementwise"),
        ("triton_poi_fused__to_copy_1", "elementwise"),
        ("cast_tile", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(...)>", "elementwise"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(...)", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(...)", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>(...)", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>", "copy"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kernels.kind_of(name) == kind
    assert kind in kernels.CLASSES


def test_kernel_times_of_a_trace():
    def kernel(name, start, length, cat="kernel"):
        return {"cat": cat, "name": name, "ts": 1000.0 * start, "dur": 1000.0 * length, "ph": "X"}

    trace = [
        {"ph": "M", "name": "process_name"},
        kernel("cudaLaunchKernel", 0, 90, cat="cuda_runtime"),
        kernel("Memcpy HtoD (Pinned -> Device)", 10, 2, cat="gpu_memcpy"),
        kernel("nvjet_tst", 14, 6),
        kernel("nvjet_tst", 18, 4),  # 2 of it beside the one before
        kernel("at::cuda::spin_kernel", 22, 1),
        kernel("nvjet_tst", 24, 6),
        kernel("at::cuda::spin_kernel", 30, 1),
        kernel("nvjet_tst", 32, 3),  # Muon's products are the optimizer's
        kernel("vectorized_elementwise_kernel<mul>", 35, 3),
        kernel("at::cuda::spin_kernel", 38, 1),
        kernel("reduce_kernel", 40, 2),
    ]
    kernel_ms, window, top = kernels.kernel_times(trace, micro_steps=2)
    expected = dict.fromkeys(kernels.CLASSES, 0.0) | {"copy": 1, "matmul": 8, "optimizer": 3, "elementwise": 1}
    # from 10 to 42, of which 2 + 8 + 6 + 6 + 2 are busy
    assert kernel_ms == expected | {"idle": (32 - 24) / 2} and window == 32
    assert top[0] == {"name": "nvjet_tst", "class": "matmul", "ms": 8.0}
    with pytest.raises(RuntimeError, match="no kernels"):
        kernels.kernel_times(trace[:2], 1)


def test_the_kernels_of_a_trace_as_a_table(tmp_path):
    rows = [["elementwise", "triton_poi_fused_cat_3", 7, 0.0, 40.0], ["matmul", "nvjet", 7, 41.0, 50.0],
            ["elementwise", "triton_poi_fused_cat_12", 7, 100.0, 60.0]]  # fmt: skip
    about = dict(mode="ddp", world_size=4, device="H9", torch="2.11", kernels=rows)
    (tmp_path / "ddp.kernels.json").write_text(json.dumps(about))
    lines = run_python("bench/kernels.py", tmp_path / "ddp.kernels.json", cwd=ROOT).stdout.splitlines()
    assert lines[0] == "ddp, 4 x H9, torch 2.11: 3 kernels"
    assert [line.split() for line in lines[2:]] == [["0.100", "2", "50.0", "elementwise", "triton_poi_fused_cat"],
                                                    ["0.050", "1", "50.0", "matmul", "nvjet"]]  # fmt: skip
    (tmp_path / "other.json").write_text("[1]")
    bad = run_python("bench/kernels.py", tmp_path / "other.json", cwd=ROOT)
    assert bad.returncode == 2 and "is no extract of a trace" in bad.stderr and "Traceback" not in bad.stderr
    no_file = "there is no file {}; readme.assets/runs has"
    for path, words in ((ROOT / "README.md", "is no extract of a trace"), ("none", no_file), (ROOT / "tests", no_file)):
        bad = run_python("bench/kernels.py", path, cwd=ROOT)
        assert bad.returncode == 2 and words.format(path) in bad.stderr and bad.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------- loss


def test_loss_runs_and_their_table(tmp_path, capsys):
    data, out = write_shards(tmp_path / "data"), tmp_path / "loss.jsonl"
    flags = ["--groups", "loss", "--variants", "fp32,bf16", "--data", str(data), "--at_once", "2", "--seeds", "2",
             "--loss_steps", "24", "--loss_tokens", "128", "--val_tokens", "300"]  # fmt: skip
    records = measure(out, *flags)
    assert [(r["variant"], r["seed"]) for r in records] == [("fp32", 1337), ("fp32", 1338), ("bf16", 1337), ("bf16", 1338)]
    for r in records:
        assert [point[0] for point in r["curve"]] == [10, 20, 24] and r["max_steps"] == 24 and r["tokens_per_step"] == 128
        seconds, losses = [point[1] for point in r["curve"]], [point[2] for point in r["curve"]]
        assert 0 < seconds[0] < seconds[1] < seconds[2] == r["seconds"] and losses[2] < losses[1] < losses[0] < r["first_loss"]
        assert r["val_tokens"] == 300 and abs(r["val_loss"] - losses[2]) < 0.3 and "step_ms" not in r
        assert f"--seed {r['seed']} --seeds 1" in r["command"] and "--data data" in r["command"]
        assert r["at_once"] == 2 and "--at_once 2" in r["command"]
    assert records[0]["val_loss"] != records[1]["val_loss"]
    assert abs(records[0]["val_loss"] - records[2]["val_loss"]) < 0.02
    capsys.readouterr()
    ladder.run(["--table", "--out", str(out)])
    text = capsys.readouterr().out
    assert f"{(records[0]['val_loss'] + records[1]['val_loss']) / 2:.4f}" in text and "24 steps of 128 tokens" in text
    assert "a card that 2 runs shared" in text
    assert len(measure(out, *flags)) == 4
    assert len(measure(out, *flags[:-6], "--loss_steps", "30", "--loss_tokens", "128")) == 8  # a longer run is another one


def test_loss_after_equal_seconds():
    assert ladder.loss_at([[10, 2.0, 6.0], [20, 4.0, 5.0], [30, 6.0, 4.5]], 5.0) == pytest.approx(4.75)
    assert ladder.loss_at([[10, 2.0, 6.0], [20, 4.0, 5.0]], 9.0) == 5.0


# ---------------------------------------------------------------------------------------------------------- floor


def test_floor_of_given_times():
    config = GPTConfig()
    positions = 64 * 1024
    sizes = floor.products(config)
    # 12 blocks and the head multiply with all weights but embeddings of positions, biases and gains
    weights = sum(n * a * b for a, b, n in sizes.values())
    assert weights == 12 * 12 * 768**2 + 50304 * 768
    times = {"qkv": 0.4, "proj": 0.1, "fc": 0.4, "fc2": 0.5, "head": 7.0}
    ms = {f"{name} {way}": t for name, t in times.items() for way in floor.WAYS}
    ms |= {"attention flash forward": 0.5, "attention flash backward": 1.5, "attention cudnn forward": 0.6,
           "attention cudnn backward": 1.0, "attention math forward": 0.1}  # fmt: skip
    alone, best = floor.isolated_ms(ms, config)
    assert best == "cudnn" and alone == pytest.approx(12 * 3 * 1.4 + 3 * 7.0 + 12 * 1.6)
    tensor = positions * 768 * 2
    assert floor.traffic(config, positions, "in its own kernels") == ((12 * 36 + 7) * tensor, 2 * positions * 50304 * 2)
    assert floor.traffic(config, positions, "inside the products")[0] == (12 * 24 + 7) * tensor
    assert floor.floor_ms(80.0, 4e9, bytes_per_s=4e12, optimizer_ms=2.0, micro_steps=8) == pytest.approx(8 * 81 + 2)
    all_four = floor.floors(config, positions, ms | {"AdamW": 1.0, "clip": 0.5}, 100.0, 4e12, micro_steps=8)
    moved = (12 * 24 + 7) * tensor + 2 * positions * 50304 * 2
    assert all_four["floor: back to back, cudnn attention, GELU inside the products"] == pytest.approx(
        8 * (100 + moved / 4e9) + 1.5
    )
    assert len(all_four) == 4
    assert len(floor.floors(config, positions, ms | {"AdamW": 1.0, "clip": 0.5}, None, 4e12, micro_steps=8)) == 2
    small = {f"fp8 {name} {way}": times[name] / 2 for name in floor.IN_8_BITS for way in floor.WAYS}
    in_8 = floor.floors(config, positions, ms | small | {"AdamW": 1.0, "clip": 0.5}, None, 4e12, 8, floor.IN_8_BITS)
    saved = 12 * 3 * 0.45 + 3 * 3.5  # the MLP's and the head's products in half the time; the casts read and write
    moved = (12 * (16 + 2 + 8 + 2 + 12) + 7) * tensor + 2 * positions * 50304 * 2
    assert in_8 == {"floor: parts alone, cudnn attention, GELU in the casts to 8 bits":
                    pytest.approx(8 * (alone - saved + moved / 4e9) + 1.5)}  # fmt: skip
    with pytest.raises(KeyError, match="head dgrad"):
        floor.isolated_ms({k: v for k, v in ms.items() if k != "head dgrad"}, config)


def test_what_bounds_an_operation():
    assert floor.bound_of(flops=2e12, moved=1e9, bytes_per_s=4e12, flop_per_s=8e14) == "compute"
    assert floor.bound_of(flops=1e11, moved=1e9, bytes_per_s=4e12, flop_per_s=8e14) == "memory"


def test_products_and_attention_are_those_of_the_model():
    """The bench's operands give the shapes, the FLOPs and, for attention, the numbers that the model's layers have."""
    config = GPTConfig(2, 2, 32, 32, vocab_size=257)
    parts = floor.Parts(config, 4, 16, torch.device("cpu"))
    for name, (inputs, outputs, _) in floor.products(config).items():
        shapes = {"forward": (64, outputs), "dgrad": (64, inputs), "wgrad": (outputs, inputs)}
        for way in floor.WAYS:
            calls, flops, moved = parts.product(name, way)
            assert calls[0]().shape == shapes[way] and not torch.equal(calls[0](), calls[1]())
            assert flops == 2 * 64 * inputs * outputs and moved == 2 * (64 * inputs + inputs * outputs + 64 * outputs)
    (forward, _), flops, moved = parts.attention("flash", "forward")
    assert forward().shape == (4, 2, 16, 16) and flops == 4 * (4 * 2) * 16 * 16 * 16 // 2 and moved == 4 * 64 * 32 * 2
    (backward, _), more, _ = parts.attention("flash", "backward")
    assert [g.shape for g in backward()] == [(4, 2, 16, 16)] * 3 and more == 2.5 * flops
    assert len(parts.micro_step("flash")) == 2 * (5 + 9) + 3


def test_floor_writes_each_part_once(tmp_path, capsys):
    out = tmp_path / "floor.jsonl"
    flags = ["--preset", "tiny", "--device", "cpu", "--seconds", "0.05", "--pause", "0", "--out", str(out)]
    floor.run([*flags, "--step_ms", "12.5"])
    records = {r["op"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert len(records) == len(out.read_text().splitlines())
    for r in records.values():
        assert {"flops", "bytes", "ms", "tflops", "bound", "error", "card", "torch", "date", "commit", "command"} <= r.keys()
        assert (r["ms"] is None) == bool(r["error"])
    qkv = records["qkv forward"]
    assert qkv["flops"] == 2 * 64 * 32 * 96 and qkv["bound"] in ("compute", "memory")
    assert qkv["flop_per_byte"] == pytest.approx(qkv["flops"] / qkv["bytes"], abs=0.01)
    assert "No viable backend" in records["attention cudnn forward"]["error"]  # and the rest went on
    floors = [r for op, r in records.items() if op.startswith("floor: ")]
    assert len(floors) == 4 and all(r["step_ms"] == 12.5 for r in floors)
    assert floors[0]["over_floor"] == pytest.approx(12.5 / floors[0]["ms"], rel=1e-3)
    assert "tokens/s; ours takes" in capsys.readouterr().out
    floor.run([*flags[:2], "--out", str(out), "--sums"])  # the same sums, from the file alone
    found = dict(re.findall(r"(floor: .+?) +([0-9.]+) ms", text := capsys.readouterr().out))
    assert {op: float(ms) for op, ms in found.items()} == {r["op"]: pytest.approx(r["ms"], abs=0.06) for r in floors}
    assert "no floor without 'fp8 fc forward'" in text
    with pytest.raises(ValueError, match="no parts of gpt2 with micro-batches of 64"):
        floor.run(["--out", str(out), "--sums"])
    # half the tokens a step: half the micro-steps of the same parts, and the same optimizer
    floor.run([*flags[:2], "--out", str(out), "--sums", "--tokens_per_step", "64"])
    half = dict(re.findall(r"(floor: .+?) +([0-9.]+) ms", capsys.readouterr().out))
    optimizer_ms = records["AdamW"]["ms"] + records["clip"]["ms"]
    assert {op: 2 * float(ms) - optimizer_ms for op, ms in half.items()} == {
        r["op"]: pytest.approx(r["ms"], abs=0.11) for r in floors
    }
    with pytest.raises(ValueError, match="a step of 100 tokens must be a multiple of a micro-step, batch_size=4 x 16"):
        floor.run([*flags, "--tokens_per_step", "100"])
    # another card's lines stay, ours are replaced
    append_record(out, floors[0] | {"card": "another"})
    floor.File(out, card=floors[0]["card"], preset="tiny", batch_size=4)
    assert [r["card"] for r in read_records(out)] == ["another"]
