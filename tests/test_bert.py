"""bert.py: the model against transformers', the masks, the tokenizer, and whole runs."""

import functools
import json
import shutil

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, add_noise, difference, of_kind, read_run, run_python, run_two, succeed

import train_gpt2
from bert import Bert, BertConfig, Masking
from lab import kernels
from lab.cli import UserError
from lab.data import tokenizers
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.eval.validation import target_counts
from lab.hf.bert import from_transformers, to_transformers
from lab.hf.export import main as export_command
from lab.kernels import replace_modules
from lab.precision import Precision
from lab.registry import config_of, load_model

TOLERANCE = 1e-4
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32)
HOW = "--vocab_multiple 64 --lr 3e-3 --eps 1e-3 --val_tokens 700 --keep_last 100"
TINY_RUN = [*conftest.TINY_RUN, *HOW.split()]


# --------------------------------------------------------------------------------------- tiny data


def sentences(count, seed=0):
    """Lines of text in which each noun has its own verb, so that masked words can be predicted."""
    rng = np.random.default_rng(seed)
    nouns = "cat dog bird horse mouse farmer teacher painter".split()
    verbs = "sleeping barking singing galloping hiding ploughing explaining drawing".split()
    places = "garden kitchen forest mountain".split()
    pairs = zip(rng.integers(8, size=count), rng.integers(4, size=count))
    return [f"The {nouns[i]} is {verbs[i]} unafraidly in the {places[j]}." for i, j in pairs]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with a text and its shards. The vocabulary has only 90 pieces, so rare words have several."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": " ".join(sentences(4, seed))}) for seed in range(150)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    flags = "--source text.jsonl --tokenizer wordpiece --vocab_size 90 --workers 0 --out words"
    said = succeed("fineweb.py", *flags.split(), cwd=folder)
    again = flags.replace("wordpiece", "words/tokenizer.json").replace("--out words", "--out again")
    assert "bert.py --data words" in said
    assert "bert.py --data again" in succeed("fineweb.py", *again.split(), cwd=folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(texts):
    return get_tokenizer(str(texts / "words" / "tokenizer.json"))


def tiny_bert(vocab_size=101, **changes):
    torch.manual_seed(7)
    config = BertConfig(**TINY | changes, vocab_size=vocab_size, vocab_multiple=8)
    return add_noise(Bert(config), std=0.2)


# ------------------------------------------------------------------ the same model as transformers'


def pair(folder, n_layer=2, n_head=4, n_embd=32):
    """transformers' model with noise, and ours, loaded from the folder that it saved."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=101, hidden_size=n_embd, num_hidden_layers=n_layer, num_attention_heads=n_head,
        intermediate_size=4 * n_embd, max_position_embeddings=24, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    theirs = add_noise(transformers.BertForMaskedLM(config), std=0.2).train()
    theirs.save_pretrained(folder)
    return theirs, Bert.from_pretrained(str(folder))


def deviations(ours, theirs):
    """Largest absolute differences in logits, loss and gradients, on 2 of 16 tokens with targets."""
    rng = torch.Generator().manual_seed(5)
    # transformers gives the embedding of [PAD], id 0, no gradient; texts do not contain it
    x, segment = (torch.randint(*n, (3, 16), generator=rng) for n in ((1, 101), (0, 2)))
    y = torch.full_like(x, -1)
    places = torch.rand(3, 16, generator=rng).topk(2).indices
    y.scatter_(1, places, torch.randint(101, (3, 2), generator=rng))
    out = theirs(x, token_type_ids=segment, labels=y.where(y >= 0, -100))
    loss = ours(x, y, segment=segment)[1]
    loss.backward(), out.loss.backward()
    found = {"logits": (ours(x, segment=segment)[0] - out.logits).abs().max().item()}
    found["loss"] = abs(loss.item() - out.loss.item())
    grads = from_transformers({n: p.grad for n, p in theirs.named_parameters()})
    for name, p in ours.named_parameters():
        found[name] = (p.grad[: len(grads[name])] - grads[name]).abs().max().item()
    return found


@pytest.mark.parametrize("shape", [(2, 4, 32), (3, 2, 48)])
def test_equals_transformers(tmp_path, shape):
    """Logits, loss and gradients agree, and an export has bit-equal weights."""
    theirs, ours = pair(tmp_path, *shape)
    assert type(ours) is Bert
    assert (ours.config.n_layer, ours.config.n_head, ours.config.n_embd) == shape
    back = to_transformers(ours).state_dict()
    assert not difference(back, theirs.state_dict())
    found = deviations(ours, theirs)
    assert len(found) == 2 + 12 * shape[0] + 10 and max(found.values()) < TOLERANCE, found
    with pytest.raises(
        UserError, match="a model of bert.py; start from it with `.*bert.py --init_from`"
    ):
        config_of(str(tmp_path), trainer_class=train_gpt2.Trainer)


def tanh_gelu(block):
    block.mlp.__class__ = train_gpt2.MLP


def causal(block):
    block.attn.causal = True


def pre_norm(block):
    block.forward = functools.partial(train_gpt2.Block.forward, block)
    block.attn.forward = lambda x, mask, cache, real=block.attn.forward: real(x, mask)


def swapped_norms(block):
    block.ln_1, block.ln_2 = block.ln_2, block.ln_1


def q_and_k_swapped(block):
    q, k, v = block.attn.c_attn.weight.chunk(3)
    block.attn.c_attn.weight = torch.nn.Parameter(torch.cat([k, q, v]))


BLOCKS = [tanh_gelu, causal, pre_norm, swapped_norms, q_and_k_swapped]
LOST = ["lm_head.bias", "transformer.wse.weight", "transformer.ln_e.bias", "head.dense.bias"]


@pytest.mark.parametrize("wrong", BLOCKS + LOST)
def test_comparison_detects_wrong_models(tmp_path, wrong):
    theirs, ours = pair(tmp_path)
    if wrong in LOST:
        ours.get_parameter(wrong).data.zero_()
    else:
        list(map(wrong, ours.blocks))
    found = deviations(ours, theirs)
    assert max(found.values()) > 5 * TOLERANCE, f"{wrong} was not detected: {found}"


def test_bert_base_has_the_published_parameter_count():
    with torch.device("meta"):
        model = Bert(BertConfig())
    assert model.num_params() == 109_514_298, "bert-base-uncased with its masked-LM head"
    assert len(model.transformer.wte.weight) == 30592 and len(model.block_matrices()) == 4 * 12


# ---------------------------------------------------------------------------------- loss and kernels


def batch_with_targets(config, B=5, T=20, vocab_size=101):
    x, K = torch.randint(vocab_size, (B, T)), config.num_masked(T)
    y = torch.full_like(x, -1)
    return x, y.scatter_(1, torch.rand(B, T).topk(K).indices, torch.randint(vocab_size, (B, K)))


def test_loss_covers_only_the_masked_tokens():
    model = tiny_bert()
    x, y = batch_with_targets(model.config)
    y[0] = -1  # as in the padding of the last batch in evaluation
    logits = model(x)[0]
    flat = logits.flatten(0, 1), y.flatten()
    each = F.cross_entropy(*flat, ignore_index=-1, reduction="none").view_as(y)
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-6)
    close(model(x, y, reduction="none")[1], each)
    close(model(x, y, reduction="sum")[1], each.sum())
    close(model(x, y)[1], each.sum() / (y >= 0).sum())
    sums = model.sums(x, y)
    close(sums["loss"], each.sum())
    assert sums["accuracy"] == ((logits.argmax(-1) == y) & (y >= 0)).sum()
    y[1] = 0
    assert model(x, y)[1].isnan(), "more than K targets in a row"


def test_fused_and_compiled_models_have_the_plain_loss(monkeypatch):
    monkeypatch.setattr(kernels.cross_entropy, "SMALL", 0)  # otherwise the plain head is used
    plain, fast = tiny_bert(), tiny_bert()
    replace_modules(
        fast, mlp_class=train_gpt2.MLP, precision=Precision("fp32", torch.device("cpu"))
    )
    assert fast.head_loss is not plain.head_loss
    x, y = batch_with_targets(plain.config)
    compiled = torch.compile(fast, dynamic=False, fullgraph=True, backend="aot_eager")
    losses = [model(x, y)[1] for model in (plain, fast, compiled)]
    assert max(losses) - min(losses) < 1e-5
    losses[0].backward(), losses[1].backward()
    for a, b in zip(plain.parameters(), fast.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=0)
    assert not plain.lm_head.bias.grad[101:].any(), "pad rows have no gradient"


def test_every_output_sees_every_token():
    model = tiny_bert()
    x = torch.randint(101, (1, 12))
    before = model(x)[0]
    for place in (0, 6, 11):
        other = x.clone()
        other[0, place] = (x[0, place] + 1) % 101
        assert ((model(other)[0] - before).abs().amax(-1) > 1e-6).all()


# -------------------------------------------------------------------------------------------- masks


def rows_of(tokenizer, B=400, T=40):
    """x and y as from the loader: sequences of sentences that contain [SEP] in places."""
    ids = tokenizer.encode_documents(["\n".join(sentences(3, i)) for i in range(2 * B)])
    rows = ids[: B * T].reshape(B, T).astype(np.int64)
    return rows, np.roll(rows, -1, 1)


def masked(masking, x, y, seed=1, first=0):
    """(x, y) after masking, with sequence ids `first`, `first` + 1, ..."""
    return masking(x.copy(), y.copy(), seed, np.arange(len(x)) + first)


def words_of(tokenizer, rows):
    """(B, T): the index of each token's word, from the spelling of the pieces; each special token is a
    word."""
    first = np.array([piece[0] for piece in tokenizer.pieces])[rows]
    begins = first != "#"
    begins[:, 1:] |= (first == "[")[:, :-1]
    begins[:, 0] = True
    return begins.cumsum().reshape(rows.shape) - 1


def test_masks_have_the_published_proportions(tokenizer):
    x0, y0 = rows_of(tokenizer)
    masking = Masking(tokenizer, BertConfig())
    x, y = masked(masking, x0, y0)
    hidden = y >= 0
    assert (hidden.sum(1) == 6).all(), "15 % of 40 tokens, in each sequence"
    assert (x[:, 0] == masking.cls).all() and (x[:, -1] == masking.sep).all()
    assert not masking.special[x0[hidden]].any() and not hidden[:, [0, -1]].any()
    assert (y[hidden] == x0[hidden]).all() and (x[:, 1:-1] == x0[:, 1:-1])[~hidden[:, 1:-1]].all()
    gone, kept = x[hidden] == masking.mask, x[hidden] == x0[hidden]
    n = hidden.sum()
    error = 4 * np.sqrt(0.8 * 0.2 / n)
    assert abs(gone.mean() - 0.8) < error and abs(kept.mean() - 0.1) < error
    swapped = x[hidden][~gone & ~kept]
    assert abs(len(swapped) / n - 0.1) < error and not masking.special[swapped].any()
    assert len(np.unique(swapped)) > 0.8 * len(masking.ordinary), "any ordinary token"
    share = hidden[:, 1:-1].mean(0) / hidden[:, 1:-1].mean()
    assert abs(share - 1).max() < 0.6, "no position is preferred"


def in_part(words, tokens):
    """Number of words of which some tokens, but not all, are marked in `tokens` (B, T)."""
    share = np.bincount(words.ravel(), tokens.ravel()) / np.bincount(words.ravel())
    return ((share > 0) & (share < 1)).sum()


def test_whole_word_masking_masks_words_completely(tokenizer):
    x0, y0 = rows_of(tokenizer)
    x0[:, 0], x0[:, -1] = tokenizer.id_of("[CLS]"), tokenizer.id_of("[SEP]")
    words = words_of(tokenizer, x0)
    assert (np.bincount(words.ravel()) > 3).sum() > 100, "there are words of several pieces"
    x, y = masked(Masking(tokenizer, BertConfig(), whole_word_masking=True), x0, y0)
    assert ((y >= 0).sum(1) == 6).all() and not in_part(words, y >= 0), "one decision per word"
    assert not in_part(words, x == tokenizer.id_of("[MASK]")), (
        "and one kind of replacement per word"
    )
    x, y = masked(Masking(tokenizer, BertConfig()), x0, y0)
    assert in_part(words, y >= 0) > 100 and in_part(words, x == tokenizer.id_of("[MASK]")) > 100
    part = next(i for i, piece in enumerate(tokenizer.pieces) if piece.startswith("##"))
    for token in (part, tokenizer.eot):  # one long word; only separators
        row = np.full((1, 40), token, np.int64)
        _, y = masked(Masking(tokenizer, BertConfig(), whole_word_masking=True), row, row)
        assert (y >= 0).sum() == 6, "the number of masked tokens is fixed"


def test_masks_depend_only_on_seed_and_sequence_number(tokenizer):
    """So they are the same for any number of processes (test_loader.py), and new in each epoch."""
    masking, rows = (
        Masking(tokenizer, BertConfig(), whole_word_masking=True),
        rows_of(tokenizer, B=4),
    )
    x, y = masked(masking, *rows)
    for a, b in zip((x, y), masked(masking, *(part[2:] for part in rows), first=2)):
        assert (a[2:] == b).all()
    for other in (masked(masking, *rows, first=5000), masked(masking, *rows, seed=2)):
        assert (other[0] != x).any(1).all()


# ---------------------------------------------------------------------------------------- tokenizer


def test_tokenizer(tokenizer, texts, monkeypatch):
    assert tokenizer.pieces[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    manifest = json.loads((texts / "words/manifest.json").read_text())
    assert tokenizer.vocab_size == manifest["vocab_size"] == 90
    assert len(tokenizer.fast.get_added_tokens_decoder()) == 5, "letters are not special tokens"
    text = "the cat is hiding in the garden."
    ids = tokenizer.encode(text.title())
    assert tokenizer.decode(ids) == text and not tokenizer.is_special()[ids].any()
    assert list(tokenizer.encode_documents([text, text])) == 2 * [3, *ids]
    assert 4 not in tokenizer.encode("[MASK] [SEP]") and tokenizer.encode("\ud800") is not None
    assert tokenizer.is_continuation().sum() == sum(p.startswith("##") for p in tokenizer.pieces)
    monkeypatch.setattr(tokenizers, "MAX_TRAIN_CHARS", 3)  # characters
    letters = tokenizers.train_wordpiece(["ab", "cd", "xx"], 99).get_vocab()
    assert "d" in letters and "x" not in letters


# --------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def learnt(tmp_path_factory, texts):
    """(output, run) of a training run of 150 steps."""
    flags = "--max_steps 150 --val_every 75 --sample_every 150 --optimizer muon --lr 1e-2 --seed 5"
    flags += " --warmup_steps 10 --total_batch_size 1024 --batch_size 64 --checkpoint_every 150"
    folder = tmp_path_factory.mktemp("learnt")
    said = succeed("bert.py", *TINY_RUN, "--data", texts / "words", *flags.split(), cwd=folder)
    return said, read_run(folder / "log/r")


def test_run_learns_and_logs_masked_samples(learnt, tokenizer):
    said, run = learnt
    (first, _, last), unigram = of_kind(run, "val"), run.events[0]["unigram"]
    assert abs(first["loss"] - np.log(tokenizer.vocab_size)) < 0.3 and first["accuracy"] < 0.1
    assert last["loss"] < unigram - 0.5, "better than the unigram baseline"
    assert last["accuracy"] > 1.5 * last["unigram_accuracy"] > 0
    assert "of masked tokens right" in said and "bert.py --resume" in said
    before, after = of_kind(run, "sample")
    assert (before["step"], after["step"]) == (0, 150) and before["words"] != after["words"]
    assert len(before["texts"]) == 3 and "[MASK]" in before["texts"][0]
    for word in after["words"]:
        assert len(word["guesses"]) == 3 and 0 < word["guesses"][0][1] <= 1


def test_damaged_tokenizer_is_refused(tmp_path, texts):
    def refused(match):
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        with pytest.raises(UserError, match=f"tokenizer.json is damaged .*{match}"):
            get_tokenizer(str(tmp_path / "tokenizer.json"))

    data = json.loads((texts / "words" / "tokenizer.json").read_text())
    data["model"]["unk_token"] = "[XXX]"
    refused("Missing .UNK. token")
    data["model"]["vocab"]["the"] += 100_000
    refused("have no piece")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--seq_len 2", "seq_len=2 must be at least 3: [CLS], a token and [SEP]"),
        ("--sample_every 1 --sample_prompt Paris", "sample_prompt='Paris' must contain [MASK]"),
        ("--init_from {run}", "--tokenizer {run}/tokenizer.json --out FOLDER"),
        ("--data chats.jsonl", "data=chats.jsonl is a file of conversations, but masked"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(tmp_path, texts, learnt, flags, sentence):
    data, run = shutil.copytree(texts / "words", tmp_path / "data"), learnt[1].dir
    made = json.loads((data / "tokenizer.json").read_text())
    vocab = made["model"]["vocab"]
    vocab["the"], vocab["a"] = vocab["a"], vocab["the"]  # the same pieces in another order
    (data / "tokenizer.json").write_text(json.dumps(made))
    flags = [*TINY_RUN, "--data", str(data), *flags.format(run=run).split()]
    done = run_python(ROOT / "bert.py", *flags, cwd=tmp_path)
    assert done.returncode == 2 and sentence.format(data=data, run=run) in done.stderr


def test_validation_equals_a_calculation_by_hand(learnt, texts, tokenizer):
    """The logged means equal those of the same masks, computed one sequence at a time."""
    _, run = learnt
    model, value = load_model(str(run.dir)).eval(), of_kind(run, "val")[-1]
    shards = TokenShards(texts / "words", "val", tokenizer.vocab_size)
    targets = min(700, len(shards) - 1)
    assert targets % 16, "the last sequence is cut"

    def by_hand(masking):
        """(mean loss, accuracy, accuracy of always guessing the most frequent token)"""
        losses, right, hidden = [], [], []
        for position in range(0, targets, 16):
            at = np.array([position])
            x, y = map(torch.from_numpy, masking(*shards.batch(at, 16), 0, at))
            y[0, targets - position :] = -1
            with torch.no_grad():
                logits, y = model(x)[0][y >= 0], y[y >= 0]
            losses += F.cross_entropy(logits, y, reduction="none").tolist()
            right += (logits.argmax(-1) == y).tolist()
            hidden += y.tolist()
        return np.mean(losses), np.mean(right), np.mean(np.array(hidden) == most_frequent)

    masking = Masking(tokenizer, model.config)
    counts = target_counts(TokenShards(texts / "words", "train", tokenizer.vocab_size), 10**6)
    most_frequent = (counts * ~masking.special).argmax()
    found = by_hand(masking)
    names = "loss", "accuracy", "unigram_accuracy"
    assert [value[name] for name in names] == pytest.approx(found, abs=1e-5)


def test_two_resumed_processes_equal_one(tmp_path, texts):
    flags = "--val_every 4 --checkpoint_every 4 --grad_clip 0 --precision fp32 --whole_word_masking".split()
    flags += "--sample_every 8 --sample_tokens 0".split()  # the minimum
    flags = [*TINY_RUN, "--data", texts / "words", *flags, "--max_steps"]
    succeed("bert.py", *flags, 8, "--run_name", "one", cwd=tmp_path)
    run_two(ROOT / "bert.py", *flags, 4, "--run_name", "two", "--batch_size", 2, cwd=tmp_path)
    run_two(ROOT / "bert.py", "--resume", "--run_name", "two", "--max_steps", 8, cwd=tmp_path)
    one, two = (read_run(tmp_path / "log" / name) for name in ("one", "two"))
    assert one.losses == pytest.approx(two.losses, abs=1e-5) and len(one.losses) == 8
    assert difference(one.checkpoints[8]["model"], two.checkpoints[8]["model"]) < 1e-5
    assert one.val == pytest.approx(two.val, abs=1e-5)
    a, b = (of_kind(run, "val")[-1] for run in (one, two))
    assert a["accuracy"] == b["accuracy"]


def test_export_loads_in_transformers(learnt, tmp_path, monkeypatch):
    from transformers import AutoModelForMaskedLM, pipeline

    run, out = str(learnt[1].dir), str(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second one replaces the first
        export_command([run, "--out", out])
    export_command([out, "--out", "again"])
    assert (tmp_path / "again" / "tokenizer.json").exists()
    theirs, ours = AutoModelForMaskedLM.from_pretrained(out), load_model(run)
    x = torch.randint(90, (2, 16))
    assert (theirs(x).logits - ours(x)[0]).abs().max() < TOLERANCE
    fill, tokenizer = pipeline("fill-mask", out), get_tokenizer(f"{run}/tokenizer.json")
    text = "the [MASK] is singing in the garden."
    a, b = (tokenizer.encode(part) for part in text.split("[MASK]"))
    ids = torch.tensor([[2, *a, 4, *b, 3]])
    assert fill.tokenizer(text)["input_ids"] == ids[0].tolist()
    best = ours(ids)[0][0, 1 + len(a)].topk(5)
    assert [guess["token"] for guess in fill(text)] == best.indices.tolist()
    asked = run_python(ROOT / "sample.py", "--model", run, "Hello", cwd=tmp_path)
    assert asked.returncode == 2 and "cannot generate text" in asked.stderr
