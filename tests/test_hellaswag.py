"""HellaSwag: scores by hand and against transformers one at a time, files good and bad, download, processes, harness."""

import hashlib
import http.server
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_RUN, VOCAB, run_python, write_shards

import hellaswag
from hellaswag import by_group, choose, ending_losses, evaluate, hidden, measure, plan, predictions, summarise
from lab.weights import TRANSPOSED
from train_gpt2 import GPT, GPTConfig

ALONE = types.SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), sum=lambda t: t, from_main=lambda v: v)
WORDS = "a man is on the roof he starts to pull up tiles with both hands and then ski down water é".split()


def made_up(count=30, context=(3, 12), ending=(2, 7), seed=0):
    """Examples like HellaSwag's, of random words."""
    rng = random.Random(seed)

    def text(low, high):
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    return [{"ctx": text(*context), "endings": [text(*ending) for _ in range(4)], "label": rng.randrange(4),
             "activity_label": rng.choice(["Roofing", "Skiing"]), "source_id": "activitynet~v_1"}
            for _ in range(count)]  # fmt: skip


def write(path, examples):
    path.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    return path


def noisy_gpt(vocab_size=VOCAB, block_size=128, n_embd=32):
    """Fresh weights score all endings alike, and hide wrong positions: add noise."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def in_transformers(model):
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    theirs = GPT2LMHeadModel(
        GPT2Config(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, n_positions=c.block_size, vocab_size=c.vocab_size,
                   bos_token_id=c.vocab_size - 1, eos_token_id=c.vocab_size - 1, loss_type="ForCausalLM")
    ).eval()  # fmt: skip
    state = {k: v.t() if k.endswith(TRANSPOSED) else v for k, v in model.state_dict().items()}
    rows = c.vocab_size
    state |= {k: state[k][:rows] for k in ("lm_head.weight", "transformer.wte.weight")}
    theirs.load_state_dict({k: v.clone() for k, v in state.items()})
    return theirs


@torch.no_grad()
def one_at_a_time(theirs, tokenizer, example):
    """(sums, means) of the four endings' losses: the plain way, one forward pass an ending, nothing shared."""
    ctx = tokenizer.encode(example["ctx"])
    endings = [tokenizer.encode(" " + text) for text in example["endings"]]
    room = theirs.config.n_positions - max(map(len, endings)) + 1  # the longest ending's last token is no input
    sums = []
    for ending in endings:
        ids = torch.tensor([ctx[-room:] + ending])
        losses = torch.nn.functional.cross_entropy(
            theirs(ids[:, :-1]).logits[0, -len(ending) :].double(), ids[0, -len(ending) :], reduction="none"
        )
        sums.append(losses.sum().item())
    return np.array(sums), np.array(sums) / [len(e) for e in endings]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the cache of tokens goes below the working directory
    return write(tmp_path / "h.jsonl", made_up())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model file as the trainer writes it, of bytes."""
    path = tmp_path_factory.mktemp("model") / "model_000001.pt"
    model = noisy_gpt()
    torch.save({"model": model.state_dict(), "model_config": vars(model.config)}, path)
    return path


# --------------------------------------------------------------------------------------------------- scores by hand


def tokenised(rows, labels):
    """hellaswag.Examples from rows of [context, ending, ending, ending, ending], lists of ids."""
    lengths = np.array([[len(piece) for piece in row] for row in rows])
    return hellaswag.Examples(
        tokens=np.array([t for row in rows for piece in row for t in piece], np.uint16),
        start=np.cumsum(lengths.sum(1)) - lengths.sum(1), ctx_len=lengths[:, 0], end_len=lengths[:, 1:],
        label=np.array(labels), line=np.arange(len(rows)) + 1, source=np.array(["x"] * len(rows)),
        activity=np.array(["y"] * len(rows)),
    )  # fmt: skip


def test_scores_worked_out_by_hand():
    """A model of pairs of tokens, whose next token depends on the last one alone:

    after   0    1    2    3
    0      1/2  1/8  1/4  1/8        (row: what stands before)
    1      1/8  1/8  1/4  1/2
    2      1/4  1/4  1/4  1/4
    3      1/16 1/16 1/8  3/4
    """
    pairs = torch.tensor([[8, 2, 4, 2], [2, 2, 4, 8], [4, 4, 4, 4], [1, 1, 2, 12]]) / 16
    model = types.SimpleNamespace(  # the head's rows are one-hot: the logits are the hidden states, here log P
        lm_head=types.SimpleNamespace(weight=torch.eye(4)), config=types.SimpleNamespace(vocab_size=4)
    )

    def log_pairs(model, idx, position, part):
        return pairs.log()[idx].flatten(0, 1)

    data = tokenised([[[2, 0], [2], [1, 3], [3, 3, 3], [0]], [[1], [1, 1], [3], [2], [0, 0, 0]]], labels=[2, 1])
    sums = ending_losses(model, data, np.array([0, 1]), data.ctx_len, 64, ALONE, log_pairs)
    first = [1 / 4, 1 / 8 * 1 / 2, 1 / 8 * 3 / 4 * 3 / 4, 1 / 2]
    second = [1 / 8 * 1 / 8, 1 / 2, 1 / 4, 1 / 8 * 1 / 2 * 1 / 2]
    assert sums == pytest.approx(-np.log([first, second]), rel=1e-6)
    # sums of the first: 1.39, 2.77, 2.65, 0.69: ending 3. Means: 1.39, 1.39, 0.88, 0.69: ending 3 as well. Wrong.
    # of the second: 4.16, 0.69, 1.39, 3.47 and 2.08, 0.69, 1.39, 1.16: ending 1 by both. Right.
    assert [p.tolist() for p in predictions(sums, data.end_len)] == [[3, 1], [3, 1]]
    result = summarise(sums, data.end_len, data.label)
    assert (result["acc"], result["acc_norm"], result["count"]) == (0.5, 0.5, 2)
    assert result["acc_stderr"] == pytest.approx(0.5)  # of [0, 1]: standard deviation 0.707 / sqrt(2)


def test_sum_and_mean_choose_differently():
    sums, lengths = np.array([[2.0, 3.0, 4.0, 9.0]]), np.array([[1, 2, 4, 3]])  # means 2, 1.5, 1, 3
    result = summarise(sums, lengths, np.array([2]))
    assert (result["acc"], result["acc_norm"]) == (0.0, 1.0)


def test_interval_by_hand():
    # 30 of 100 (Wilson): centre (0.3 + 0.019208) / 1.038416, half width 1.96 * sqrt(0.0021 + 0.00009604) / 1.038416
    assert hellaswag.interval(0.3, 100) == pytest.approx([0.21894, 0.39585], abs=1e-4)
    low, high = hellaswag.interval(0.0, 5)
    assert abs(low) < 1e-12 and high == pytest.approx(0.4345, abs=1e-3)  # none of five is no proof of never


def test_groups_and_worst_by_hand():
    sums = np.array([[1.0, 4, 4, 4], [2, 1, 4, 4], [9, 1, 4, 4], [4, 4, 4, 1]])
    ones, labels = np.ones((4, 4), int), np.array([0, 0, 0, 3])
    groups = by_group(np.array(["a", "b", "b", "b"]), sums, ones, labels)
    assert [(name, g["count"], round(g["acc"], 3)) for name, g in groups.items()] == [("b", 3, 0.333), ("a", 1, 1.0)]
    assert hellaswag.most_sure_and_wrong(sums, ones, labels, 10) == [(2, 8.0), (1, 1.0)]


# ------------------------------------------------------------------------------- against transformers, one at a time


def without_mask(model, idx, position, part):
    return hidden(model, idx, position, torch.zeros_like(part))  # endings see those before them


def without_positions(model, idx, position, part):
    position = torch.arange(idx.size(1)).clamp(max=model.config.block_size - 1)
    return hidden(model, idx, position.expand_as(idx), part)  # endings do not start again after the context


@pytest.mark.parametrize("block_size", [128, 48])  # the second cuts contexts
def test_equals_one_at_a_time_in_transformers(file, block_size):
    from lab.data.tokenizers import get_tokenizer

    model = noisy_gpt(block_size=block_size)
    theirs, tokenizer = in_transformers(model), get_tokenizer("bytes")
    result, data, chosen, sums = measure(model, data=str(file))
    expected = [one_at_a_time(theirs, tokenizer, e) for e in made_up()]
    assert chosen.tolist() == list(range(30))
    assert sums == pytest.approx(np.array([s for s, _ in expected]), rel=1e-5)
    assert sums / data.end_len == pytest.approx(np.array([m for _, m in expected]), rel=1e-5)
    labels = [e["label"] for e in made_up()]
    assert result["acc"] == np.mean([s.argmin() == y for (s, _), y in zip(expected, labels)])
    assert result["acc_norm"] == np.mean([m.argmin() == y for (_, m), y in zip(expected, labels)])
    assert result["cut"] == sum(len(e["ctx"].encode()) + max(len(t.encode()) for t in e["endings"]) > block_size
                                for e in made_up())  # fmt: skip
    assert (result["cut"] > 0) == (block_size == 48)
    for wrong in (without_mask, without_positions):
        assert np.abs(measure(model, data=str(file), trunk=wrong)[3] - sums).max() > 0.1


def test_equals_one_at_a_time_on_the_real_file(test_data, tmp_path, monkeypatch):
    from lab.data.tokenizers import get_tokenizer

    source = test_data / "hellaswag" / "hellaswag_val.jsonl"
    if not source.exists():
        pytest.skip(f"no {source}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken"))
    lines = source.read_text(encoding="utf-8").splitlines()[::700]  # both sources
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = noisy_gpt(vocab_size=50257, block_size=1024, n_embd=16)
    theirs, tokenizer = in_transformers(model), get_tokenizer("gpt2")
    _, data, _, sums = measure(model, data=str(path))
    expected = [one_at_a_time(theirs, tokenizer, json.loads(line))[0] for line in lines]
    assert sums == pytest.approx(np.array(expected), rel=1e-5)
    assert set(data.source) == {"activitynet", "wikihow"}


def test_autocast_changes_little_and_result_is_plain_numbers(file):
    model = noisy_gpt()
    plain = measure(model, data=str(file))[3]
    with torch.autocast("cpu", torch.bfloat16):
        result, _, _, sums = measure(model, data=str(file))
    assert 0 < np.abs(sums / plain - 1).max() < 0.02
    assert {"acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "count", "seconds"} <= json.loads(json.dumps(result)).keys()


def test_evaluating_draws_no_random_numbers_and_leaves_the_model(file):
    model = noisy_gpt()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    evaluate(model, data=str(file))
    assert torch.equal(before, torch.get_rng_state()) and model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# ------------------------------------------------------------------------------------------------ batches and limits


def test_batch_size_does_not_matter(file):
    model = noisy_gpt()
    large, small, single = (measure(model, data=str(file), batch_tokens=n)[3] for n in (16384, 700, 1))
    assert small == pytest.approx(large, rel=1e-6) and single == pytest.approx(large, rel=1e-6)


def test_every_row_once_in_few_shapes():
    lengths = np.random.default_rng(0).integers(30, 300, 1000)
    batches = plan(lengths, 4096)
    assert sorted(np.concatenate([rows for rows, _, _ in batches])) == list(range(1000))
    assert len({(B, T) for _, B, T in batches}) == len({T for _, _, T in batches}) == 10  # 30 to 299 in steps of 32
    for rows, B, T in batches:
        assert len(rows) <= B and B * T <= 4096 and T - 32 < lengths[rows].min() and lengths[rows].max() <= T
    empty = sum(B - len(rows) for rows, B, _ in batches)
    assert empty < len(batches)  # at most one row in vain for each batch


def test_compiled_once_for_each_shape_and_never_again(file):
    """Counts the graphs that torch.compile asks a backend for."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return graph.forward

    model = noisy_gpt()
    trunk = torch.compile(hidden, dynamic=False, backend=backend)
    first = measure(model, data=str(file), batch_tokens=1500, trunk=trunk)
    shapes = len({(B, T) for _, B, T in plan(first[1].ctx_len + (first[1].end_len - 1).sum(1), 1500)})
    assert len(graphs) == shapes > 2
    second = measure(model, data=str(file), batch_tokens=1500, trunk=trunk)
    assert len(graphs) == shapes and (first[3] == second[3]).all()
    assert first[3] == pytest.approx(measure(model, data=str(file))[3], rel=1e-5)


