"""The command: a silent import, flags, the choice of a preset, and one sentence for each thing a reader can get wrong."""

import dataclasses
import importlib.util
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_RUN, VOCAB, run_python, write_shards
from test_train import train_here

from lab.device import this_python
from lab.run.vitals import check_config
from train_gpt2 import PRESETS, GPTConfig, TrainConfig, choose_defaults, parse_args

# --------------------------------------------------------------------------------------------------------- import

IMPORT = """
import json, os, random, signal, sys
import numpy, torch, torch.distributed
def state():
    return {
        "rng": [torch.get_rng_state().tolist(), repr(numpy.random.get_state()), random.getstate()[1]],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.get_float32_matmul_precision(),
                     torch.get_num_threads(), torch.is_grad_enabled(), torch.backends.cudnn.benchmark,
                     torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32],
        "environment": dict(os.environ), "folder": [os.getcwd(), sorted(os.listdir())],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "processes": torch.distributed.is_initialized(), "cuda": torch.cuda.is_initialized(),
    }
before, modules = json.dumps(state()), set(sys.modules)
sys.path.insert(0, ROOT)
import lab.run.folder, lab.kernels.cross_entropy, lab.evals, lab.device, lab.run.log, lab.data.shards
assert "train_gpt2" not in sys.modules, "it uses them, they know nothing of it"
import train_gpt2
assert json.dumps(state()) == before, [k for k in state() if json.dumps(state()[k]) != json.dumps(json.loads(before)[k])]
heavy = {"tyro", "tqdm", "transformers", "tiktoken", "tensorboard", "wandb", "matplotlib", "datasets", "pyarrow"}
assert not heavy & (set(sys.modules) - modules), heavy & (set(sys.modules) - modules)
"""


