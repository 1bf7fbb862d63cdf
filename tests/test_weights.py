"""Weights in and out, and that the model they are put into computes what transformers' GPT-2 does."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_python

from lab import weights
from lab.run.checkpoints import save_checkpoint
from lab.weights import TRANSPOSED, export, load_model, model_from_state
from train_gpt2 import GPT, GPTConfig, param_groups

TOLERANCE = 1e-4
# n_layer, n_head, n_embd, block_size, vocab_size: heads and proportions of the four published models, small
SHAPES = {"gpt2": (2, 12, 48), "gpt2-medium": (3, 16, 64), "gpt2-large": (4, 20, 80), "gpt2-xl": (5, 25, 100)}


def add_noise(model, vocab_size):
    """Fresh weights hide a lost bias, swapped layer norms and more: both are 0 or 1 throughout."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        model.transformer.wte.weight[vocab_size:] = 0
    return model


def tiny_gpt(vocab_size=101, vocab_multiple=8, **changes):
    shape = dict(n_layer=2, n_head=4, n_embd=32, block_size=16) | changes
    return add_noise(GPT(GPTConfig(**shape, vocab_size=vocab_size, vocab_multiple=vocab_multiple)), vocab_size)


def tiny_transformers(shape="gpt2", vocab_size=101):
    from transformers import GPT2Config, GPT2LMHeadModel

    n_layer, n_head, n_embd = SHAPES[shape]
    config = GPT2Config(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, n_positions=24, vocab_size=vocab_size, attn_pdrop=0, embd_pdrop=0,
        resid_pdrop=0, bos_token_id=vocab_size - 1, eos_token_id=vocab_size - 1, attn_implementation="eager",
    )  # fmt: skip
    return add_noise(GPT2LMHeadModel(config), vocab_size).train()


def equal_models(a, b):
    """Bit by bit, pad rows aside."""
    rows, a, b = a.config.vocab_size, a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    cut = weights.VOCAB_ROWS
    return all(torch.equal(a[k][:rows] if k in cut else a[k], b[k][:rows] if k in cut else b[k]) for k in a)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(shape): transformers' model with noise, and ours, read from the folder that it saved."""
    made = {}

    def get(shape):
        if shape not in made:
            folder = tmp_path_factory.mktemp(shape)
            theirs = tiny_transformers(shape)
            theirs.save_pretrained(folder)
            made[shape] = theirs, load_model(str(folder))
        return copy.deepcopy(made[shape])

    return get


# ------------------------------------------------------------------------------------ the same model as transformers'


def deviations(ours, theirs):
    """Largest absolute differences in logits, loss, gradients, and logits and weights after three AdamW steps."""
    V = theirs.config.vocab_size
    rows = torch.randint(V, (3, 25), generator=torch.Generator().manual_seed(5))
    x, y = rows[:, :-1], rows[:, 1:]
    found = {}

    def same_names():
        turned = {k: p.t() if k.endswith(TRANSPOSED) else p for k, p in theirs.named_parameters()}
        for name, p in ours.named_parameters():
            if name in turned:
                yield name, p, turned[name], dict(theirs.named_parameters())[name]

    def differ(a, b):
        return (a[: len(b)].detach() - b.detach()).abs().max().item()

    # .train() and no dropout; theirs shifts the labels itself, so its loss is taken from its logits
    optimizers = [torch.optim.AdamW(param_groups(m, 0.1), lr=3e-4, betas=(0.9, 0.95)) for m in (ours, theirs)]
    for step in range(4):
        their_logits = theirs(x).logits
        their_loss = F.cross_entropy(their_logits.reshape(-1, V), y.reshape(-1))
        found["logits" if step == 0 else "logits after AdamW"] = differ(ours(x)[0], their_logits)
        loss = ours(x, y)[1]
        found["loss" if step == 0 else "loss after AdamW"] = differ(loss[None], their_loss[None])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        their_loss.backward()
        if step == 0:
            for name, p, _, original in same_names():
                grad = original.grad.t() if name.endswith(TRANSPOSED) else original.grad
                found["gradient"] = max(found.get("gradient", 0), differ(p.grad, grad))
        if step < 3:
            for optimizer in optimizers:
                optimizer.step()
    for name, p, theirs_p, _ in same_names():
        if name.endswith("c_attn.bias"):  # a key's bias adds the same to a whole row of scores: no gradient but rounding
            keep = torch.arange(len(p)) // (len(p) // 3) != 1  # noise, which AdamW would blow up to full steps
            p, theirs_p = p[keep], theirs_p[keep]
        found["weights after AdamW"] = max(found.get("weights after AdamW", 0), differ(p, theirs_p))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_same_as_transformers(pair, shape):
    theirs, ours = pair(shape)
    assert tuple(ours.config.shape().values()) == (*SHAPES[shape], 24, 101)
    found = deviations(ours, theirs)
    assert len(found) == 6 and max(found.values()) < TOLERANCE, found


