"""Loading and exporting weights, and parity with transformers' GPT-2."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, add_noise, equal_bits, run_code
from models import saved, tiny_gpt

from lab.cli import UserError
from lab.hf import export as hf_export
from lab.hf.export import export
from lab.hf.gpt2 import TRANSPOSED
from lab.hf.load import has_other_vocabulary, parse_checkpoint
from lab.program import LEGACY_PROGRAMS
from lab.registry import init_from, load_model, resolve_source
from lab.trainer.checkpoint import read_checkpoint
from train_gpt2 import GPT, GPTConfig

TOLERANCE = 1e-4
# (n_layer, n_head, n_embd): the published models' numbers of heads and proportions, scaled down
SHAPES = {"gpt2": (2, 12, 48), "gpt2-xl": (5, 25, 100)}


def tiny_transformers(shape="gpt2", vocab_size=101):
    """A transformers GPT-2 with noise in its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    n_layer, n_head, n_embd = SHAPES[shape]
    config = GPT2Config(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_positions=24, vocab_size=vocab_size,
        attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    return add_noise(GPT2LMHeadModel(config)).train()


def equal_models(a, b):
    """Whether two models have the same bits, except in padding rows."""
    cut = {k: a.config.vocab_size for k in GPT.vocab_rows}
    a, b = a.state_dict(), b.state_dict()
    same = (torch.equal(a[k][: cut.get(k)], b[k][: cut.get(k)]) for k in a)
    return a.keys() == b.keys() and all(same)


def pair(folder, shape="gpt2"):
    """transformers' model, and ours loaded from the folder that it saved."""
    theirs = tiny_transformers(shape)
    theirs.save_pretrained(folder)
    return theirs, GPT.from_pretrained(str(folder))


# ---------------------------------------------------------------------- parity with transformers


def deviations(ours, theirs):
    """Largest absolute differences in logits, loss and gradients: {name: difference}."""
    V = theirs.config.vocab_size
    rows = torch.randint(V, (3, 25), generator=torch.Generator().manual_seed(5))
    x, y = rows[:, :-1], rows[:, 1:]
    their_logits = theirs(x).logits  # its own loss would shift the labels once more
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
def test_equals_transformers(tmp_path, shape):
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


WRONG = {  # name: what changes the model, (a parameter, its change), or arguments of attention
    "exact GELU": exact_gelu,
    "ln_1 and ln_2 swapped": swapped_norms,
    "untied head": untied_head,
    "no query bias": ("h.0.attn.c_attn.bias", lambda p: p * (torch.arange(144) >= 48)),
    "no MLP bias": ("h.0.mlp.c_fc.bias", torch.zeros_like),
    "positions shifted": ("wpe.weight", lambda p: p.roll(1, 0)),
    "not transposed": ("h.0.attn.c_proj.weight", torch.t),
    "unscaled attention": dict(scale=1.0),
    "not causal": dict(is_causal=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_comparison_detects_wrong_models(tmp_path, name, monkeypatch):
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
    assert max(found.values()) > 5 * TOLERANCE, f"{name} was not detected: {found}"


# ----------------------------------------------------------------------------------- loading


def as_pickles(folder):
    """Turn a folder's safetensors files, with their index if there is one, into pytorch_model.bin."""
    from safetensors.torch import load_file

    for file in folder.glob("model*.safetensors"):
        new = file.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(load_file(file), folder / new)
        file.unlink()
    if (index := folder / "model.safetensors.index.json").exists():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


LAYOUTS = {  # {a file that holds the weights: files beside it that transformers ignores}
    "model.safetensors": (
        "model.fp16.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin",
    ),
    "model.safetensors.index.json": (
        "model.fp16.safetensors", "model-00001-of-00099.safetensors", "pytorch_model.bin",
    ),
    "pytorch_model.bin": ("pytorch_model.fp16.bin", "pytorch_model.bin.index.json"),
    "pytorch_model.bin.index.json": ("pytorch_model-00001-of-00099.bin",),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_the_same_files_as_transformers(tmp_path, layout):
    """The logits equal transformers' for each layout, with other weights files in the folder."""
    from transformers import GPT2LMHeadModel

    right, wrong = tmp_path / "right", tmp_path / "wrong"
    several = layout.endswith(".index.json")
    sizes = {"max_shard_size": "60KB"} if several else {}
    tiny_transformers().save_pretrained(right, **sizes)
    add_noise(tiny_transformers()).save_pretrained(wrong)
    if layout.startswith("pytorch_model"):
        as_pickles(right), as_pickles(wrong)
    other = next(wrong.glob("*model.*"))
    assert (right / layout).exists() and any(right.glob("*model-*")) == several
    for name in LAYOUTS[layout]:
        if name.endswith(".index.json"):
            shard = f"other{other.suffix}"
            shutil.copyfile(other, right / shard)
            index = {"metadata": {}, "weight_map": {"transformer.wte.weight": shard}}
            (right / name).write_text(json.dumps(index))
        else:
            shutil.copyfile(other, right / name)
    theirs, ours = GPT2LMHeadModel.from_pretrained(right).eval(), load_model(str(right))
    x = torch.randint(101, (2, 24))
    assert (ours(x)[0] - theirs(x).logits).abs().max() < TOLERANCE
    assert (ours(x)[0] - load_model(str(wrong))(x)[0]).abs().max() > 100 * TOLERANCE


def test_weights_of_the_bare_transformer(tmp_path):
    """The published files have no lm_head, and names without "transformer."."""
    theirs = tiny_transformers()
    theirs.save_pretrained(tmp_path / "whole")
    theirs.transformer.save_pretrained(tmp_path / "bare")
    whole, bare = (load_model(str(tmp_path / name)) for name in ("whole", "bare"))
    assert equal_models(whole, bare)


def test_a_run_is_found_by_each_of_its_names(tmp_path, monkeypatch):
    """Folder, checkpoint, name in log/, "" for the newest; "gpt2" is OpenAI's even if a run has that name."""
    monkeypatch.chdir(tmp_path)
    for seconds, name in enumerate(("gpt2", "old", "new")):
        model = tiny_gpt(n_embd=32 + 8 * seconds, vocab_size=257, document_mask=name == "new")
        checkpoint = tmp_path / "log" / name / "model_000010.pt"
        path = saved(model, checkpoint, program=LEGACY_PROGRAMS["gpt2"])
        os.utime(path, (seconds, seconds))
    (tmp_path / "log/new/config.json").write_text("")  # a damaged config.json does not matter
    for source in ("log/new", "log/new/model_000010.pt", "new", ""):
        assert resolve_source(source) == "log/new/model_000010.pt"
        loaded = load_model(source)
        assert equal_bits(loaded.state_dict(), model.state_dict()), "pad rows too"
    assert resolve_source("gpt2") == "gpt2" and resolve_source("old") == "log/old/model_000010.pt"
    x = torch.randint(256, (1, 12))
    x[0, 6] = 256  # end-of-text: later tokens must not attend to earlier ones
    other = torch.cat([(x[:, :6] + 1) % 256, x[:, 6:]], dim=1)
    assert torch.allclose(loaded(x)[0][:, 6:], loaded(other)[0][:, 6:], atol=1e-6)


def test_files_of_an_earlier_version():
    """A checkpoint made at commit a3954dc, and its export."""
    folder = ROOT / "tests/fixtures/a3954dc"
    checkpoint, exported = load_model(str(folder / "log/old")), load_model(str(folder / "export"))
    assert equal_models(checkpoint, exported) and checkpoint.config.vocab_size == 257


def test_init_from(tmp_path):
    model = GPT(GPTConfig(2, 4, 32, 16, vocab_size=101, vocab_multiple=128))
    init_from(saved(start := tiny_gpt(), tmp_path / "model.pt"), model)
    assert equal_models(start, model) and not model.lm_head.weight[101:].any()
    message = r"n_layer=2 \(here 3\), vocab_size=101 \(here 257\); pass --n_layer 2 and --data"
    with pytest.raises(UserError, match=message):
        init_from(tmp_path / "model.pt", GPT(GPTConfig(3, 4, 32, 16, vocab_size=257)))


def test_nanogpt_file(tmp_path):
    """model_args, prefixes of torch.compile and DDP, no biases, causal masks, pad rows."""
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
        model = load_model(str(tmp_path / "ckpt.pt"))
        assert shape.items() <= vars(model.config).items(), prefix
        assert not model.transformer.wte.weight[101:].any()
        x = torch.randint(101, (2, 16))
        assert torch.equal(model(x)[0], ours(x)[0][..., :101])


def test_plain_state_dicts(tmp_path):
    """Without a config: 64 channels per head; 50304 rows are GPT-2's padded vocabulary."""
    ours = tiny_gpt(n_embd=128, n_head=2)
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    model = load_model(str(tmp_path / "model.pt"))
    assert model.config.n_head == 2 and model.config.vocab_size == 104, "pad rows are unknown"
    assert equal_models(model, ours)
    state = tiny_gpt(50304, 128, n_embd=16, n_head=2).state_dict()
    config = {"n_head": 2, "vocab_size": 50304}
    for saved_size, ids in ((50304, 50257), (50300, 50300)):
        config["vocab_size"] = saved_size
        shape, _ = parse_checkpoint({"model": state, "config": config}, "file")
        assert shape["vocab_size"] == ids


class Foreign:
    """Like the object that build-nanogpt pickles as its config."""


def test_build_nanogpt_file_with_a_pickled_object(tmp_path):
    """n_head is only in the object; 64 channels per head would give 1."""
    ours, config = tiny_gpt(n_head=8, vocab_multiple=1), Foreign()
    vars(config).update(n_head=8, vocab_size=101)
    torch.save({"model": ours.state_dict(), "config": config, "step": 9}, tmp_path / "model.pt")
    model = load_model(str(tmp_path / "model.pt"))
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
        config = dict(model_type="gpt2", n_head=4, n_embd=32, n_layer=2, n_positions=16)
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 104}))
        torch.save(tiny_gpt().state_dict() | {"x": evil}, tmp_path / "pytorch_model.bin")
        file = tmp_path
    with pytest.raises(UserError):
        load_model(str(file))
    assert not Path("touched").exists()


def listing(*names):
    """Writes an index that lists these weights files."""
    weight_map = {str(i): name for i, name in enumerate(names)}

    def change(folder):
        (folder / "model.safetensors").unlink()
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)

    return change


