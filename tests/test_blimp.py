"""BLiMP: scores compared with one sentence at a time and with lm-evaluation-harness; file, command."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    VOCAB,
    Process,
    add_noise,
    fail,
    finished,
    run_python,
    run_two,
    succeed,
    two_ranks,
)
from models import noisy_gpt, saved

import blimp
from lab.cli import RunError, UserError
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.eval import blimp_published, multiple_choice
from lab.hf.export import export

WORLD = World("cpu")
FOLDER = ROOT / "tests" / "fixtures" / "blimp"  # sentences of our own
COUNT = 19
ZIP_FILE = Path("data/blimp/BLiMP.zip")  # where a run looks for it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(noisy_gpt(block_size=128), tmp_path_factory.mktemp("model") / "model_000001.pt")


def zipped(path):
    """The fixtures as a zip with the published one's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file in FOLDER.glob("*.jsonl"):
            archive.write(file, f"data/{file.name}")
        archive.writestr("__MACOSX/data/._our_agreement.jsonl", b"\0not a pair")
    return path


@torch.no_grad()
def losses_one_by_one(model, tokenizer, pairs, space=" "):
    """Summed losses (N, 2) of the whole sentences after end-of-text, one forward pass for each."""
    sums = []
    for pair in pairs:
        for key in ("sentence_good", "sentence_bad"):
            ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(space + pair[key])]])
            logits = model(ids[:, :-1])[0][0].double()
            sums.append(F.cross_entropy(logits, ids[0, 1:], reduction="sum").item())
    return np.array(sums).reshape(-1, 2)


def margins(model, data):
    """How much larger the bad sentence's loss is, for each pair."""
    good, bad = multiple_choice.continuation_losses(model, data.tokens, WORLD).T
    return bad - good


def check_margins(model, tokenizer, pairs, block_size, monkeypatch):
    """The margins equal those of one sentence at a time, however rows are padded and batched."""
    expected = np.diff(losses_one_by_one(model, tokenizer, pairs))[:, 0]
    data = blimp.tokenize_pairs(pairs, tokenizer, block_size)
    assert (data.num_cut, data.num_skipped, len(data)) == (0, 0, len(pairs))
    for multiple, batch in ((8, 16384), (64, 16384), (1, 300)):
        monkeypatch.setattr(multiple_choice, "PAD_MULTIPLE", multiple)
        monkeypatch.setattr(multiple_choice, "BATCH_TOKENS", batch)
        assert margins(model, data) == pytest.approx(expected, abs=1e-4)
    score = np.where(np.abs(expected) < 1e-6, 0.5, expected > 0)
    assert (blimp.pair_scores(model, data, WORLD) == score).all()


def test_margins_equal_those_of_one_sentence_at_a_time(monkeypatch):
    model, pairs = noisy_gpt(block_size=128), blimp.read_pairs(FOLDER)
    check_margins(model, get_tokenizer("bytes"), pairs, 128, monkeypatch)


def test_margins_of_a_speedrun_model(monkeypatch):
    """Its token shift and rotary positions must not cross from one sentence of a row to the other."""
    import speedrun

    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=128, vocab_size=VOCAB, value_tables=1)
    model = add_noise(speedrun.GPT(speedrun.GPTConfig(**shape)))
    check_margins(model, get_tokenizer("bytes"), blimp.read_pairs(FOLDER), 128, monkeypatch)


def test_margins_on_every_pair_of_five_paradigms(test_data, gpt2_files, monkeypatch):
    pairs = blimp.read_pairs(blimp.locate(str(test_data / "blimp")))
    names = sorted({pair["UID"] for pair in pairs})
    assert len(pairs) == 67_000 and len(names) == 67
    pairs = [pair for pair in pairs if pair["UID"] in names[::15]]
    assert len(pairs) == 5000
    model = noisy_gpt(vocab_size=50257, block_size=64, n_embd=16)
    check_margins(model, get_tokenizer("gpt2"), pairs, 64, monkeypatch)