def wrong_gelu(model):
    for block in model.transformer.h:
        mlp = block.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.c_proj(F.gelu(mlp.c_fc(x)))


def post_norm(model):
    for b in model.transformer.h:
        b.forward = lambda x, mask=None, cache=None, b=b: (lambda z: b.ln_2(z + b.mlp(z)))(b.ln_1(x + b.attn(x, mask, cache)))


def swapped_norms(model):
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = block.ln_2, block.ln_1


def attention_with(model, **wrong):
    """Attention that passes other arguments to the fused kernel."""
    for block in model.transformer.h:
        attn = block.attn

        def forward(x, mask=None, cache=None, attn=attn):
            B, T, C = x.shape
            q, k, v = (t.view(B, T, attn.n_head, -1).transpose(1, 2) for t in attn.c_attn(x).split(C, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, **({"is_causal": True} | wrong))
            return attn.c_proj(y.transpose(1, 2).reshape(B, T, C))

        attn.forward = forward


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def zero(get):
    def change(model):
        with torch.no_grad():
            get(model).zero_()

    return change


def interleaved_heads(model):
    """Heads taken from every n_head-th channel instead of from neighbours."""
    with torch.no_grad():
        for block in model.transformer.h:
            w, H = block.attn.c_attn.weight, block.attn.n_head
            w.copy_(w.view(3, H, -1, w.size(1)).transpose(1, 2).reshape(w.shape))


def shifted_positions(model):
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(model.transformer.wpe.weight.roll(1, 0))


def turned_projection(model):
    with torch.no_grad():
        w = model.transformer.h[0].attn.c_proj.weight
        w.copy_(w.t().clone())


def other_eps(model):
    for block in model.transformer.h:
        block.ln_1.eps = 1e-6


def scaled_loss(model):
    right = model.forward
    model.forward = lambda x, y=None: (right(x)[0], None) if y is None else (None, right(x, y)[1] * 1.001)


WRONG = {
    "exact GELU": wrong_gelu, "post-norm": post_norm, "ln_1 and ln_2 swapped": swapped_norms, "untied head": untied,
    "unscaled attention": lambda m: attention_with(m, scale=1.0), "not causal": lambda m: attention_with(m, is_causal=False),
    "no query bias": zero(lambda m: m.transformer.h[0].attn.c_attn.bias[: m.config.n_embd]),
    "no value bias": zero(lambda m: m.transformer.h[0].attn.c_attn.bias[2 * m.config.n_embd :]),
    "no attention output bias": zero(lambda m: m.transformer.h[1].attn.c_proj.bias),
    "no MLP bias": zero(lambda m: m.transformer.h[0].mlp.c_fc.bias), "no ln_f bias": zero(lambda m: m.transformer.ln_f.bias),
    "interleaved heads": interleaved_heads, "positions shifted": shifted_positions, "c_proj not turned": turned_projection,
    "layer norm eps 1e-6": other_eps, "loss times 1.001": scaled_loss,
}  # fmt: skip


def test_rebuilt_attention_is_right(pair):
    """So that the attention variants below fail for what they change, not for how they are built."""
    theirs, ours = pair("gpt2")
    attention_with(ours)
    assert max(deviations(ours, theirs).values()) < TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_wrong_models_are_caught(pair, name):
    theirs, ours = pair("gpt2")
    WRONG[name](ours)
    found = deviations(ours, theirs)
    assert max(found.values()) > 5 * TOLERANCE, f"{name} was not noticed: {found}"


@pytest.mark.parametrize("vocab_size", [101, 257])
@pytest.mark.parametrize("method", ["plain", "chunked", "auto"])
def test_padding_changes_nothing(vocab_size, method):
    x = torch.randint(vocab_size, (2, 16))
    y = torch.randint(vocab_size, (2, 16))
    plain, padded = tiny_gpt(vocab_size, 1), tiny_gpt(vocab_size, 128, cross_entropy=method)
    assert len(plain.lm_head.weight) == vocab_size and len(padded.lm_head.weight) % 128 == 0
    weights.load_weights(padded, plain.state_dict(), "plain")
    assert padded(x)[0].shape == plain(x)[0].shape == (2, 16, vocab_size)
    assert torch.allclose(padded(x)[0], plain(x)[0], atol=1e-5)
    (_, a), (_, b) = plain(x, y), padded(x, y)
    assert abs(a.item() - b.item()) < 1e-5
    a.backward(), b.backward()
    for (name, p), q in zip(plain.named_parameters(), padded.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad[: len(p)], atol=1e-5), name
    table = padded.transformer.wte.weight
    assert table.grad[:vocab_size].abs().sum() > 0 and not table.grad[vocab_size:].any()
    optimizer = torch.optim.AdamW(param_groups(padded, 0.1), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        padded(x, y)[1].backward()
        optimizer.step()
    assert not table[vocab_size:].any()


# --------------------------------------------------------------------------------------------------------------- in


def test_other_files_of_transformers(tmp_path):
    """Several files with an index, the older pickle format, and names as of the bare transformer on the hub."""
    theirs = tiny_transformers()
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "several", max_shard_size="60KB")
    theirs.transformer.save_pretrained(tmp_path / "bare")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text((tmp_path / "one/config.json").read_text())
    torch.save(theirs.state_dict(), tmp_path / "old/pytorch_model.bin")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    one = load_model(str(tmp_path / "one"))
    for name in ("several", "bare", "old"):
        assert equal_models(one, load_model(str(tmp_path / name))), name


def test_our_checkpoint_run_folder_and_newest_run(tmp_path, run_train):
    done = run_train("--max_steps", 2, "--ckpt_every", 1)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "log/r"
    saved = torch.load(run / "model_000002.pt", weights_only=True)
    for source in (run, run / "model_000002.pt", ""):  # the run folder holds a config.json too
        model = load_model(str(source), tmp_path / "log")
        assert model.config.shape() == {k: saved["model_config"][k] for k in model.config.shape()}
        state = model.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in saved["model"].items())


