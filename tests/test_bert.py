"""bert.py: the model against transformers', the masks, the tokenizer, and whole runs of the real
command."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, difference, differing_parts, of_kind, read_run, run_python, run_two

from bert import Bert, BertConfig, Masking
from lab import bert_weights, evals, kernels, models
from lab.cli import UserError
from lab.data import TokenLoader, TokenShards, get_tokenizer
from lab.device import Precision
from train_gpt2 import MLP

TOLERANCE = 1e-4
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32)
TINY_RUN = (
    "--preset laptop --device cpu --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --seq_len 16 "
    "--vocab_multiple 64 --batch_size 4 --total_batch_size 128 --optimizer adamw --warmup_steps 2 "
    "--schedule constant --lr 3e-3 --eps 1e-3 --val_tokens 700 --val_every 0 --sample_every 0 "
    "--ckpt_every 1000 --keep_last 100 --log_every 1 --run_name r"
).split()


# ------------------------------------------------------------------------------------- a tiny world


def sentences(count, seed=0):
    """Lines of text: of each noun its own verb follows, so hidden words can be told."""
    rng = np.random.default_rng(seed)
    nouns = "cat dog bird horse mouse farmer teacher painter".split()
    verbs = "sleeping barking singing galloping hiding ploughing explaining drawing".split()
    places = "garden kitchen forest mountain".split()
    lines = []
    for _ in range(count):
        i, j = rng.integers(8), rng.integers(4)
        lines.append(f"The {nouns[i]} is {verbs[i]} unafraidly in the {places[j]}.")
    return lines


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with the text, and its shards in words, made by the real command: 90 pieces, so that
    rare words fall into several."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": " ".join(sentences(4, seed))}) for seed in range(150)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    flags = "--source text.jsonl --tokenizer wordpiece --vocab_size 90 --workers 0 --out words"
    done = run_python(ROOT / "fineweb.py", *flags.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def tokenizer(texts):
    return get_tokenizer(str(texts / "words" / "tokenizer.json"))


@pytest.fixture
def run_bert(tmp_path, texts):
    """run_bert("--max_steps", 5, ...): the real command on the tiny shards; the run is
    tmp_path/log/r."""

    def run(*flags, ok=True):
        base = [] if "--resume" in flags else [*TINY_RUN, "--data", texts / "words"]
        done = run_python(ROOT / "bert.py", *base, *flags, cwd=tmp_path)
        assert done.returncode == 0 or not ok, done.stderr + done.stdout
        return done

    return run


def add_noise(model):
    """Fresh weights hide a lost bias and swapped norms."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
            if name in getattr(model, "vocab_rows", ()):
                p[model.config.vocab_size :] = 0
    return model


def tiny_bert(vocab_size=101, **changes):
    torch.manual_seed(7)
    config = BertConfig(**TINY | changes, vocab_size=vocab_size, vocab_multiple=8)
    return add_noise(Bert(config))


# ------------------------------------------------------------------ the same model as transformers'


def tiny_transformers(n_layer=2, n_head=4, n_embd=32):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=101, hidden_size=n_embd, num_hidden_layers=n_layer, num_attention_heads=n_head,
        intermediate_size=4 * n_embd, max_position_embeddings=24, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    return add_noise(BertForMaskedLM(config)).train()


def pair(folder, *shape):
    """transformers' model with noise, and ours, read from the folder that it saved."""
    theirs = tiny_transformers(*shape)
    theirs.save_pretrained(folder)
    return theirs, Bert.from_pretrained(str(folder))


def deviations(ours, theirs):
    """Largest absolute differences in logits, loss and gradients, on 2 of 16 tokens with targets."""
    rng = torch.Generator().manual_seed(5)
    # theirs gives [PAD], id 0, no gradient where it is read; no text has one
    x, segment = (torch.randint(*n, (3, 16), generator=rng) for n in ((1, 101), (0, 2)))
    y = torch.full_like(x, -1)
    places = torch.rand(3, 16, generator=rng).topk(2).indices
    y.scatter_(1, places, torch.randint(101, (3, 2), generator=rng))
    out = theirs(x, token_type_ids=segment, labels=y.where(y >= 0, -100))
    loss = ours(x, y, segment=segment)[1]
    loss.backward(), out.loss.backward()
    found = {"logits": (ours(x, segment=segment)[0] - out.logits).abs().max().item()}
    found["loss"] = abs(loss.item() - out.loss.item())
    grads = bert_weights.from_transformers({n: p.grad for n, p in theirs.named_parameters()})
    for name, p in ours.named_parameters():
        found[name] = (p.grad[: len(grads[name])] - grads[name]).abs().max().item()
    return found