FOLDERS = {  # message: what is changed in config.json, or in a folder that transformers has saved
    "activation_function=gelu in": dict(activation_function="gelu"),
    "n_head=7 of folder does not divide": dict(n_head=7),
    "n_layer=3 in folder/config.json must be 2": dict(n_layer=3),
    "n_embd=96 in folder/config.json must be 48": dict(n_embd=96),
    "n_positions=16 in folder/config.json must be 24": dict(n_positions=16),
    "vocab_size=100 in folder/config.json must be 101": dict(vocab_size=100),
    "vocab_size=None in folder/config.json must be 101": dict(vocab_size=None),
    "transformers_weights=x in": dict(transformers_weights="x"),
    "model.safetensors is damaged": lambda f: os.truncate(f / "model.safetensors", 5000),
    "has no model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "there is no weights file folder/a.safetensors": listing("a.safetensors"),
    "../a is not in its folder": listing("../a"),
    "index.json is damaged": listing(3),
}
H = "transformer.h.1."
FILES = {  # message: what is changed in a state dict
    f"has no {H}mlp.c_fc": lambda state: state.pop(f"{H}mlp.c_fc.weight"),
    "c_fc.bias of broken.pt contains nan": lambda state: state[f"{H}mlp.c_fc.bias"].fill_(
        torch.nan
    ),
    "c_fc.bias of broken.pt contains nan or infinity": lambda s: s.update(
        {f"{H}mlp.c_fc.bias": torch.full((128,), 1e300, dtype=torch.float64)}
    ),
    "lm_head.weight of broken.pt must be a dense": lambda s: s.update(
        {"lm_head.weight": torch.eye(1).to_sparse()}
    ),
    "lm_head.weight of broken.pt must equal": lambda s: s.update(
        {"lm_head.weight": torch.tensor(1.0)}
    ),
    "checkpoint broken.pt is damaged": lambda state: state.update({3: torch.ones(4)}),
}
NOWHERE = {"'./x' is not a file or folder": "./x", "there is no checkpoint x.pt": "x.pt"}
NOWHERE |= {
    "checkpoint text.pt is": "text.pt",
    "no run of train_gpt2.py with a checkpoint in log": "",
}


