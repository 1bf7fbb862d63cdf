"""HellaSwag: scores against hand calculations and transformers; the file, the callback, the command."""

import copy
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, VOCAB, equal_bits, run_python, run_two, succeed
from models import noisy_gpt, saved

import hellaswag
from hellaswag import (
    Examples,
    HellaSwag,
    ending_losses,
    load_examples,
    measure,
    read_examples,
    summarize,
    tokenize_examples,
)
from lab.cli import RunError, UserError
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.eval import multiple_choice
from lab.eval.multiple_choice import continuation_losses, make_batches, row_length
from lab.hf.export import export
from lab.precision import Precision

WORLD = World("cpu")
DEFAULT_FILE = Path("data/hellaswag/hellaswag_val.jsonl")  # where a run looks for it
WORDS = "a man is on the roof he starts to pull tiles with both hands and ski down water é".split()


def random_examples(count=30, longest=7):
    """Examples like HellaSwag's, of random words."""
    rng = random.Random(0)

    def text(most):
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    def example():
        about = dict(activity_label=rng.choice(["Roofing", "Skiing"]), source_id="activitynet~v_1")
        endings = [text(longest) for _ in range(4)]
        return dict(ctx=text(12), endings=endings, label=rng.randrange(4)) | about

    return [example() for _ in range(count)]


def write(path, examples):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    return path


def score(model, path, limit=0):
    """(summary, sums) of a file."""
    return measure(model, load_examples(model, WORLD, "", path, limit), WORLD)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "h.jsonl", random_examples())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(noisy_gpt(block_size=128), tmp_path_factory.mktemp("model") / "model_000001.pt")


def examples_of(tokens, labels):
    """Examples from rows of [context, ending, ending, ending, ending], lists of ids."""
    return Examples([{"label": label} for label in labels], tokens)


def test_scores_worked_out_by_hand(monkeypatch):
    """A model whose next token depends on the last one only:

    after   0    1    2    3
    0      1/2  1/8  1/4  1/8        (row: the token before)
    1      1/8  1/8  1/4  1/2
    2      1/4  1/4  1/4  1/4
    3      1/16 1/16 1/8  3/4
    """
    pairs = torch.tensor([[8, 2, 4, 2], [2, 2, 4, 8], [4, 4, 4, 4], [1, 1, 2, 12]]) / 16
    logits = pairs.log()  # input of the head, whose rows are one-hot

    def hidden_states(model, idx, position, segment):
        return logits[idx].flatten(0, 1)

    monkeypatch.setattr(multiple_choice, "hidden_states", hidden_states)

    def head_loss(x, weight, targets, reduction):
        return F.cross_entropy(x @ weight.T, targets, reduction=reduction)

    model = SimpleNamespace(lm_head=SimpleNamespace(weight=torch.eye(4)), head_loss=head_loss)
    rows = [[[2, 0], [2], [1, 3], [3, 3, 3], [0]], [[1], [1, 1], [3], [2], [0, 0, 0]]]
    data = examples_of(rows, labels=[2, 1])
    sums = ending_losses(model, data, WORLD)
    first = [1 / 4, 1 / 8 * 1 / 2, 1 / 8 * 3 / 4 * 3 / 4, 1 / 2]
    second = [1 / 8 * 1 / 8, 1 / 2, 1 / 4, 1 / 8 * 1 / 2 * 1 / 2]
    assert sums == pytest.approx(-np.log([first, second]), rel=1e-6)
    # first: sums 1.39, 2.77, 2.65, 0.69 choose 3; means 1.39, 1.39, 0.88, 0.69 choose 3 too. Wrong.
    # second: sums 4.16, 0.69, 1.39, 3.47 and means 2.08, 0.69, 1.39, 1.16 choose 1. Right.
    assert [s.argmin(1).tolist() for s in (sums, sums / data.end_len)] == [[3, 1], [3, 1]]
    result = summarize(sums, data.end_len, data.label)
    assert (result["acc"], result["acc_norm"], result["count"]) == (0.5, 0.5, 2)
    assert result["acc_stderr"] == pytest.approx(0.5)  # of [0, 1]: deviation 0.707 / sqrt(2)


