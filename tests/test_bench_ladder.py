"""bench/ladder.py, rungs, kernels, compiled, floor: what stands behind the numbers they record."""

import contextlib
import dataclasses
import time
from types import SimpleNamespace
from unittest import mock

import compiled
import drawing
import floor
import kernels
import ladder
import pytest
import rungs
import torch
from conftest import ROOT
from records import RUNS, append_record, random_shards, read_records

from lab.data import wordpiece
from lab.world import World
from train_gpt2 import GPTConfig, HeadLoss, set_up


def tiny_args(tmp_path, **more):
    data = random_shards(tmp_path / "data", 257, 20_000, 2_000)
    return ladder.Config(device="cpu", data=data, **more)


def build(tmp_path, **settings):
    case = rungs.Case("rungs", "tiny", "x", settings, 1337)
    return ladder.build(case, 4, tiny_args(tmp_path), World("cpu"))


def test_a_record_holds_what_was_measured(tmp_path, monkeypatch):
    padded = rungs.VARIANTS["rungs"]["vocab_50304"] | rungs.EAGER  # to compile takes half a minute
    monkeypatch.setattr(ladder, "fresh_cache", contextlib.nullcontext)
    two = {"fp32": rungs.START, "vocab_50304": padded}
    monkeypatch.setitem(rungs.VARIANTS, "rungs", two)
    flags = "--shapes tiny --device cpu --steps 6 --variants fp32 vocab_50304 --out".split()
    for _ in range(2):  # what is done is not measured again
        assert not ladder.main([*flags, str(tmp_path / "ladder.jsonl")])
    records = read_records(tmp_path / "ladder.jsonl")
    assert [(r["group"], r["variant"]) for r in records] == [("rungs", name) for name in two]
    for r in records:
        assert len(r["step_ms"]) == 6 and min(r["step_ms"]) <= r["median_ms"] <= max(r["step_ms"])
        assert r["tok_per_s"] == pytest.approx(1000 * 128 / r["median_ms"], rel=0.01)
        assert r["micro_steps"] * r["batch_size"] * r["seq_len"] == r["tokens_per_step"] == 128
        assert not r["error"] and {"gpu", "torch", "date", "commit", "command"} <= r.keys()


