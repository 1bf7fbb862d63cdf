"""The command line: imports between files, silent imports, flags, presets, and one sentence for each user
error."""

import ast
import dataclasses
import errno
import graphlib
import importlib
import json
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, TINY_RUN, run_python, succeed, train_here, write_shards
from test_plot import start, write_log

import bert
import speedrun
import train_gpt2
from lab.cli import RunError, UserError, run_main, torchrun_env
from lab.config import rename_flags
from lab.data.manifest import new_manifest, write_manifest
from lab.distributed import World
from lab.hardware import oom_hint
from train_gpt2 import PRESETS

PROGRAMS = {"train_gpt2", "fineweb", "hellaswag", "blimp", "sample"}


def imports():
    """{module: the modules of this project that it imports}, without bench and tests."""
    files = [f.relative_to(ROOT) for f in (*ROOT.glob("*.py"), *ROOT.glob("lab/**/*.py"))]
    names = {".".join(f.with_suffix("").parts).removesuffix(".__init__"): f for f in files}
    found = {}
    for name, file in names.items():
        used = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: imports are absolute"
                inside = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                used |= inside or {node.module}
        found[name] = used & names.keys()
    return found


def test_imports_go_one_way():
    """lab imports no program, except for lab.notebook, whose only user is play.ipynb; programs import
    lab and the two benchmarks; there are no cycles."""
    found = imports()
    assert {"lab.cli", "lab.trainer.loggers"} <= found.keys() and "lab.cli" in found["train_gpt2"]
    for name, used in found.items():
        roots = {module.split(".")[0] for module in used}
        in_notebook = name.startswith("lab.notebook")
        assert not name.startswith("lab") or in_notebook or roots <= {"lab"}, name
        assert in_notebook or not any(module.startswith("lab.notebook") for module in used), name
        assert name not in PROGRAMS or roots & PROGRAMS <= {"hellaswag", "blimp"}, name
    graphlib.TopologicalSorter(found).prepare()  # raises CycleError


SILENT = """
import json, os, random, signal, sys
import numpy, torch, torch.distributed
def state():
    return json.dumps([
        torch.get_rng_state().tolist(), repr(numpy.random.get_state()), random.getstate()[1],
        str(torch.get_default_dtype()), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32,
        dict(os.environ), os.getcwd(), os.listdir(), torch.distributed.is_initialized(),
        [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)], torch.cuda.is_initialized(),
    ], indent=1).splitlines()
before, modules = state(), set(sys.modules)
sys.path.insert(0, sys.argv[1])
import lab.cli, lab.files
assert not {"lab.hardware", "tyro"} & set(sys.modules), "a mistyped command fails immediately"
import train_gpt2, hellaswag, blimp, bert
assert state() == before, [pair for pair in zip(before, state()) if pair[0] != pair[1]]
heavy = {"tyro", "tqdm", "transformers", "tiktoken", "tensorboard", "wandb", "matplotlib", "datasets",
         "pyarrow", "plotly", "jinja2", "huggingface_hub"}
assert not heavy & (set(sys.modules) - modules), heavy & (set(sys.modules) - modules)
"""