def test_summary_interval_and_errors_worked_out_by_hand():
    sums, lengths = np.array([[2.2, 4.0, 9.4, 9.0]]), np.array([[2, 4, 9, 3]])
    result = summarize(sums, lengths, np.array([1]))  # means 1.1, 1, 1.04, 3
    # sums choose ending 0, as would sums / (length + 1); sums / (length - 1) would choose ending 2
    assert (result["acc"], result["acc_norm"]) == (0.0, 1.0)
    # 30 of 100: (0.3 + 0.019208 -+ 1.96 * sqrt(0.0021 + 0.00009604)) / 1.038416
    assert hellaswag.wilson_interval(0.3, 100) == pytest.approx([0.21894, 0.39585], abs=1e-4)
    assert hellaswag.wilson_interval(0.0, 5) == pytest.approx([0, 0.4345], abs=1e-3)
    sums = np.array([[1.0, 4, 4, 4], [2, 1, 4, 4], [9, 1, 4, 4], [4, 4, 4, 1]])
    data = examples_of([[[0]] * 5] * 4, labels=[0, 0, 0, 3])
    wrong = hellaswag.most_confident_errors(sums, data, 10)
    found = [(e["margin"], e["mean_losses"]) for e in wrong]
    assert found == [(8, [9, 1, 4, 4]), (1, [2, 1, 4, 4])]


@torch.no_grad()
def losses_one_by_one(theirs, ctx, endings):
    """Summed losses of the four endings, with one forward pass per ending."""
    # the longest ending's last token is not an input
    room = theirs.config.n_positions - max(map(len, endings)) + 1
    sums = []
    for ending in endings:
        ids = torch.tensor([ctx[-room:] + ending])
        logits = theirs(ids[:, :-1]).logits[0, -len(ending) :].double()
        sums.append(F.cross_entropy(logits, ids[0, -len(ending) :], reduction="sum").item())
    return sums


@pytest.mark.parametrize(
    "vocab_size, block_size, n_embd", [(257, 128, 32), (257, 48, 32), (50257, 1024, 16)],
    ids=["bytes", "some contexts are cut", "the real file"],
)  # fmt: skip
def test_losses_equal_transformers_one_ending_at_a_time(
    tmp_path, monkeypatch, request, vocab_size, block_size, n_embd
):
    from transformers import GPT2LMHeadModel

    examples, tokenizer = random_examples(), get_tokenizer("bytes")
    if vocab_size == 50257:
        request.getfixturevalue("gpt2_files")
        source = request.getfixturevalue("test_data") / "hellaswag" / "hellaswag_val.jsonl"
        lines = source.read_text(encoding="utf-8").splitlines()[::700]  # both sources
        examples, tokenizer = list(map(json.loads, lines)), get_tokenizer("gpt2")
    model = noisy_gpt(vocab_size=vocab_size, block_size=block_size, n_embd=n_embd)
    export(saved(model, tmp_path / "model.pt"), tmp_path / "export")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "export").eval()
    contexts = [tokenizer.encode(e["ctx"]) for e in examples]
    endings = [[tokenizer.encode(" " + text) for text in e["endings"]] for e in examples]
    expected = np.array([losses_one_by_one(theirs, *row) for row in zip(contexts, endings)])
    path = write(tmp_path / "h.jsonl", examples)
    result, sums = score(model, path)
    assert sums == pytest.approx(expected, rel=1e-5)
    labels = np.array([e["label"] for e in examples])
    lengths = np.array([list(map(len, four)) for four in endings])
    assert result["acc"] == (expected.argmin(1) == labels).mean()
    assert result["acc_norm"] == ((expected / lengths).argmin(1) == labels).mean()
    long = [len(ctx) + n.max() > block_size + 1 for ctx, n in zip(contexts, lengths)]
    assert result["cut"] == sum(long) and any(long) == (block_size == 48)
    right = multiple_choice.hidden_states
    for wrong in (  # endings see the endings before them; positions don't restart after the context
        lambda model, idx, position, segment: right(model, idx, position, 0 * segment),
        lambda model, idx, position, segment: right(model, idx, position.cummax(1).values, segment),
    ):
        monkeypatch.setattr(multiple_choice, "hidden_states", wrong)
        assert np.abs(score(model, path)[1] - sums).max() > 0.1


