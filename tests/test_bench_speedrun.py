"""bench/speedrun.py: recipes, seconds to a loss, and runs that are compared by seed."""

import importlib.util
import json

import pytest
from conftest import ROOT

import speedrun
import train_gpt2
from lab.cli import UserError


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_speedrun", ROOT / "bench" / "speedrun.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recipes_parse_and_differ(bench):
    """The flags of all recipes, of both scales, are accepted, and no two recipes are equal."""
    programs = {"speedrun.py": speedrun, "train_gpt2.py": train_gpt2}
    for recipes in bench.RECIPES.values():
        found = []
        for flags in recipes.values():
            program, *flags = flags.split()
            how = programs[program].PRESETS, programs[program].__doc__, programs[program].Trainer
            _, *configs = train_gpt2.settings.parse_flags([*flags, "--max_steps", "400"], *how)
            assert configs not in found, flags
            found.append(configs)


def test_times_targets_and_intervals_match_a_hand_calculation(bench):
    log = [dict(kind="val", step=0, loss=5.0)]
    for step, dt_ms, loss in ((10, 100, 4.0), (20, 200, 3.0)):
        log.append(dict(kind="train", step=step, dt_ms=dt_ms, loss=9))
        log.append(dict(kind="val", step=step, loss=loss))
    curve = bench.timed(log)
    assert curve == [(0.0, 0, 5.0), (1.0, 10, 4.0), (3.0, 20, 3.0)]
    assert [bench.seconds_to(curve, loss) for loss in (6, 3.5, 2.9)] == [0.0, 2.0, None]
    assert bench.interval([0.1, 0.2, 0.3]) == "+0.2000 +- 0.2483"  # 4.30 * 0.1 / sqrt(3)


@pytest.mark.parametrize("flags", ["--steps -3", "--seconds inf", "--steps 2 --gpus 0", ""])
def test_comparison_without_a_length_is_refused(bench, flags):
    with pytest.raises(UserError, match="must be 1 or more|exactly one of .* must be above 0"):
        bench.main(["--scale", "laptop", *flags.split()])


def test_finished_runs_are_reused_and_compared_by_seed(bench, tmp_path, monkeypatch, capsys):
    """A short run converts seconds to steps. A finished run is not repeated, unless it used other flags
    under the same recipe name. A run that fails does not end the others. A recipe whose loss is higher
    than speedrun.py's for the same seeds has a positive difference."""
    made = []
    stale = dict(
        scale="laptop", data="", gpus=1, more="", seconds=20.0, steps=0, recipe="muon", seed=1
    )
    (tmp_path / "o.jsonl").write_text(json.dumps(stale | dict(flags="another recipe's")) + "\n")

    def train(recipe, seed, steps, cfg, folder, measured=True):
        if recipe == "readable":
            raise UserError("it has failed")
        made.append((recipe, seed, steps, measured))
        loss = 3 + 0.01 * seed + (recipe == "muon")
        log = [dict(kind="start", device="CPU", num_params=9), dict(kind="first_step", seconds=1)]
        for step in (steps // 2, steps):
            dt_ms = 150 if step < 20 else 350  # in the short run, first steps are smaller
            dt_ms = dt_ms if steps == 30 else 250
            log.append(dict(kind="train", step=step, dt_ms=dt_ms, tokens=step * 8))
            log.append(dict(kind="val", step=step, loss=loss))
        return log

    monkeypatch.setattr(bench, "train", train)
    argv = f"--scale laptop --seconds 20 --seeds 1 2 --out {tmp_path}/o.jsonl"
    argv += " --recipes readable speedrun muon"
    for more in ([], ["--seeds", "1", "2", "3"]):
        bench.main([*argv.split(), *more])
        rows, said = (text.splitlines() for text in capsys.readouterr())
    assert sum(line.endswith("to repeat it, pass another --out") for line in said) == 4, (
        "reused runs are reported"
    )
    runs = [(r, s, *how) for s in (1, 2, 3) for r in ("speedrun", "muon")
            for how in ((30, False), (80, True))]  # fmt: skip
    assert made == runs, "20 s of 250 ms are 80 steps; seeds 1 and 2 were not repeated"
    assert [row.split()[:4] for row in rows[1:]] == [
        [r, "3", "80", "20.0"] for r in ("speedrun", "muon")
    ]
    assert "+1.0000 +- 0.0000" in rows[2]
