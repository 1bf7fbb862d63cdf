"""fineweb.py: what is in the shards, that nothing stops it for good, and that it says what is wrong.

Real commands, real kill -9. Downloads are in test_hub.py.
"""
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import ROOT, run_python

import fineweb
from lab.data import sources
from lab.data.shards import open_shard
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import ShardWriter, different_files, new_manifest, read_manifest, verify

DATA = Path(os.environ.get("GPT2_TEST_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / "corpus").is_dir() or not (DATA / "tiktoken").is_dir(),
                                reason="needs the corpus and GPT-2's tokenizer files: set GPT2_TEST_DATA")
BYTES = ["--tokenizer", "bytes"]
LOCKS = os.name == "posix"  # only there can a folder be locked


def documents(count, seed=0, longest=400):
    """Texts of different lengths with letters of one to four bytes."""
    rng = np.random.default_rng(seed)
    words = ["the ", "model ", "reads ", "naïve ", "日本 ", "😀 ", "\n\n", "a ", "token, ", "3.14 "]
    return ["#" + str(i) + " " + "".join(rng.choice(words, rng.integers(1, longest))) for i in range(count)]


def write_parquet(path, texts, rows=50):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": [f"id-{i}" * 20 for i in range(len(texts))], "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=rows)
    return path


def plain_stream(texts):
    """The tokens that must come out, by the shortest code that can say it."""
    return np.array([i for t in texts if t and t.strip() for i in [256, *t.encode()]], dtype=np.uint16)


def stream_of(folder):
    return np.concatenate([np.load(folder / e["name"]) for e in read_manifest(folder)["shards"]])


def hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.suffix != ".png"}


def command(*args):
    return [sys.executable, str(ROOT / "fineweb.py"), *map(str, args)]


def call(*args, **env):
    return run_python(ROOT / "fineweb.py", *args, cwd=ROOT, timeout=120, **env)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two parquet files with empty documents among the others, and the shards of an undisturbed run."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = documents(700)
    texts[3], texts[60], texts[450] = "", None, " \n "
    write_parquet(folder / "in" / "000.parquet", texts[:300])
    write_parquet(folder / "in" / "001.parquet", texts[300:])
    args = ["--source", folder / "in", *BYTES, "--shard_tokens", "100k", "--val_tokens", "70000"]
    assert fineweb.main([str(a) for a in [*args, "--workers", 0, "--out", folder / "out"]]) == 0
    return folder, texts, args


# ---- the shards ------------------------------------------------------------------------------------------------------


def test_tokens_are_all_documents_in_order(corpus):
    folder, texts, _ = corpus
    stream, manifest = plain_stream(texts), read_manifest(folder / "out")
    assert np.array_equal(stream_of(folder / "out"), stream)
    names = [e["name"] for e in manifest["shards"]]
    assert names[:2] == ["in_val_000000.npy", "in_train_000001.npy"]
    sizes = [e["tokens"] for e in manifest["shards"]]
    assert sizes == [70_000] + [100_000] * ((len(stream) - 70_000) // 100_000) + [(len(stream) - 70_000) % 100_000]
    assert manifest["complete"] and manifest["empty"] == 3 and manifest["documents"] == 697
    assert manifest["tokens"] == len(stream) and manifest["text_bytes"] == len(stream) - 697
    assert sum(e["documents"] for e in manifest["shards"]) == 697 == sum(manifest["lengths"])
    assert (manifest["vocab_size"], manifest["eot"], manifest["tokenizer"]) == (257, 256, "bytes")
    for entry in manifest["shards"]:
        path = folder / "out" / entry["name"]
        assert open_shard(path).dtype == np.uint16
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert verify(folder / "out") == []
    assert (folder / "out" / "documents.png").stat().st_size > 10_000


def test_same_bytes_from_real_processes(corpus, tmp_path):
    """Spawned workers, whatever their number; the summary says what was made."""
    folder, _, args = corpus
    got = call(*args, "--workers", 3, "--out", tmp_path / "o")
    assert got.returncode == 0, got.stderr
    assert hashes(tmp_path / "o") == hashes(folder / "out")
    assert "697 documents" in got.stdout and "3 empty" in got.stdout and "GB are free" in got.stdout


def test_every_format_gives_the_same_tokens(corpus, tmp_path):
    folder, texts, _ = corpus
    lines = "".join(json.dumps({"n": i, "text": t}) + "\n" for i, t in enumerate(texts)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:5000]) + gzip.compress(lines[5000:]))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines[:5000]) + zstandard.compress(lines[5000:]))
    for path in sorted(tmp_path.iterdir()):
        out = tmp_path / path.name[0]
        assert fineweb.main(["--source", str(path), *BYTES, "--out", str(out), "--workers", "0"]) == 0
        assert np.array_equal(stream_of(out), plain_stream(texts)), path.name


