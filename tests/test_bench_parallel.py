"""bench/parallel.py and bench/cpu.py: that the ways to share work agree, and that records, tables and pictures are right."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY_MODEL, clean_env, run_python

sys.path.insert(0, str(ROOT / "bench"))

import cpu  # noqa: E402
import parallel  # noqa: E402
from records import append_record, random_shards, read_records  # noqa: E402

from lab.device import Precision, why_no_compile  # noqa: E402
from lab.optim.zero import ZeroAdamW  # noqa: E402
from train_gpt2 import (  # noqa: E402
    GPT,
    PRESETS,
    GPTConfig,
    TrainConfig,
    World,
    compile_model,
    make_optimizer,
    share_out,
)

# ------------------------------------------------------------------------------------------- two processes, one result

STEPS = 6
# a threshold that clips, decay that shows, and an eps that does not blow rounding up
CFG = TrainConfig("laptop", total_batch_size=128, batch_size=4, seq_len=16, lr=3e-3, max_steps=20, warmup_steps=2,
                  schedule="constant", weight_decay=0.1, eps=1e-3, grad_clip=0.25, device="cpu", precision="fp32")  # fmt: skip


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def updates(mode, cfg, world, how="off"):
    """What STEPS updates do on this process; `moments`: how many numbers of AdamW's first moment lie here; `products`: how
    many matrix products the last update, if it is compiled, has done before, between and after its exchanges."""
    step, model, optimizer = parallel.build(mode, GPTConfig(**TINY_MODEL), cfg, world, how)
    start = {name: whole(p) for name, p in model.named_parameters()}
    clock = parallel.PhaseClock(False, world.device)
    seen = [step(clock) for _ in range(STEPS - 1)]
    with torch.profiler.profile() if how == "model" else contextlib.nullcontext() as profiler:
        seen.append(step(clock))
    events = sorted(profiler.events(), key=lambda e: e.time_range.start) if profiler else []
    ops = [{"aten::mm": "m", "aten::addmm": "m", "gpt2::start_exchange": "|"}.get(e.name, "") for e in events]
    moments = [s["exp_avg"] for s in getattr(optimizer, "of_shares", optimizer).state.values()]
    return {
        "losses": [loss.item() if mode == "alone" else world.mean(loss.item()) for loss, _ in seen],
        "norms": [whole(norm).item() for _, norm in seen],
        "start": start, "end": {name: whole(p) for name, p in model.named_parameters()},
        "moments": sum((m.to_local() if hasattr(m, "to_local") else m).numel() for m in moments),
        "saved": len(optimizer.state_dict()["state"]), "products": [len(part) for part in "".join(ops).split("|")],
    }  # fmt: skip


MODES = {"off": ["alone", "ddp", "flat", "in_graph", "zero1", "fsdp2"], "model": ["in_graph", "zero1"]}  # what is compiled
ROUNDED = ["zero1", "zero1_16bit"]  # in bf16


def main(data, out, how):
    """What each of the two processes of the test below runs."""
    world, cfg = World("cpu"), dataclasses.replace(CFG, data=data)
    found = {mode: updates(mode, cfg, world, how) for mode in MODES[how]}
    if how == "off":
        rounding = dataclasses.replace(cfg, precision="bf16", grad_clip=0)  # a norm is summed in another order
        sizes = [dataclasses.replace(rounding, total_batch_size=n) for n in (128, 256)]  # of one and of two micro-steps
        torch.save([[updates(mode, c, world, how) for mode in ROUNDED] for c in sizes], f"{out}/bf16_{world.rank}.pt")
    torch.save(found, f"{out}/rank{world.rank}.pt")
    zero1 = dataclasses.replace(cfg, zero1=True, compile=False)
    model = GPT(GPTConfig(**TINY_MODEL))
    assert compile_model(model, zero1, world, None) is model, "DDP would exchange what ZeroAdamW does"
    torch.manual_seed(world.rank)
    model = GPT(GPTConfig(**TINY_MODEL))
    share_out(make_optimizer(model, cfg, world.device), model, Precision("fp32", world.device), world)
    assert len(set(world.gather(model.lm_head.weight.sum().item()))) == 1, "rank 0's weights are everyone's"
    large = torch.nn.Parameter(torch.zeros(10_000_000))
    shared = ZeroAdamW(torch.optim.AdamW([large]), [], torch.float32, world)
    large.grad = torch.randn(large.shape, generator=torch.Generator().manual_seed(0))
    expected = large.grad.double().norm().item()
    assert shared.exchange(0.0, accumulated=True).item() == pytest.approx(expected, rel=1e-6)
    world.exit()


@pytest.mark.skipif(not dist.is_gloo_available() or sys.platform == "win32", reason="needs gloo and torchrun")
@pytest.mark.parametrize("how", ["off", pytest.param("model", marks=pytest.mark.slow)])
def test_two_processes_are_one_in_every_mode(how, tmp_path, shards):
    """ddp_bf16 is left out: PyTorch has its hook for NCCL alone."""
    if reason := how == "model" and why_no_compile(torch.device("cpu")):
        pytest.skip(reason)
    command = [*parallel.torchrun(2, Path(__file__)), shards, tmp_path, how]
    done = subprocess.run(list(map(str, command)), env=clean_env(PYTHONPATH=str(ROOT / "tests")), capture_output=True,
                          text=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    one = updates("alone", dataclasses.replace(CFG, data=str(shards), batch_size=8), World("cpu"))
    half = updates("alone", dataclasses.replace(CFG, data=str(shards), total_batch_size=64), World("cpu"))
    assert min(one["norms"]) > 2 * CFG.grad_clip, "clipping has to take part"
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert list(found) == MODES[how] and found.pop("alone", half)["losses"] == half["losses"]
        for mode, two in found.items():
            assert two["losses"] == pytest.approx(one["losses"], abs=1e-5), mode
            assert two["norms"] == pytest.approx(one["norms"], abs=1e-5), mode
            for name, p in one["end"].items():
                assert (p - two["end"][name]).abs().max() < 1e-5, (mode, name)
                assert (p - two["start"][name]).abs().max() > 1e-4, (mode, name)
            share = two["moments"] / one["moments"]
            assert 0.45 < share < 0.55 if mode in ("zero1", "fsdp2") else share == 1, mode
            assert (two["saved"] > 0) == (mode != "zero1" or rank == 0), "rank 0 alone keeps what all have gathered"
        for exact, same in torch.load(tmp_path / f"bf16_{rank}.pt") if how == "off" else []:
            assert exact["losses"] == same["losses"]
            assert exact["norms"] == pytest.approx(same["norms"], rel=1e-6)
            for name, p in exact["end"].items():
                p = p.bfloat16().float() if p.dim() == 2 and ".h." in name else p
                assert torch.equal(p, same["end"][name]), name
        if how == "model":
            first, second, third, rest = found["in_graph"]["products"]
            # the second block's gradients leave before the 8 products of the first block's backward pass
            assert first > 8 and second == 8 and third <= 1 and rest == 0


def test_an_exchange_in_the_graph_refuses_to_accumulate(shards):
    cfg = dataclasses.replace(CFG, data=str(shards))
    with pytest.raises(ValueError, match="total_batch_size=128 takes 2 micro-steps; 64 takes one"):
        parallel.build("in_graph", GPTConfig(**TINY_MODEL), cfg, World("cpu"), "off")


# ------------------------------------------------------------------------------------------------- records of parallel

QUICK = "--device cpu --preset laptop --batch_size 1 --seq_len 16 --steps 2 --warmup 0 --precision fp32 --compile off".split()


def work(out, *more):
    """One process of parallel.py, this one; returns the records of `out`."""
    parallel.work(parallel.parse_args([*QUICK, "--out", str(out), *more]))
    return read_records(out)


def test_a_finished_measurement_is_left_alone_and_a_failed_one_tried_again(tmp_path):
    out = tmp_path / "new" / "r.jsonl"
    first = work(out)
    assert len(first) == 1 and work(out) == first
    record = first[0]
    assert record["mode"] == "alone_one" and len(record["rank_step_ms"][0]) == 2
    assert record["tok_per_s"] == pytest.approx(16_000 / record["step_ms"]) and 4 < record["loss"] < 6
    assert len(record["losses"]) == 3 and record["losses"][-1] == pytest.approx(record["loss"], abs=1e-6)
    assert {"date", "commit", "torch", "command", "device", "peak_gib", "first_step_s"} <= record.keys()
    assert len(work(out, "--steps", "3")) == 2, "other settings are another measurement"
    with pytest.raises(ValueError, match="cross_entropy=fp8 and fp8_mlp=True: 8 bits need"):
        work(out, "--eight_bits", "--batch_size", "1024")
    with pytest.raises(SystemExit):
        work(out, "--eight_bits")
    assert len(work(out, "--round", "2")) == len(work(out, "--round", "2")) == 3
    failed = {k: v for k, v in record.items() if k != "loss"} | {"error": "it rained"}
    out.write_text(json.dumps(failed) + "\n" + json.dumps(record)[:50])  # and a line that a kill has cut
    again = work(out)
    assert again[0] == failed and len(again) == 2 and "error" not in again[1] and work(out) == again


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_leaves_out_what_needs_nccl_and_writes_no_records_of_ours(capsys):
    assert "ddp_bf16" not in parallel.parse_args([*QUICK, "--nproc_per_node", "2", "--out", "try.jsonl"]).modes
    assert parallel.parse_args([*QUICK, "--nproc_per_node", "2", "--out", "o", "--modes", "ddp_bf16"]).modes == ["ddp_bf16"]
    with pytest.raises(SystemExit):
        parallel.parse_args([*QUICK, "--out", str(parallel.OUT)])
    assert "parallel.jsonl is README's, and of GPUs; for a try on a CPU add --out try.jsonl" in capsys.readouterr().err


def test_several_micro_steps_to_an_update_are_another_measurement(tmp_path):
    """One process, so the mode alone; two sequences at once or one after the other are the same update."""
    once, twice, at_once = work(tmp_path / "r.jsonl") + [
        work(tmp_path / words[0], *words)[0] for words in (["--grad_accum_steps", "2"], ["--batch_size", "2"])
    ]
    assert once["grad_accum_steps"] is None and twice["grad_accum_steps"] == 2
    assert twice["tok_per_s"] == pytest.approx(32_000 / twice["step_ms"])
    assert twice["losses"] == pytest.approx(at_once["losses"], abs=1e-4) and twice["losses"] != once["losses"]
    lines = parallel.table([once, twice])
    assert sum("1 x 16 tokens in 2 micro-steps each" in line for line in lines) == 1
    assert sum("1 x 16 tokens each" in line for line in lines) == 1
    rows = [record("alone_one", 1000), record("alone_one", 2000, grad_accum_steps=4), record("alone", 1, grad_accum_steps=4)]
    assert parallel.references(record("ddp", 900, grad_accum_steps=4), rows)[0] == 4000
    assert any(line.endswith("slowest card of each step: 5,242,880") for line in parallel.table(rows))  # 2 x 4 x 65,536 / 0.1 s


def test_modes_start_from_the_same_weights_and_tokens(tmp_path):
    alone, together = work(tmp_path / "r.jsonl", "--modes", "alone_one", "alone")
    assert alone["loss"] == together["loss"] and alone["grad_norm"] == together["grad_norm"]


def test_bad_input_is_one_sentence(capsys):
    bad = {"--steps 0": "--steps 0 must be 1 or more", "--grad_accum_steps 0": "--grad_accum_steps 0 must be 1 or more",
           "--data nowhere": "there is no folder nowhere",
           "--modes ddp zero1": "ddp, zero1 need two processes or more", "--modes loop": "loop and loop_zero1 start processes",
           "--modes dpd": "invalid choice", "--device cuda:99": "device=cuda:99 is not there", "--device tpu": "is not one of",
           "--preset laptop --seq_len 999": "--seq_len 999 must be at most 128, the context of laptop"}  # fmt: skip
    for words, sentence in bad.items():
        with pytest.raises(SystemExit) as stopped:
            parallel.parse_args(words.split())
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("script, flags", [("parallel.py", ["--preset", "laptop", "--device", "cpu"]), ("cpu.py", [])])
def test_a_file_that_cannot_be_written_is_named_before_measuring(script, flags, tmp_path):
    (tmp_path / "f").write_text("")
    done = run_python(ROOT / "bench" / script, "--out", "f/o.jsonl", *flags, cwd=tmp_path)
    assert done.returncode == 2 and "error: out=f/o.jsonl cannot be written (" in done.stderr and not done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_a_time_without_end_is_refused(seconds, tmp_path):
    done = run_python(ROOT / "bench" / "cpu.py", "--out", "o.jsonl", "--seconds", seconds, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "must be above 0, and not without end" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["parallel.py", "cpu.py", "memory.py"])
def test_a_file_that_is_broken_or_missing_is_named(script, tmp_path):
    (tmp_path / "r.jsonl").write_text("{\n{}\n")
    done = run_python(ROOT / "bench" / script, "--table", "--out", "r.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "error: line 1 of " in done.stderr and "Traceback" not in done.stderr
    done = run_python(ROOT / "bench" / script, "--table", "--out", "none.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "error: no measurements in " in done.stderr and "none.jsonl" in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_a_command_that_hangs_or_fails_is_named_and_gone(capfd):
    with pytest.raises(RuntimeError, match="not done after 0.5 s"):
        parallel.run_limited([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    script = "import sys; print('x', 'b.py: error: [rank 1] ValueError: no', 'b.py: error: y', sep=chr(10), file=sys.stderr);"
    with pytest.raises(RuntimeError, match=r"^\[rank 1\] ValueError: no$"):
        parallel.run_limited([sys.executable, "-c", script + "sys.exit(3)"], 60)
    parallel.run_limited([sys.executable, "-c", ""], 60)


@pytest.mark.slow
def test_the_driver_isolates_what_fails(tmp_path):
    out = tmp_path / "r.jsonl"

    def drive(*modes):
        command = [sys.executable, ROOT / "bench" / "parallel.py", *QUICK, "--nproc_per_node", 2, "--out", out]
        command += ["--loop_steps", 4, "--modes", *modes]
        return subprocess.run(list(map(str, command)), cwd=tmp_path, env=clean_env(), capture_output=True, text=True)

    done = drive("ddp_bf16", "ddp")
    bf16, ddp = read_records(out)
    assert done.returncode == 1 and "NCCL" in bf16["error"] and "error" not in ddp and "ddp_bf16" in done.stdout
    done = drive("ddp", "alone", "loop")
    assert done.returncode == 0 and "ddp: already in" in done.stdout, done.stderr
    alone, loop = read_records(out)[2:]
    assert len(alone["rank_tok_per_s"]) == 2 and min(alone["rank_tok_per_s"]) > 0
    assert set(loop["seconds"]) == {"val", "sample", "checkpoint"} and loop["not_measured"] == ["hella"]


# -------------------------------------------------------------------------------------------------- table, loop, traces


def record(mode, tok_per_s, **more):
    base = dict(bench="parallel", mode=mode, preset="gpt2", world_size=2, batch_size=64, seq_len=1024, compile="model",
                activation_checkpointing=False, precision="bf16", data="", warmup=10, steps=40, device="H9", torch="2",
                env={}, date="2026-11-21", step_ms=100.0, step_ms_min=99.0, step_ms_max=101.5, tok_per_s=tok_per_s,
                rank_tok_per_s=[tok_per_s], first_step_s=9.0, peak_gib=22.2, losses=[11, 11, 10, 10, 9.5, 7.1], loss=7.1,
                cards=None)  # fmt: skip
    return base | more


def test_the_table_holds_modes_against_cards_alone():
    rows = [record("ddp", 100), record("ddp", 1710), record("alone", 1800, rank_tok_per_s=[1000, 800]),
            record("alone_one", 1050), record("alone_one", 9999, batch_size=32),
            {k: v for k, v in record("fsdp2", 1).items() if k not in ("tok_per_s", "loss")} | {"error": "no memory"},
            record("flat", 1764, env={"NCCL_MAX_CTAS": "8"}, steps=39, round=2)]  # fmt: skip
    lines = parallel.table(rows)
    ddp = next(line for line in lines if line.startswith("ddp"))
    assert ddp.split() == "ddp 100.0 (99.0 to 101.5) 1,710 81.4% 95.0% 106.9% 22.2 9.0 9.5000 7.1000".split()
    assert next(line for line in lines if line.startswith("flat")).endswith("NCCL_MAX_CTAS=8 steps=39 round=2")
    assert any(line.split() == "fsdp2 failed: no memory".split() for line in lines)
    assert any("each card: 1,000, 800" in line for line in lines)
    assert any(line.endswith("slowest card of each step: 1,310,720") for line in lines)  # 2 x 64 x 1024 in 100 ms
    assert sum("in 8 bits" in line for line in parallel.table([*rows, record("ddp", 2000, eight_bits=True)])) == 1
    heads = [i for i, line in enumerate(lines) if line.startswith("gpt2, 2 x H9")]
    assert len(heads) == 2 and "9,999" in lines[heads[1] + 2] and sum("alone_one" in line for line in lines) == 2


def test_a_mode_is_held_against_its_own_round_where_that_has_cards_alone():
    rows = [record("alone_one", 1000, round=1), record("alone_one", 2000, round=2), record("alone_one", 500)]
    for number, one in ((1, 1000), (2, 2000), (None, 500), (7, 500)):
        assert parallel.references(record("ddp", 900, round=number), rows)[0] == 2 * one, number
    here = [rows[0] | {"commit": "abc"}, *rows[1:]]
    assert parallel.references(record("loop", 900, commit="abc"), here)[0] == 2000, "one commit, likely one machine"
    between = record("ddp", 900, round=7)
    assert parallel.references(between, [rows[0], between, rows[1]])[0] == 2000, "a later round's cards may be others"
    older = record("alone", 1, rank_tok_per_s=[600, 400], commit="older", round=1)
    ddp = record("ddp", 900, commit="abc", round=3)
    assert parallel.references(ddp, [older]) == (None, 1000, 800)
    own = [older, record("alone_one", 500, commit="abc", round=2)]
    assert parallel.references(ddp, own) == (1000, None, None), "another commit's cards are others than this one's"
    lines = parallel.table([record("ddp", n, round=n) for n in (1, 2)])
    assert [line.split()[-1] for line in lines if line.startswith("ddp")] == ["round=1", "round=2"]
    lines = parallel.table([record("ddp", 1, round=1), record("flat", 1, round=1)])
    assert sum(line.endswith("round=1") for line in lines) == 2, "also where it is the only one"
    lines = parallel.table([record("ddp", 100, bucket_mb=25), record("ddp", 110, bucket_mb=250), record("flat", 90)])
    assert [line.split()[-1] for line in lines if line.startswith("ddp")] == ["bucket_mb=25", "bucket_mb=250"]


def test_the_loop_counts_each_event_as_often_as_a_full_run_has_it():
    kinds = [("start", 0, 0), ("val", 0, 9), ("train", 5, 30), ("train", 10, 50), ("val", 10, 60), ("hella", 10, 70),
             ("sample", 10, 80), ("checkpoint", 10, 90), ("train", 15, 92), ("train", 20, 94), ("val", 20, 95.0),
             ("hella", 20, 97), ("sample", 20, 97.5), ("checkpoint", 20, 101.5), ("end", 20, 102)]  # fmt: skip
    events = [{"kind": kind, "step": step, "time": t, "loss": 3.0, "val_tokens": 101} for kind, step, t in kinds]
    found = parallel.read_loop(events, half=10, total_batch_size=1000, val_tokens=500)
    assert found["train_ms"] == pytest.approx(400)  # from 90 to 94, ten steps
    # 100 of 500 tokens took a second
    assert found["seconds"] == {"val": pytest.approx(5), "hella": 2, "sample": 0.5, "checkpoint": 4}
    assert found["step_ms"] == pytest.approx(400 + 5000 / 250 + 6500 / 1000)
    assert found["tok_per_s"] == pytest.approx(1000 / 0.4265) and found["not_measured"] == []
    assert found["raw_tok_per_s"] == pytest.approx(10_000 / (102 - 90))
    few = [e for e in events if e["kind"] != "hella"]
    assert parallel.read_loop(few, 10, 1000, 500)["not_measured"] == ["hella"]


def test_overlap_of_a_made_up_step():
    kernels = [["matmul", "a", 7, 0, 10], ["matmul", "b", 8, 5, 10], ["communication", "c", 20, 12, 8],
               ["communication", "d", 21, 18, 6], ["optimizer", "e", 7, 22, 4], ["communication", "f", 20, 30, 2]]  # fmt: skip
    # compute 0-15 and 22-26, communication 12-24 and 30-32: hidden are 12-15 and 22-24, idle is 26-30
    assert parallel.overlap(kernels) == {"step_us": 32, "nccl_us": 14, "hidden_us": 5, "idle_us": 4}
    with pytest.raises(ValueError, match="no kernel"):
        parallel.overlap([])


def test_a_chrome_trace_becomes_a_picture(tmp_path):
    def event(name, start, dur, cat="kernel", stream=7):
        return {"ph": "X", "cat": cat, "name": name, "ts": 1000.0 + start, "dur": dur, "args": {"stream": stream}}

    names = {"ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)": "communication", "nvjet_sm90_tst_128x256": "matmul",
             "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
             "triton_per_fused__to_copy_attention_1": "elementwise", "row": "loss",
             "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer", "Memcpy HtoD": "copy"}  # fmt: skip
    events = [event(name, 10 * i, 20) for i, name in enumerate(names)]
    trace = {"traceEvents": [*events[::-1], event("cudaLaunchKernel", 0, 5, cat="cuda_runtime"), {"ph": "M"}]}
    kernels = parallel.extract_kernels(trace)
    assert [row[0] for row in kernels] == list(names.values())
    assert kernels[0][2:] == [7, 0, 20] and kernels[-1][3] == 60
    about = {"mode": "ddp", "world_size": 4, "device": "H9"}
    (tmp_path / "ddp.kernels.json").write_text(json.dumps(about | {"kernels": kernels}))
    parallel.overlap_picture(tmp_path / "ddp.kernels.json", tmp_path / "p.svg")
    svg = (tmp_path / "p.svg").read_text()
    assert "<!-- ddp: 50% of 0.0 ms of communication hidden under computation -->" in svg and "<!-- attention -->" in svg
    (tmp_path / "none.json").write_text("[]")
    assert parallel.main(["--picture", str(tmp_path / "none.json"), str(tmp_path / "q.png")]) == 2


def test_random_tokens_are_uneven_and_in_range(tmp_path):
    random_shards(tmp_path, 100, 20_000, 500)
    counts = np.bincount(np.load(tmp_path / "random_train_000000.npy"), minlength=100)
    assert len(counts) == 100 and counts.min() > 0 and counts[0] / counts[90] == pytest.approx(10, rel=0.5)
    assert len(np.load(tmp_path / "random_val_000000.npy")) == 500


# --------------------------------------------------------------------------------------------------------------- cpu


def test_products_are_those_of_the_model():
    model_config, cfg = cpu.settings(64)
    model = GPT(model_config)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    shapes = cpu.products(model_config, 1000)
    assert sum(2 * m * k * n * times for (m, k, n), times in shapes.items()) == 6 * weights * 1000
    assert {(1000, 64, 256), (1000, 256, 64), (256, 1000, 64)} <= shapes.keys()  # c_fc: forward, its input's, its weight's
    assert model_config.n_head == 1 and cpu.settings(128) == (PRESETS["laptop"][0], cpu.settings(128)[1])


def made_up(job):
    """A record of a row, without measuring: products that take 20 ms, steps that take 100."""
    about = job | {"date": "2026-11-21"}
    if job["what"] == "products":
        return about | {"peak_gflops": 200.0, "shapes_gflops": 150.0, "products_ms": 20.0}
    return about | dict(tok_per_s=40960.0, step_ms=100.0, step_ms_min=99.0, step_ms_max=104.0, first_step_s=0.2,
                        gflop_per_step=5.0, loss=5.5)  # fmt: skip


def test_cpu_measures_what_is_missing_in_a_process_of_its_own(tmp_path, capsys):
    rows, out = list(cpu.jobs([64], 0.05)), tmp_path / "r.jsonl"
    job = next(row for row in rows if row["what"] == "training")
    for row in rows:
        if row != job:
            append_record(out, made_up(row))
    flags = ["--out", str(out), "--widths", "64", "--seconds", "0.05"]
    assert cpu.main(flags) == 0
    records = read_records(out)
    assert len(records) == len(rows) and "error" not in records[-1]
    new = records[-1]
    assert new["threads"] == 1 and new["steps"] >= 3 and new["step_ms_min"] <= new["step_ms"] <= new["step_ms_max"]
    assert new["tok_per_s"] == pytest.approx(4096 / new["step_ms"] * 1000) and 5 < new["loss"] < 6
    weights = 2 * (12 * 64**2 + 13 * 64) + 257 * 64 + 2 * 64  # two blocks, the tied head, the last norm
    assert new["gflop_per_step"] == pytest.approx(4096e-9 * (6 * weights + 12 * 2 * 64 * 128))
    assert cpu.main(flags) == 0 and read_records(out) == records
    assert "not done after 0.1 s" in cpu.run_job(job, 0.1)["error"]
    assert capsys.readouterr().out.count("training, 64 wide, 1 threads, fp32, eager") == 1


def test_cpu_table(capsys):
    rows = [made_up(row) for row in cpu.jobs([64], 0.05)]
    rows[-1] = {k: v for k, v in rows[-1].items() if k != "tok_per_s"} | {"error": "no compiler"}
    lines = cpu.table(rows)
    eager = [line.split() for line in lines if "%" in line and all(f" {w} " in line for w in ("passive", "no", cpu.cores()))]
    assert len(eager) == 2
    for words in eager:  # 5 GFLOP in 0.1 s of 200 GFLOP/s; products take 20 of 100 ms
        assert words[-8:] == ["100.0", "(99.0", "to", "104.0)", "0.2", "25.0%", "20.0%", "5.5000"]
    assert sum("failed: no compiler" in line for line in lines) == 1


def test_cpu_measures_products():
    job = next(row for row in cpu.jobs([64], 0.01) if row["what"] == "products")
    found = cpu.measure_products(job)
    assert found["products_ms"] == pytest.approx(sum(count * ms for *_, count, ms in found["rows"]))
    flops = sum(2 * m * k * n * count for m, k, n, count, _ in found["rows"])
    assert found["shapes_gflops"] == pytest.approx(flops / found["products_ms"] / 1e6) and found["peak_gflops"] > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