def test_limit_spreads_over_the_file(file):
    data = measure(noisy_gpt(), data=str(file))[1]
    assert choose(data, 3, 128, False)[0].tolist() == [0, 10, 20]
    assert len(choose(data, 99, 128, False)[0]) == len(choose(data, 0, 128, False)[0]) == 30
    with pytest.raises(ValueError, match="limit=-1 must be 0"):
        choose(data, -1, 128, False)


def test_context_without_tokens_is_led_by_end_of_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, example = noisy_gpt(), made_up(1)[0] | {"ctx": ""}
    sums = measure(model, data=str(write(tmp_path / "h.jsonl", [example])))[3]
    ids = torch.tensor([[VOCAB - 1, *f" {example['endings'][2]}".encode()]])
    loss = model(ids[:, :-1], ids[:, 1:], reduction="sum")[1].item()
    assert sums[0, 2] == pytest.approx(loss, rel=1e-5)


# ---------------------------------------------------------------------------------------------- the file, good and bad


def test_sources_by_id_or_by_form():
    assert hellaswag.sources([{"source_id": "wikihow~7"}, {"source_id": "activitynet~v_x"}]) == ["wikihow", "activitynet"]
    roof = {"activity_label": "Roofing", "source_id": None}
    examples = [roof | {"ctx_b": text} for text in ("he", "she", "")] + [{"activity_label": "Health", "ctx_b": ""}]
    assert hellaswag.sources(examples) == ["activitynet"] * 3 + ["wikihow"]
    assert hellaswag.sources([{"activity_label": "Health"}]) == ["unknown"]