def test_nanogpt_file(tmp_path):
    """model_args, names as torch.compile and DDP leave them, no biases, causal masks, 50304-like pad rows."""
    ours = tiny_gpt(vocab_size=104, vocab_multiple=8)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if name.endswith("bias"):
                p.zero_()
    state = {k: v for k, v in ours.state_dict().items() if not k.endswith("bias")}
    for i in range(2):
        state[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=False, vocab_size=101, dropout=0.0)
    for prefix in ("", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."):
        file = {"model": {prefix + k: v for k, v in state.items()}, "model_args": args, "iter_num": 5, "config": {"lr": 1}}
        torch.save(file, tmp_path / "ckpt.pt")
        model = load_model(str(tmp_path / "ckpt.pt"))
        assert model.config.shape() == dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=101), prefix
        assert torch.equal(model.transformer.wte.weight[:101], ours.transformer.wte.weight[:101])
        assert not model.transformer.wte.weight[101:].any()
        assert model.lm_head.weight is model.transformer.wte.weight
        x = torch.randint(101, (2, 16))
        assert torch.equal(model(x)[0], ours(x)[0][..., :101])


def test_plain_state_dict_has_64_channels_a_head(tmp_path):
    ours = tiny_gpt(n_embd=128, n_head=2)
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    model = load_model(str(tmp_path / "model.pt"))
    assert model.config.n_head == 2 and model.config.vocab_size == 104  # nothing in the file tells pad rows from others
    assert equal_models(model, ours)


def test_50304_rows_are_gpt2s_vocabulary():
    state = tiny_gpt(50304, 128, n_embd=16, n_head=2).state_dict()
    model = model_from_state(state, {"n_head": 2, "vocab_size": 50304}, "file")
    assert model.config.vocab_size == 50257 and not model.lm_head.weight[50257:].any()


