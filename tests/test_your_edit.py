"""Edits in train_gpt2.py, or in a copy of it, are used in training, validation, sampling and export."""

import json
import re

import pytest
import torch

from conftest import (  # isort: skip
    ROOT, TINY_RUN, Process, equal_bits, fail, finished, read_run, run_code, run_python, succeed, two_ranks,
)  # fmt: skip

import speedrun
from lab.cli import UserError
from lab.distributed import World
from lab.hf.load import copy_into
from lab.optim.fsdp2 import shard_state_dict
from lab.program import class_path, find_class
from lab.registry import load_model
from lab.trainer.checkpoint import read_checkpoint
from lab.trainer.model_check import check_model
from train_gpt2 import GPT

TINY = "--max_steps 3 --checkpoint_every 3 --val_every 3 --lr 3e-3".split()


def edited_copy(folder, name, *edits):
    """A copy of train_gpt2.py in a user's folder, with some lines changed."""
    source = (ROOT / "train_gpt2.py").read_text()
    source = source.replace(
        "import contextlib\n",
        f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\nimport contextlib\n",
        1,
    )
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / name
    path.write_text(source)
    return path


SOFT_CAP = (
    "        logits = F.linear(x, weight)[:, : self.vocab_size]\n",
    "        logits = F.linear(x, weight)[:, : self.vocab_size]\n"
    "        logits = 0.05 * torch.tanh(logits / 0.05)\n",
)
RELU2 = (
    'return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))',
    "return self.c_proj(F.relu(self.c_fc(x)).square())",
)


def test_a_soft_cap_in_head_loss_trains_and_validates_with_it(tmp_path, shards):
    """In older versions, the fused cross-entropy replaced any HeadLoss."""
    program = edited_copy(tmp_path, "my_gpt.py", SOFT_CAP)
    done = succeed(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)
    assert "HeadLoss differs from the fused cross-entropy: using your version" in done
    run = read_run(tmp_path / "log" / "r")
    # logits within +-0.05 can't move the loss more than 0.1 from ln(257) = 5.549
    assert all(abs(loss - 5.549) < 0.1 for loss in (*run.losses, *run.val.values()))
    plain = succeed(
        ROOT / "train_gpt2.py", *TINY_RUN, "--data", shards, *TINY, "--run_name", "p", cwd=tmp_path
    )
    assert "using your version" not in plain
    assert read_run(tmp_path / "log" / "p").losses[-1] < 5.4