def test_importing_is_silent(tmp_path):
    result = run_python("-B", "-c", IMPORT.replace("ROOT", repr(str(ROOT))), cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------- commands that fail


def empty(path):
    np.save(path, np.zeros(0, dtype=np.uint16))


def truncated(path):
    path.write_bytes(path.read_bytes()[:-10])


def int64(path):
    np.save(path, np.load(path).astype(np.int64))


def no_bin(path):
    path.with_suffix(".bin").write_bytes(bytes(2048))
    path.unlink()


def beyond(path):
    np.save(path, np.full_like(np.load(path), VOCAB))


# name: flags after those of a tiny run, and what the sentence must hold. {name} stands for data made below.
BAD = {
    "eight_bits_on_cpu": ("--fp8_mlp --cross_entropy fp8", ["cross_entropy=fp8 and fp8_mlp=True", "RTX 40, H100"]),
    "no_liger": ("--cross_entropy liger", ["cross_entropy=liger needs `pip install liger-kernel`"]),
    "plan_flag_alone": ("--plan_card H100", ["--plan_card belongs to --plan"]),
    "no_shards": ("--data nowhere", ["no train shards in nowhere", "python fineweb.py --source FOLDER"]),
    "empty_shard": ("--data {empty}", ["x_train_000000.npy is empty"]),
    "truncated_shard": ("--data {truncated}", ["x_train_000000.npy", "truncated"]),
    "wrong_dtype": ("--data {int64}", ["x_train_000000.npy", "int64", "uint16"]),
    "wrong_magic": ("--data {no_bin}", ["x_train_000000.bin", "20240520"]),
    "ids_beyond_vocabulary": ("--data {beyond}", ["token id 257", "x_train_000000.npy", "vocabulary of 257"]),
    "too_few_tokens": ("--data {short}", ["10 training tokens, a sequence takes 17", "--seq_len smaller than 16"]),
    "batch_not_divisible": ("--total_batch_size 1000", ["total_batch_size=1000", "the next one up is 1024"]),
    "micro_batch_no_divisor": ("--total_batch_size 128 --batch_size 7", ["next one up is 224", "or pass --batch_size 4"]),
    "batch_not_divisible_auto": ("--total_batch_size 1001 --batch_size 0", ["total_batch_size=1001", "next one up is 1008"]),
    "heads": ("--n_embd 50 --n_head 4", ["n_embd=50", "n_head=4", "n_embd=52"]),
    "seq_len": ("--seq_len 64", ["seq_len=64", "block_size=32"]),
    "no_steps": ("--max_steps 0", ["max_steps=0"]),
    "no_heads": ("--n_head 0", ["n_head=0"]),
    "infinite_rate": ("--lr inf", ["lr=inf must be a finite number, 0 or more"]),
    "rate_rises": ("--schedule linear --min_lr 1", ["min_lr=1.0", "lr=0.001"]),
    "no_decay": ("--schedule cosine --decay_steps 5", ["schedule=cosine; leave it out, or pass --schedule wsd"]),
    "no_end": ("--min_lr=0", ["--min_lr does nothing with schedule=constant"]),
    "no_muon": ("--muon-lr 0.1", ["--muon_lr does nothing with optimizer=adamw"]),
    "no_hellaswag": ("--hella_examples 9", ["hella_every=0; leave it out, or pass --hella_every 1000"]),
    "no_samples": ("--sample_prompt The", ["--sample_prompt does nothing with sample_every=0"]),
    "resume_no_decay": ("--resume --run_name r --log_dir {log} --decay_steps 5", ["--decay_steps does nothing with sched"]),
    "beta": ("--beta1 1.5", ["beta1=1.5", "less than 1"]),
    "seed": ("--seed 99999999999999999999999", ["seed=9999", "less than"]),
    "seed_below_0": ("--seed -1", ["seed=-1 must be a whole number, 0 or more"]),
    "resume_what": ("--resume log/mine", ["resume=log/mine: --resume takes no value", "add --run_name mine"]),
    "never": ("--val_every -1", ["val_every=-1"]),
    "device": ("--device tpu", ["device=tpu", "mps and cpu"]),
    "device_number": ("--device cpu:foo", ["device=cpu:foo is no device"]),
    "no_mps": ("--device mps", ["device=mps is not there", "--device cpu"]),
    "resume_newer": ("--resume --run_name newer --log_dir {log}", ["newer/config.json has warp, which this version"]),
    "name_with_folders": ("--run_name ../x", ["run_name=../x", "plain name"]),
    "weights_of_text": ("--init_from {file}", ["is no checkpoint"]),
    "negative": ("--grad_clip -1", ["grad_clip=-1"]),
    "preset": ("--preset gpt5", ["gpt5", "gpt2-xl", "laptop"]),
    "resume_nothing": ("--resume --log_dir empty", ["no run with a checkpoint in empty"]),
    "resume_unknown": ("--resume --run_name other --log_dir {log}", ["other", "no config.json"]),
    "resume_unnamed": ("--resume --log_dir {log} --run_name=", ["run_name is empty", "leave --run_name out"]),
    "resume_other_preset": ("--resume --run_name r --log_dir {log} --preset gpt2-xl", ["preset=gpt2-xl is for a new"]),
    "resume_other_shape": ("--resume --run_name r --log_dir {log} --n_embd 64", ["n_embd=32 (here 64)", "pass --n_embd 32"]),
    "resume_broken": ("--resume --run_name cut --log_dir {log}", ["model_000001.pt cannot be read"]),
    "run_is_there": ("--log_dir {log} --run_name r", ["log/r is another run's", "--resume", "another --run_name"]),
    "run_saved_nothing": ("--log_dir {log} --run_name early", ["log/early is the folder of a run that has ended"]),
    "resume_saved_nothing": ("--resume --log_dir {log} --run_name early", ["log/early has no checkpoint to resume from"]),
    "resume_other_start": ("--resume --run_name r --log_dir {log} --init_from gpt2", ["init_from=gpt2 is for a new run"]),
    "broken_manifest": ("--data {manifest}", ["manifest.json is not what this project has written", "cut short"]),
    "empty_manifest": ("--data {hollow}", ["manifest.json is not what this project has written (it must hold vocab_size)"]),
    "listed_manifest": ("--data {listed} --vocab_size 257", ["manifest.json is not what this", "(it holds no names)"]),
    "resume_broken_config": ("--resume --run_name torn --log_dir {log}", ["torn/config.json is not what this project has"]),
    "resume_empty_config": ("--resume --run_name bare --log_dir {log}", ["bare/config.json", "must hold model and train"]),
    "shard_gone": ("--data {gone}", ["x_train_000001.npy is missing, manifest.json has it"]),
    "too_large": ("--n_layer 1000000 --n_embd 4096 --n_head 4", ["n_layer=1000000", "GiB or more", "make the model smaller"]),
    "unwritable": ("--log_dir {file}", ["cannot write the run folder", "--log_dir"]),
    "no_weights": ("--init_from nothing.pt", ["no checkpoint nothing.pt"]),
    "fp16": ("--precision fp16", ["fp16 needs a GPU"]),
    "no_gpu": ("--device cuda", ["device=cuda", "--device cpu"]),
}
REFUSED = {  # by tyro, in its own layout
    "unknown_flag": ("--n_layers 3", "n_layers"),
    "abbreviation": ("--max_step 3", "max_step"),
    "no_number": ("--n_layer three", "three"),
    "no_such_choice": ("--schedule sine", "sine"),
    "stray_word": ("three", "three"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{case: (status, stdout, stderr, files that are new)} of all commands above, and of --help."""
    folder = tmp_path_factory.mktemp("cli")
    places = {"log": folder / "log", "file": folder / "file"}
    places["file"].write_text("not a folder")
    for fault in (empty, truncated, int64, no_bin, beyond):
        places[fault.__name__] = write_shards(folder / fault.__name__)
        fault(places[fault.__name__] / "x_train_000000.npy")
    entries = [{"name": f"x_train_00000{i}.npy", "bytes": 128 + 2 * n} for i, n in enumerate((1501, 997))]
    gone = json.dumps({"vocab_size": VOCAB, "shards": entries})
    for name, text in (("manifest", "{"), ("hollow", "{}"), ("listed", "[]"), ("gone", gone)):
        places[name] = write_shards(folder / name)
        (places[name] / "manifest.json").write_text(text)
    (places["gone"] / "x_train_000001.npy").unlink()
    places["short"] = write_shards(folder / "short", sizes=(10,))
    data = write_shards(folder / "data")
    for name in ("r", "cut"):
        train_here(folder / "log", data, name, max_steps=1)
    truncated(folder / "log" / "cut" / "model_000001.pt")
    shutil.copytree(folder / "log" / "r", folder / "log" / "newer")
    config = json.loads((folder / "log" / "newer" / "config.json").read_text())
    config["train"]["warp"] = 9
    (folder / "log" / "newer" / "config.json").write_text(json.dumps(config))
    shutil.copytree(folder / "log" / "r", folder / "log" / "torn")
    (folder / "log" / "torn" / "config.json").write_text('{"train": ')
    shutil.copytree(folder / "log" / "r", folder / "log" / "bare")
    (folder / "log" / "bare" / "config.json").write_text("{}")
    (folder / "log" / "early").mkdir()
    (folder / "log" / "early" / "config.json").write_bytes((folder / "log" / "r" / "config.json").read_bytes())
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    out = {}
    for name, (flags, _) in {**BAD, **REFUSED, "help": ("--help", "")}.items():
        words = flags.format(**places).split()
        base = [] if {"--resume", "--help"} & {*words} else [*TINY_RUN, "--data", data, "--max_steps", 3, "--val_every", 1]
        base += [] if "--log_dir" in words else ["--log_dir", f"log_{name}"]
        done = run_python(ROOT / "train_gpt2.py", *base, *words, cwd=folder)
        left = sorted(str(p.relative_to(folder)) for p in folder.glob(f"log_{name}*"))
        out[name] = done.returncode, done.stdout, done.stderr, left
    assert all(path.read_bytes() == content for path, content in before.items()), "a command that failed changed a file"
    out["folders"] = sorted(p.name for p in (folder / "log").iterdir())
    return out


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_one_sentence_and_status_2(outcomes, name):
    if (name == "no_gpu" and torch.cuda.is_available()) or (name == "no_mps" and torch.backends.mps.is_available()):
        pytest.skip("there is such a GPU here")
    if name == "no_liger" and importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    status, _, stderr, left = outcomes[name]
    assert status == 2, stderr
    assert stderr.startswith("train_gpt2.py: error: ") and stderr.count("\n") == 1 and "Traceback" not in stderr, stderr
    for words in BAD[name][1]:
        assert words in stderr
    assert not left, "a run that could not start leaves nothing behind"


def test_what_could_not_start_left_no_run(outcomes):
    assert outcomes["folders"] == ["bare", "cut", "early", "newer", "r", "torn"]


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_there_are_not_are_refused(outcomes, name):
    status, stdout, stderr, left = outcomes[name]
    assert status == 2 and REFUSED[name][1] in stdout + stderr and "Traceback" not in stderr and not left


def test_help_names_every_setting(outcomes):
    status, stdout, stderr, _ = outcomes["help"]
    assert status == 0 and stderr == ""
    for field in dataclasses.fields(GPTConfig) + dataclasses.fields(TrainConfig):
        assert f"--{field.name} " in stdout or f"--{field.name}," in stdout, field.name
    words = " ".join(stdout.replace("│", " ").split())
    assert "transformer blocks" in words and "largest norm of the whole gradient" in words  # the comments beside the fields
    assert "torchrun --standalone" in words and "--no_compile" in words


def test_help_stands_beside_every_setting():
    """tyro takes a field's help from the comment beside it; a field without one would be a flag without help."""
    import inspect

    for config in (GPTConfig, TrainConfig):
        source = inspect.getsource(config).splitlines()
        for field in dataclasses.fields(config):
            (line,) = [text for text in source if text.strip().startswith(f"{field.name}:")]
            assert "  # " in line, field.name


# ------------------------------------------------------------------------------------------ commands that succeed


def test_a_run_says_once_what_it_does_and_saves_it(run_train, tmp_path):
    result = run_train("--max_steps", 2, "--seed", 5, "--val_every", 2)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert "preset laptop: as asked for; run folder log/r" in result.stdout
    for setting in ("n_embd=32", "total_batch_size=128", "seed=5", "schedule='constant'", "vocab_size=257"):
        assert result.stdout.count(setting) == 1, setting
    saved = json.loads((tmp_path / "log" / "r" / "config.json").read_text())
    assert saved["train"].keys() == {f.name for f in dataclasses.fields(TrainConfig)}
    for name, value in (saved["model"] | saved["train"]).items():
        assert f"{name}={value!r}" in result.stdout, name
    assert saved["train"]["seed"] == 5 and saved["model"]["n_layer"] == 2
    assert "128 tokens = 4 sequences x 16 x 1 processes x 2 micro-steps" in result.stdout
    names = {p.name.split(".")[0] for p in (tmp_path / "log" / "r").iterdir()}
    assert names == {"config", "log", "events", "loss", "model_000002", "model_best"}
    assert {p.name for p in tmp_path.iterdir()} == {"data", "log"}, "everything a run writes lies in its folder"
    assert result.stdout.index("validation loss") < result.stdout.index("log/r/ holds")


def test_the_manifest_decides_the_vocabulary(run_train, shards, tmp_path):
    (shards / "manifest.json").write_text(json.dumps({"vocab_size": 300, "shards": []}))
    result = run_train("--max_steps", 1)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "log" / "r" / "config.json").read_text())["model"]["vocab_size"] == 300
    assert "no samples and no bits per byte" in result.stdout, "no tokenizer has 300 ids"


def test_a_resumed_run_says_what_differs_and_one_that_keeps_nothing_says_so(run_train, tmp_path):
    result = run_train("--max_steps", 1, "--ckpt_every", 0)
    assert result.returncode == 0 and "note: ckpt_every=0: nothing of this run is kept but its log" in result.stdout
    result = run_train("--max_steps", 3, "--run_name", "s")
    assert "note" not in result.stdout
    result = run_train("--resume", "--run_name", "s", "--max_steps", 5, "--seed", 7, "--grad_clip", 0.5)
    assert result.returncode == 0, result.stderr
    assert "note: not as this run went on before: grad_clip 1.0 -> 0.5, seed 1337 -> 7\n" in result.stdout
    result = run_train("--resume", "--run_name", "s", "--max_steps", 7)
    assert result.returncode == 0 and "note" not in result.stdout
    assert re.search(r"  train it further +\S+ \S*train_gpt2.py --resume --run_name s --max_steps N\n", result.stdout)
    cosine = "--schedule", "cosine", "--min_lr", 0, "--warmup_steps", 0, "--run_name", "c"
    result = run_train("--max_steps", 2, *cosine)
    assert result.returncode == 0 and "note" not in result.stdout, result.stderr
    result = run_train("--resume", "--run_name", "c", "--max_steps", 4)
    note = "note: max_steps 2 -> 4 gives the cosine schedule another end: the next step's lr is 5.00e-04, it had ended with"
    assert f"{note} 5.00e-04" in result.stdout
    result = run_train("--resume", "--run_name", "c", "--max_steps", 6, "--ckpt_every", 0)
    assert "the next step's lr is 2.50e-04, it had ended with 1.46e-04" in result.stdout
    assert re.search(r"  finish it +\S+ \S*train_gpt2.py --resume --run_name c --ckpt_every N\n", result.stdout)
    config = tmp_path / "log" / "c" / "config.json"
    saved = json.loads(config.read_text())
    del saved["train"]["preset"], saved["train"]["max_steps"]  # what is not there is as it was by default
    config.write_text(json.dumps(saved))
    result = run_train("--resume", "--run_name", "c", "--max_steps", 5)
    assert result.returncode == 0 and "preset gpt2: resumes" in result.stdout, result.stderr


def test_commands_name_the_interpreter_that_can_run_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert this_python() == ".venv/bin/python3"
    monkeypatch.setenv("PATH", str(tmp_path / ".venv/bin"))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text("")
    (tmp_path / ".venv/bin/python").chmod(0o755)
    assert this_python() == ".venv/bin/python3", "another one in the same folder"
    (tmp_path / ".venv/bin/python3").symlink_to("python")
    assert this_python() == "python", "an environment that is active"
    monkeypatch.setattr(sys, "executable", "/elsewhere/bin/python3")
    assert this_python() == "/elsewhere/bin/python3"


def test_a_vocabulary_that_was_asked_for_is_resumed_with(run_train, shards, tmp_path):
    (shards / "manifest.json").write_text(json.dumps({"vocab_size": VOCAB, "shards": []}))
    result = run_train("--max_steps", 1, "--vocab_size", 300, "--log_dir", "elsewhere")
    assert result.returncode == 0, result.stderr
    said = f"python {ROOT / 'train_gpt2.py'} --resume --log_dir elsewhere --run_name r --max_steps N"  # called from elsewhere
    assert said in result.stdout
    result = run_train(*said.split()[2:-1], 2)
    assert result.returncode == 0, result.stderr
    assert "vocab_size=300" in " ".join(result.stdout.split())


# ------------------------------------------------------------------------------------------- defaults and presets


def test_defaults_are_the_headline_run():
    assert PRESETS["gpt2"] == (GPTConfig(), TrainConfig())
    _, model_config, cfg = parse_args(["--preset", "gpt2"])
    assert (model_config, cfg) == PRESETS["gpt2"]
    _, model_config, cfg = parse_args(["--preset=gpt2-xl", "--lr", "1e-3", "--no-compile", "--n-layer", "2"])
    assert (model_config.n_layer, model_config.n_embd, cfg.lr, cfg.compile, cfg.preset) == (2, 1600, 1e-3, False, "gpt2-xl")


def test_only_what_is_typed_has_to_have_an_effect():
    """The laptop preset has decay_steps and muon_lr, GPT-2's a min_lr above this lr: a constant rate heeds none of them."""
    for flags in ("--preset laptop --schedule constant --optimizer adamw --sample_every 0", "--schedule constant --lr 1e-5",
                  "--preset laptop --decay_steps 9 --min_lr 1e-4 --muon_lr 0.1 --sample_tokens 9",
                  "--preset laptop --hella_every 9 --hella_examples 9"):  # fmt: skip
        _, model_config, cfg = parse_args(flags.split() if "laptop" in flags else ["--preset", "gpt2", *flags.split()])
        check_config(model_config, cfg)


def test_the_preset_fits_the_machine_and_says_why(monkeypatch, tmp_path, shards):
    monkeypatch.chdir(tmp_path)
    choices = {}
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)  # the one thing that a test cannot have
        for data in ("nowhere", str(shards)):
            reason, _, cfg = choose_defaults(["--data", data])
            choices[gpu, data] = cfg.preset
            assert ("there is no GPU" in reason) == (not gpu), reason
            assert ("no shards are in nowhere" in reason) == (data == "nowhere"), reason
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert choose_defaults([])[2].preset == "gpt2", "torchrun is for the real run"
        monkeypatch.delenv("WORLD_SIZE")
    assert choices == {
        (False, "nowhere"): "laptop", (False, str(shards)): "laptop", (True, "nowhere"): "laptop", (True, str(shards)): "gpt2",
    }  # fmt: skip
    assert choose_defaults(["--preset", "gpt2-large"])[0] == "as asked for"