BUILD_NANOGPT = """
import sys, torch
from dataclasses import dataclass
sys.path.insert(0, sys.argv[1])

@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 101
    n_layer: int = 2
    n_head: int = 8
    n_embd: int = 32

    def __setstate__(self, state):
        open(sys.argv[2] + "/executed", "w")

import train_gpt2
torch.manual_seed(3)
model = train_gpt2.GPT(train_gpt2.GPTConfig(2, 8, 32, 16, 101, 1))
torch.save({"model": model.state_dict(), "config": GPTConfig(), "step": 9, "val_loss": 3.2}, sys.argv[2] + "/model.pt")
"""


def test_build_nanogpt_file_with_a_pickled_object(tmp_path):
    """Its config is an object of a class that is not here. What it holds is read; its code is not run."""
    (tmp_path / "train.py").write_text(BUILD_NANOGPT)
    done = run_python("train.py", ROOT, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    main = sys.modules["__main__"]
    main.GPTConfig = type("GPTConfig", (), {"__setstate__": lambda self, state: (tmp_path / "executed").touch()})
    try:  # even where a class of that name is to be had
        model = load_model(str(tmp_path / "model.pt"))
    finally:
        del main.GPTConfig
    assert model.config.n_head == 8  # only the object says so: 64 channels a head would make it 1
    torch.manual_seed(3)
    assert equal_models(model, GPT(GPTConfig(2, 8, 32, 16, 101, 1)))
    assert not (tmp_path / "executed").exists()


class Evil:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("how", ["os.system", "eval", "open", "subprocess", "raw pickle", "pytorch_model.bin"])
def test_malicious_pickles_do_nothing(tmp_path, how):
    import os
    import pickle

    target = tmp_path / "touched"
    evil = {
        "eval": Evil(eval, f"open({str(target)!r}, 'w')"), "open": Evil(open, str(target), "w"),
        "subprocess": Evil(subprocess.call, ["touch", str(target)]),
    }.get(how, Evil(os.system, f"touch {target}"))  # fmt: skip
    pickle.loads(pickle.dumps(evil))
    assert target.exists(), "the attack itself must work"
    target.unlink()
    file = tmp_path / "model.pt"
    if how == "raw pickle":
        file.write_bytes(pickle.dumps(evil))
    elif how == "pytorch_model.bin":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 4, "n_embd": 32}))
        torch.save(tiny_gpt().state_dict() | {"x": evil}, tmp_path / "pytorch_model.bin")
        file = tmp_path
    else:
        torch.save({"model": tiny_gpt().state_dict(), "config": evil}, file)
    with pytest.raises(ValueError, match="(is refused|cannot be read)"):
        load_model(str(file))
    assert not target.exists()


def test_loading_leaves_random_numbers_alone(tmp_path):
    torch.save(tiny_gpt().state_dict(), tmp_path / "model.pt")
    before = torch.get_rng_state()
    load_model(str(tmp_path / "model.pt"))
    assert torch.equal(before, torch.get_rng_state())


def changed(key, value):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))

    return change


def drop(state, name):
    return {k: v for k, v in state.items() if k != name}


@pytest.mark.parametrize(
    "change, message",
    [
        (changed("activation_function", "gelu"), "activation_function=gelu"),
        (changed("model_type", "llama"), "model_type=llama"),
        (changed("scale_attn_by_inverse_layer_idx", True), "scale_attn_by_inverse_layer_idx=True"),
        (changed("n_inner", 64), "n_inner=64"),
        (changed("n_head", 7), "n_head=7 does not divide"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]), "are broken"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no pytorch_model.bin"),
    ],
)
def test_broken_folders(tmp_path, change, message):
    tiny_transformers().save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: drop(s, "transformer.wpe.weight"), "not a GPT-2"),
        (lambda s: drop(s, "transformer.h.1.mlp.c_fc.weight"), "has no transformer.h.1.mlp.c_fc.weight"),
        (lambda s: s | {"transformer.ln_f.weight": torch.ones(31)}, "ln_f.weight has shape"),
        (lambda s: s | {"transformer.h.0.attn.c_attn.weight": torch.ones(32, 96)}, "c_attn.weight has shape"),
        (lambda s: s | {"lm_head.weight": s["lm_head.weight"] + 1}, "a head of its own"),
        (lambda s: s | {"transformer.h.0.attn.rotary.inv_freq": torch.ones(4)}, "rotary.inv_freq, which GPT-2 has not"),
        (lambda s: [1, 2, 3], "holds a list"),
        (lambda s: {"model": 3}, "not a GPT-2"),
    ],
)
def test_broken_files(tmp_path, change, message):
    torch.save(change(tiny_gpt().state_dict()), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / "model.pt"))