GOOD = json.dumps(made_up(1)[0])
BAD = {
    "label": (json.dumps(made_up(1)[0] | {"label": 4}), r"line 2 has the label 4, it must be 0, 1, 2 or 3"),
    "label text": (json.dumps(made_up(1)[0] | {"label": ""}), r"line 2 has the label '', it must be"),
    "label bool": (json.dumps(made_up(1)[0] | {"label": True}), r"line 2 has the label True, it must be"),
    "three": (json.dumps(made_up(1)[0] | {"endings": ["a", "b", "c"]}), r"line 2 has 3 endings, every example needs 4"),
    "empty": (json.dumps(made_up(1)[0] | {"endings": ["a", "b", "c", " "]}), r"line 2: .* texts that are not empty"),
    "not a list": (json.dumps(made_up(1)[0] | {"endings": "abcd"}), r"line 2 has endings of type str"),
    "utf-8": (b'{"ctx": "caf\xe9"}', r"line 2 is not UTF-8 \(byte 0xe9 at column 13\); save the file as UTF-8"),
    "json": ('{"ctx": "a", ', r"line 2 is not JSON .*: a HellaSwag file has one object a line"),
    "keys": ('{"ctx": "a", "endings": []}', r"line 2 must hold ctx, endings and label, and holds ctx, endings \(the test"),
    "number": ("17", r"line 2 must hold ctx, endings and label, and holds int; use"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named(tmp_path, name):
    bad, message = BAD[name]
    path = tmp_path / "h.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        hellaswag.read_examples(path)
    assert "\n" not in str(error.value)


def test_empty_file_blank_lines_and_labels_as_text(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no examples"):
        hellaswag.read_examples(path)
    path.write_text("\n" + json.dumps(made_up(1)[0] | {"label": "3"}) + "\r\n\n" + GOOD)
    assert [(e["line"], e["label"]) for e in hellaswag.read_examples(path)] == [(2, 3), (4, made_up(1)[0]["label"])]


def test_ending_longer_than_the_context(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = made_up(5, ending=(1, 2))
    examples[3]["endings"][1] = "x" * 32  # 33 tokens with the leading blank
    path = str(write(tmp_path / "h.jsonl", examples))
    assert evaluate(noisy_gpt(block_size=33), data=path)["count"] == 5  # one token of context is enough
    with pytest.raises(ValueError, match=r"line 4 has an ending of 33 tokens, .* block_size=32 \(1 of 5 .*--skip_long"):
        evaluate(noisy_gpt(block_size=32), data=path)
    result = evaluate(noisy_gpt(block_size=32), data=path, skip_long=True)
    assert (result["count"], result["skipped"]) == (4, 1)


def test_cache_is_used_rewritten_and_bound_to_the_content(file, tmp_path):
    first = hellaswag.load(file, "bytes")
    (cache,) = Path("data/hellaswag").iterdir()
    assert [p.name for p in tmp_path.rglob("*.part")] == []
    np.savez(cache, **(vars(first) | {"label": 3 - first.label}))
    assert (hellaswag.load(file, "bytes").label == 3 - first.label).all()  # it is read
    cache.write_bytes(cache.read_bytes()[:-100])
    assert (hellaswag.load(file, "bytes").label == first.label).all()  # a broken one is made again
    assert (hellaswag.load(file, "bytes").tokens == first.tokens).all()
    write(file, made_up(seed=5))
    assert (hellaswag.load(file, "bytes").label == [e["label"] for e in made_up(seed=5)]).all()
    assert len(list(Path("data/hellaswag").iterdir())) == 2


def test_cache_folder_that_cannot_be_written(file):
    assert len(hellaswag.load(file, "bytes", cache_dir=file)) == 30  # a file where the folder should be


# -------------------------------------------------------------------------------------------------------- download


@pytest.fixture
def server(monkeypatch):
    """A web server with one file, which breaks off after `limit` bytes of an answer as long as `breaks` > 0."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = types.SimpleNamespace(content=b"", breaks=0, limit=0, ranges=[], status=None)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            state.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            self.send_response(state.status or (206 if asked else 200))
            self.send_header("Content-Length", str(len(state.content) - start))
            self.end_headers()
            body = state.content[start:]
            state.breaks -= 1
            self.wfile.write(body[: state.limit] if state.breaks >= 0 else body)

        def log_message(self, *_):
            pass

    httpd = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True).start()
    state.url = f"http://127.0.0.1:{httpd.server_port}/h.jsonl"
    monkeypatch.setattr(hellaswag.time, "sleep", lambda s: state.__dict__.setdefault("waits", []).append(s))
    yield state
    httpd.shutdown()


def test_download_resumes_and_checks(server, tmp_path):
    server.content, server.breaks, server.limit = bytes(range(256)) * 1000, 2, 100_000
    digest, path = hashlib.sha256(server.content).hexdigest(), tmp_path / "new" / "h.jsonl"
    hellaswag.download(server.url, path, len(server.content), digest)
    assert path.read_bytes() == server.content and list(path.parent.iterdir()) == [path]
    assert server.ranges == [None, "bytes=100000-", "bytes=200000-"] and server.waits == [1, 2]


def test_download_of_something_else_is_refused(server, tmp_path):
    server.content = b"x" * 1000
    with pytest.raises(OSError, match=r"another SHA-256 .*tried 2 times; download it by hand to .*h.jsonl \(hellaswag.py also"):
        hellaswag.download(server.url, tmp_path / "h.jsonl", 1000, "0" * 64, tries=2)
    assert list(tmp_path.iterdir()) == []


def test_download_of_nothing_is_tried_once(server, tmp_path):
    server.status = 404
    with pytest.raises(OSError, match="tried 1 times"):
        hellaswag.download(server.url, tmp_path / "h.jsonl", 1000, "0" * 64)


def test_a_name_that_there_is_not_is_looked_up_once(server, tmp_path, monkeypatch):
    """No network: four more tries were 15 seconds of waiting. A connection that is refused is tried again."""
    monkeypatch.setenv("no_proxy", "*")
    try:
        socket.getaddrinfo("nowhere.invalid", 80)
    except socket.gaierror as error:
        if error.errno != socket.EAI_NONAME:
            pytest.skip("the name server here does not answer")
    for url, tries in (("http://nowhere.invalid/h.jsonl", 1), ("http://127.0.0.1:9/h.jsonl", 5)):
        with pytest.raises(OSError, match=f"tried {tries} times"):
            hellaswag.download(url, tmp_path / "h.jsonl", 1000, "0" * 64)
    assert server.waits == [1, 2, 4, 8]


def test_part_that_was_whole_is_taken(tmp_path):
    """Killed between the last byte and the rename: nothing is fetched again (the address leads nowhere)."""
    (tmp_path / "h.jsonl.part").write_bytes(b"abc")
    hellaswag.download("http://127.0.0.1:9/x", tmp_path / "h.jsonl", 3, hashlib.sha256(b"abc").hexdigest(), tries=1)
    assert (tmp_path / "h.jsonl").read_bytes() == b"abc"


# ------------------------------------------------------------------------------------------------- the real command


def test_the_speed_bench_runs_and_finds_both_ways_equal(tmp_path, checkpoint):
    flags = ["--checkpoint", checkpoint, "--device", "cpu", "--batch_tokens", 1500, "--repeats", 1, "--no_compile"]
    bench = ROOT / "bench" / "hellaswag_speed.py"
    done = run_python(bench, "--data", write(tmp_path / "h.jsonl", made_up()), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if ", eager" in line and "%" in line]
    assert len(rows) == 2 and all(row[-1] == "0.00%" and float(row[-2]) < 1e-4 for row in rows), done.stdout
    missing = run_python(bench, "--data", "nowhere.jsonl", *flags, cwd=tmp_path)
    assert missing.returncode == 2 and "Traceback" not in missing.stderr and "nowhere.jsonl" in missing.stderr


def test_what_cannot_be_downloaded_is_asked_for_once_in_a_run(tmp_path):
    data = write_shards(tmp_path / "data")
    nowhere = {"https_proxy": "http://127.0.0.1:9", "HELLASWAG_TRIES": "1"}
    flags = [*TINY_RUN, "--data", data, "--max_steps", 6, "--hella_every", 2, "--val_every", 0, "--sample_every", 0]
    run = run_python(ROOT / "train_gpt2.py", *flags, cwd=tmp_path, **nowhere)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("no HellaSwag in this run: cannot download") == 1


def test_two_processes_equal_one(tmp_path, checkpoint):
    path = write(tmp_path / "h.jsonl", made_up())
    flags = ["--model", checkpoint, "--data", path, "--json", "--device", "cpu", "--batch_tokens", 1500, "--worst", 30]
    one = run_python(ROOT / "hellaswag.py", *flags, cwd=tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    two = run_python(*launch, ROOT / "hellaswag.py", *flags, "--by_source", cwd=tmp_path)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    one, two = (json.loads(run.stdout.strip().splitlines()[-1]) for run in (one, two))
    assert two.pop("by_source")["activitynet"]["count"] == one["count"] == 30
    assert one.pop("seconds") > 0 and two.pop("seconds") > 0
    assert len(one["worst"]) == 30 - round(30 * one["acc_norm"]) and len(one["worst"][0]["mean_losses"]) == 4
    assert one == two  # losses to the last bit: no batch depends on the number of processes


def test_processes_agree_in_being_stopped_though_one_has_a_batch_more(tmp_path):
    path, loaded, asked = str(write(tmp_path / "h.jsonl", made_up())), {}, []
    for rank in range(2):
        world = vars(ALONE) | dict(rank=rank, world_size=2, from_main=lambda value: loaded.setdefault("by rank 0", value))
        evaluate(noisy_gpt(), 30, types.SimpleNamespace(**world), data=path, batch_tokens=1500, stopped=lambda: asked.append(0))
    rounds, odd = divmod(len(asked), 2)
    assert rounds > 1 and not odd
    asked.clear()
    assert evaluate(noisy_gpt(), 30, data=path, batch_tokens=1500, stopped=lambda: asked.append(0) or len(asked) == 2) is None
    assert len(asked) == 2


def test_command_prints_tables_and_draws(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "h.jsonl", made_up())
    flags = "--device cpu --by_source --by_activity --worst 3 --picture p.png --limit 20".split()
    run = run_python(ROOT / "hellaswag.py", "--model", checkpoint, "--data", path, *flags, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    expected = evaluate(noisy_gpt(), 20, data=str(path))
    assert f"acc_norm  {expected['acc_norm']:.4f} +- {expected['acc_norm_stderr']:.4f}" in run.stdout
    assert "20 examples" in run.stdout and "not the published file" in run.stdout
    for word in ("activitynet", "Roofing", "Skiing", "nats a token", "wrote p.png"):
        assert word in run.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    if Path("/sys/kernel").is_dir():  # where nobody, root either, may write
        flags[flags.index("p.png")] = "/sys/p.png"
        run = run_python(ROOT / "hellaswag.py", "--model", checkpoint, "--data", path, *flags, cwd=tmp_path)
        assert (run.returncode, run.stdout) == (2, "") and "error: picture=/sys/p.png cannot be written (" in run.stderr


@pytest.mark.parametrize("what", ["label", "missing", "offline", "folder", "kind", "limit", "split"])
def test_bad_input_is_one_sentence_and_status_2(tmp_path, checkpoint, what):
    data = ["--data", write(tmp_path / "h.jsonl", [made_up(1)[0] | {"label": 9}])] if what == "label" else []
    data = ["--data", "nowhere.jsonl"] if what == "missing" else data
    data = ["--data", write(tmp_path / "h.jsonl", made_up(1)), "--split", "train"] if what == "split" else data
    data = {"folder": ["--picture", "none/p.png"], "kind": ["--picture", "p.xyz"], "limit": ["--limit", "-3"]}.get(what, data)
    nowhere = {"https_proxy": "http://127.0.0.1:9", "HELLASWAG_TRIES": "1"}
    run = run_python(ROOT / "hellaswag.py", "--model", checkpoint, "--device", "cpu", *data, cwd=tmp_path, **nowhere)
    expected = {
        "label": "line 1 has the label 9, it must be 0, 1, 2 or 3",
        "missing": "no HellaSwag file nowhere.jsonl; name one with --data",
        "folder": "picture=none/p.png must lie in a folder that is there", "kind": "picture=p.xyz must lie in",
        "limit": "limit=-3 must be 0",  # before anything is downloaded
        "split": "split=train does nothing for --data",
        "offline": "cannot download https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl",
    }
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and run.stderr.startswith("hellaswag.py: error: ") and expected[what] in run.stderr


def test_a_full_memory_names_the_flag(tmp_path):
    code = """if True:
        import hellaswag, torch
        def run(cfg):  # as CUDA says it; there is none here to fill
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.59 GiB")
        hellaswag.run = run
        hellaswag.main()
    """
    for rank, whose in (("0", ""), ("1", "[rank 1] ")):  # it may be one process's trouble alone
        done = run_python("-c", code, "--batch_tokens", 70000, cwd=ROOT, RANK=rank)
        assert done.returncode == 2
        assert done.stderr.strip() == f"hellaswag.py: error: {whose}the memory is full; pass a --batch_tokens below 70000"


# ------------------------------------------------------------------------------------------- lm-evaluation-harness


@pytest.mark.slow
def test_export_in_lm_evaluation_harness(test_data, tmp_path, monkeypatch):
    """The harness scores our export on 100 examples; from its own per-example losses ours can be computed.

    Its style differs from ours in three ways: it puts "activity: " before the context and capitalises ctx_b, it cleans
    WikiHow's marks out of the text, and its acc_norm divides by the ending's characters, where ours divides by its
    tokens. So it is given our texts: a file whose ctx is what the harness would build. Then losses and acc are equal,
    and acc_norm is once characters are counted.
    """
    python = os.environ.get("LM_EVAL_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import lm_eval"], capture_output=True).returncode:
        pytest.skip("lm-evaluation-harness is not installed: pip install lm_eval[hf] (LM_EVAL_PYTHON may name its python)")
    source = test_data / "hellaswag" / "hellaswag_val.jsonl"
    if not source.exists():
        pytest.skip(f"no {source}")
    examples = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()[::100]][:100]
    for e in examples:
        e["label"] = str(e["label"])
    write(tmp_path / "validation.jsonl", examples)
    task = Path(subprocess.run([python, "-c", "import lm_eval.tasks as t; print(t.__path__[0])"], capture_output=True,
                               text=True, check=True).stdout.strip()) / "hellaswag"  # fmt: skip
    shutil.copytree(task, tmp_path / "task")
    yaml = (tmp_path / "task" / "hellaswag.yaml").read_text()
    yaml = yaml.replace("task: hellaswag", "task: hellaswag_local").replace("training_split: train\n", "")
    yaml = yaml.replace("dataset_path: Rowan/hellaswag", "dataset_path: json").replace(
        "dataset_name: null", f"dataset_kwargs:\n  data_files:\n    validation: {tmp_path / 'validation.jsonl'}"
    )
    (tmp_path / "task" / "hellaswag.yaml").write_text(yaml)
    model = noisy_gpt(vocab_size=50257, block_size=1024)
    torch.save({"model": model.state_dict(), "model_config": vars(model.config)}, tmp_path / "model_000001.pt")
    tiktoken = {"TIKTOKEN_CACHE_DIR": str(test_data / "tiktoken"), "HF_HUB_OFFLINE": "1"}
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", tiktoken["TIKTOKEN_CACHE_DIR"])
    made = run_python(ROOT / "lab", "export", "model_000001.pt", "--out", "export", cwd=tmp_path, **tiktoken)
    assert made.returncode == 0, made.stderr
    flags = "--tasks hellaswag_local --include_path task --device cpu --batch_size 4 --output_path out --log_samples"
    command = [python, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=export,dtype=float32", *flags.split()]
    env = os.environ | tiktoken | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.glob("out/**/results_*.json")
    theirs = json.loads(results.read_text())["results"]["hellaswag_local"]
    (samples,) = tmp_path.glob("out/**/samples_*.jsonl")
    samples = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda s: s["doc_id"])

    same_text = [{"ctx": s["doc"]["query"], "endings": s["doc"]["choices"], "label": s["doc"]["gold"]} for s in samples]
    write(tmp_path / "same.jsonl", same_text)
    flags = "--model export --data same.jsonl --json --device cpu".split()
    ours = run_python(ROOT / "hellaswag.py", *flags, cwd=tmp_path, **tiktoken)
    assert ours.returncode == 0, ours.stderr
    ours = json.loads(ours.stdout)
    monkeypatch.chdir(tmp_path)
    sums = measure(model, data=str(tmp_path / "same.jsonl"))[3]
    losses = -np.array([[float(r[0][0]) for r in s["resps"]] for s in samples])
    assert sums == pytest.approx(losses, rel=1e-4)
    assert (ours["acc"], ours["acc_stderr"]) == pytest.approx((theirs["acc,none"], theirs["acc_stderr,none"]), abs=1e-9)
    characters = np.array([[len(text) for text in e["endings"]] for e in same_text])
    by_characters = (sums / characters).argmin(1) == [e["label"] for e in same_text]
    assert by_characters.mean() == pytest.approx(theirs["acc_norm,none"], abs=1e-9)
    print(f"\nharness: acc {theirs['acc,none']}, acc_norm {theirs['acc_norm,none']}; ours on the same texts: "
          f"acc {ours['acc']}, acc_norm by tokens {ours['acc_norm']}, by characters {by_characters.mean()}")  # fmt: skip


@pytest.mark.slow
@pytest.mark.network
def test_published_gpt2(tmp_path):
    """GPT-2 124M on the published file: 0.2859 and 0.2955 (build-nanogpt's hellaswag.py)."""
    run = run_python(ROOT / "hellaswag.py", "--model", "gpt2", "--json", cwd=tmp_path, timeout=3600)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["count"] == 10042 and math.isclose(result["acc_norm"], 0.2955, abs_tol=0.005)
    assert math.isclose(result["acc"], 0.2859, abs_tol=0.005)