@pytest.mark.parametrize("shape", [(2, 4, 32), (3, 2, 48)])
def test_same_as_transformers(tmp_path, shape):
    theirs, ours = pair(tmp_path, *shape)
    assert (ours.config.n_layer, ours.config.n_head, ours.config.n_embd) == shape
    found = deviations(ours, theirs)
    assert len(found) == 2 + 12 * shape[0] + 10 and max(found.values()) < TOLERANCE, found


def tanh_gelu(model):
    for block in model.transformer.h:
        block.mlp.forward = functools.partial(MLP.forward, block.mlp)


def causal(model):
    for block in model.transformer.h:
        block.attn.causal = True


def pre_norm(model):
    def forward(block, x, mask=None):
        x = x + block.attn(block.ln_1(x), mask)
        return x + block.mlp(block.ln_2(x))

    for block in model.transformer.h:
        block.forward = functools.partial(forward, block)


def swapped_norms(model):
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = block.ln_2, block.ln_1


def without(name):
    def change(model):
        with torch.no_grad():
            model.get_parameter(name).zero_()

    return change


@torch.no_grad()
def other_order(model):
    q, k, v = model.transformer.h[0].attn.c_attn.weight.chunk(3)
    model.transformer.h[0].attn.c_attn.weight.copy_(torch.cat([k, q, v]))