def test_resuming_takes_the_settings_of_the_run(tmp_path, shards):
    train_here(tmp_path / "log", shards, "r", max_steps=1, lr=0.123, model={"n_head": 4}.items())
    train_here(tmp_path / "log", shards, "s", max_steps=1, lr=0.456)
    for flags, lr in (([], 0.456), (["--run_name", "r"], 0.123), (["--run-name=r"], 0.123)):
        reason, model_config, cfg = parse_args(["--resume", "--log_dir", str(tmp_path / "log"), *flags])
        assert cfg.resume and cfg.lr == lr and reason.startswith("resumes") and cfg.run_name == ("r" if flags else "s")
        assert model_config.n_head == (4 if flags else 2)
    _, _, cfg = parse_args(["--resume", "--log_dir", str(tmp_path / "log"), "--lr", "0.5", "--max_steps", "9"])
    assert (cfg.lr, cfg.max_steps) == (0.5, 9), "flags change what was saved"


@pytest.mark.parametrize("name", ["bench/fp8_attention.py", "bench/packed_attention.py"])
def test_a_file_without_a_command_says_who_uses_it(name, tmp_path):
    done = run_python(ROOT / name, "--help", cwd=tmp_path)
    assert done.returncode == 2 and "error: no command of its own; `python " in done.stderr and done.stderr.count("\n") == 1