def test_phenomena_of_the_published_file(test_data):
    path = blimp.locate(str(test_data / "blimp"))
    assert blimp.sha256_of(path) == blimp.SHA256
    pairs = blimp.tokenize_pairs(blimp.read_pairs(path), get_tokenizer("bytes"), 1024)
    assert set(pairs.phenomena) == blimp_published.PUBLISHED.keys()
    lines = (test_data / "blimp" / "published_models.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["UID"] == "overall"]
    ours = blimp_published.PUBLISHED | {"overall": blimp_published.TOTAL}
    for row in rows:
        theirs = [row[name] for name in ("ngram", "lstm", "txl", "gpt2")]
        assert ours.pop(row["linguistics_term"]) == pytest.approx(theirs, abs=6e-5)
    assert not ours


def test_pairs_share_their_beginning():
    eot = 256
    split = blimp.split_pair
    assert split([1, 2, 3, 4], [1, 2, 5], eot) == [[eot, 1, 2], [3, 4], [5]]
    assert split([1, 2], [1, 2], eot) == [[eot, 1], [2], [2]]  # a token is left to predict
    assert split([1, 2], [1, 2, 3], eot) == [[eot, 1], [2], [2, 3]]
    assert split([7], [8, 9], eot) == [[eot], [7], [8, 9]]
    for space, text in ((True, " The farmer walk"), (False, "The farmer walk")):
        data = blimp.tokenize_pairs(blimp.read_pairs(FOLDER), get_tokenizer("bytes"), 128, space)
        assert data.tokens[0][0] == [eot, *text.encode()]


def test_scores_ties_and_errors_worked_out_by_hand():
    scores, group = np.array([1, 1, 0, 0.5, 1, 0.0]), np.array([0, 0, 0, 0, 1, 1])
    found = blimp.summarize(scores, group)
    # first: mean 5/8, squared deviations 9+9+25+1 = 44/64, of which 4/3 times; second: 1/2, 1/2, 2/1
    assert found["acc"] == pytest.approx(3.5 / 6) and (found["ties"], found["count"]) == (1, 6)
    assert found["acc_stderr"] == pytest.approx(np.sqrt(4 * 44 / 64 / 3 + 2 * 0.5) / 6)
    of_own = blimp.summarize(scores, np.arange(6))["acc_stderr"]  # each pair is a paradigm
    assert of_own == pytest.approx(scores.std(ddof=1) / np.sqrt(6))
    only = blimp.summarize(scores[:4], group[:4])["acc_stderr"]
    assert only == pytest.approx(scores[:4].std(ddof=1) / 2)  # lm-evaluation-harness's
    data = blimp.Pairs([[]] * 6, group, ["p", "q"], ["binding", "ellipsis"])
    by = blimp.summarize_by(data.phenomena, scores, data)
    assert [(k, v["acc"], v["count"]) for k, v in by.items()] == [
        ("binding", 0.625, 4), ("ellipsis", 0.5, 2)
    ]  # fmt: skip


def test_equal_sentences_and_uniform_models_tie():
    """Also where the model cannot tell two sentences of equal length apart."""
    model = noisy_gpt(block_size=128)
    data = blimp.tokenize_pairs(blimp.read_pairs(FOLDER), get_tokenizer("bytes"), 128)
    result, scores = blimp.measure(model, data, WORLD)
    assert result["ties"] == 1 and scores[17] == 0.5  # "Nobody slept."
    with torch.no_grad():
        model.lm_head.weight.zero_()
    lengths = np.array([[len(ids) for ids in rest] for _, *rest in data.tokens])
    good, bad = lengths.T
    expected = (good < bad) + 0.5 * (good == bad)  # the shorter sentence is more likely
    assert (blimp.pair_scores(model, data, WORLD) == expected).all() and 0.5 in expected[:17]


def test_long_pairs_are_cut_then_skipped():
    pairs, tokenizer = blimp.read_pairs(FOLDER), get_tokenizer("bytes")
    data = blimp.tokenize_pairs(pairs, tokenizer, 12)
    rests = [max(len(good), len(bad)) for _, good, bad in data.tokens]
    assert data.num_cut and data.num_skipped and len(data) == len(pairs) - data.num_skipped
    assert max(len(c) + n - 1 for (c, *_), n in zip(data.tokens, rests)) == 12
    assert np.isfinite(margins(noisy_gpt(block_size=12), data)).all()
    with pytest.raises(UserError, match="all 17 pairs differ in more than block_size=1 tokens"):
        blimp.tokenize_pairs(pairs[:17], tokenizer, 1)


def test_first_pairs_of_each_paradigm():
    pairs = blimp.first_of_each(blimp.read_pairs(FOLDER), 5)
    data = blimp.tokenize_pairs(pairs, get_tokenizer("bytes"), 128)
    assert np.bincount(data.group).tolist() == [5, 5, 4, 4]
    assert [pair["line"] for pair in pairs] == [*range(1, 6), *range(1, 6), *range(1, 5)] + [
        1,
        2,
        3,
        4,
    ]
    assert data.phenomena[-1] == "argument_structure"  # the file's s-selection


def test_a_loss_that_is_not_finite():
    model = noisy_gpt(block_size=128)
    data = blimp.tokenize_pairs(blimp.read_pairs(FOLDER), get_tokenizer("bytes"), 128)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = np.nan
    with pytest.raises(RunError, match="a loss of our_agreement is not finite"):
        blimp.measure(model, data, WORLD)


@pytest.mark.skipif(os.name != "posix", reason="FIFOs")
def test_a_fifo_in_the_folder_is_a_sentence(tmp_path, checkpoint):
    os.mkfifo(tmp_path / "a.jsonl")
    command = ROOT / "blimp.py", "--model", checkpoint, "--device", "cpu", "--data", tmp_path
    done = run_python(*command, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "a.jsonl is a FIFO" in done.stderr, done.stderr


def test_zip_folder_and_file_have_the_same_pairs(tmp_path):
    expected = blimp.read_pairs(FOLDER)
    path = zipped(tmp_path / "BLiMP.zip")
    assert blimp.locate(str(tmp_path)) == path and blimp.read_pairs(path) == expected
    (tmp_path / "other" / "data").mkdir(parents=True)
    for file in FOLDER.iterdir():
        (tmp_path / "other" / "data" / file.name).write_bytes(file.read_bytes())
    assert blimp.read_pairs(blimp.locate(str(tmp_path / "other"))) == expected
    one = "".join(file.read_text() for file in sorted(FOLDER.iterdir()))
    (tmp_path / "all.jsonl").write_text(one)
    pairs = blimp.read_pairs(blimp.locate(str(tmp_path / "all.jsonl")))
    assert [p | {"line": 0} for p in pairs] == [p | {"line": 0} for p in expected]


def test_download_is_verified(tmp_path, monkeypatch, serve):
    monkeypatch.chdir(tmp_path)
    content = zipped(tmp_path / "BLiMP.zip").read_bytes()
    served = serve(tmp_path / "served")
    (tmp_path / "served" / "BLiMP.zip").write_bytes(content[:-9])
    monkeypatch.setattr(blimp, "BASE_URL", served)
    monkeypatch.setattr(blimp, "SHA256", blimp.sha256_of(tmp_path / "BLiMP.zip"))
    with pytest.raises(UserError, match=f"cannot download .*hash.*by hand to {ZIP_FILE}"):
        blimp.locate()
    assert list(ZIP_FILE.parent.iterdir()) == []
    (tmp_path / "served" / "BLiMP.zip").write_bytes(content)
    assert blimp.locate() == ZIP_FILE and ZIP_FILE.read_bytes() == content


GOOD = dict(sentence_good="It is.", sentence_bad="It are.", UID="a", linguistics_term="binding")
BAD = {  # the file's name and contents, and part of the error
    "empty": ("x.jsonl", b"\n", "contains no pairs"),
    "no text": ("x.jsonl", json.dumps(GOOD | {"sentence_bad": " "}), "x.jsonl line 2 is damaged"),
    "no name": ("x.jsonl", json.dumps(GOOD | {"UID": 3}), "x.jsonl line 2 is damaged"),
    "list": ("x.jsonl", "[1]", "x.jsonl line 2 is damaged"),
    "zip": ("x.zip", b"PK\x03\x04", "BLiMP file .*x.zip is damaged"),
    "missing": ("", b"", "there is no BLiMP file .*nowhere"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_one_sentence(tmp_path, name):
    file, content, message = BAD[name]
    path = tmp_path / (file or "nowhere")
    if file:
        content = (
            content if isinstance(content, bytes) else f"{json.dumps(GOOD)}\n{content}\n".encode()
        )
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        blimp.read_pairs(blimp.locate(str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--pairs 1", "pairs=1 must be 2 or more"),
        ("--figure x.txt", "figure=x.txt must end in .png"),
        ("--json no/x/y.json --data none.zip", "there is no BLiMP file none.zip"),
        ("--json d/d.json", "cannot be written"),
        ("--json pairs.jsonl", "json=pairs.jsonl must end in .json"),
    ],
)
def test_bad_flags_are_one_sentence(tmp_path, checkpoint, flags, message):
    (tmp_path / "d" / "d.json").mkdir(parents=True)
    words = ["--model", checkpoint, "--device", "cpu", *flags.split()]
    assert message in fail("blimp.py", *words, cwd=tmp_path)


def test_bert_is_refused(tmp_path):
    import bert

    shape = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=300)
    path = saved(bert.Bert(bert.BertConfig(**shape)), tmp_path / "model_000001.pt")
    said = fail("blimp.py", "--model", path, "--data", FOLDER, "--device", "cpu", cwd=tmp_path)
    assert "is a masked language model, but BLiMP needs one that predicts the next token" in said


def test_command_in_one_and_two_processes(tmp_path, checkpoint, monkeypatch):
    """Table, JSON file and figure; the control with fresh weights; a sentence with and without space."""
    words = [ROOT / "blimp.py", "--model", checkpoint, "--data", FOLDER, "--device", "cpu"]
    text = succeed(*words, "--json", "one.json", "--figure", "f.png", "--paradigms", cwd=tmp_path)
    run_two(*words, "--json", "two.json", cwd=tmp_path)
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert one | {"seconds": 0} == two | {"seconds": 0}
    assert (one["count"], one["ties"], len(one["paradigms"])) == (COUNT, 1, 4)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    pairs = blimp.read_pairs(FOLDER)
    model, tokenizer = noisy_gpt(block_size=128), get_tokenizer("bytes")
    gap = np.diff(losses_one_by_one(model, tokenizer, pairs))[:, 0]
    binding = [i for i, pair in enumerate(pairs) if pair["UID"] == "our_reflexives"]
    acc = (gap[binding] > 0).mean()
    assert one["phenomena"]["binding"]["acc"] == one["paradigms"]["our_reflexives"]["acc"] == acc
    assert re.search(rf"^binding +4 +{acc:.1%} .* 64.4% +73.5% +74.7% +80.9%$", text, re.M)
    assert "not the published BLiMP.zip" in text and "our_determiners  " in text
    found = {}
    for flag in ("--untrained", "--no_leading_space"):
        succeed(*words, flag, "--json", "x.json", "--pairs", 3, cwd=tmp_path)
        found[flag] = json.loads((tmp_path / "x.json").read_text())
        assert found[flag]["count"] == 12
    torch.manual_seed(1337)
    fresh = type(model)(model.config)
    for flag, scored, space in (("--untrained", fresh, " "), ("--no_leading_space", model, "")):
        some = blimp.first_of_each(pairs, 3)
        gap = np.diff(losses_one_by_one(scored, tokenizer, some, space))[:, 0]
        assert found[flag]["acc"] == pytest.approx(np.where(gap == 0, 0.5, gap > 0).mean()), flag


def test_event_of_two_processes_equals_the_command(tmp_path, shards, monkeypatch):
    """Also at step 0; log.jsonl, report and plot have the phenomena."""
    from conftest import EPS, TINY_RUN

    monkeypatch.chdir(tmp_path)
    zipped(ZIP_FILE)
    flags = [*TINY_RUN, "--data", shards, "--eps", EPS, "--batch_size", 2, "--block_size", 64]
    flags += ["--max_steps", 3, "--blimp_every", 2]
    ranks = [Process(ROOT / "train_gpt2.py", *flags, cwd=tmp_path, **rank) for rank in two_ranks()]
    said = finished(ranks)
    log = [json.loads(line) for line in Path("log/r/log.jsonl").read_text().splitlines()]
    events = [record for record in log if record["kind"] == "blimp"]
    assert [record["step"] for record in events] == [0, 2, 3]
    succeed("blimp.py", "--model", "log/r", "--device", "cpu", "--pairs", blimp.EVENT_PAIRS,
            "--json", "x.json", cwd=tmp_path)  # fmt: skip
    command = json.loads(Path("x.json").read_text())
    for name in ("acc", "acc_stderr", "ties", "count", "cut", "skipped"):
        assert events[-1][name] == command[name], name
    for name, group in command["phenomena"].items():
        assert events[-1][name] == group["acc"], name
    assert len(command["phenomena"]) == 4 and f"BLiMP {command['acc']:.4f} +- " in said
    for tool in ("report", "plot"):
        succeed("lab", tool, "log/r", cwd=tmp_path)
    page = Path("log/r/report.html").read_text()
    assert '"phenomena"' in page and "subject verb agreement" in page


def test_a_run_without_the_file_goes_on(tmp_path, shards):
    """The download fails, which is printed once."""
    from conftest import TINY_RUN

    env = dict(https_proxy="http://127.0.0.1:9")
    flags = [*TINY_RUN, "--data", shards, "--max_steps", 2, "--blimp_every", 1]
    run = run_python(ROOT / "train_gpt2.py", *flags, cwd=tmp_path, **env)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("no BLiMP in this run: cannot download https") == 1


@pytest.mark.slow
def test_lm_evaluation_harness_gives_the_same_scores(test_data, gpt2_files, tmp_path, monkeypatch):
    """Three of its blimp_* tasks, with their own template, on a random GPT-2: the same margins, and the
    same accuracy. The harness counts a tie as right."""
    python = os.environ.get("LM_EVAL_PYTHON", sys.executable)
    where = "import lm_eval, pathlib; print(pathlib.Path(lm_eval.__file__).parent / 'tasks/blimp')"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True)
    if found.returncode:
        pytest.skip("pip install lm_eval[hf]; LM_EVAL_PYTHON names the python that has it")
    monkeypatch.chdir(tmp_path)
    names = ["principle_A_case_1", "adjunct_island", "regular_plural_subject_verb_agreement_1"]
    pairs = blimp.read_pairs(blimp.locate(str(test_data / "blimp")))
    pairs = [p for p in blimp.first_of_each(pairs, 100) if p["UID"] in names]
    model = noisy_gpt(vocab_size=50257, block_size=128)
    export(saved(model, tmp_path / "model.pt"), "export")
    for name in names:
        rows = [pair for pair in pairs if pair["UID"] == name]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = dict(
            include=f"{found.stdout.strip()}/_template_yaml", task=f"ours_{name}", dataset_path="json",
            dataset_name=None, dataset_kwargs={"data_files": {"train": f"{tmp_path}/{name}.jsonl"}},
        )  # fmt: skip
        Path(f"{name}.yaml").write_text(json.dumps(task))
    flags = "--model hf --model_args pretrained=export,dtype=float32 --include_path . --device cpu "
    flags += f"--tasks {','.join(f'ours_{n}' for n in names)} --batch_size 8 --output_path out "
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run = [python, "-m", "lm_eval", *flags.split(), "--log_samples"]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.glob("out/**/results_*")
    theirs = json.loads(results.read_text())["results"]
    for name in names:
        (samples,) = tmp_path.glob(f"out/**/samples_ours_{name}_*")
        samples = sorted(map(json.loads, samples.open()), key=lambda sample: sample["doc_id"])
        losses = -np.array([[float(r[0][0]) for r in s["resps"]] for s in samples])
        ours = [pair for pair in pairs if pair["UID"] == name]
        data = blimp.tokenize_pairs(ours, get_tokenizer("gpt2"), 128)
        assert margins(model, data) == pytest.approx(np.diff(losses)[:, 0], abs=1e-4)
        result, scores = blimp.measure(model, data, WORLD)
        score = theirs[f"ours_{name}"]
        assert np.ceil(scores).mean() == pytest.approx(score["acc,none"], abs=1e-9)
        if not result["ties"]:
            assert result["acc_stderr"] == pytest.approx(score["acc_stderr,none"], abs=1e-9)