def test_measuring_leaves_rng_and_model_unchanged(file):
    """It uses no random numbers and keeps weights and training mode; autocast changes little."""
    model = noisy_gpt(block_size=128)
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    _, plain = score(model, file)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = score(model, file)
    assert 0 < np.abs(rounded / plain - 1).max() < 0.02
    after = torch.get_rng_state(), model.state_dict()
    assert equal_bits((before, state), after) and model.training
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = np.nan
    with pytest.raises(RunError, match="the loss of line 1 is not finite"):
        score(model, file)


def test_limit_and_length_decide_which_examples_are_used(tmp_path):
    """A limit is spread over the file. Endings that don't fit are errors, or are skipped with skip_long."""
    examples = random_examples(longest=2)
    examples[3]["endings"][1] = "x" * 32  # 33 tokens with the leading space
    examples[4]["ctx"] = ""
    lines = [e | {"line": i + 1} for i, e in enumerate(examples)]
    data = lines, get_tokenizer("bytes")
    assert [row["line"] for row in tokenize_examples(*data, 128, limit=3).rows] == [1, 11, 21]
    assert len(tokenize_examples(*data, 128, limit=99)) == len(tokenize_examples(*data, 128)) == 30
    # one token of context is enough
    assert tokenize_examples(*data, 33).tokens[3][0] == [ord(examples[3]["ctx"][-1])]
    with pytest.raises(UserError, match="line 4 .* 33 tokens, .*block_size=32; .*--skip_long"):
        tokenize_examples(*data, 32)
    kept = tokenize_examples(*data, 32, skip_long=True)
    assert (len(kept), kept.num_skipped) == (29, 1)
    assert 4 not in [row["line"] for row in kept.rows]
    model = noisy_gpt(block_size=128)  # a context without tokens becomes end-of-text
    _, sums = score(model, write(tmp_path / "h.jsonl", examples[4:5]))
    ids = torch.tensor([[VOCAB - 1, *f" {examples[4]['endings'][2]}".encode()]])
    alone = model(ids[:, :-1], ids[:, 1:], reduction="sum")[1].item()
    assert sums[0, 2] == pytest.approx(alone, rel=1e-5)