def test_a_text_file_is_one_document_however_long(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 1000)
    text = "line é\n" * 2000 + "x" * 5000 + "日" * 3000
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    assert fineweb.main(["--source", str(tmp_path / "in"), *BYTES, "--out", str(tmp_path / "o"), "--workers", "0"]) == 0
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream([text, "second"]))
    assert read_manifest(tmp_path / "o")["documents"] == 2


def test_tokens_stops_early_and_goes_on_later(corpus, tmp_path):
    folder, _, args = corpus
    sizes = []
    for limit in ("130k", "130000", "250k", "100T"):
        assert fineweb.main([str(a) for a in [*args, "--workers", 0, "--out", tmp_path, "--tokens", limit]]) == 0
        manifest = read_manifest(tmp_path)
        sizes.append(manifest["tokens"])
        assert manifest["complete"] and verify(tmp_path) == [] and len(stream_of(tmp_path)) == sizes[-1]
        assert sum(e["documents"] for e in manifest["shards"]) == manifest["documents"] == sum(manifest["lengths"])
    assert sizes[:3] == [130_000, 130_000, 250_000]
    assert hashes(tmp_path) == hashes(folder / "out")


def test_fewer_tokens_than_there_are_is_refused(corpus, tmp_path, capsys):
    """Where a larger --tokens was stopped; less than that would have to take something away."""
    _, _, args = corpus
    args = [str(a) for a in [*args, "--workers", 0, "--out", tmp_path, "--tokens"]]
    assert fineweb.main([*args, "250k"]) == 0
    (tmp_path / "manifest.json").write_text(json.dumps(read_manifest(tmp_path) | {"complete": False}))
    before, there = hashes(tmp_path), read_manifest(tmp_path)["resume"]["tokens"]
    assert fineweb.main([*args, "130k"]) == 2 and hashes(tmp_path) == before
    assert re.search(rf"--tokens 130k is less than the {there:,} .* or choose another --out", capsys.readouterr().err)
    assert fineweb.main([*args, "250k"]) == 0 and len(stream_of(tmp_path)) == 250_000


@pytest.mark.skipif(os.name != "posix", reason="elsewhere an open file cannot be replaced")
def test_a_trainer_may_read_what_grows(tmp_path):
    """The last shard is open in another process while a larger --tokens lets it grow."""
    code = """if True:
        import sys
        import numpy as np
        from lab.data.tokenizers import get_tokenizer
        from lab.data.writer import ShardWriter, new_manifest, read_manifest
        first = ShardWriter(sys.argv[1], new_manifest("x", get_tokenizer("bytes"), {}, 100_000, 70))
        first.append(np.ones(70, np.uint16))
        first.note()
        first.append(np.full(90_000, 7, np.uint16))
        first.complete()
        there = np.load(f"{sys.argv[1]}/x_train_000001.npy", mmap_mode="r")
        second = ShardWriter(sys.argv[1], read_manifest(first.dir))
        assert (np.array(there) == 7).all() and len(there) == 90_000
        second.append(np.full(95_000, 8, np.uint16))
        second.complete()
        assert (np.array(there) == 7).all()
        assert len(np.load(f"{sys.argv[1]}/x_train_000001.npy")) == 95_000
    """
    got = run_python("-c", code, tmp_path / "o", cwd=ROOT)
    assert got.returncode == 0, (got.returncode, got.stderr)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_texts_in_the_data_folder_stay(kind, tmp_path):
    """The folder that a command without --out chooses is that of the texts."""
    if kind == "chat":
        line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    else:
        line = {"text": "Once upon a time. " * 20}
    source = tmp_path / "data" / "mine"
    source.mkdir(parents=True)
    (source / "chat_2024_01.jsonl").write_text((json.dumps(line) + "\n") * 40)
    before = hashes(source)
    args = [ROOT / "fineweb.py", "--source", "data/mine", *BYTES, "--workers", 0, "--context", 64]
    for _ in range(2):  # the second time it is there already
        got = run_python(*args, cwd=tmp_path)
        assert got.returncode == 0, got.stderr
    assert before.items() <= hashes(source).items() and verify(source) == []


