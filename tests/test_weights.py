"""Weights in and out, and that our model computes what transformers' GPT-2 does."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, add_noise, equal_bits, run_python

from lab import models, weights
from lab.cli import UserError
from lab.tools import export as tool
from lab.tools.export import export
from lab.weights import TRANSPOSED
from train_gpt2 import GPT, GPTConfig

TOLERANCE = 1e-4
# n_layer, n_head, n_embd: heads and proportions of the published models, small
SHAPES = {"gpt2": (2, 12, 48), "gpt2-xl": (5, 25, 100)}


def tiny_gpt(vocab_size=101, vocab_multiple=8, **changes):
    torch.manual_seed(7)
    shape = dict(n_layer=2, n_head=4, n_embd=32, block_size=16) | changes
    config = GPTConfig(**shape, vocab_size=vocab_size, vocab_multiple=vocab_multiple)
    return add_noise(GPT(config))


def saved(model, path, **more):
    """The path of a checkpoint with this model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "model_config": vars(model.config)} | more, path)
    return str(path)


def tiny_transformers(shape="gpt2", vocab_size=101):
    from transformers import GPT2Config, GPT2LMHeadModel

    n_layer, n_head, n_embd = SHAPES[shape]
    config = GPT2Config(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_positions=24, vocab_size=vocab_size,
        attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    return add_noise(GPT2LMHeadModel(config)).train()


def equal_models(a, b):
    """Bit by bit, pad rows aside."""
    cut = {k: a.config.vocab_size for k in GPT.vocab_rows}
    a, b = a.state_dict(), b.state_dict()
    same = (torch.equal(a[k][: cut.get(k)], b[k][: cut.get(k)]) for k in a)
    return a.keys() == b.keys() and all(same)


def pair(folder, shape="gpt2"):
    """transformers' model with noise, and ours, read from the folder that it saved."""
    theirs = tiny_transformers(shape)
    theirs.save_pretrained(folder)
    return theirs, GPT.from_pretrained(str(folder))


# ------------------------------------------------------------------ the same model as transformers'


def deviations(ours, theirs):
    """Largest absolute differences in logits, loss and gradients."""
    V = theirs.config.vocab_size
    rows = torch.randint(V, (3, 25), generator=torch.Generator().manual_seed(5))
    x, y = rows[:, :-1], rows[:, 1:]
    their_logits = theirs(x).logits  # theirs shifts the labels itself, so its loss is of these
    their_loss = F.cross_entropy(their_logits.reshape(-1, V), y.reshape(-1))
    loss = ours(x, y)[1]
    loss.backward(), their_loss.backward()
    found = {"logits": (ours(x)[0] - their_logits).abs().max().item()}
    found["loss"] = abs(loss.item() - their_loss.item())
    same = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if name in same:
            grad = same[name].grad.t() if name.endswith(TRANSPOSED) else same[name].grad
            found[name] = (p.grad[: len(grad)] - grad).abs().max().item()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_same_as_transformers(tmp_path, shape):
    theirs, ours = pair(tmp_path, shape)
    c = ours.config
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.vocab_size) == (*SHAPES[shape], 24, 101)
    found = deviations(ours, theirs)
    assert len(found) == 2 + 12 * SHAPES[shape][0] + 4 and max(found.values()) < TOLERANCE, found


def exact_gelu(model):
    for mlp in (block.mlp for block in model.transformer.h):
        mlp.forward = lambda x, mlp=mlp: mlp.c_proj(F.gelu(mlp.c_fc(x)))


def swapped_norms(model):
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = block.ln_2, block.ln_1