WRONG = {
    "GELU of GPT-2": tanh_gelu,
    "causal": causal,
    "pre-norm": pre_norm,
    "norms swapped": swapped_norms,
    "q and k swapped": other_order,
    "no decoder bias": without("lm_head.bias"),
    "no segments": without("transformer.wse.weight"),
    "no norm of the embeddings' sum": without("transformer.ln_e.bias"),
    "no dense layer's bias in the head": without("head.dense.bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_models_are_caught(tmp_path, name):
    theirs, ours = pair(tmp_path)
    WRONG[name](ours)
    found = deviations(ours, theirs)
    assert max(found.values()) > 5 * TOLERANCE, f"{name} was not noticed: {found}"


def test_bert_base_has_the_published_parameter_count():
    with torch.device("meta"):
        model = Bert(BertConfig())
    assert model.num_params() == 109_514_298, "bert-base-uncased with its masked-LM head"
    assert model.transformer.wte.weight.shape == (30592, 768)
    assert len(model.block_matrices()) == 4 * 12


def test_weights_come_back_bit_by_bit(tmp_path):
    ours = tiny_bert()
    bert_weights.in_transformers(ours).save_pretrained(tmp_path)
    again = models.load(str(tmp_path))
    assert type(again) is Bert
    a, b = (model.state_dict() for model in (ours, again))
    assert all(torch.equal(a[k][:101], b[k][:101]) for k in a if k in Bert.vocab_rows)
    assert all(torch.equal(a[k], b[k]) for k in a if k not in Bert.vocab_rows)


def test_another_bert_is_refused(tmp_path):
    tiny_transformers().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(UserError, match="hidden_act=relu, wanted is gelu"):
        models.load(str(tmp_path))


# ---------------------------------------------------------------------------------- loss and kernels


def batch_with_targets(config, B=5, T=20, vocab_size=101):
    x, K = torch.randint(vocab_size, (B, T)), config.hidden_tokens(T)
    y = torch.full_like(x, -1)
    return x, y.scatter_(1, torch.rand(B, T).topk(K).indices, torch.randint(vocab_size, (B, K)))


def test_loss_is_that_of_the_hidden_tokens_alone():
    model = tiny_bert()
    x, y = batch_with_targets(model.config)
    y[0] = -1  # as evaluation fills up its last batch
    expected = F.cross_entropy(
        model(x)[0].flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none"
    ).view_as(y)
    each = model(x, y, reduction="none")[1]
    torch.testing.assert_close(each, expected, atol=1e-5, rtol=0)
    total, mean = model(x, y, reduction="sum")[1], model(x, y)[1]
    torch.testing.assert_close(total, expected.sum(), atol=1e-4, rtol=0)
    torch.testing.assert_close(mean, expected.sum() / (y >= 0).sum(), atol=1e-5, rtol=0)
    sums = model.sums(x, y)
    torch.testing.assert_close(sums["loss"], total)
    assert sums["accuracy"] == ((model(x)[0].argmax(-1) == y) & (y >= 0)).sum()
    y[1] = 0
    assert model(x, y)[1].isnan(), "more targets than the head has room for"


def test_fused_loss_is_the_plain_one(monkeypatch):
    monkeypatch.setattr(kernels.cross_entropy, "SMALL", 0)  # or so little is left to the plain one
    plain, fast = tiny_bert(), tiny_bert()
    precision = Precision("fp32", torch.device("cpu"))
    kernels.use(fast, mlp=MLP, precision=precision)
    x, y = batch_with_targets(plain.config)
    losses = [model(x, y)[1] for model in (plain, fast)]
    for loss in losses:
        loss.backward()
    assert fast.head_loss is not plain.head_loss and abs(losses[0] - losses[1]) < 1e-5
    for a, b in zip(plain.parameters(), fast.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=0)
    assert not plain.lm_head.bias.grad[101:].any(), "pad rows never move"


def test_every_output_sees_every_token():
    model = tiny_bert()
    x = torch.randint(101, (1, 12))
    before = model(x)[0]
    for place in (0, 6, 11):
        other = x.clone()
        other[0, place] = (x[0, place] + 1) % 101
        assert ((model(other)[0] - before).abs().amax(-1) > 1e-6).all()


# -------------------------------------------------------------------------------------------- masks


def rows_of(tokenizer, B=400, T=40, seed=0):
    """Text as it comes from the loader: x and y, sequences of sentences with a [SEP] here and there."""
    ids = tokenizer.encode_documents(["\n".join(sentences(3, seed + i)) for i in range(2 * B)])
    rows = ids[: B * T].reshape(B, T).astype(np.int64)
    return rows.copy(), np.roll(rows, -1, 1)


def words_of(tokenizer, row):
    """Lists of places: the words of a sequence by the pieces' spelling, specials left out."""
    words = []
    for t, piece in enumerate(tokenizer.pieces[i] for i in row):
        if piece.startswith("##") and words and words[-1][-1] == t - 1:
            words[-1].append(t)
        elif not piece.startswith("["):
            words.append([t])
    return words


def test_masks_have_their_shares(tokenizer):
    x0, y0 = rows_of(tokenizer)
    masking = Masking(tokenizer, BertConfig())
    x, y = masking(x0.copy(), y0, 1, np.arange(len(x0)))
    hidden = y >= 0
    assert (hidden.sum(1) == 6).all(), "15 % of 40 tokens, in each sequence"
    assert (x[:, 0] == masking.cls).all() and (x[:, -1] == masking.sep).all()
    assert not masking.special[x0[hidden]].any() and not hidden[:, [0, -1]].any()
    assert (y[hidden] == x0[hidden]).all() and (x[:, 1:-1] == x0[:, 1:-1])[~hidden[:, 1:-1]].all()
    masked, kept = x[hidden] == masking.mask, x[hidden] == x0[hidden]
    n = hidden.sum()
    error = 4 * np.sqrt(0.8 * 0.2 / n)
    assert abs(masked.mean() - 0.8) < error and abs(kept.mean() - 0.1) < error
    swapped = x[hidden][~masked & ~kept]
    assert abs(len(swapped) / n - 0.1) < error and not masking.special[swapped].any()
    assert len(np.unique(swapped)) > 0.8 * len(masking.ordinary), "any ordinary token"
    share = hidden[:, 1:-1].mean(0) / hidden[:, 1:-1].mean()
    assert abs(share - 1).max() < 0.6, "no place is preferred"


def split_words(tokenizer, x0, x, y):
    """How many words of several pieces are hidden in part, and how many of the wholly hidden ones
    had several fates."""
    in_part = mixed = whole = 0
    for before, after, targets in zip(x0, x, y):
        for word in words_of(tokenizer, before):
            hidden = targets[word] >= 0
            if len(word) > 1 and hidden.any():
                whole += 1
                in_part += not hidden.all()
                masked = after[word] == tokenizer.id_of("[MASK]")
                mixed += masked.any() and not masked.all()
    assert whole > 100, "there are words of several pieces"
    return in_part, mixed


def test_a_word_is_hidden_whole_or_not_at_all(tokenizer):
    x0, y0 = rows_of(tokenizer)
    x0[:, 0], x0[:, -1] = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    assert any(len(word) > 3 for word in words_of(tokenizer, x0[0]))
    whole = Masking(tokenizer, BertConfig(), whole_words=True)
    x, y = whole(x0.copy(), y0.copy(), 1, np.arange(len(x0)))
    assert ((y >= 0).sum(1) == 6).all()
    assert split_words(tokenizer, x0, x, y) == (0, 0), "one decision a word, and one fate"
    pieces = Masking(tokenizer, BertConfig())
    x, y = pieces(x0.copy(), y0.copy(), 1, np.arange(len(x0)))
    in_part, mixed = split_words(tokenizer, x0, x, y)
    assert in_part > 100 and mixed > 10, "without the option words are split: the test can tell"


def test_the_number_hidden_is_kept_in_odd_texts(tokenizer):
    """One long word, and nothing but separators."""
    part = next(i for i, piece in enumerate(tokenizer.pieces) if piece.startswith("##"))
    long, empty = np.full((1, 40), part), np.full((1, 40), tokenizer.eot)
    for row in (long, empty):
        masking = Masking(tokenizer, BertConfig(), whole_words=True)
        x, y = masking(row.astype(np.int64), row.astype(np.int64), 0, np.array([3]))
        assert (y >= 0).sum() == 6


def test_masks_are_new_in_each_pass_and_the_same_on_any_number_of_processes(texts, tokenizer):
    shards = TokenShards(texts / "words", "train", tokenizer.vocab_size)
    masking = Masking(tokenizer, BertConfig(), whole_words=True)
    settings = dict(seq_len=16, total_batch_size=128, shuffle=True, align_documents=False, seed=3)

    def step(loader):
        parts = [loader.next_batch() for _ in range(loader.grad_accum_steps)]
        return parts, {num for _, _, num in parts}

    def loaders(world_size, batch_size):
        for rank in range(world_size):
            world = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
            yield TokenLoader(shards, SimpleNamespace(**settings), world, batch_size, masking)

    whole, two = list(loaders(1, 8)), list(loaders(2, 2))
    for _ in range(3):
        (parts, numbers), *_ = [step(loader) for loader in whole]
        rows = {tuple(x.tolist() + y.tolist()) for X, Y, _ in parts for x, y in zip(X, Y)}
        others = [step(loader) for loader in two]
        rows_of_two = {
            tuple(x.tolist() + y.tolist())
            for parts, _ in others
            for X, Y, _ in parts
            for x, y in zip(X, Y)
        }
        assert rows == rows_of_two and numbers == others[0][1] == {2 * 8}
    x0, y0 = rows_of(tokenizer, B=4)
    first, again, later, seed = (
        masking(x0.copy(), y0.copy(), seed, np.arange(4) + offset)[0]
        for seed, offset in ((1, 0), (1, 0), (1, len(shards)), (2, 0))
    )
    assert (first == again).all(), "pure"
    assert (first != later).any(1).all() and (first != seed).any(1).all(), "anew in each pass"


# ---------------------------------------------------------------------------------------- tokenizer


def test_tokenizer(tokenizer, texts):
    assert tokenizer.pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    manifest = json.loads((texts / "words/manifest.json").read_text())
    assert tokenizer.vocab_size == manifest["vocab_size"] == 90
    text = "the cat is hiding in the garden."
    ids = tokenizer.encode(text.title())
    assert tokenizer.decode(ids) == text and not tokenizer.is_special()[ids].any()
    assert list(tokenizer.encode_documents([text, text])) == 2 * [3, *ids]
    assert 4 not in tokenizer.encode("[MASK] [SEP]") and tokenizer.encode("\ud800") is not None
    assert tokenizer.goes_on().sum() == sum(p.startswith("##") for p in tokenizer.pieces)


def test_the_same_text_makes_the_same_vocabulary(texts, tmp_path):
    """In another process, whose hash tables have another order."""
    flags = "--tokenizer wordpiece --vocab_size 90 --workers 0 --out again --source".split()
    command = [ROOT / "fineweb.py", *flags, texts / "text.jsonl"]
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("tokenizer.json", "text_train_000001.npy", "text_val_000000.npy"):
        assert (tmp_path / "again" / name).read_bytes() == (texts / "words" / name).read_bytes()
    assert run_python(*command, cwd=tmp_path).returncode == 0, "it is there already"


# --------------------------------------------------------------------------------------- whole runs


def test_a_run_learns_and_says_what_it_hides(run_bert, tmp_path, texts, tokenizer):
    flags = "--max_steps 150 --val_every 75 --sample_every 150 --optimizer muon --lr 1e-2"
    flags += " --warmup_steps 10 --total_batch_size 1024 --batch_size 64"
    done = run_bert(*flags.split())
    run = read_run(tmp_path / "log" / "r")
    values = of_kind(run, "val")
    first, last = values[0], values[-1]
    start = run.events[0]
    assert abs(first["loss"] - np.log(tokenizer.vocab_size)) < 0.3 and first["accuracy"] < 0.1
    assert last["loss"] < start["unigram"] - 0.5, "better than a guess without context"
    assert last["accuracy"] > 1.5 * last["unigram_accuracy"] > 0
    assert 1 < last["pseudo_perplexity"] < np.exp(start["unigram"])
    assert "of hidden tokens right" in done.stdout and "bert.py --resume" in done.stdout
    samples = of_kind(run, "sample")
    assert [s["step"] for s in samples] == [0, 150] and samples[0]["words"] != samples[1]["words"]
    assert len(samples[0]["texts"]) == 3 and "[MASK]" in samples[0]["texts"][0]
    for word in samples[1]["words"]:
        assert len(word["guesses"]) == 3 and 0 < word["guesses"][0][1] <= 1
    assert (run.dir / "tokenizer.json").exists()


def test_validation_by_hand(tmp_path, texts, tokenizer, run_bert):
    """Its mean is that of the same masks, worked out one sequence at a time."""
    run_bert("--max_steps", 1, "--val_every", 1, "--ckpt_every", 1, "--seed", 5)
    run = read_run(tmp_path / "log" / "r")
    model = models.load(str(run.dir)).eval()
    shards = TokenShards(texts / "words", "val", tokenizer.vocab_size)
    targets = min(700, len(shards) - 1)
    assert targets % 16, "the last sequence is cut"
    for masking, name in (
        (Masking(tokenizer, model.config), "loss"),
        (Masking(tokenizer, BertConfig(mask_share=1e-9), always=True), "pseudo_perplexity"),
    ):
        losses, right = [], []
        for position in range(0, targets, 16):
            at = np.array([position])
            x, y = masking(*shards.batch(at, 16), 0, at)
            y[0, targets - position :] = -1
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            with torch.no_grad():
                logits = model(x)[0][y >= 0]
            losses += F.cross_entropy(logits, y[y >= 0], reduction="none").tolist()
            right += (logits.argmax(-1) == y[y >= 0]).tolist()
        value = of_kind(run, "val")[-1]
        if name == "loss":
            assert abs(value["loss"] - np.mean(losses)) < 1e-5
            assert abs(value["accuracy"] - np.mean(right)) < 1e-9
        else:
            assert abs(np.log(value[name]) - np.mean(losses)) < 1e-5


def test_twenty_steps_are_ten_and_resume_and_ten(run_bert, tmp_path):
    run_bert("--max_steps", 20, "--ckpt_every", 10, "--run_name", "whole", "--whole_words")
    run_bert("--max_steps", 10, "--ckpt_every", 10, "--whole_words", "--val_every", 5)
    run_bert("--resume", "--max_steps", 20)
    a, b = (read_run(tmp_path / "log" / name) for name in ("whole", "r"))
    assert a.losses == b.losses and len(a.losses) == 20
    parts = ("step", "model", "optimizer", "loader", "rng")
    assert not differing_parts(a.checkpoints[20], b.checkpoints[20], parts)


def test_two_processes_are_one(tmp_path, texts, run_bert):
    flags = "--max_steps 8 --val_every 4 --ckpt_every 8 --grad_clip 0 --precision fp32".split()
    run_bert(*flags, "--run_name", "one")
    args = [*TINY_RUN, "--data", texts / "words", *flags, "--run_name", "two", "--batch_size", 2]
    run_two(ROOT / "bert.py", *args, cwd=tmp_path)
    one, two = (read_run(tmp_path / "log" / name) for name in ("one", "two"))
    assert np.abs(np.subtract(one.losses, two.losses)).max() < 1e-5 and len(one.losses) == 8
    assert difference(one.checkpoints[8]["model"], two.checkpoints[8]["model"]) < 1e-5
    for a, b in zip(of_kind(one, "val"), of_kind(two, "val")):
        assert abs(a["loss"] - b["loss"]) < 1e-5 and a["accuracy"] == b["accuracy"]
        assert abs(a["pseudo_perplexity"] - b["pseudo_perplexity"]) < 1e-2


def test_export_loads_in_transformers(run_bert, tmp_path):
    from transformers import AutoModelForMaskedLM, pipeline

    run_bert("--max_steps", 60, "--ckpt_every", 60, "--optimizer", "muon")
    done = run_python(ROOT / "lab", "export", "log/r", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = str(tmp_path / "out")
    theirs, ours = AutoModelForMaskedLM.from_pretrained(out), models.load(str(tmp_path / "log/r"))
    x = torch.randint(90, (2, 16))
    assert (theirs(x).logits - ours(x)[0]).abs().max() < TOLERANCE
    fill = pipeline("fill-mask", out)
    text = "the [MASK] is singing in the garden."
    tokenizer = get_tokenizer(str(tmp_path / "log/r/tokenizer.json"))
    a, b = (tokenizer.encode(part) for part in text.split("[MASK]"))
    ids = torch.tensor([[2, *a, 4, *b, 3]])
    assert fill.tokenizer(text)["input_ids"] == ids[0].tolist()
    best = ours(ids)[0][0, 1 + len(a)].softmax(-1).topk(5)
    assert [guess["token"] for guess in fill(text)] == best.indices.tolist()
    asked = run_python(ROOT / "sample.py", "--model", "log/r", "Hello", cwd=tmp_path)
    assert asked.returncode == 2 and "writes no text" in asked.stderr
    again = run_python(ROOT / "lab", "export", "log/r", "--out", "out", cwd=tmp_path)
    assert again.returncode == 0, "an earlier export is replaced"


def test_compiled_agrees_with_eager():
    model = tiny_bert()
    x, y = batch_with_targets(model.config)
    expected = model(x, y)[1]
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    assert abs(compiled(x, y)[1] - expected) < 1e-5


def test_bad_input_is_one_sentence(run_bert, tmp_path, shards):
    for flags, words in (
        (["--data", shards], "tokenizer.json"),
        (["--mask_share", 0], "mask_share=0"),
        (["--hella_every", 5], "hella_every"),
    ):
        done = run_bert("--max_steps", 1, *flags, ok=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_evaluate_sums_what_a_model_counts(shards, tiny_config):
    """Sums by name, on the first tokens of the split, whatever is measured."""
    from lab.world import World

    cfg = SimpleNamespace(val_tokens=300, seq_len=16, data=str(shards))
    split = TokenShards(shards, "val", tiny_config.vocab_size)
    world, precision = World("cpu"), Precision("fp32", torch.device("cpu"))

    def ids(model, x, y):
        return {"loss": x[y >= 0].sum(), "odd": (x[y >= 0] % 2).sum()}

    sums = evals.evaluate(None, split, cfg, 4, world, precision, measure=ids)
    tokens = split.read(0, 300).astype(np.int64)
    assert sums == {"loss": tokens.sum(), "odd": (tokens % 2).sum(), "targets": 300}