def test_what_could_not_begin_leaves_no_folder(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    args = ["--source", str(tmp_path / "a.jsonl"), *BYTES, "--workers", "0", "--out", str(tmp_path / "o")]
    assert fineweb.main([*args, "--text_column", "body"]) == 2
    left = sorted(p.name for p in tmp_path.glob("o/*"))
    assert not (tmp_path / "o").exists() or left, "an empty folder"
    assert fineweb.main(["--source", str(tmp_path / "nothing"), "--out", str(tmp_path / "o2"), *BYTES]) == 2
    got = call("--dataset", "me/texts", *BYTES, "--out", tmp_path / "o3", HF_ENDPOINT="http://127.0.0.1:9", FINEWEB_TRIES="1")
    assert got.returncode == 2 and not (tmp_path / "o2").exists() and not (tmp_path / "o3").exists(), got.stderr


def test_of_unfinished_data_nothing_is_to_be_deleted(corpus, tmp_path):
    _, _, args = corpus
    assert fineweb.main([str(a) for a in [*args, "--workers", 0, "--out", tmp_path / "o"]]) == 0
    manifest = read_manifest(tmp_path / "o")
    manifest |= {"complete": False, "shards": manifest["shards"][:2]}
    (tmp_path / "o" / "manifest.json").write_text(json.dumps(manifest))
    got = call("--verify", "--out", tmp_path / "o")
    assert got.returncode == 1 and got.stdout.count("\n") == 1 and "run the command that began it again" in got.stdout
    assert "delete" not in got.stderr


def test_what_lies_beside_the_shards_stays_when_they_grow(corpus, tmp_path):
    _, _, args = corpus
    args = [str(a) for a in [*args, "--workers", 0, "--out", tmp_path, "--tokens"]]
    assert fineweb.main([*args, "130k"]) == 0
    for path in list(tmp_path.glob("*.npy")):
        path.with_suffix(".mask").touch()
    (tmp_path / "in_train_000009.bin").touch()
    assert fineweb.main([*args, "250k"]) == 0
    assert len(list(tmp_path.glob("*.mask"))) == 2 and (tmp_path / "in_train_000009.bin").exists()


def test_a_small_corpus_that_is_killed_while_it_grows_keeps_its_validation_shard(corpus, tmp_path):
    """Its first note is at 0 tokens, as all of it came from one row group."""
    folder, _, _ = corpus
    args = ["--source", str(folder / "in"), *BYTES, "--workers", "0", "--out", str(tmp_path), "--tokens"]
    assert fineweb.main([*args, "3k"]) == 0
    manifest = read_manifest(tmp_path)
    assert not manifest["resume"]["tokens"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"complete": False, "shards": []}))  # killed at its beginning
    assert fineweb.main([*args, "9k"]) == 0
    assert read_manifest(tmp_path)["val_tokens"] == manifest["val_tokens"] == 300


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_shards_of_others_stay(kind, tmp_path, capsys):
    """No manifest says that they are ours."""
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    source, out = tmp_path / "edu.jsonl", tmp_path / "o"
    source.write_text(json.dumps(line if kind == "chat" else {"text": "Once."}) + "\n")
    out.mkdir()
    for i in range(3):
        (out / f"{'chat' if kind == 'chat' else 'edu'}_train_{i:06d}.npy").write_bytes(b"somebody's")
    before = hashes(out)
    assert fineweb.main(["--source", str(source), *BYTES, "--workers", "0", "--context", "64", "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert "and 2 more but no manifest.json of theirs" in err and "choose another --out" in err and hashes(out) == before
    empty = tmp_path / "empty.txt"
    empty.write_text(" ")
    assert fineweb.main(["--source", str(empty), *BYTES, "--workers", "0", "--out", str(out)]) == 2
    assert fineweb.main(["--source", str(source), *BYTES, "--workers", "0", "--context", "64", "--out", str(out)]) == 2
    assert before.items() <= hashes(out).items(), "a manifest of something else says nothing of them"
    (out / "manifest.json").unlink(missing_ok=True)
    got = call("--verify", "--out", out)
    assert got.returncode == 1 and "delete" not in got.stderr + got.stdout


def test_nothing_is_done_twice(corpus, capsys):
    folder, _, args = corpus
    before = {p: p.stat().st_mtime_ns for p in (folder / "out").glob("*.npy")} | {0: hashes(folder / "out")}
    assert fineweb.main([str(a) for a in [*args, "--out", folder / "out"]]) == 0
    assert {p: p.stat().st_mtime_ns for p in (folder / "out").glob("*.npy")} | {0: hashes(folder / "out")} == before
    assert "already there" in capsys.readouterr().out


def test_small_corpus_keeps_a_tenth_for_validation(corpus, tmp_path):
    folder, texts, _ = corpus
    assert fineweb.main(["--source", str(folder / "in"), *BYTES, "--out", str(tmp_path), "--workers", "0"]) == 0
    val, train = read_manifest(tmp_path)["shards"]
    assert 0.05 < val["tokens"] / (val["tokens"] + train["tokens"]) < 0.2


@needs_data
def test_gpt2_shards_of_the_real_corpus(tmp_path):
    import tiktoken
    source = DATA / "corpus" / "000_00003.parquet"
    got = call("--source", source, "--tokens", "300k", "--out", tmp_path, TIKTOKEN_CACHE_DIR=str(DATA / "tiktoken"))
    assert got.returncode == 0, got.stderr
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken"))
    encode, texts, plain = tiktoken.get_encoding("gpt2").encode_ordinary, pq.read_table(source)["text"].to_pylist(), []
    while len(plain) < 300_000:
        plain += [50256, *encode(texts.pop(0))]
    assert stream_of(tmp_path).tolist() == plain[:300_000]


# ---- the built-in text -----------------------------------------------------------------------------------------------


def test_builtin(tmp_path, capsys):
    out = tmp_path / "b"
    manifest = fineweb.build_builtin(out)
    assert [e["name"] for e in manifest["shards"]] == ["builtin_val_000000.npy", "builtin_train_000001.npy"]
    val, train = (np.load(out / e["name"]) for e in manifest["shards"])
    assert val[0] == train[0] == 256 and verify(out) == []
    assert (val == 256).sum() == manifest["documents"] // 10
    assert len(val) + len(train) == manifest["tokens"] == manifest["text_bytes"] + manifest["documents"] > 500_000
    text = get_tokenizer("bytes").decode(train)
    assert "class definition" in text.lower() and "Return" in text
    # Validation is like the rest: a model of single letters fitted to one fits the other about as well.
    p, q = (np.bincount(x, minlength=257) / len(x) for x in (val, train))
    assert (p * np.log((p + 1e-9) / (q + 1e-9))).sum() < 0.05
    before = hashes(out), (out / "manifest.json").stat().st_mtime_ns
    assert fineweb.build_builtin(out) == manifest
    assert (hashes(out), (out / "manifest.json").stat().st_mtime_ns) == before
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="tokenizer"):
        fineweb.build_builtin(out, "gpt2")
    # Other processes, other hash seeds, shards cut short before: the same bytes again, made by one while the other waits.
    (out / "builtin_train_000001.npy").write_bytes(b"cut")
    both = [subprocess.Popen(command("--source", "builtin", *BYTES, "--out", out), env={**os.environ, "PYTHONHASHSEED": seed},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for seed in "78"]
    said = "".join(process.communicate(timeout=120)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0] and hashes(out) == before[0]
    assert said.count(f"{manifest['documents']:,} documents") == 1 == said.count("already there") or not LOCKS


# ---- what stops it -----------------------------------------------------------------------------------------------------


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def works(pid):
    """True while this process of fineweb.py is there and no zombie."""
    try:
        about = Path(f"/proc/{pid}")
        return "spawn_main" in (about / "cmdline").read_text() and (about / "stat").read_text().split()[2] != "Z"
    except OSError:  # it ended meanwhile
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
def test_kill_9_at_any_moment(tmp_path):
    """Killed again and again, it ends with the bytes of an undisturbed run; no half shard, no orphan is left."""
    texts = documents(2500, seed=1)
    write_parquet(tmp_path / "in.parquet", texts, rows=10)
    args = ["--source", tmp_path / "in.parquet", *BYTES, "--shard_tokens", "300k", "--note_every", 0]
    assert fineweb.main([str(a) for a in [*args, "--workers", 0, "--out", tmp_path / "whole"]]) == 0
    out, kills, seen, orphans = tmp_path / "killed", 0, 0, []
    for attempt in range(40):
        process = subprocess.Popen(command(*args, "--workers", attempt % 2 * 2, "--out", out),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            size = 0
            with contextlib.suppress(FileNotFoundError):  # a file gets its name just now; the next look will see it
                size = sum(p.stat().st_size for p in out.glob("*.npy*"))
            if size > seen + 500_000 + 100_003 * attempt and kills < 4:
                orphans += children(process.pid)
                process.send_signal(signal.SIGKILL)
                kills, seen = kills + 1, size
                break
            time.sleep(0.002)
        if process.wait() == 0:
            break
        for path in out.glob("*.npy"):  # under its name a shard is whole
            assert len(open_shard(path)) in (300_000, read_manifest(out)["val_tokens"])
    assert kills >= 3 and process.returncode == 0
    assert hashes(out) == hashes(tmp_path / "whole")
    assert np.array_equal(stream_of(out), plain_stream(texts))
    deadline = time.time() + 10
    while orphans and time.time() < deadline:
        orphans = [pid for pid in orphans if works(pid)]
        time.sleep(0.05)
    assert not orphans


def begin(args, out):
    """fineweb.py in a process, once it has noted in the manifest that there is something to go on with."""
    process = subprocess.Popen(command(*args, "--out", out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    while not (read_manifest(out) or {"resume": {}})["resume"].get("tokens"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


@pytest.mark.skipif(not LOCKS, reason="folders cannot be locked here")
def test_of_two_runs_into_one_folder_the_second_is_refused(tmp_path):
    """As long as the first lives, even if it is held up; after kill -9 of it the next goes on and ends with the same bytes."""
    write_parquet(tmp_path / "in.parquet", documents(2500), rows=10)
    args = ["--source", tmp_path / "in.parquet", *BYTES, "--workers", 1, "--note_every", 0]
    first = begin(args, tmp_path / "o")
    first.send_signal(signal.SIGSTOP)
    os.waitpid(first.pid, os.WUNTRACED)  # until it stands still
    before, got, after = hashes(tmp_path / "o"), call(*args, "--out", tmp_path / "o"), hashes(tmp_path / "o")
    verified = call("--verify", "--out", tmp_path / "o").stdout
    first.kill()
    assert first.wait(timeout=60) == -signal.SIGKILL
    assert (got.returncode, got.stdout) == (2, "") and got.stderr.count("\n") == 1
    assert re.fullmatch(rf"fineweb.py: error: another fineweb.py is writing {tmp_path / 'o'},.*--out\n", got.stderr)
    assert before == after and "not finished" in verified
    got = call(*args, "--out", tmp_path / "o")
    assert got.returncode == 0 and "going on after" in got.stdout, got.stderr
    first.communicate()
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(documents(2500)))


@pytest.mark.parametrize("after_note", [0, 30, 100, 101, 250, 1000])
def test_what_came_after_the_last_note_is_written_again(tmp_path, after_note):
    """Stopped just after `after_note` tokens more, even with shards that got their names meanwhile."""
    tokens = np.arange(1234, dtype=np.uint16) % 257

    def writer(folder):
        manifest = read_manifest(folder) or new_manifest("x", get_tokenizer("bytes"), {}, 100, 70)
        return ShardWriter(folder, manifest)

    whole = writer(tmp_path / "whole")
    whole.append(tokens)
    whole.note()
    whole.complete()
    first = writer(tmp_path / "cut")
    first.append(tokens[:200])
    first.note()
    first.append(tokens[200:200 + after_note])
    first.file.close()  # and gone
    second = writer(tmp_path / "cut")
    second.append(tokens[200:])
    second.note()
    second.complete()
    assert hashes(tmp_path / "cut") == hashes(tmp_path / "whole")
    assert np.array_equal(stream_of(tmp_path / "cut"), tokens)


def test_a_shorter_end_leaves_nothing_behind(tmp_path):
    """More was written before it stopped than is wanted now."""
    first = ShardWriter(tmp_path, new_manifest("x", get_tokenizer("bytes"), {}, 100, 70))
    first.append(np.ones(10, np.uint16))
    first.note()
    first.append(np.ones(60, np.uint16))
    first.file.close()
    second = ShardWriter(tmp_path, read_manifest(tmp_path))
    second.append(np.zeros(10, np.uint16))
    second.complete()
    assert verify(tmp_path) == [] and (tmp_path / "x_val_000000.npy").stat().st_size == 128 + 2 * 20


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a process group")
def test_ctrl_c_is_no_traceback(tmp_path):
    """Ctrl-C reaches the workers as well. What was done is noted, however seldom notes are."""
    texts = documents(3000)
    write_parquet(tmp_path / "in.parquet", texts, rows=10)
    args = ["--source", tmp_path / "in.parquet", *BYTES, "--workers", 2, "--note_every", 1000]
    process = subprocess.Popen(command(*args, "--out", tmp_path / "o"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)
    while not any(path.stat().st_size > 100_000 for path in tmp_path.glob("o/*.part")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "goes on where it was" in err and "Traceback" not in err
    assert 0 < read_manifest(tmp_path / "o")["resume"]["documents"] < 3000
    again = call(*args, "--out", tmp_path / "o")
    assert again.returncode == 0 and "going on after" in again.stdout + again.stderr
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(texts))


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a process group")
def test_ctrl_c_while_the_workers_start_is_no_traceback(tmp_path):
    write_parquet(tmp_path / "in.parquet", documents(300), rows=10)
    words = command("--source", tmp_path / "in.parquet", *BYTES, "--workers", 2, "--out", tmp_path / "o")
    for seconds in (0.3, 0.5, 0.7, 0.9):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 30
        while not (tmp_path / "o" / "manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # until then it imports, and has no workers
        time.sleep(seconds - 0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode in (0, 130) and "Traceback" not in err, err
        shutil.rmtree(tmp_path / "o")


def test_interrupts_wait_for_the_body():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with fineweb.interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            done.append(True)
    assert done and signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("before, now, said", [
    ([["a", 1], ["b", 2]], [["a", 3], ["b", 2]], ("2 files", "2 files, changed: a")),
    ([["a", 1, "x"]], [["a", 1, "y"], ["b", 2, "z"]], ("1 file", "2 files (new: b), changed: a")),
    ([["a", 1], ["b", 2]], [["b", 2], ["a", 1]], None),
    (3, 4, None),
])  # fmt: skip
def test_sources_are_told_apart_in_a_few_words(before, now, said):
    before, now = ({"kind": "local", "files": files} for files in (before, now))
    assert different_files(before, now) == (said or (repr(before), repr(now)))


def test_a_source_that_has_grown_says_by_what(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(f"text number {i}")
    args = ["--source", str(folder), *BYTES, "--workers", "0", "--out", str(tmp_path / "o")]
    assert fineweb.main(args) == 0
    for name in ("new.txt", "new2.txt"):
        (folder / name).write_text("more")
    (folder / "07.txt").unlink()
    assert fineweb.main(args) == 2
    err = capsys.readouterr().err
    assert "source = 30 files (gone: 07.txt), now it is 31 files (new: new.txt, new2.txt):" in err
    assert err.count(".txt") == 3, "not the whole list"


# ---- bad input ---------------------------------------------------------------------------------------------------------


def truncated(data):
    return data[:len(data) * 2 // 3]


LINES = b'{"text": "good"}\n' * 500
NOISE = b"".join(b'{"text": "%s"}\n' % os.urandom(50).hex().encode() for _ in range(500))
BAD = {  # name of the file, its content, more arguments, what the sentence must hold
    "no such file": (None, None, ["--source", "nowhere"], "nowhere does not exist"),
    "broken parquet": ("a.parquet", b"PAR1 and then nothing", [], r"a\.parquet is no readable parquet"),
    "no text column": ("a.jsonl", b'{"body": "x", "title": "y"}\n', [], r"line 1: no text under 'text'.*body, title"),
    "text is a number": ("a.jsonl", LINES + b'{"text": 5}\n', [], r"line 501: no text"),
    "not JSON": ("a.jsonl", LINES + b'{"text": \n', [], r"line 501: not JSON"),
    "a list": ("a.json", b'[{"text": "x"}]', [], r"line 1: a JSON list"),
    "not UTF-8": ("a.jsonl", LINES + b'{"text": "caf\xe9"}\n', [], r"line 501: not UTF-8"),
    "text not UTF-8": ("a.txt", b"one\ntwo\ncaf\xe9\n", [], r"a\.txt, line 3: not UTF-8"),
    "cut gzip": ("a.jsonl.gz", truncated(gzip.compress(NOISE)), [], r"a\.jsonl\.gz cannot be unpacked"),
    "cut zstd": ("a.jsonl.zst", truncated(zstandard.compress(NOISE)), [], r"a\.jsonl\.zst cannot be unpacked"),
    "no gzip": ("a.jsonl.gz", LINES, [], r"cannot be unpacked"),
    "unknown ending": ("a.docx", b"x", [], r"nothing to read.*\*\.jsonl"),
    "nothing in it": ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', [], r"no text: 2 documents"),
    "empty file": ("a.jsonl", b"", [], r"no text: 0 documents"),
    "builtin in part": ("", b"", ["--source", "builtin", "--tokens", "1k"], r"--tokens does nothing for --source builtin"),
    "hub's name": ("a.jsonl", LINES, ["--name", "sample-100BT"], r"--name does nothing for --source a\.jsonl, as it is about"),
    "hub's data set": ("a.jsonl", LINES, ["--dataset", "x/y"], r"--dataset does nothing for --source a\.jsonl"),
    "hub's split": ("a.jsonl", LINES, ["--split", "test"], r"--split does nothing for --source a\.jsonl.*; leave it out"),
    "hub's revision": ("a.jsonl", LINES, ["--revision", "v2"], r"--revision does nothing for --source a\.jsonl"),
    "no number": ("a.jsonl", LINES, ["--tokens", "many"], r"--tokens many.*500M"),
    "no context": ("a.jsonl", LINES, ["--context", "0"], "--context 0: wanted are 2 tokens or more"),
    "no note": ("a.jsonl", LINES, ["--note_every", "-1"], r"--note_every -1\.0: wanted are seconds, 0 or more"),
    "out below a file": ("a.jsonl", LINES, ["--out", "a.jsonl/x"], r"a\.jsonl/x cannot be read or written \(Not a directory\)"),
    "workers": ("a.jsonl", LINES, ["--workers", "-2"], r"--workers -2: wanted is"),
    "zero": ("a.jsonl", LINES, ["--shard_tokens", "0"], r"--shard_tokens 0"),
    "unknown role": ("a.jsonl", b'{"messages": [{"role": "robot", "content": "x"}]}\n', [], r"line 1: unknown role 'robot'"),
    "no answers": ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}\n', [], r"no conversation.*1 without"),
    "no messages": ("a.jsonl", LINES, ["--chat"], r"line 1: no conversation"),
    "out is a file": ("a.jsonl", LINES, ["--out", "a.jsonl"], r"out=a\.jsonl is a file"),
    "content no text": ("a.jsonl", b'{"messages": [{"role": "user", "content": 3}]}\n', [], r"content of a message is int"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, tmp_path, capsys, monkeypatch):
    name, content, more, wanted = BAD[case]
    monkeypatch.chdir(tmp_path)
    if name:
        Path(name).write_bytes(content)
        more = ["--source", name, *more]
    assert fineweb.main([*BYTES, "--out", "o", "--workers", "0", *more]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fineweb.py: ")]
    assert len(err) == 1 and re.search(wanted, err[0]), err
    assert not list(tmp_path.glob("o/*.npy"))


def test_bad_parquet(tmp_path, capsys):
    path = write_parquet(tmp_path / "a.parquet", documents(200))

    def error(*more, source=path):
        assert fineweb.main(["--source", str(source), *BYTES, "--out", str(tmp_path / "o"), *more]) == 2
        return capsys.readouterr().err

    assert "--text_column is one of id, text" in error("--text_column", "body", "--workers", "0")
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"fine", b"caf\xe9"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "u.parquet")
    assert re.search(r"u\.parquet, row group 0: text that is not UTF-8", error("--workers", "1", source=tmp_path / "u.parquet"))
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "n.parquet")
    assert "holds int64" in error("--workers", "0", source=tmp_path / "n.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2:len(data) // 2 + 200] = b"\0" * 200
    (tmp_path / "d.parquet").write_bytes(data)
    assert re.search(r"d\.parquet, row group \d: broken data", error("--workers", "0", source=tmp_path / "d.parquet"))


def test_other_settings_are_refused_and_nothing_is_lost(corpus, capsys, tmp_path):
    folder, _, args = corpus
    before = hashes(folder / "out")
    args = [str(a) for a in args] + ["--out", str(folder / "out"), "--workers", "0"]
    for more, wanted in ((["--tokenizer", "gpt2"], "tokenizer = 'bytes', now it is 'gpt2'"),
                         (["--shard_tokens", "5k"], "shard_tokens"), (["--val_tokens", "5k"], "val_tokens"),
                         (["--source", str(folder / "in" / "000.parquet")], "data = 'in', now it is '000'")):
        assert fineweb.main([*args, *more]) == 2
        assert wanted in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{")
    assert fineweb.main([*args, "--out", str(tmp_path)]) == 2
    assert "not a manifest of format 1" in capsys.readouterr().err
    assert hashes(folder / "out") == before
    got = call("--sauce", "x")
    assert got.returncode == 2 and "--source" in got.stderr
    with pytest.raises(ValueError, match="larger disk"):
        fineweb.check_disk(tmp_path / "not" / "yet", 10**18, lambda line: None)


def test_verify_names_what_is_broken(corpus, tmp_path):
    folder, _, args = corpus
    assert fineweb.main([str(a) for a in [*args, "--workers", 0, "--out", tmp_path]]) == 0
    flipped, cut, gone = (tmp_path / f"in_train_{i:06d}.npy" for i in (1, 2, 3))
    data = bytearray(flipped.read_bytes())
    data[5000] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-2])
    gone.unlink()
    np.save(tmp_path / "in_train_000099.npy", np.zeros(3, np.uint16))
    got = call("--verify", "--out", tmp_path)
    assert got.returncode == 1
    assert [re.search(r"_(\d+)\.npy (\w+ \w+)", line).groups() for line in got.stdout.splitlines()] == [
        ("000001", "was changed"), ("000002", "has 200"), ("000003", "is missing"), ("000099", "is not")]
    assert [f"or delete {tmp_path} and make it again" in line for line in got.stdout.splitlines()] == [True, True, True, False]
    nowhere = call("--verify", "--out", tmp_path / "nowhere")
    assert nowhere.returncode == 2 and "is not there, so there is nothing to verify" in nowhere.stderr
    (tmp_path / "empty").mkdir()
    (tmp_path / "log" / "a_run").mkdir(parents=True)
    (tmp_path / "log" / "a_run" / "model_000001.pt").touch()
    for out in ("empty", "log"):  # the wrong folder: nothing in it is to be deleted
        got = call("--verify", "--out", tmp_path / out)
        assert got.returncode == 2 and "holds no shards" in got.stderr and "delete" not in got.stderr + got.stdout


def test_import_is_silent(tmp_path):
    got = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fineweb, chat"],
                         cwd=tmp_path, capture_output=True, text=True)
    assert (got.returncode, got.stdout, got.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


# ---- engines and speed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_with_a_killed_worker(tmp_path):
    """A real cluster of two workers, one of which goes away with its node in the middle: the same bytes."""
    pytest.importorskip("ray", reason="Ray is optional: pip install ray")
    texts = documents(8000, seed=2, longest=2000)
    write_parquet(tmp_path / "in.parquet", texts, rows=10)
    args = ["--source", tmp_path / "in.parquet", *BYTES, "--shard_tokens", "3M", "--note_every", 0]
    assert fineweb.main([str(a) for a in [*args, "--workers", 0, "--out", tmp_path / "whole"]]) == 0
    script = """if True:
        import json, subprocess, sys, time, pathlib, os
        from ray.cluster_utils import Cluster
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        out = pathlib.Path(sys.argv[1])
        run = subprocess.Popen(sys.argv[2:], env={**os.environ, "RAY_ADDRESS": cluster.address})
        manifest = out / "manifest.json"
        while run.poll() is None:
            if nodes and manifest.exists() and json.loads(manifest.read_bytes())["resume"]["tokens"] > 500_000:
                cluster.remove_node(nodes[0], allow_graceful=False)
                nodes = []
                print("killed", json.loads(manifest.read_bytes())["resume"]["tokens"])
            time.sleep(0.01)
        cluster.shutdown()
        sys.exit(run.returncode)
    """
    got = subprocess.run([sys.executable, "-c", script, tmp_path / "ray",
                          *command(*args, "--engine", "ray", "--out", tmp_path / "ray")],
                         capture_output=True, text=True, timeout=300)
    assert got.returncode == 0, got.stderr[-3000:]
    killed_at = int(re.search(r"killed (\d+)", got.stdout)[1])
    assert killed_at < 0.9 * len(plain_stream(texts))
    assert hashes(tmp_path / "ray") == hashes(tmp_path / "whole")


@pytest.mark.slow
@needs_data
def test_bench_counts_tokens_and_costs():
    got = subprocess.run([sys.executable, ROOT / "bench" / "tokenize.py", DATA / "corpus", "--json", "--rounds", "1"],
                         capture_output=True, text=True, env={**os.environ, "TIKTOKEN_CACHE_DIR": str(DATA / "tiktoken")})
    assert got.returncode == 0, got.stderr
    result = json.loads(got.stdout)
    assert result["tokens"] == 3 * 28_306_552
    for row in result["costs"]:
        assert row["hours"] * 3600 * row["cores"] * result["tok_per_s_per_core"]["ours"] == pytest.approx(row["tokens"])
        assert row["disk_gb"] == row["tokens"] * 2 / 1e9


def test_bench_names_what_is_not_there(tmp_path):
    got = run_python(ROOT / "bench" / "tokenize.py", "nosuch", cwd=tmp_path)
    said = "bench/tokenize.py: error: nosuch does not exist; name a file or folder of parquet\n"
    assert (got.returncode, got.stderr) == (2, said)


def test_bench_does_not_hide_the_standard_library(tmp_path):
    """bench/tokenize.py has the name of a module that torch imports: a neighbour's `import tokenize` gets the right one."""
    (tmp_path / "tokenize.py").write_text((ROOT / "bench" / "tokenize.py").read_text())
    (tmp_path / "neighbour.py").write_text("import inspect, tokenize; print(tokenize.generate_tokens.__name__)")
    got = subprocess.run([sys.executable, tmp_path / "neighbour.py"], capture_output=True, text=True)
    assert got.stdout == "generate_tokens\n", got.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_memory_does_not_grow_with_the_source(tmp_path):
    """400 MB of text in row groups of 40 MB: all processes together stay under 2 GB."""
    text = "".join(documents(3000, longest=2000))[:4_000_000]
    pq.write_table(pa.table({"text": [text] * 100}), tmp_path / "in.parquet", row_group_size=10, use_dictionary=False)
    process = subprocess.Popen(command("--source", tmp_path / "in.parquet", *BYTES, "--out", tmp_path / "o", "--workers", 2))
    peak = 0
    while process.poll() is None:
        total = 0
        with contextlib.suppress(OSError):
            for pid in [process.pid, *children(process.pid)]:
                found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                total += int(found[1]) if found else 0
        peak = max(peak, total)
        time.sleep(0.02)
    print(f"peak {peak / 1024:.0f} MiB")
    assert process.returncode == 0 and peak < 2_000_000


def test_a_folder_of_several_kinds_says_what_is_left_out(tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").write_text(json.dumps({"text": "read me " * 50}) + "\n")
    (tmp_path / "mixed" / "b.txt").write_text("not me " * 50)
    done = run_python(ROOT / "fineweb.py", "--source", "mixed", *BYTES, "--workers", 0, cwd=tmp_path)
    assert "1 jsonl files are read; of another kind, and left out: 1 (b.txt)" in done.stderr