def untied_head(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


WRONG = {  # a change of the model, of a parameter, or of attention
    "exact GELU": exact_gelu,
    "ln_1 and ln_2 swapped": swapped_norms,
    "untied head": untied_head,
    "no query bias": ("h.0.attn.c_attn.bias", lambda p: p * (torch.arange(144) >= 48)),
    "no MLP bias": ("h.0.mlp.c_fc.bias", torch.zeros_like),
    "positions shifted": ("wpe.weight", lambda p: p.roll(1, 0)),
    "not turned": ("h.0.attn.c_proj.weight", torch.t),
    "unscaled attention": dict(scale=1.0),
    "not causal": dict(is_causal=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_models_are_caught(tmp_path, name, monkeypatch):
    theirs, ours = pair(tmp_path)
    right, wrong = F.scaled_dot_product_attention, WRONG[name]
    if isinstance(wrong, dict):
        attention = lambda *args, **more: right(*args, **more | wrong)  # noqa: E731
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    elif isinstance(wrong, tuple):
        p = ours.transformer.get_parameter(wrong[0])
        p.data = wrong[1](p.data)
    else:
        wrong(ours)
    found = deviations(ours, theirs)
    assert max(found.values()) > 5 * TOLERANCE, f"{name} was not noticed: {found}"


# ----------------------------------------------------------------------------------------------- in


def test_other_files_of_transformers(tmp_path):
    """Several files with an index, the older pickle format, names as of the bare transformer."""
    theirs = tiny_transformers()
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "several", max_shard_size="60KB")
    theirs.transformer.save_pretrained(tmp_path / "bare")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text((tmp_path / "one/config.json").read_text())
    torch.save(theirs.state_dict(), tmp_path / "old/pytorch_model.bin")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    one = models.load(str(tmp_path / "one"))
    for name in ("several", "bare", "old"):
        assert equal_models(one, models.load(str(tmp_path / name))), name


def test_a_run_by_each_of_its_names(tmp_path, monkeypatch):
    """Folder, checkpoint, name, nothing for the newest; "gpt2" is OpenAI's, also beside such a run."""
    monkeypatch.chdir(tmp_path)
    for seconds, name in enumerate(("gpt2", "old", "new")):
        model = tiny_gpt(n_embd=32 + 8 * seconds, vocab_size=257, document_mask=name == "new")
        path = saved(model, tmp_path / "log" / name / "model_000010.pt", program="gpt2")
        os.utime(path, (seconds, seconds))
    (tmp_path / "log/new/config.json").write_text("")  # broken settings do not hide the weights
    for source in ("log/new", "log/new/model_000010.pt", "new", ""):
        assert models.find(source) == "log/new/model_000010.pt"
        loaded = models.load(source)
        assert equal_bits(loaded.state_dict(), model.state_dict()), "pad rows and all"
    assert models.find("gpt2") == "gpt2" and models.find("old") == "log/old/model_000010.pt"
    x = torch.randint(256, (1, 12))
    x[0, 6] = 256  # end-of-text: what stands before it is not seen after it
    other = torch.cat([(x[:, :6] + 1) % 256, x[:, 6:]], dim=1)
    assert torch.allclose(loaded(x)[0][:, 6:], loaded(other)[0][:, 6:], atol=1e-6)


def test_files_of_an_earlier_version():
    """Made at a3954dc; the export there is of the checkpoint."""
    folder = ROOT / "tests/fixtures/a3954dc"
    checkpoint, exported = models.load(str(folder / "log/old")), models.load(str(folder / "export"))
    assert equal_models(checkpoint, exported) and checkpoint.config.vocab_size == 257


def test_start_from(tmp_path):
    model = GPT(GPTConfig(2, 4, 32, 16, vocab_size=101, vocab_multiple=128))
    models.start_from(saved(start := tiny_gpt(), tmp_path / "model.pt"), model)
    assert equal_models(start, model) and not model.lm_head.weight[101:].any()
    said = r"n_layer=2 \(here 3\), vocab_size=101 \(here 257\); pass --n_layer 2 and --data"
    with pytest.raises(UserError, match=said):
        models.start_from(tmp_path / "model.pt", GPT(GPTConfig(3, 4, 32, 16, vocab_size=257)))


def test_nanogpt_file(tmp_path):
    """model_args, names as torch.compile and DDP leave them, no biases, causal masks, pad rows."""
    ours = tiny_gpt(vocab_size=104, vocab_multiple=8)
    for name, p in ours.named_parameters():
        p.data *= not name.endswith("bias")
    state = {k: v for k, v in ours.state_dict().items() if not k.endswith("bias")}
    for i in range(2):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    shape = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=101)
    file = {"model_args": shape | dict(bias=False, dropout=0.0), "config": {"lr": 1}}
    for prefix in ("", "_orig_mod.module."):
        named = {prefix + k: v for k, v in state.items()}
        torch.save(file | {"model": named}, tmp_path / "ckpt.pt")
        model = models.load(str(tmp_path / "ckpt.pt"))
        assert shape.items() <= vars(model.config).items(), prefix
        assert not model.transformer.wte.weight[101:].any()
        x = torch.randint(101, (2, 16))
        assert torch.equal(model(x)[0], ours(x)[0][..., :101])


def test_plain_state_dicts(tmp_path):
    """64 channels a head; 50304 rows are GPT-2's vocabulary."""
    ours = tiny_gpt(n_embd=128, n_head=2)
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    model = models.load(str(tmp_path / "model.pt"))
    assert model.config.n_head == 2 and model.config.vocab_size == 104, "no file tells pad rows"
    assert equal_models(model, ours)
    state = tiny_gpt(50304, 128, n_embd=16, n_head=2).state_dict()
    config = {"n_head": 2, "vocab_size": 50304}
    for said, ids in ((50304, 50257), (50300, 50300)):
        config["vocab_size"] = said
        shape, _ = weights.unpack({"model": state, "config": config}, "file")
        assert shape["vocab_size"] == ids


class Foreign:
    """As the object that build-nanogpt pickles for its config."""


def test_build_nanogpt_file_with_a_pickled_object(tmp_path):
    """Only the object tells the heads: 64 channels a head would make it one."""
    ours, config = tiny_gpt(n_head=8, vocab_multiple=1), Foreign()
    vars(config).update(n_head=8, vocab_size=101)
    torch.save({"model": ours.state_dict(), "config": config, "step": 9}, tmp_path / "model.pt")
    model = models.load(str(tmp_path / "model.pt"))
    assert model.config.n_head == 8 and equal_models(model, ours)


class Evil:
    def __reduce__(self):
        return os.system, ("touch touched",)


@pytest.mark.parametrize("how", ["checkpoint", "raw pickle", "pytorch_model.bin"])
def test_malicious_pickles_do_nothing(tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    file, evil = tmp_path / "model.pt", Evil()
    file.write_bytes(pickle.dumps(evil))
    pickle.loads(file.read_bytes())
    Path("touched").unlink()  # the attack itself works
    if how == "checkpoint":
        torch.save({"model": tiny_gpt().state_dict(), "config": evil}, file)
    elif how == "pytorch_model.bin":
        (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_head": 4, "n_embd": 32}')
        torch.save(tiny_gpt().state_dict() | {"x": evil}, tmp_path / "pytorch_model.bin")
        file = tmp_path
    with pytest.raises(UserError):
        models.load(str(file))
    assert not Path("touched").exists()


FOLDERS = {  # what is said of a folder that transformers has saved: what was done to it
    "activation_function=gelu": dict(activation_function="gelu"),
    "n_head=7 does not divide": dict(n_head=7),
    "model.safetensors is damaged": lambda f: os.truncate(f / "model.safetensors", 5000),
    "has no model.safetensors": lambda f: (f / "model.safetensors").unlink(),
}  # fmt: skip
H = "transformer.h.1."
FILES = {  # what is said of a state dict in a file: what became of it
    f"has no {H}mlp.c_fc": lambda state: state.pop(f"{H}mlp.c_fc.weight"),
    "c_fc.bias holds numbers that": lambda state: state[f"{H}mlp.c_fc.bias"].fill_(torch.nan),
    "lm_head.weight is sparse or": lambda s: s.update({"lm_head.weight": torch.eye(1).to_sparse()}),
    "checkpoint broken.pt is damaged": lambda state: state.update({3: torch.ones(4)}),
}
NOWHERE = {"'./x' is no file or folder": "./x", "there is no checkpoint x.pt": "x.pt"}
NOWHERE |= {
    "checkpoint text.pt is": "text.pt",
    "no run of train_gpt2.py with a checkpoint in log": "",
}


@pytest.mark.parametrize("said", [*FOLDERS, *FILES, *NOWHERE])
def test_broken_sources_are_one_sentence(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no checkpoint")
    source = NOWHERE.get(said, "broken.pt")
    if said in FOLDERS:
        tiny_transformers().save_pretrained(source := "folder")
        config, change = Path(source, "config.json"), FOLDERS[said]
        if isinstance(change, dict):
            config.write_text(json.dumps(json.loads(config.read_text()) | change))
        else:
            change(Path(source))
    elif said in FILES:
        FILES[said](state := tiny_gpt().state_dict())
        torch.save(state, source)
    with pytest.raises(UserError) as error:
        models.load(source)
    assert said in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------- out


def test_round_trip_is_bit_equal(tmp_path, capsys):
    """Ours -> folder -> transformers -> folder -> ours; pad rows stay at home."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ours = tiny_gpt(257, 128)
    export(saved(ours, tmp_path / "model.pt"), tmp_path / "sub" / "out")
    (tmp_path / "sub" / "out").rename(tmp_path / "out")
    assert "257 ids are not GPT-2's vocabulary; they are bytes" in capsys.readouterr().out
    wanted = {"config.json", "generation_config.json", "model.safetensors", "model.sha256"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == wanted, "and no tokenizer"
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in (tmp_path / "out").iterdir())
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["transformer.wte.weight"].shape == (257, 32) and "lm_head.weight" not in tensors
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.eos_token_id == 256 and theirs.generation_config.eos_token_id == 256
    x = torch.randint(257, (2, 16))
    assert (ours(x)[0] - theirs(x).logits).abs().max() < TOLERANCE
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("out", "theirs"):
        assert equal_models(ours, models.load(str(tmp_path / folder))), folder
    export(tmp_path / "theirs", tmp_path / "again")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "out"))
    assert one == two


def test_exported_tokenizer_and_pipeline(tmp_path, gpt2_files):
    """AutoTokenizer gives GPT-2's ids, from tokenizer.json and from vocab.json with merges.txt."""
    from transformers import AutoTokenizer, pipeline

    from lab.data.tokenizers import get_tokenizer

    out, text = tmp_path / "out", "Hello,  I'm\n\n\tnaïve 日本語 🙂 x = [22]\r\n"
    export(saved(tiny_gpt(50257, 128, n_embd=16, n_head=2), tmp_path / "model.pt"), out)
    weights_and_sum = {"model.safetensors", "model.sha256"}
    assert {path.name for path in out.iterdir()} == tool.OURS | weights_and_sum
    write = pipeline("text-generation", model=str(out))
    made = write("Hello", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert made.startswith("Hello") and len(made) > 5
    for _ in range(2):
        theirs = AutoTokenizer.from_pretrained(out)
        assert (len(theirs), theirs.eos_token_id, theirs.model_max_length) == (50257, 50256, 16)
        assert theirs.encode(text) == get_tokenizer("gpt2").encode(text)
        assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
        (out / "tokenizer.json").unlink(missing_ok=True)


def test_an_export_with_another_bit_is_refused(tmp_path):
    """safetensors has no checksum."""
    export(saved(tiny_gpt(), tmp_path / "model.pt"), tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    with pytest.raises(UserError, match="model.safetensors is another than model.sha256 beside it"):
        models.load(str(tmp_path / "out"))
    (tmp_path / "out/model.sha256").unlink()
    models.load(str(tmp_path / "out"))


def test_what_a_killed_export_left_goes_with_the_next(tmp_path):
    """The earlier one stays until then."""
    export(saved(earlier := tiny_gpt(), tmp_path / "earlier.pt"), tmp_path / "out")
    source = saved(model := tiny_gpt(n_embd=64), tmp_path / "model.pt")
    code = f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
    code += "from lab.tools.export import export\nPath.chmod = lambda *_: os.kill(os.getpid(), 9)\n"
    killed = run_python("-c", f"{code}export({source!r}, Path('out'))", cwd=tmp_path)
    assert killed.returncode == -9 and (tmp_path / ".out.part/model.safetensors").exists()
    assert equal_models(models.load(str(tmp_path / "out")), earlier)
    export(source, tmp_path / "out")
    assert equal_models(models.load(str(tmp_path / "out")), model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["earlier.pt", "model.pt", "out"]


def test_export_replaces_exports_alone(tmp_path, monkeypatch):
    """An empty folder or an earlier export; never another model, a run, another folder, a file."""
    monkeypatch.chdir(tmp_path)
    source = saved(tiny_gpt(), tmp_path / "log/a/model_000005.pt")
    (tmp_path / "log/a/config.json").write_text('{"model": {}, "train": {}}')
    (tmp_path / "mine").mkdir()
    for _ in range(2):
        export(source, "mine")
    (tmp_path / "mine/notes.txt").write_text("mine")
    tiny_transformers().save_pretrained(tmp_path / "theirs")
    before = sorted(tmp_path.rglob("*"))
    for out in ("theirs", "mine", "log/a", "log", source):
        with pytest.raises(UserError, match="is not a new folder, nor an earlier export"):
            export(source, out)
    assert sorted(tmp_path.rglob("*")) == before