GOOD = random_examples(1)[0]
BAD = {  # a line, and part of the error
    "label": (GOOD | {"label": 4}, "a label from 0 to 3"),
    "empty": (GOOD | {"endings": ["a", "b", "c", " "]}, "4 endings that are not empty"),
    "keys": ({"messages": []}, "expected a ctx, 4 endings"),
    "json": (b'{"ctx": "a", ', "property name"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named(tmp_path, name):
    bad, message = BAD[name]
    bad = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    (tmp_path / "h.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + bad + b"\n")
    with pytest.raises(UserError, match="h.jsonl line 2 is damaged") as error:
        read_examples(tmp_path / "h.jsonl")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_blank_lines_and_labels_as_strings(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text("\n" + json.dumps(GOOD | {"label": "3"}) + "\r\n\n" + json.dumps(GOOD))
    found = [(e["line"], e["label"]) for e in read_examples(path)]
    assert found == [(2, 3), (4, GOOD["label"])]


def test_download(tmp_path, monkeypatch, serve):
    """A file with another hash never gets the published name; the right one is downloaded once."""
    monkeypatch.chdir(tmp_path)
    content = json.dumps(GOOD).encode()
    url = serve(served := tmp_path / "served")
    (served / "hellaswag_val.jsonl").write_bytes(content[:-9])
    hashes = {"hellaswag_val.jsonl": hashlib.sha256(content).hexdigest()}
    monkeypatch.setattr(hellaswag, "BASE_URL", url)
    monkeypatch.setattr(hellaswag, "SHA256", hashes)
    with pytest.raises(UserError, match=f"cannot download .*hash.*by hand to {DEFAULT_FILE}"):
        hellaswag.locate()
    assert list(DEFAULT_FILE.parent.iterdir()) == []
    (served / "hellaswag_val.jsonl").write_bytes(content)
    assert hellaswag.locate() == DEFAULT_FILE and DEFAULT_FILE.read_bytes() == content
    (served / "hellaswag_val.jsonl").unlink()
    assert hellaswag.locate() == DEFAULT_FILE


def trainer_of(every=2, **more):
    cfg = SimpleNamespace(hellaswag_every=every, hellaswag_examples=20, data="no_folder")
    precision = Precision("fp32", WORLD.device)
    return SimpleNamespace(cfg=cfg, world=WORLD, precision=precision, **more)


def callback(every=2):
    return HellaSwag(trainer_of(every), SimpleNamespace(check=lambda: None))


def test_callback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(DEFAULT_FILE, random_examples())
    steps = [(0, False), (1, False), (2, False), (3, True)]
    assert [callback().should_run(*step) for step in steps] == [False, False, True, True]
    assert not callback(every=0).should_run(2, True)
    hella, trainer = callback(), trainer_of(raw_model=noisy_gpt(block_size=128), step=4)
    expected = score(trainer.raw_model, DEFAULT_FILE, limit=20)[0] | {"seconds": 0}
    for _ in range(2):
        found = json.loads(json.dumps(hella(trainer) | {"seconds": 0}))
        assert found == expected and found["count"] == 20
        DEFAULT_FILE.unlink(missing_ok=True)  # the examples are kept in memory


def test_callback_reads_the_tokenizer_of_the_runs_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(DEFAULT_FILE, random_examples())
    hella, trainer = callback(), trainer_of(raw_model=noisy_gpt(block_size=128))
    sources = []
    monkeypatch.setattr(
        hellaswag,
        "load_tokenizer",
        lambda _, source: sources.append(source) or get_tokenizer("bytes"),
    )
    trainer.cfg.data = str(tmp_path)
    assert hella(trainer)["count"] == 20
    assert sources == [str(tmp_path)]


def test_callback_that_cannot_run_prints_why_and_turns_itself_off(tmp_path, monkeypatch, capsys):
    """At the start of the run without a network; at the first evaluation if an ending does not fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert callback(every=0).interval == 0 and not capsys.readouterr().out
    assert not callback().should_run(4, True)
    line = "no HellaSwag in this run: {}.*\n"
    assert re.fullmatch(line.format("cannot download https"), capsys.readouterr().out)
    write(DEFAULT_FILE, random_examples())
    hella, trainer = callback(), trainer_of(raw_model=noisy_gpt(block_size=8), step=4)
    assert hella(trainer) is None and not hella.should_run(6, True)
    assert re.fullmatch(line.format(".*block_size=8"), capsys.readouterr().out)


def test_ranks_check_for_signals_equally_often_with_unequal_batches(file, monkeypatch):
    monkeypatch.setattr(multiple_choice, "BATCH_TOKENS", 800)
    model = noisy_gpt(block_size=128)
    data = load_examples(model, WORLD, "", file)
    num_batches = len(make_batches(np.array([row_length(item) for item in data.tokens])))
    sums = []
    for rank in range(2):
        own = dict(rank=rank, world_size=2, is_main=not rank, all_reduce=lambda tensor: tensor)
        world, calls = SimpleNamespace(**vars(WORLD) | own), []
        sums.append(ending_losses(model, data, world, lambda calls=calls: calls.append(0)))
        assert num_batches % 2 and len(calls) == (num_batches + 1) // 2
    assert (sums[0] + sums[1] == ending_losses(model, data, WORLD)).all()


@pytest.mark.parametrize("num_continuations", [2, 3, 7])
def test_any_number_of_continuations(num_continuations):
    """For example pairs of sentences without a context, after end-of-text."""
    model, rng = noisy_gpt(block_size=128), np.random.default_rng(0)
    items = [
        [[VOCAB - 1], *(rng.integers(0, 256, n).tolist() for n in rng.integers(1, 9, num_continuations))]
        for _ in range(5)
    ]  # fmt: skip
    sums = continuation_losses(model, items, WORLD)
    assert sums.shape == (5, num_continuations) and sums.dtype == np.float64
    for (context, *continuations), row in zip(items, sums):
        for ids, found in zip(continuations, row):
            x = torch.tensor([context + ids])
            expected = model(x[:, :-1], x[:, 1:], reduction="sum")[1].item()
            assert found == pytest.approx(expected, rel=1e-5)


def test_out_of_memory_is_one_sentence(file, checkpoint, monkeypatch):
    def allocate(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(hellaswag, "continuation_losses", allocate)
    flags = ["--model", str(checkpoint), "--data", str(file), "--device", "cpu"]
    with pytest.raises(UserError, match="out of memory .* choose a smaller --model"):
        hellaswag.main(flags)


def test_report_as_text(file, checkpoint, capsys):
    flags = ["--model", str(checkpoint), "--data", str(file), "--device", "cpu"]
    hellaswag.main([*flags, "--by_activity", "--worst", "1"])
    out = capsys.readouterr().out
    assert re.search(r"^acc       0\.\d{4} \+- 0\.\d{4}  \(95 %: ", out)
    assert "30 examples of" in out and "not the published file" in out
    assert re.search(r"^Roofing +\d+  0", out, re.M) and re.search(r"^Skiing +\d+  0", out, re.M)
    assert "nats per token lower" in out and re.search(r"^  = ", out, re.M)


def test_two_processes_give_the_result_of_one(tmp_path, checkpoint):
    path = write(tmp_path / "h.jsonl", random_examples(300))
    words = [ROOT / "hellaswag.py", "--model", checkpoint, "--data", path, "--device", "cpu"]
    words += ["--worst", 300, "--by_source", "--json"]
    succeed(*words, "one.json", cwd=tmp_path)
    run_two(*words, "two.json", cwd=tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("one.json", "two.json")]
    found = [json.loads(text) | {"seconds": 0} for text in texts]
    assert found[0] == found[1]
    assert found[0]["by_source"]["activitynet"]["count"] == found[0]["count"] == 300
    assert len(found[0]["worst"]) == 300 - round(300 * found[0]["acc_norm"])


@pytest.mark.slow
def test_lm_evaluation_harness_gives_the_same_scores(test_data, gpt2_files, tmp_path, monkeypatch):
    """For the same texts the harness gives the same losses, acc and standard error, and the same acc_norm
    if our losses are divided by characters, as it does. (Its HellaSwag task preprocesses the texts.)"""
    python = os.environ.get("LM_EVAL_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import lm_eval"], capture_output=True).returncode:
        pytest.skip("pip install lm_eval[hf]; LM_EVAL_PYTHON names the python that has it")
    monkeypatch.chdir(tmp_path)
    source = test_data / "hellaswag" / "hellaswag_val.jsonl"
    examples = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[::100]]
    path, model = (
        write(tmp_path / "h.jsonl", examples),
        noisy_gpt(vocab_size=50257, block_size=1024),
    )
    export(saved(model, tmp_path / "model.pt"), "export")
    task = dict(
        task="ours", output_type="multiple_choice", dataset_path="json", test_split="test",
        dataset_kwargs={"data_files": {"test": str(path)}},
        doc_to_text="{{ctx}}", doc_to_choice="endings", doc_to_target="label",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    Path("ours.yaml").write_text(json.dumps(task))
    flags = "--model hf --model_args pretrained=export,dtype=float32 --tasks ours --include_path ."
    flags += " --device cpu --batch_size 4 --output_path out --log_samples"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run = [python, "-m", "lm_eval", *flags.split()]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,), (samples,) = (tmp_path.glob(f"out/**/{kind}_*") for kind in ("results", "samples"))
    theirs = json.loads(results.read_text())["results"]["ours"]
    samples = sorted(map(json.loads, samples.open()), key=lambda sample: sample["doc_id"])
    ours, sums = score(model, path)
    losses = -np.array([[float(r[0][0]) for r in s["resps"]] for s in samples])
    assert sums == pytest.approx(losses, rel=1e-4)
    scores = theirs["acc,none"], theirs["acc_stderr,none"]
    assert (ours["acc"], ours["acc_stderr"]) == pytest.approx(scores, abs=1e-9)
    characters = np.array([[len(text) for text in e["endings"]] for e in examples])
    right = (sums / characters).argmin(1) == [e["label"] for e in examples]
    assert right.mean() == pytest.approx(theirs["acc_norm,none"], abs=1e-9)


@pytest.mark.slow
@pytest.mark.network
def test_published_gpt2(tmp_path):
    """GPT-2 124M on the published file: 0.2859 and 0.2955 (build-nanogpt's hellaswag.py)."""
    words = ["--model", "gpt2", "--json", "gpt2.json"]
    run = run_python(ROOT / "hellaswag.py", *words, cwd=tmp_path, timeout=3600)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "gpt2.json").read_text())
    found = result["acc"], result["acc_norm"]
    assert result["count"] == 10042 and found == pytest.approx((0.2859, 0.2955), abs=0.005)