@pytest.mark.parametrize("source", ["nowhere.pt", "./nowhere", "/nowhere/at/all", "a/b/c", "empty"])
def test_missing_sources(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=source.strip("./")):
        load_model(source)


# -------------------------------------------------------------------------------------------------------------- out


def test_round_trip_is_bit_equal(tmp_path):
    """Ours -> folder -> transformers -> folder -> ours; pad rows stay at home."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ours = tiny_gpt(257, 128)
    torch.save({"model": ours.state_dict(), "model_args": {"n_head": 4, "vocab_size": 257}}, tmp_path / "model.pt")
    names = export(tmp_path / "model.pt", tmp_path / "out")
    assert names == ["config.json", "generation_config.json", "model.safetensors"]  # bytes need no tokenizer
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
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_exported_tokenizer_and_pipeline(tmp_path, test_data, monkeypatch):
    """AutoTokenizer gives GPT-2's ids, from tokenizer.json and from vocab.json with merges.txt; pipeline runs."""
    import hashlib

    from transformers import AutoTokenizer, pipeline

    from lab.data.tokenizers import get_tokenizer

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken"))
    torch.save(tiny_gpt(50257, 128, n_embd=16, n_head=2).state_dict(), tmp_path / "model.pt")
    names = export(tmp_path / "model.pt", tmp_path / "out")
    assert set(names) == weights.EXPORTED
    published = {
        "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    }
    for name, sha256 in published.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == sha256
    texts = ["Hello, I'm a language model,", "  two  blanks\n\n\ttab", "naïve 日本語 🙂", "x = [1, 22, 333]  # ok\r\n"]
    with_json = AutoTokenizer.from_pretrained(tmp_path / "out")
    (tmp_path / "out/tokenizer.json").rename(tmp_path / "aside.json")
    without_json = AutoTokenizer.from_pretrained(tmp_path / "out")
    (tmp_path / "aside.json").rename(tmp_path / "out/tokenizer.json")
    for theirs in (with_json, without_json):
        assert len(theirs) == 50257 and theirs.eos_token_id == 50256 and theirs.model_max_length == 16
        for text in texts:
            assert theirs.encode(text) == get_tokenizer("gpt2").encode(text)
            assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
    made = pipeline("text-generation", model=str(tmp_path / "out"))("Hello", max_new_tokens=3, do_sample=False)
    assert made[0]["generated_text"].startswith("Hello") and len(made[0]["generated_text"]) > 5


def test_export_is_whole_or_not_at_all(tmp_path, monkeypatch):
    torch.save(tiny_gpt(50257, 128, n_embd=16, n_head=2).state_dict(), tmp_path / "model.pt")
    torch.save({"model": tiny_gpt().state_dict(), "model_args": {"n_head": 4}}, tmp_path / "small.pt")
    export(tmp_path / "small.pt", tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    def no_network(folder, block_size):
        assert (folder / "model.safetensors").exists()  # half of it is written by now
        raise OSError("no network")

    monkeypatch.setattr(weights, "write_tokenizer", no_network)
    for out in ("out", "new"):
        with pytest.raises(OSError, match="no network"):
            export(tmp_path / "model.pt", tmp_path / out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt", "out", "small.pt"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_export_replaces_only_exports(tmp_path):
    torch.save({"model": tiny_gpt().state_dict(), "model_args": {"n_head": 4}}, tmp_path / "model.pt")
    out, downloaded = tmp_path / "out", tmp_path / "downloaded"
    out.mkdir()
    for _ in range(2):  # an empty folder, an earlier export
        export(tmp_path / "model.pt", out)
    (out / "notes.txt").write_text("mine")
    downloaded.mkdir()
    (downloaded / "config.json").write_text('{"model_type": "gpt2"}')
    for path in (out, downloaded):
        with pytest.raises(FileExistsError, match="not an earlier export.*--force, which deletes what"):
            export(tmp_path / "model.pt", path)
    assert (out / "notes.txt").read_text() == "mine"
    export(tmp_path / "model.pt", out, force=True)
    assert not (out / "notes.txt").exists()


def test_force_deletes_no_run(tmp_path, monkeypatch):
    """Only the folder of a model goes: not the source, not what holds it, not another run, not where we are, no file."""
    checkpoint = {"model": tiny_gpt().state_dict(), "model_args": {"n_head": 4}}
    for run in ("a", "b"):
        (tmp_path / "log" / run).mkdir(parents=True)
        torch.save(checkpoint, tmp_path / "log" / run / "model_5.pt")
        for name in ("config.json", "log.jsonl"):
            (tmp_path / "log" / run / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    export("a", "model")
    (tmp_path / "model" / "log").mkdir()
    (tmp_path / "link").symlink_to("log/a")
    files = sorted(tmp_path.rglob("*"))
    for out, said in (("log/a", "is or holds the model to export"), ("log", "is or holds the model to export"),
                      ("link", "is or holds the model to export"), ("log/b", "even --force deletes nothing else"),
                      (".", "is or holds the model to export"), ("model", "even --force deletes nothing else"),
                      ("log/a/log.jsonl", "is a file, and an export is a folder")):  # fmt: skip
        for force in (False, True):
            with pytest.raises(FileExistsError, match=said) as error:
                export("a", out, force=force)
            assert "pass --force" not in str(error.value)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir("empty")
    with pytest.raises(FileExistsError, match="is or holds the folder that you are in"):
        export("../log/a", ".", force=True)
    assert sorted(tmp_path.rglob("*")) == sorted([*files, tmp_path / "empty"])
    (tmp_path / "to_empty").symlink_to("empty")
    monkeypatch.chdir(tmp_path)
    assert export("a", "to_empty") and (tmp_path / "to_empty").is_symlink() and (tmp_path / "empty/config.json").exists()


def test_export_command(tmp_path):
    torch.save({"model": tiny_gpt(257, 1).state_dict(), "model_args": {"n_head": 4}}, tmp_path / "model.pt")
    done = run_python(ROOT / "lab", "export", "model.pt", "--out", "sub/out", cwd=tmp_path)
    assert done.returncode == 0 and "model.safetensors" in done.stdout and "no tokenizer files" in done.stdout, done.stderr
    assert equal_models(load_model(str(tmp_path / "model.pt")), load_model(str(tmp_path / "sub/out")))
    modes = {path.stat().st_mode & 0o444 for path in (tmp_path / "sub/out").iterdir()}
    assert modes == {0o444}, "all may read all files"
    done = run_python(ROOT / "lab", "export", "missing.pt", "--out", "x", cwd=tmp_path)
    assert done.returncode == 2 and "missing.pt" in done.stderr and done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if p.name != "model.pt"] == ["sub"]
    for out, reason in (("model.pt/x/y", "Not a directory"), (f"sub/{'x' * 255}", "File name too long")):
        done = run_python(ROOT / "lab", "export", "model.pt", "--out", out, cwd=tmp_path)
        said = f"weights.py: error: {out} cannot be written ({reason}); choose another --out\n"
        assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.network
def test_published_gpt2():
    from transformers import GPT2LMHeadModel

    model = load_model("gpt2")
    assert model.num_params() == 124_439_808
    idx = torch.tensor([[464, 3139, 286, 4881, 318]])  # "The capital of France is"
    theirs = GPT2LMHeadModel.from_pretrained("gpt2").eval()
    assert (model(idx)[0] - theirs(idx).logits).abs().max() < 1e-3


def test_import_is_silent(tmp_path):
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; import plot, sample, weights; assert 'matplotlib' not in sys.modules"
    done = run_python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_a_run_whose_settings_are_broken_still_has_its_weights(tmp_path):
    model = GPT(GPTConfig(1, 2, 32, 16, vocab_size=50))
    state = {"step": 1, "model": model.state_dict(), "model_config": dataclasses.asdict(model.config)}
    save_checkpoint(tmp_path, 1, state, keep_last=1, best=False)
    (tmp_path / "config.json").write_text("")
    assert torch.equal(load_model(str(tmp_path)).transformer.wte.weight, model.transformer.wte.weight)