def test_importing_is_silent(tmp_path):
    slow = "{'torch', 'plotly', 'matplotlib', 'tyro'} & {*sys.modules}"  # they take seconds
    modules = "fineweb, lab.notebook, lab.tools.report"
    light = f"import sys; sys.path[0] = sys.argv[1]; import {modules}; assert not {slow}"
    for code in (SILENT, light):
        result = run_python("-B", "-c", code, ROOT, cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_the_commands_that_a_run_prints_work(tmp_path, run_train):
    """Also from a folder other than the project's."""
    done = run_train("--max_steps", 2, "--seed", 5, "--optimizations", "bf16")
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert "preset laptop (from --preset), optimizations=bf16; changed by flags: " in done.stdout
    for setting in ("n_embd=32", "total_batch_size=128", "seed=5", "schedule=constant"):
        assert done.stdout.count(setting) == 1, setting
    assert "128 tokens = 4 sequences x 16 tokens x 2 micro-steps\n" in done.stdout
    assert "vocabulary of 257 tokens, padded to 384 rows\n" in done.stdout
    commands = re.findall(r"^  .*? \S*python\S* (\S+ .*)$", done.stdout, re.MULTILINE)
    ask, serve, html, page, resume = (command.replace("'", "") for command in commands)
    assert serve == page.replace("lab report", "lab serve")
    for command in (f"{ask} --max_new_tokens 2 Hello", html, page, resume.replace(" TOTAL", " 3")):
        succeed(*command.split(), cwd=tmp_path)
    run = tmp_path / "log" / "r"
    assert list(run.glob("*.html")) and (tmp_path / "my-model.html").exists()
    assert (run / "model_000003.pt").exists()


def test_vocabulary_comes_from_the_data_unless_a_flag_is_given(tmp_path, shards, run_train):
    other = SimpleNamespace(name="other", vocab_size=300, eot=299)  # a tokenizer
    manifest = new_manifest("x", other, source={}, shard_tokens=0, val_tokens=0)
    (shards / "manifest.json").write_text(json.dumps(manifest))
    run = train_here(tmp_path, shards, "data", model=dict(vocab_size=0), max_steps=1)
    assert run.checkpoints[1]["model_config"]["vocab_size"] == 300
    result = run_train("--max_steps", 1, "--vocab_size", 300)
    assert result.returncode == 0 and "no samples and no bits per byte" in result.stdout
    assert run_train("--resume", "--max_steps", 2).returncode == 0
    result = run_train("--resume", "--max_steps", 3, "--eot_id", 5)
    assert result.returncode == 2 and "eot_id=5 must be 299, as in the resumed" in result.stderr
    for other in (299, 301):
        result = run_train("--run_name", "other", "--vocab_size", other)
        assert result.returncode == 2 and f"vocab_size={other} must be 300, as in" in result.stderr
    for flag, value, recorded in (("eot_id", 5, 299), ("tokenizer", "bytes", "other")):
        result = run_train("--run_name", "other", f"--{flag}", value)
        assert result.returncode == 2 and f"{flag}={value} must be {recorded}, as" in result.stderr


def test_built_in_text_with_another_tokenizer_is_used_as_it_is(tmp_path, run_train):
    """As made by `fineweb.py --source builtin --tokenizer bpe:1024`; without --data, too."""
    folder = write_shards(tmp_path / "data/builtin", vocab_size=300)
    other = SimpleNamespace(name="other", vocab_size=300, eot=299)  # a tokenizer
    write_manifest(folder, new_manifest("x", other, source={}, shard_tokens=0, val_tokens=0), True)
    result = run_train("--max_steps", 1, "--data", "data/builtin")
    assert result.returncode == 0 and "vocabulary of 300 tokens" in result.stdout, result.stderr


# {command: pattern of the error}; a key without a program is added to the flags of a tiny run
BAD = {
    "--data nowhere": "no train shards in nowhere, which is not a folder: .*fineweb.py --source FOLDER "
    ".*without a GPU add --tokenizer bytes.*--preset laptop without --data",
    "--data chats": "no train shards in chats: pass one of its .jsonl files itself if",
    "--data dta": "no train shards in dta; did you mean data.$",
    "--data file": "data=file must be a folder of shards or a file of conversations .*--out data/mine",
    "--data a.txt": "data=a.txt is plain text, .*fineweb.py --source a.txt --out data/mine",
    "bert.py --preset laptop --data a.txt": "data=a.txt is plain text",
    "--data short": "10 training tokens, but a sequence takes 17.*--seq_len below 10,",
    "--data a_train_000001.bin": "a_train_000001.bin is a single shard, .*; pass --data [.]$",
    "--batch_size 7": "total_batch_size=128 must be a multiple .* is 224, or pass another --batch_size",
    "--n_embd 50 --n_head 4": "n_embd=50 must be divisible by n_head=4; try 52",
    f"--n_embd {2**40}": "out of memory .*; pass .* a smaller model",
    "--max_steps 0": "max_steps=0 must be from 1 to",
    "--lr nan": "lr=nan must be a finite number",
    "--lr -1": "lr=-1.0 must be at least 0$",
    "--warmup_steps 1.0": "a whole number of steps, or a fraction .* pass --warmup_steps 1$",
    "--lr 0 --min_lr 0": "lr=0.0 must be above 0, because",
    "--parallel zero1 --optimizer muon": "zero1 shards AdamW's state and does not work with optimizer=muon",
    "--block_size 1 --seq_len 1": "block_size=1 must be at least 2",
    "--n_layer 5000": "n_layer=5000 must be from 1 to 4096",
    "fineweb.py --tokens 1" + 400 * "0": "tokens=10+ must be a number of tokens",
    "--run_name ../x": "run_name=../x must be a plain name",
    "--run_name n\udce9": r"run directory 'log/n.udce9' must be UTF-8",
    "--vocab_size 60 --eot_id 60": "eot_id=60 must be less than vocab_size=60",
    "--vocab_size 300 --tokenizer bytes": "vocab_size=300 must be 257, the size of the tokenizer",
    "--preset gpt5": "preset=gpt5 must be one of gpt2, .* laptop",
    "--init_from log/there --n_embd 64": r"is a different model: n_embd=32 \(here 64\); pass --n_embd 32",
    "--log_dir file": "file.* cannot be written",
    "--run_name there": "there belongs to another run; pass --resume .*, or another --run_name",
    "--resume --run_name there --preset laptop": "preset=laptop must be that of the resumed .*there, gpt2",
    "--resume cc": "--resume has no value; pass --resume --run_name cc$",
    "--resume out/cc": "pass --resume --log_dir out --run_name cc$",
    "--resume --run_name log/there": "run_name=log/there is a path; pass --run_name there$",
    "--resume --log_dir empty": "no run of train_gpt2.py with a checkpoint in empty",
    "--on_spike skip --optimizer muon": "on_spike=skip works with AdamW only, not with optimizer=muon",
    "speedrun.py --resume": "no run of speedrun.py with a checkpoint in log/; .*speedrun.py",
    "speedrun.py --resume --run_name there": "there is a run of train_gpt2.py",
    "sample.py ab --model log/nope": "there is no log/nope; `ls log` lists that folder",
    "speedrun.py --preset laptop --max_steps 1 --n_head 64": "heads of 2 channels, .* at least 4",
    "speedrun.py --max_steps 1 --preset laptop --value_tables 3": "3 must be at most n_layer=2",
    "speedrun.py --preset laptop --init_from log/nope": "log/nope is not a run, and .*`ls log` lists",
    "bert.py --preset laptop --data data": "there is no tokenizer .*tokenizer.json; `.*fineweb.py",
    "speedrun.py --preset laptop --init_from there": "a model of train_gpt2.py; .*train_gpt2.py --init_from",
    "--learning_rate 1e-3": "--learning_rate is not a flag of this program; pass --lr instead",
    "--learnig-rate=1e-3": "--learnig-rate is not a flag of this program; pass --lr instead",
    "speedrun.py --max_iters 9": "--max_iters is not a flag of this program; pass --max_steps instead",
    "sample.py ab --chat": "--chat reads messages from stdin; leave out the prompt$",
    "sample.py --chat --html a.html": "--chat writes no page; leave out --html$",
    "sample.py ab --temperature -1": r"temperature=-1.0 must be at least 0 \(greedy\)",
    "sample.py ab --temperature nan": "temperature=nan must be a finite number",
    "sample.py ab --top_p 1.5": "top_p=1.5 must be above 0",
    "sample.py ab --html log/r/model.pt": r"html=log/r/model.pt must end in \.html",
    f"sample.py {'a' * 64}": "a prompt of 65 tokens is longer .* context, block_size=32",
    "hellaswag.py --data none.jsonl": "no HellaSwag file none.jsonl; pass one with --data",
    "hellaswag.py --model nowhere.pt": "nowhere.pt",
    "lab plot log/none": "no run or log log/none",
    "lab report there young": "no measurement",
    "lab report there --out x.jsonl": "end in .html",
    "lab plan --gpu Voodoo": "gpu=Voodoo is not in the list of .*--gpu 24GB$",
    "lab plan --gpu 4070": 'did you mean --gpu "RTX 4070"',
    "fineweb.py --shard_tokens=": "shard_tokens= must be a number of tokens",
    "fineweb.py --source chats --tokens 9k --tokenizer bytes": "do not work with conversations",
    "lab plan --gpu H100 --gpus 3": "total_batch_size=524288 must be a multiple",
    "lab plan --preset laptop --mfu 0.4": "mfu=0.4 needs --gpu; .* leave out --mfu",
    "fineweb.py --source builtin --val_tokens 9": "not possible with --source builtin.*--val_tokens",
    "lab replay none.json": "there is no file none.json; pass a spike_<step>",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data of several kinds, and with a run."""
    folder = tmp_path_factory.mktemp("place")
    write_shards(folder / "data")
    write_shards(folder / "short", sizes=(10,))
    (folder / "file").write_text("not a folder")
    (folder / "a.txt").write_text("not conversations")
    (folder / "a_train_000001.bin").write_bytes(b"")
    (folder / "chats").mkdir()
    (folder / "chats" / "a.jsonl").write_text("")  # not the first file, so it does not decide
    (folder / "chats" / "b.jsonl").write_text('{"messages": []}\n')
    write_log(folder / "log" / "young", [start()])
    train_here(folder / "log", folder / "data", "there", max_steps=1)
    return folder


@pytest.mark.parametrize("tool, package", [("serve", "torch"), ("report", "numpy")])
def test_tools_name_a_package_that_is_not_installed(tmp_path, tool, package):
    done = run_python("-S", ROOT / "lab", tool, cwd=tmp_path)  # without site-packages
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        f"lab {tool}: error: {package} is not installed for this Python; run `make" in done.stderr
    )


@pytest.mark.parametrize("file", ["train_gpt2.py", "fineweb.py", "blimp.py", "hellaswag.py"])
def test_programs_name_a_missing_pytorch(tmp_path, file):
    done = run_python("-S", ROOT / file, cwd=tmp_path)  # without site-packages
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "error: PyTorch is not installed for this Python" in done.stderr


@pytest.mark.parametrize(
    "call", ["lab.cli; lab.cli.pre_import_setup()", "lab.__main__; lab.__main__.main([])"]
)
def test_an_old_python_is_named(call):
    done = run_python("-c", f"import sys; sys.version_info = (3, 9); import {call}", cwd=ROOT)
    assert done.returncode == 2 and done.stderr.endswith("but 3.11 or newer is needed\n")


def test_a_package_that_a_tool_imports_late_is_named_too(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError(name='tyro')")
    done = run_python("-m", "lab", "report", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "lab report: error: tyro is not installed" in done.stderr


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gives_one_sentence_and_changes_nothing(place, monkeypatch, command):
    monkeypatch.chdir(place)
    program, *flags = command.split()
    if program == "lab":
        program = f"lab.tools.{flags.pop(0)}"
    elif not program.endswith(".py"):
        base = [] if "--resume" in command else [*TINY_RUN, "--data", "data", "--max_steps", "3"]
        program, flags = "train_gpt2", [*base, *command.split()]
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*")}
    with pytest.raises(UserError, match=BAD[command]) as raised:
        importlib.import_module(program.removesuffix(".py")).main(flags)
    assert "\n" not in str(raised.value) and raised.value.status == 2
    after = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.name != ".lock"}
    assert {p: t for p, t in after.items() if p.is_file() and before.get(p) != t} == {}


@pytest.mark.parametrize(
    "raised, status, said",
    [
        (UserError("fix it"), 2, "it.py: error: fix it"), (RunError("bad"), 1, "it.py: error: bad"),
        (KeyboardInterrupt(), 130, "it.py: stopped"),
        (OSError(errno.ENOSPC, ""), 2, "it.py: error: the disk that the output"),
        (torch.distributed.DistNetworkError("The client timed out. x"), 1, "it.py: error: [rank 0] lost"),
        (RuntimeError("a bug"), None, ""), (ValueError("a bug"), None, ""),
        (torch.OutOfMemoryError("a bug"), None, ""),
    ],
)  # fmt: skip
def test_exit_statuses_of_a_command(monkeypatch, capsys, raised, status, said):
    """User errors become a sentence and an exit status; bugs keep their traceback."""
    monkeypatch.setattr(sys, "argv", ["it.py", "--flag"])
    with pytest.raises(SystemExit if status else type(raised)) as ended:
        run_main(mock.Mock(side_effect=raised))
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count("\n") == bool(status)
    assert not status or ended.value.code == status


INCOMPLETE_TORCHRUN = [
    "RANK=1", "WORLD_SIZE=2", "RANK=0 WORLD_SIZE=2", "RANK=0 LOCAL_RANK=0 WORLD_SIZE=two", "RANK=-1",
    "RANK=2 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", "LOCAL_RANK=1",
    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=abc",
    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=70000",
]  # fmt: skip


@pytest.mark.parametrize("given", INCOMPLETE_TORCHRUN)
def test_incomplete_torchrun_variables_are_refused(monkeypatch, given):
    for word in given.split():
        monkeypatch.setenv(*word.split("="))
    with pytest.raises(UserError, match=f"{given.split()[0]}.* must all be set.* with torchrun"):
        World("cpu")


def test_a_command_with_incomplete_torchrun_variables_prints_no_traceback(tmp_path):
    for env in (dict(RANK="1"), dict(WORLD_SIZE="2")):
        done = run_python(ROOT / "train_gpt2.py", *TINY_RUN, cwd=tmp_path, **env)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "must all be set" in done.stderr.splitlines()[-1]


def test_empty_torchrun_variables_count_as_unset(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    assert torchrun_env() == (0, 0, 1)
    with pytest.raises(SystemExit) as ended:
        run_main(lambda argv: 0)
    assert ended.value.code == 0
    whole = dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", MASTER_ADDR="host", MASTER_PORT="1")
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    assert torchrun_env() == (3, 1, 4)


def test_out_of_memory_in_training_gives_one_sentence(capsys):
    """Outside of training, an allocation failure keeps its traceback."""
    with pytest.raises(
        UserError, match="out of memory .CUDA out of memory.; pass a smaller --batch_size"
    ):
        with oom_hint():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    with pytest.raises(RuntimeError, match="a bug"):
        with oom_hint():
            raise RuntimeError("a bug")


def test_old_spellings_of_flags_keep_working():
    old = (
        "--ckpt_every 7 --hella-every=3 --speed baseline --no_small_steps --ckpt_every_x 1".split()
    )
    new = (
        "--checkpoint_every 7 --hellaswag_every=3 --optimizations baseline --no_batch_warmup_steps"
    )
    assert rename_flags(old) == [*new.split(), "--ckpt_every_x", "1"]
    _, model, cfg = parsed("--speed", "bf16", "--ckpt_every", "7", "--hella-every", "3")
    assert (cfg.checkpoint_every, cfg.hellaswag_every, cfg.precision) == (7, 3, "bf16")
    assert model.attention == "math"


def parsed(*argv):
    return train_gpt2.settings.parse_flags(
        list(argv), PRESETS, train_gpt2.__doc__, train_gpt2.Trainer
    )


def test_flags_change_a_preset():
    flags = "--preset=gpt2-xl --lr 1e-3 --no-compile --n-layer 2"
    _, model_config, cfg = parsed(*flags.split())
    assert (model_config.n_layer, model_config.n_embd) == (2, 1600)
    assert (cfg.lr, cfg.compile) == (1e-3, False)
    reason, model_config, cfg = parsed("--preset", "gpt2")
    assert reason == "preset gpt2 (from --preset)"
    assert model_config.vocab_size == 0, "the data decides"
    assert (dataclasses.replace(model_config, vocab_size=50257), cfg) == PRESETS["gpt2"]


def test_optimizations_work_in_all_programs_and_flags_override_them():
    for program in (train_gpt2, bert, speedrun):
        words = ["--preset", "laptop", "--optimizations"]
        for speed, precision in (("baseline", "fp32"), ("bf16", "bf16"), ("recommended", "auto")):
            flags = [*words, speed, "--seed", "7"]
            how = program.PRESETS, program.__doc__, program.Trainer
            reason, model, cfg = train_gpt2.settings.parse_flags(flags, *how)
            assert (cfg.optimizations, cfg.precision) == (speed, precision) and "seed=7" in reason
            assert cfg.kernels == ("fused" if speed == "recommended" else "plain")
            exact = speed != "recommended" and program is not speedrun
            assert getattr(model, "attention", "sdpa") == ("math" if exact else "sdpa")
    assert parsed(*words, "baseline", "--precision", "tf32")[2].precision == "tf32"
    assert parsed("--preset", "gpt2", "--optimizations", "full")[2].fp8 == "all"
    compiles = [
        parsed("--preset", "gpt2", "--optimizations", s)[2].compile for s in ("baseline", "full")
    ]
    assert compiles == [False, True]


def test_default_preset_depends_on_the_machine(monkeypatch, tmp_path, shards):
    monkeypatch.chdir(tmp_path)
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for data in ("nowhere", str(shards)):
            reason, _, cfg = parsed("--data", data)
            assert cfg.preset == ("gpt2" if gpu and data != "nowhere" else "laptop")
            assert ("there is no GPU" in reason) == (not gpu), reason
            missing = "no data in nowhere; to make some, see `" in reason and "fineweb.py" in reason
            assert missing == (gpu and data == "nowhere"), reason
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert parsed()[2].preset == ("gpt2" if gpu else "laptop")
        monkeypatch.delenv("WORLD_SIZE")


def test_resuming_uses_the_settings_of_the_run(tmp_path, shards):
    log = tmp_path / "log"
    train_here(log, shards, "r", max_steps=1, lr=0.123, model=dict(n_head=4))
    train_here(log, shards, "s", max_steps=1, lr=0.456)
    for flags, lr in (("", 0.456), ("--run_name r", 0.123), ("--run-name=r --lr 0.5", 0.5)):
        reason, model_config, cfg = parsed("--resume", "--log_dir", str(log), *flags.split())
        assert cfg.resume and cfg.lr == lr and cfg.run_name == ("r" if flags else "s")
        assert model_config.n_head == (4 if flags else 2)
        assert reason.startswith(str(log / cfg.run_name))
    with pytest.raises(UserError, match="run_name is empty; without --run_name the newest"):
        parsed("--resume", "--log_dir", str(log), "--run_name", "")
