"""bench/: timed steps, variants, wrong compilations, tables and figures, planted faults."""

import dataclasses
import subprocess
from types import SimpleNamespace

import compiled
import figures
import ladder
import mutations
import pytest
import rungs
import torch
from conftest import ROOT
from records import random_shards

from lab import kernels
from lab.cli import UserError
from lab.distributed import World
from lab.precision import Precision
from train_gpt2 import GPT, MLP, GPTConfig, HeadLoss, build_trainer


def tiny_args(tmp_path, **more):
    data = random_shards(tmp_path / "data", 257, 20_000, 2_000)
    return ladder.Config(device="cpu", data=data, **more)


def build(tmp_path, **settings):
    case = rungs.Case("rungs", "tiny", "x", settings, 1337)
    return ladder.build(case, 4, tiny_args(tmp_path), World("cpu"))


def test_timed_steps_are_the_trainers_updates(tmp_path):
    def losses(run):
        return [run.train_step()[0].sum().item() for _ in range(3)]

    torch.set_float32_matmul_precision("high")  # as after a previous case
    run = build(tmp_path, compile_mode="none", precision="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    config, cfg = run.raw_model.config, dataclasses.replace(run.cfg, kernels="fused")
    found = losses(run)
    assert found == losses(build_trainer(config, cfg, World("cpu")))
    # the first rung computes the same with other operations
    first = build(tmp_path, **rungs.START | dict(vocab_multiple=128))
    assert losses(first) == pytest.approx(found, abs=1e-4)
    plain = [type(r.raw_model.head_loss) is HeadLoss for r in (first, run)]
    assert plain == [True, False]


def test_every_variant_of_every_shape_is_valid(tmp_path):
    args = tiny_args(tmp_path, shapes=tuple(rungs.SHAPES), groups=tuple(rungs.VARIANTS))
    keys = [rungs.key_of(case.about(args, "H9")) for case in rungs.cases(args)]
    assert len(set(keys)) == len(keys) > 300
    best = dict(precision="bf16", attention="sdpa", compile_mode="default", adamw="fused")
    best |= dict(vocab_multiple=128, bf16_residual=True, head="fp8", mlp="fp8")
    assert rungs.VARIANTS["rungs"]["fp8_mlp"] == best


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_wrongly_compiled_rung_is_a_failure(tmp_path, monkeypatch, factor):
    def compile_wrongly(model, **_):
        def forward(*args, **kwargs):
            logits, loss = model(*args, **kwargs)
            return logits, loss * factor

        return forward

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    run = build(tmp_path, precision="fp32")
    assert bool(compiled.compile_error(run)) == (factor != 1)
    if factor == 1:
        assert ladder.first_step(run)[0] == pytest.approx(5.55, abs=0.3)
    else:
        with pytest.raises(FloatingPointError, match="wrong results"):
            ladder.first_step(run)


def test_the_ladders_table_matches_its_records(capsys):
    ladder.main(["--table"])
    table = ROOT / "readme.assets" / "ladder.txt"
    assert capsys.readouterr().out.strip() == table.read_text().strip()


def test_records_compiled_with_a_race_are_marked():
    settings = dict(precision="bf16", compile_mode="default", bf16_residual=False)
    record = dict(shape="gpt2-xl", torch="2.11.0+cu130", settings=settings | dict(mlp="plain"))
    assert rungs.raced(record)
    for harmless in (dict(shape="gpt2"), dict(torch="2.14.1"), dict(settings=settings)):
        assert not rungs.raced(record | harmless)


def test_figures_can_be_made_from_the_records(tmp_path, capsys):
    assert not figures.main(["--out", str(tmp_path)]) and not capsys.readouterr().err
    there = {path.name for path in (ROOT / "readme.assets").glob("*.png")}
    drawn = {path.name for path in tmp_path.iterdir()}
    screenshots = {name for name in there if name.startswith(("serve", "report"))}
    assert there - screenshots == drawn


def test_plain_mlp_is_kept_when_the_head_is_replaced(monkeypatch):
    monkeypatch.setattr(kernels, "is_supported", lambda device: True)  # as on a GPU
    model, precision = GPT(GPTConfig(1, 2, 32, 16, 257)), Precision("bf16", torch.device("cpu"))
    own = SimpleNamespace(mlp="plain", head="fused")
    rungs.replace_head_and_mlp(model, own, precision)
    assert type(model.transformer.h[0].mlp) is MLP
    assert type(model.head_loss) is not HeadLoss


def test_planted_faults_are_caught_missed_or_refused(tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "double.py").write_text("def double(x):\n    return 2 * x\n")
    test = "from double import double\n\n\ndef test_two():\n    assert double(2) == 4\n"
    (tmp_path / "tests/test_double.py").write_text(test)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    news = ["3 * x", "x * x"]  # 2 * 2 = 2 squared: the test misses this fault
    faults = [mutations.Fault(new, "double.py", "2 * x", new, "double") for new in news]
    assert mutations.run_faults(dict(enumerate(faults)), tmp_path, all_tests=False) == 1
    _, caught, missed, total = capsys.readouterr().out.splitlines()
    assert caught.endswith(" tests/test_double.py::test_two") and missed.endswith(" NOT CAUGHT")
    assert total == "1 of 2 faults caught; the tests that caught them pass without a fault"
    assert "2 * x" in (tmp_path / "double.py").read_text()
    (tmp_path / "double.py").write_text("def double(x):\n    return x + x\n")
    with pytest.raises(UserError, match="is in double.py 0 times, but must occur once"):
        mutations.run_faults({1: faults[0]}, tmp_path, all_tests=True)


def test_every_fault_fits_todays_code():
    for fault in mutations.FAULTS:
        assert mutations.planted(fault, ROOT) != (ROOT / fault.file).read_text(encoding="utf-8")
        for path in fault.paths():
            file, _, name = path.partition("::")
            assert f"\ndef {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), (
                path
            )