@pytest.mark.parametrize("message", [*FOLDERS, *FILES, *NOWHERE])
def test_broken_sources_give_one_sentence(tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no checkpoint")
    source = NOWHERE.get(message, "broken.pt")
    if message in FOLDERS:
        tiny_transformers().save_pretrained(source := "folder")
        config, change = Path(source, "config.json"), FOLDERS[message]
        if isinstance(change, dict):
            config.write_text(json.dumps(json.loads(config.read_text()) | change))
        else:
            change(Path(source))
    elif message in FILES:
        FILES[message](state := tiny_gpt().state_dict())
        torch.save(state, source)
    with pytest.raises(UserError) as error:
        load_model(source)
    assert message in str(error.value) and "\n" not in str(error.value)


# --------------------------------------------------------------------------------- exporting


def test_round_trip_is_bit_equal(tmp_path, capsys):
    """Ours -> folder -> transformers -> folder -> ours; pad rows are not exported."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = tiny_gpt(257, 128)
    export(saved(ours, tmp_path / "model.pt"), tmp_path / "sub" / "out")
    (tmp_path / "sub" / "out").rename(tmp_path / "out")
    assert "in transformers put <|endoftext|> before a prompt" in capsys.readouterr().out
    wanted = {"config.json", "generation_config.json", "model.safetensors", "model.sha256"}
    wanted |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == wanted
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("<|endoftext|>naïve\n") == [256, *"naïve\n".encode()]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in (tmp_path / "out").iterdir())
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["transformer.wte.weight"].shape == (257, 32) and "lm_head.weight" not in tensors
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.eos_token_id == 256 and theirs.generation_config.eos_token_id == 256
    x = torch.randint(257, (2, 16))
    assert (ours(x)[0] - theirs(x).logits).abs().max() < TOLERANCE
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("out", "theirs"):
        assert equal_models(ours, load_model(str(tmp_path / folder))), folder
    export(tmp_path / "theirs", tmp_path / "again")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "out"))
    assert one == two


def test_the_example_model_predicts_english():
    model = load_model(str(ROOT / "examples/laptop_model"))
    idx = torch.tensor(
        [list(b"Return True if the object is an instance of the class, False otherwise.")]
    )
    with torch.no_grad():
        assert model(idx[:, :-1], idx[:, 1:])[1] < 1.5  # untrained: 5.5


def test_an_export_in_16_bits_is_half_the_size_and_rounds(tmp_path):
    ours = tiny_gpt(257, 128)
    source = saved(ours, tmp_path / "model.pt")
    export(source, tmp_path / "out")
    export(source, tmp_path / "half", dtype="float16")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("out", "half")]
    assert 0.5 < sizes[1] / sizes[0] < 0.6
    loaded = load_model(str(tmp_path / "half"))
    for p, q in zip(loaded.parameters(), ours.half().parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p[: len(q)], q[: len(p)].float())
    ours.float().transformer.ln_f.weight.data[3] = 1e5
    source = saved(ours, tmp_path / "model.pt")
    with pytest.raises(UserError, match="ln_f.weight of .* above 65504, the largest float16"):
        export(source, tmp_path / "no", dtype="float16")
    assert not (tmp_path / "no").exists()


def test_exported_tokenizer_and_pipeline(tmp_path, gpt2_files):
    """AutoTokenizer gives GPT-2's ids, from tokenizer.json and from vocab.json with merges.txt."""
    from transformers import AutoTokenizer, pipeline

    from lab.data.tokenizers import get_tokenizer

    out, text = tmp_path / "out", "Hello,  I'm\n\n\tnaïve 日本語 🙂 x = [22]\r\n"
    export(saved(tiny_gpt(50257, 128, n_embd=16, n_head=2), tmp_path / "model.pt"), out)
    names = {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"}
    names |= {"config.json", "generation_config.json", "model.safetensors", "model.sha256"}
    assert {path.name for path in out.iterdir()} == names
    listed = (out / "model.sha256").read_text().splitlines()
    assert {line[66:] for line in listed} == names - {"model.sha256"}
    write = pipeline("text-generation", model=str(out))
    made = write("Hello", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert made.startswith("Hello") and len(made) > 5
    for _ in range(2):
        theirs = AutoTokenizer.from_pretrained(out)
        assert (len(theirs), theirs.eos_token_id, theirs.model_max_length) == (50257, 50256, 16)
        assert theirs.encode(text) == get_tokenizer("gpt2").encode(text)
        assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
        (out / "tokenizer.json").unlink(missing_ok=True)
    assert not has_other_vocabulary(out)  # has vocab.json
    vocab = json.loads((out / "vocab.json").read_text())
    (out / "vocab.json").write_text(json.dumps(dict(zip(reversed(vocab), vocab.values()))))
    assert has_other_vocabulary(out)


def test_model_with_a_wordpiece_is_not_treated_as_bytes(tmp_path, capsys):
    """The recorded tokenizer is used, not one with the same vocabulary size."""
    model = tiny_gpt(257, tokenizer="tokenizer.json", eot_id=3)
    export(saved(model, tmp_path / "model.pt"), tmp_path / "out")
    assert f"copy {tmp_path}/tokenizer.json, which belongs to the model" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 3


def test_a_weights_file_with_a_wrong_checksum_is_refused(tmp_path):
    """safetensors files have no checksum of their own."""
    export(saved(tiny_gpt(), tmp_path / "model.pt"), tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    with pytest.raises(
        UserError, match="model.safetensors differs from its checksum in model.sha256"
    ):
        load_model(str(tmp_path / "out"))
    (tmp_path / "out/model.sha256").unlink()
    load_model(str(tmp_path / "out"))


def test_a_killed_export_keeps_the_earlier_one_and_is_cleaned_up_by_the_next(tmp_path):
    export(saved(earlier := tiny_gpt(), tmp_path / "earlier.pt"), tmp_path / "out")
    source = saved(model := tiny_gpt(n_embd=64), tmp_path / "model.pt")
    code = "import os\nfrom pathlib import Path\n"
    code += "from lab.hf.export import export\nPath.chmod = lambda *_: os.kill(os.getpid(), 9)\n"
    killed = run_code(f"{code}export({source!r}, Path('out'))", cwd=tmp_path)
    assert killed.returncode == -9 and (tmp_path / ".out.part/model.safetensors").exists()
    assert equal_models(load_model(str(tmp_path / "out")), earlier)
    export(source, tmp_path / "out")
    assert equal_models(load_model(str(tmp_path / "out")), model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["earlier.pt", "model.pt", "out"]


@pytest.mark.skipif(os.name != "posix", reason="links")
def test_a_link_in_place_of_the_temporary_folder_of_an_export_is_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    (tmp_path / ".out.part").symlink_to(tmp_path / "mine")
    export(saved(tiny_gpt(), tmp_path / "model.pt"), tmp_path / "out")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "out").is_symlink() and not (tmp_path / ".out.part").is_symlink()


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_export_replaces_only_earlier_exports(tmp_path, monkeypatch):
    """An empty folder or an earlier export, never another model, a run, another folder or a file."""
    monkeypatch.chdir(tmp_path)
    source = saved(tiny_gpt(), tmp_path / "log/a/model_000005.pt")
    (tmp_path / "log/a/config.json").write_text('{"model": {}, "train": {}}')
    (tmp_path / "mine").mkdir()
    for _ in range(2):
        export(source, "mine")
    tiny_transformers().save_pretrained(tmp_path / "theirs")
    before = contents(tmp_path)
    for out in ("theirs", "log/a", "log", source):
        with pytest.raises(UserError, match="must be a new or empty folder, or an earlier export"):
            export(source, out)
    assert contents(tmp_path) == before


def test_export_never_deletes_a_file_of_the_user(tmp_path, capsys):
    """Files that were not written by an export, and exported files that were changed later."""
    source, out = saved(tiny_gpt(), tmp_path / "model.pt"), tmp_path / "out"
    for name in ("model_card.md", "models/notes.txt", "merges.txt", "vocab.json", "README.md"):
        export(source, out)
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        before = contents(out)
        first = out / Path(name).parts[0]
        with pytest.raises(
            UserError, match=f"{first} would be deleted, but is not among the exported"
        ):
            export(source, out)
        assert contents(out) == before and len(list(tmp_path.iterdir())) == 2, (
            "no temporary folder is left"
        )
        shutil.rmtree(out)
    export(source, out)
    (out / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match="generation_config.json would be deleted, but was changed"):
        export(source, out)
    (out / "model.sha256").unlink()  # without it no file is known to be exported
    with pytest.raises(UserError, match="config.json would be deleted, but is not among"):
        export(source, out)


def test_a_model_that_computes_something_else_is_not_exported(tmp_path, monkeypatch):
    """For example one with exact GELU, whose relative difference is 1e-4 or less."""
    source = saved(tiny_gpt(n_layer=6), tmp_path / "model.pt")
    load = hf_export.load_model
    monkeypatch.setattr(
        hf_export, "load_model", lambda path: exact_gelu(model := load(path)) or model
    )
    with pytest.raises(
        UserError, match="does not compute GPT-2 .the relative difference of logits is"
    ):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checksums_are_verified_even_if_a_second_end_record_is_incomplete(tmp_path):
    """torch.load reads such a file, but zipfile.is_zipfile says that it is none."""
    path = tmp_path / "model_000001.pt"
    torch.save({"w": torch.arange(100.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(100.0).numpy().tobytes()) + 1] ^= 1  # one bit of a weight
    path.write_bytes(data + b"PK\x05\x06")  # the signature of a zip file's end
    assert not torch.equal(torch.load(path, weights_only=True)["w"], torch.arange(100.0))
    with pytest.raises(UserError, match="model_000001.pt is damaged"):
        read_checkpoint(path)


def test_checkpoint_with_a_tensor_as_program_or_an_impossible_size_is_refused(tmp_path):
    path = tmp_path / "model_000001.pt"
    program = {"model": "train_gpt2.py:GPT", "config": "train_gpt2.py:GPTConfig"}
    torch.save({"program": program, "model_config": {"n_embd": -1}}, path)
    with pytest.raises(UserError, match="n_embd=-1, which must be from 0 to"):
        load_model(str(path))
    torch.save({"program": program, "model_config": {"n_layer": 5000, "n_embd": 12}}, path)
    with pytest.raises(UserError, match="000001.pt: n_layer=5000 must be from 1 to 4096"):
        load_model(str(path))
    torch.save({"program": torch.ones(2), "model": {}}, path)
    with pytest.raises(UserError, match="model_000001.pt"):
        load_model(str(path))