def test_a_line_that_a_kill_has_cut_short_is_passed_over(tmp_path):
    path = tmp_path / "r.jsonl"
    append_record(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2, "b"')
    append_record(path, {"a": 3})
    assert [r["a"] for r in read_records(path)] == [1, 3]


def test_the_timed_steps_are_updates_of_the_trainer(tmp_path):
    def losses(run):
        return [run.update()[0].sum().item() for _ in range(3)]

    torch.set_float32_matmul_precision("high")  # as a case before this one may have left it
    run = build(tmp_path, compile_mode="none", precision="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    config, cfg = run.raw_model.config, dataclasses.replace(run.cfg, kernels="fused")
    found = losses(run)
    assert found == losses(set_up(config, cfg, World("cpu")))
    # the first rung's arithmetic is another
    first = build(tmp_path, **rungs.START | dict(vocab_multiple=128))
    assert losses(first) == pytest.approx(found, abs=1e-4)
    plain = [type(r.raw_model.head_loss) is HeadLoss for r in (first, run)]
    assert plain == [True, False]


def test_every_variant_of_every_shape_is_a_valid_run(tmp_path):
    args = tiny_args(tmp_path, shapes=tuple(rungs.SHAPES), groups=tuple(rungs.VARIANTS))
    keys = [rungs.key_of(case.about(args, "H9")) for case in rungs.cases(args)]
    assert len(set(keys)) == len(keys) > 300
    best = dict(precision="bf16", attention="sdpa", compile_mode="default", adamw="fused")
    best |= dict(vocab_multiple=128, bf16_residual=True, head="fp8", mlp="fp8")
    assert rungs.VARIANTS["rungs"]["fp8_mlp"] == best


def test_group_speed_trains_as_the_programs_do_with_those_flags(tmp_path, monkeypatch):
    """On both objectives; what makes a step faster changes no loss. What compiling takes is apart,
    and a variant finds nothing of the others'."""
    first, caches, late = ladder.first_step, mock.Mock(side_effect=ladder.fresh_cache), []
    monkeypatch.setattr(ladder, "fresh_cache", caches)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 1000 * len(late))
    monkeypatch.setattr(ladder, "time", clock)
    monkeypatch.setattr(ladder, "first_step", lambda run: late.append(run) or first(run))
    data = {"tiny": random_shards(tmp_path / "data", 257, 20_000, 2_000)}
    data["masked-tiny"] = random_shards(tmp_path / "words", 257, 20_000, 2_000)
    wordpiece.prepare(data["masked-tiny"], "wordpiece", map(str, range(1000, 9999)), 4096)
    names = "baseline checkpointing recommended_eager".split()
    for shape, folder in data.items():
        how = "--groups speed --device cpu --loss_steps 12 --seeds 2 --val_tokens 2048".split()
        how += ["--shapes", shape, "--data", folder, "--variants", *names]
        assert not ladder.main([*how, "--out", str(tmp_path / shape)])
        records = read_records(tmp_path / shape)
        assert [r["cold_cache"] for r in records] == [True, False] * 3
        found = {r["variant"]: r for r in records[::2]}
        losses = [found[name]["val_loss"] for name in names]
        assert losses == pytest.approx([losses[0]] * 3, abs=1e-4) and losses[0] < 8.4
        assert found["baseline"]["settings"]["attention"] == "math"
        assert found["baseline"]["max_steps"] == 12 and found["baseline"]["curve"][-1][0] == 12
        assert all(r["seconds"] < 500 for r in records), "what compiling takes is not training"
    assert caches.call_count == 2 * len(names)


def test_what_is_not_read_ahead_is_read_when_it_is_asked_for(tmp_path):
    """The same batches, and none before."""
    ahead, at_once = (build(tmp_path).loader for _ in range(2))
    at_once.worker, asked, read = ladder.AtOnce(), [], at_once.micro_batch
    at_once.micro_batch = lambda *place: asked.append(place) or read(*place)
    for n in range(1, 9):
        assert all(a.equal(b) for a, b in zip(ahead.next_batch()[:2], at_once.next_batch()[:2]))
        assert len(asked) == n


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_rung_that_is_compiled_wrongly_is_a_failure(tmp_path, monkeypatch, factor):
    def compile_wrongly(model, **_):
        def forward(*args, **kwargs):
            logits, loss = model(*args, **kwargs)
            return logits, loss * factor

        return forward

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    run = build(tmp_path, precision="fp32")
    assert bool(compiled.differs(run)) == (factor != 1)
    if factor == 1:
        assert ladder.first_step(run)[0] == pytest.approx(5.55, abs=0.3)
    else:
        with pytest.raises(FloatingPointError, match="wrong results"):
            ladder.first_step(run)


def test_compiled_sees_gradients(tmp_path):
    """Of the same model compared with itself all agree, whatever the precision."""
    rows, (from_exact, _, apart) = compiled.compare(build(tmp_path, compile_mode="none"))
    assert apart < 0.05 and 0 < from_exact < 0.1  # bf16 from fp32
    assert rows[0][0] == pytest.approx(rows[0][2], abs=0.01) and rows[1][0] != rows[0][0]


def test_the_table_of_the_ladder_is_that_of_the_records(capsys):
    ladder.main(["--table"])
    table = ROOT / "readme.assets" / "ladder.txt"
    assert capsys.readouterr().out.strip() == table.read_text().strip()


def test_a_star_marks_what_was_compiled_with_a_race():
    settings = dict(precision="bf16", compile_mode="default", bf16_residual=False)
    record = dict(shape="gpt2-xl", torch="2.11.0+cu130", settings=settings | dict(mlp="plain"))
    assert rungs.raced(record)
    for harmless in (dict(shape="gpt2"), dict(torch="2.14.1"), dict(settings=settings)):
        assert not rungs.raced(record | harmless)


# ------------------------------------------------------------------------------------------ kernels


def test_kernel_times_of_a_trace():
    def kernel(name, start, length, cat="kernel"):
        return {"cat": cat, "name": name, "ts": 1000.0 * start, "dur": 1000.0 * length, "ph": "X"}

    trace = [
        kernel("cudaLaunchKernel", 0, 90, cat="cuda_runtime"),
        kernel("Memcpy HtoD", 10, 2, cat="gpu_memcpy"),
        kernel("nvjet_tst", 14, 6),
        kernel("nvjet_tst", 18, 4),  # 2 of it beside the one before
        kernel("nvjet_tst", 24, 6),
        kernel("at::cuda::spin_kernel", 30, 1),
        kernel("nvjet_tst", 32, 3),  # Muon's products are the optimizer's
        kernel("vectorized_elementwise_kernel<mul>", 35, 3),
        kernel("at::cuda::spin_kernel", 38, 1),
        kernel("reduce_kernel", 40, 2),
    ]
    kernel_ms, window = kernels.kernel_times(trace, micro_steps=2)
    busy = dict(copy=1, matmul=8, optimizer=3, elementwise=1)
    expected = dict.fromkeys(kernels.CLASSES, 0.0) | busy
    # from 10 to 42, of which 2 + 8 + 6 + 6 + 2 are busy
    assert kernel_ms == expected | {"idle": (32 - 24) / 2} and window == 32


# -------------------------------------------------------------------------------------------- floor


def test_the_parts_of_a_floor_add_up_to_what_was_recorded():
    """By the program that measured them, which had the sum in it."""
    found = drawing.records(RUNS, "floor", "ms", preset="gpt2", batch_size=64)
    ms = {r["op"]: r["ms"] for r in found}
    copy_ms = next(r["ms"] / r["bytes"] for r in found if r["op"].startswith("copy"))
    for gelu, in_8_bits in zip(floor.GELU, ((), floor.IN_8_BITS)):
        alone, best = floor.isolated_ms(ms, GPTConfig(), in_8_bits)
        moved = sum(floor.traffic(GPTConfig(), 64 * 1024, gelu))
        step = 8 * (alone + copy_ms * moved) + ms["AdamW"] + ms["clip"]
        whole = ms[f"floor: parts alone, {best} attention, GELU {gelu}"]
        assert step == pytest.approx(whole, rel=1e-4)