HEAD_LOSS = 'return losses if reduction == "none" else losses.sum()\n'
MISTAKES = {  # part of the message: edit
    "for the same text differ": (
        'F.gelu(self.c_fc(x), approximate="tanh")',
        "F.dropout(F.gelu(self.c_fc(x)), 0.1)",
    ),
    "change with later tokens": ("is_causal = hide_later and mask is None", "is_causal = False"),
    "the cross-entropy of its": (
        HEAD_LOSS,
        HEAD_LOSS.replace("losses.sum()", "0.9 * losses.sum()"),
    ),
    "loss is nan before": (HEAD_LOSS, HEAD_LOSS.replace("losses.sum()", "losses.sum() * math.nan")),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_in_an_edited_model_are_found_before_training(said, tmp_path, shards):
    program = edited_copy(tmp_path, "my_gpt.py", MISTAKES[said])
    done = run_python(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)
    assert done.returncode == (2 if "nan" in said else 0)
    found = [message for message in MISTAKES if message in done.stdout + done.stderr]
    assert found == [said]


class SeesAll(speedrun.GPT):
    def hidden(self, idx, position=None, mask=None, cache=None):
        T = idx.size(1)
        return super().hidden(idx, position, torch.ones(1, 1, T, T, dtype=torch.bool), cache)


def test_a_view_of_later_tokens_is_found_although_speedrun_begins_with_zeros(capsys):
    for model, found in ((SeesAll, True), (speedrun.GPT, False)):
        model = model(speedrun.PRESETS["laptop"][0])
        before = [p.clone() for p in model.parameters()]
        check_model(model, World("cpu", 60))
        assert ("change with later tokens" in capsys.readouterr().out) == found
        assert equal_bits(before, list(model.parameters()))


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp2"])
def test_a_layer_without_gradient_is_named_under_torchrun(tmp_path, shards, parallel):
    extra = "        self.n_head, self.layer, self.attention ="
    program = edited_copy(
        tmp_path, "my_gpt.py", (extra, f"        self.extra = nn.Linear(2, 2)\n{extra}")
    )
    words = [program, *TINY_RUN, "--data", shards, *TINY, "--parallel", parallel]
    said = "depend on some parameters.*: transformer.h.0.attn.extra.weight"
    done = [Process(*words, cwd=tmp_path, **rank) for rank in two_ranks()]
    assert all(process.wait() == 2 for process in done)
    assert re.search(said, done[0].stderr)


def test_a_model_without_layernorm_trains_with_fsdp2(tmp_path, shards):
    norms = ("self.ln_1 = nn.", "self.ln_2 = nn.", "ln_f=nn.")
    edits = [(f"{name}LayerNorm", f"{name}RMSNorm") for name in norms]
    words = [edited_copy(tmp_path, "my_gpt.py", *edits), *TINY_RUN, "--data", shards, *TINY]
    finished([Process(*words, "--parallel", "fsdp2", cwd=tmp_path, **rank) for rank in two_ranks()])
    succeed(*words, "--run_name", "one", cwd=tmp_path)
    two, one = (read_run(tmp_path / "log" / name).losses for name in ("r", "one"))
    assert two == pytest.approx(one, abs=1e-5)


def test_a_copy_is_sampled_resumed_exported_with_its_own_model(tmp_path, shards):
    """From training to export. In older versions, all tools loaded train_gpt2.GPT for such checkpoints."""
    program = edited_copy(tmp_path, "my_gpt.py", RELU2)
    succeed(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)
    run_dir = tmp_path / "log" / "r"
    record = json.loads((run_dir / "config.json").read_text())["program"]
    assert record["model"] == f"{program.as_posix()}:GPT"

    code = """
import torch, train_gpt2
from lab.registry import load_model
model, idx = load_model("r"), torch.arange(20)[None]
assert type(model) is not train_gpt2.GPT and type(model).__name__ == "GPT"
plain = train_gpt2.GPT(train_gpt2.GPTConfig(**vars(model.config)))
plain.load_state_dict(model.state_dict())
print(model(idx)[0].sub(plain(idx)[0]).abs().max().item() > 1e-3)
x = torch.randn(1, 4, model.config.n_embd)
mlp = model.transformer.h[0].mlp
print(torch.allclose(mlp(x), mlp.c_proj(mlp.c_fc(x).relu().square())))
"""
    assert run_code(code, cwd=tmp_path).stdout.split() == ["True", "True"]
    text = succeed(ROOT / "sample.py", "ab", "--model", "r", "--max_new_tokens", 5, cwd=tmp_path)
    assert "ab" in text
    resumed = succeed(program, "--resume", "--max_steps", 5, cwd=tmp_path)
    assert "resuming after step 3" in resumed and len(read_run(run_dir).losses) == 5
    wrong = fail(ROOT / "train_gpt2.py", "--resume", "--run_name", "r", cwd=tmp_path)
    assert "is a run of " in wrong and "my_gpt.py --resume`" in wrong
    # transformers' GPT-2 has another MLP: the export says so instead of writing other logits
    assert "does not compute GPT-2" in fail("lab", "export", "log/r", "--out", "out", cwd=tmp_path)
    program.unlink()
    missing = fail(ROOT / "sample.py", "ab", "--model", "r", cwd=tmp_path)
    assert "is defined in" in missing and "put a copy of that file there" in missing


def test_weights_used_with_changed_code_are_reported(tmp_path, shards):
    """Changes of the model, also in a file that it imports; not of comments or of training."""
    program = edited_copy(tmp_path, "my_gpt.py")
    succeed(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)

    def warnings(*args):
        done = run_python(*args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stderr.split())

    sample = ROOT / "sample.py", "ab", "--max_new_tokens", 2, "--model"
    warning = "the model's code in .*my_gpt.py differs from the code with which .* was saved"
    training = ("return cfg.lr * (step + 1) / warmup", "return cfg.lr * (step + 2) / warmup")
    comment = ("class MLP(nn.Module):\n", 'class MLP(nn.Module):\n    """A comment."""\n\n')
    edited_copy(tmp_path, "my_gpt.py", training, comment)
    assert "warning" not in warnings(*sample, "r")
    edited_copy(tmp_path, "my_gpt.py", RELU2)
    assert re.search(warning, warnings(*sample, "r"))
    assert re.search(warning, warnings(program, "--resume", "--max_steps", 4))
    assert "warning" not in warnings(*sample, "r")  # saved by the new code

    other = tmp_path / "sub.py"
    other.write_text(
        "import sys\nimport my_gpt\n\nclass GPT(my_gpt.GPT):\n    pass\n\n"
        "class Trainer(my_gpt.Trainer):\n    model_class = GPT\n\n"
        "if __name__ == '__main__':\n    sys.exit(my_gpt.main(sys.argv[1:], trainer_class=Trainer))\n"
    )
    succeed(other, *TINY_RUN, "--data", shards, *TINY, "--run_name", "s", cwd=tmp_path)
    edited_copy(tmp_path, "my_gpt.py")
    assert re.search(warning.replace("my_gpt", "sub"), warnings(*sample, "s"))


DETACHED = (
    'return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))',
    'return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh").detach())',
)


def test_parts_without_a_gradient_and_weights_of_another_program_are_reported(tmp_path, shards):
    program = edited_copy(tmp_path, "my_gpt.py", DETACHED)
    flags = *TINY_RUN, "--data", shards, *TINY
    said = {}
    for file, more in ((program, "--run_name r"), (ROOT / "train_gpt2.py", "--run_name p")):
        for start in ("", " --init_from log/r"):
            name = more + start.replace(" --init_from log/r", "2 --init_from log/r")
            done = run_python(file, *flags, *name.split(), cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            said[name] = " ".join((done.stdout + done.stderr).split())
    lost = "so they are not trained: transformer.h.0.ln_2.weight and "
    other = "the model's code in train_gpt2.py differs from the code with which .* was saved"
    assert [lost in text for text in said.values()] == [True, True, False, False]
    assert [bool(re.search(other, text)) for text in said.values()] == [False, False, False, True]


DROPOUT = (
    'return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))',
    'return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), 0.9, self.training)',
)


def test_dropout_is_off_in_validation(tmp_path, shards):
    """In older versions, validation, HellaSwag and samples ran with dropout that was added."""
    program = edited_copy(tmp_path, "my_gpt.py", DROPOUT)
    for name, file in (("r", program), ("p", ROOT / "train_gpt2.py")):
        succeed(file, *TINY_RUN, "--data", shards, *TINY, "--run_name", name, cwd=tmp_path)
    dropped, plain = (read_run(tmp_path / "log" / name) for name in "rp")
    assert dropped.val[0] == plain.val[0] and dropped.losses[0] != plain.losses[0]


GATE = (
    "        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)  # init_weights scales this name\n",
    "        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)\n"
    "        self.c_gate = nn.Linear(config.n_embd, 4 * config.n_embd)\n",
)
GATED = (RELU2[0], "return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))")


def test_a_model_with_other_weights_is_trained_and_sampled_but_not_exported(tmp_path, shards):
    """A gated MLP (SwiGLU), which transformers' GPT-2 does not have."""
    program = edited_copy(tmp_path, "gated.py", GATE, GATED)
    succeed(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)
    assert "ab" in succeed(ROOT / "sample.py", "ab", "--model", "r", cwd=tmp_path)
    for out in (("--out", "out"), ("--html", "page.html")):
        refused = fail("lab", "export", "log/r", *out, cwd=tmp_path)
        assert "the model has other weights than GPT-2" in refused


WINDOW = (
    "        S = k.size(2)\n",
    "        S = k.size(2)\n"
    "        if cache is None:\n"
    "            i = torch.arange(T, device=x.device)\n"
    "            mask = (i[:, None] >= i) & (i[:, None] < i + 20)\n",
)


def test_a_model_that_differs_only_in_long_texts_is_not_exported(tmp_path, shards):
    """Attention to the last 20 of 32 tokens."""
    program = edited_copy(tmp_path, "window.py", WINDOW)
    succeed(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)
    refused = fail("lab", "export", "log/r", "--out", "out", cwd=tmp_path)
    assert "does not compute GPT-2" in refused and "cannot be exported" in refused


MEAN_WEIGHTS = (
    (
        "        self.saved_step = 0",
        "        self.mean = [p.detach().clone() for p in raw_model.parameters()]\n"
        "        self.saved_step = 0",
    ),
    (
        "        self.step += 1\n",
        "        self.step += 1\n"
        "        torch._foreach_lerp_(self.mean, [p.data for p in self.raw_model.parameters()], 0.5)\n",
    ),
    (
        "    def callbacks(self, stop):\n",
        "    def state_dict(self):\n"
        "        return super().state_dict() | {'mean': self.mean}\n\n"
        "    def load_state_dict(self, state):\n"
        "        super().load_state_dict(state)\n"
        "        self.mean = state['mean']\n\n"
        "    def callbacks(self, stop):\n",
    ),
)


def test_a_trainer_with_more_state_saves_and_restores_it(tmp_path, shards):
    program = edited_copy(tmp_path, "my_gpt.py", *MEAN_WEIGHTS)
    flags = "--max_steps", 4, "--checkpoint_every", 2
    succeed(program, *TINY_RUN, "--data", shards, *flags, cwd=tmp_path)
    path = tmp_path / "log" / "r" / "model_000004.pt"
    state = read_checkpoint(path.rename(tmp_path / "whole.pt"))
    succeed(program, "--resume", cwd=tmp_path)  # from step 2
    assert equal_bits(read_checkpoint(path)["mean"], state["mean"])
    weights = list(state["model"].values())
    assert len(state["mean"]) == len(weights) - 1, "the tied head is one parameter"
    assert not torch.equal(state["mean"][0], weights[0]), "they lag behind the weights"


SGD = (
    "optimizer = torch.optim.AdamW(param_groups(model, cfg.weight_decay), **adamw)",
    "optimizer = torch.optim.SGD(param_groups(model, cfg.weight_decay), cfg.lr, momentum=0.9)",
)


def test_a_run_with_another_optimizer_is_resumed_exactly(tmp_path, shards):
    program = edited_copy(tmp_path, "sgd.py", SGD)
    flags = "--max_steps", 4, "--checkpoint_every", 2
    succeed(program, *TINY_RUN, "--data", shards, *flags, cwd=tmp_path)
    path = tmp_path / "log" / "r" / "model_000004.pt"
    whole = read_checkpoint(path.rename(tmp_path / "whole.pt"))
    succeed(program, "--resume", cwd=tmp_path)  # from step 2
    resumed = read_checkpoint(path)
    assert equal_bits(resumed["model"], whole["model"])
    momentum = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (resumed, whole)]
    assert torch.equal(*momentum) and momentum[0].any()


def test_an_unchanged_copy_exports_to_transformers(tmp_path, shards):
    program = edited_copy(tmp_path, "my_gpt.py")
    succeed(program, *TINY_RUN, "--data", shards, *TINY, cwd=tmp_path)
    succeed("lab", "export", "log/r", "--out", "out", cwd=tmp_path)
    ours = read_checkpoint(tmp_path / "log" / "r" / "model_000003.pt")["model"]
    assert equal_bits(load_model(str(tmp_path / "out")).state_dict(), ours)


def test_from_pretrained_builds_the_class_it_is_called_on(tmp_path, tiny_config):
    class MyGPT(GPT):
        pass

    model = GPT(tiny_config)
    torch.save({"model": model.state_dict(), "model_config": vars(tiny_config)}, tmp_path / "m.pt")
    assert type(MyGPT.from_pretrained(str(tmp_path / "m.pt"))) is MyGPT
    assert type(GPT.from_pretrained(str(tmp_path / "m.pt"))) is GPT


def test_buffers_of_an_edited_model_are_kept(tmp_path, tiny_config):
    """from_pretrained left a mask uninitialized, and --init_from refused a run of such a model."""

    class MaskedGPT(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())
            self.register_buffer("scale", torch.tensor(2.0))

    model, other = MaskedGPT(tiny_config), MaskedGPT(tiny_config)
    plain = {"model": GPT(tiny_config).state_dict(), "model_config": vars(tiny_config)}
    torch.save(plain, tmp_path / "m.pt")
    loaded = MaskedGPT.from_pretrained(str(tmp_path / "m.pt"))
    assert torch.equal(loaded.mask, model.mask) and loaded.scale == 2
    model.scale.fill_(3)  # as training may do
    copy_into(other, model.state_dict(), "a run")
    assert equal_bits(other.state_dict(), model.state_dict()) and other.scale == 3
    state = model.state_dict()  # of FSDP2's load_state_dict
    assert shard_state_dict(state, dict(model.named_parameters())) == state


def test_a_model_with_an_untied_head_starts_from_its_own_weights_and_from_tied_ones(tmp_path):
    class Untied(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.lm_head.weight = torch.nn.Parameter(torch.randn(config.padded_vocab_size, 128))

    tied = GPT.from_pretrained(str(ROOT / "examples" / "laptop_model"))
    model, x = (
        Untied.from_pretrained(str(ROOT / "examples" / "laptop_model")),
        torch.arange(9)[None],
    )
    assert torch.equal(model(x)[0], tied(x)[0]) and len([*model.parameters()]) == 29
    model.lm_head.weight.data[:257] += 1
    copy_into(other := Untied(tied.config), model.state_dict(), "a run")
    assert equal_bits(other.state_dict(), model.state_dict())
    with pytest.raises(UserError, match="must equal transformer.wte.weight"):
        copy_into(tied, model.state_dict(), "a run")


def test_classes_are_recorded_by_file_and_name(tmp_path, monkeypatch):
    assert class_path(GPT) == "train_gpt2.py:GPT" and find_class("train_gpt2.py:GPT", "x") is GPT
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Model:\n    class Inner:\n        pass\n")
    inner = find_class(f"{tmp_path}/mine.py:Model.Inner", "log/x")
    assert (
        inner.__qualname__ == "Model.Inner"
        and class_path(inner) == f"{tmp_path}/mine.py:Model.Inner"
    )
    with pytest.raises(
        UserError, match="log/x was made by class Gone, which .*mine.py no longer defines"
    ):
        find_class(f"{tmp_path}/mine.py:Gone", "log/x")
    with pytest.raises(UserError, match="in a notebook or an interactive session"):
        find_class(":Model", "x")


def test_a_checkpoint_cannot_name_a_file_elsewhere(tmp_path, monkeypatch):
    """Only files of the user are imported, because a checkpoint may come from somebody else."""
    (tmp_path / "here").mkdir()
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass GPT:\n    pass\n")
    monkeypatch.chdir(tmp_path / "here")
    in_runs = [tmp_path / "here" / "log" / "m.py", ROOT / "log" / "evil_of_a_test.py"]
    for file in (evil, "../evil.py", "here/../../evil.py", *in_runs):
        if file in in_runs:
            file.parent.mkdir(exist_ok=True)
            file.write_text(evil.read_text())
        try:
            with pytest.raises(UserError, match="which is not a file in"):
                find_class(f"{file}:GPT", "log/x")
        finally:
            if file in in_runs:
                file.unlink()
    evil.rename("m.py")
    with pytest.raises(UserError, match="which is not a file in"):
        find_class(f"{tmp_path}/here/m.py:GPT", "a.pt")  # the checkpoint is beside it
    assert find_class("train_gpt2.py:GPT", ROOT / "a.pt") is GPT
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "program", ["nobody", 7, {}, {"model": 7, "config": None}, {"model": "x"}, ["a"]]
)
def test_odd_records_of_a_program_are_refused(tmp_path, tiny_config, program):
    state = {"model": GPT(tiny_config).state_dict(), "model_config": vars(tiny_config)}
    torch.save(state | {"program": program, "train_config": {}}, tmp_path / "m.pt")
    if not program:  # none: a file of another project, whose tensors tell the shape
        assert isinstance(load_model(str(tmp_path / "m.pt")), GPT)
        return
    with pytest.raises(UserError, match="m.pt"):
        load_model(str(tmp_path / "m.pt"))
