"""fineweb.py: the contents of shards, and errors for bad input.

Interrupted builds are tested in test_fineweb_interrupted.py, downloads in test_hub.py, conversations in
test_chat.py."""

import base64
import ctypes
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run_python

import fineweb
from lab.cli import UserError
from lab.data import python_docs, sources
from lab.data.manifest import read_manifest, verify_shards
from lab.data.shards import TokenShards
from lab.data.workers import ordered_map

BYTES = ["--tokenizer", "bytes"]
posix = pytest.mark.skipif(os.name != "posix", reason="sends signals")


def documents(count, seed=0, longest=400):
    """Texts of different lengths with characters of one to four bytes."""
    rng = np.random.default_rng(seed)
    words = ["the ", "model ", "reads ", "naïve ", "日本 ", "😀 ", "\n\n", "a ", "token, ", "3.14 "]
    return [f"#{i} " + "".join(rng.choice(words, rng.integers(1, longest))) for i in range(count)]


def write_parquet(path, texts, rows=50):
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [f"id-{i}" * 20 for i in range(len(texts))]
    table = pa.table({"id": ids, "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=rows)
    return path


def plain_stream(texts):
    """The expected tokens, computed by the shortest possible code."""
    full = [t for t in texts if t and t.strip()]
    return np.array([i for t in full for i in [256, *t.encode()]], dtype=np.uint16)


def stream_of(folder):
    return np.concatenate([np.load(folder / e["name"]) for e in read_manifest(folder)["shards"]])


def hashes(folder):
    files = [p for p in folder.iterdir() if p.name != ".lock"]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def command(*args):
    return [sys.executable, str(ROOT / "fineweb.py"), *map(str, args)]


def call(*args, **env):
    """Run the real command in its own process."""
    return run_python(ROOT / "fineweb.py", *args, cwd=ROOT, timeout=120, **env)


def make(*args):
    """Run the same command in this process, with the byte tokenizer."""
    assert fineweb.main([str(a) for a in [*args, *BYTES, "--workers", 0]]) == 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(folder with two parquet files in in/ and their shards in out/, texts, flags)."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = documents(700)
    texts[3], texts[60], texts[450] = "", None, " \n "
    write_parquet(folder / "in" / "000.parquet", texts[:300])
    write_parquet(folder / "in" / "001.parquet", texts[300:])
    args = ["--source", folder / "in", "--shard_tokens", "100k", "--val_tokens", "70000"]
    make(*args, "--out", folder / "out")
    return folder, texts, args


# ---- the shards ----------------------------------------------------------------------------------


def test_tokens_are_all_documents_in_order(corpus):
    folder, texts, _ = corpus
    stream, manifest = plain_stream(texts), read_manifest(folder / "out")
    assert np.array_equal(stream_of(folder / "out"), stream)
    names = [e["name"] for e in manifest["shards"]]
    assert names[:2] == ["in_val_000000.npy", "in_train_000001.npy"]
    whole, rest = divmod(len(stream) - 70_000, 100_000)
    assert [e["tokens"] for e in manifest["shards"]] == [70_000] + [100_000] * whole + [rest]
    about = dict(complete=True, documents=697, tokens=len(stream), vocab_size=257, eot=256)
    assert {key: manifest[key] for key in about} == about
    assert verify_shards(folder / "out") == []


def test_every_format_gives_the_same_tokens(corpus, tmp_path):
    _, texts, _ = corpus
    lines = "".join(json.dumps({"n": i, "text": t}) + "\n" for i, t in enumerate(texts)).encode()
    halves = lines[:5000], lines[5000:]
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    zstd = [pa.compress(half, codec="zstd", asbytes=True) for half in halves]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(zstd))
    for path in sorted(tmp_path.iterdir()):
        make("--source", path, "--out", tmp_path / path.name[0])
        assert np.array_equal(stream_of(tmp_path / path.name[0]), plain_stream(texts)), path.name
        val, train = read_manifest(tmp_path / path.name[0])["shards"]
        share = val["tokens"] / (val["tokens"] + train["tokens"])
        assert 0.03 < share < 0.12, f"about a tenth of a small corpus is for validation: {path}"


def test_other_columns_do_not_enlarge_the_validation_split(tmp_path):
    texts = ["a text of some words, like all of them"] * 300
    rows = [{"text": t, "meta": "x" * 900} for t in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = np.random.default_rng(0).random((300, 200)).tolist()
    pq.write_table(pa.table({"text": texts, "more": numbers}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        make("--source", tmp_path / name, "--out", tmp_path / name[0])
        val, train = read_manifest(tmp_path / name[0])["shards"]
        assert 0 < val["tokens"] < 0.12 * train["tokens"], name


def test_an_empty_first_file_does_not_shrink_the_validation_split(tmp_path):
    """Spark writes such files for its empty partitions."""
    write_parquet(tmp_path / "in" / "part-0.parquet", [])
    write_parquet(tmp_path / "in" / "part-1.parquet", documents(300))
    make("--source", tmp_path / "in", "--out", tmp_path / "out")
    val, train = read_manifest(tmp_path / "out")["shards"]
    assert val["tokens"] > 0.05 * train["tokens"]


def test_shards_of_another_corpus_are_refused(tmp_path):
    """Even if the manifest lists none, as after a kill while the first shard was being extended."""
    out = tmp_path / "o"
    (tmp_path / "a.txt").write_text("word " * 100)
    (tmp_path / "b.txt").write_text("other " * 100)
    make("--source", tmp_path / "a.txt", "--out", out)
    manifest = json.loads((out / "manifest.json").read_text()) | {"shards": [], "complete": False}
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="o has a_train_000001.npy, which is not a shard of b;"):
        make("--source", tmp_path / "b.txt", "--out", out)
    make("--source", tmp_path / "a.txt", "--out", out)


def test_a_text_file_is_one_document_however_long(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 1000)
    text = "line é\n" * 2000 + "x" * 5000 + "日" * 3000
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    make("--source", tmp_path / "in", "--out", tmp_path / "o")
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream([text, "second"]))
    assert read_manifest(tmp_path / "o")["documents"] == 2


def test_tokens_limit_can_be_raised_later(corpus, tmp_path):
    folder, _, args = corpus
    before = None
    for limit in ("130k", "130000", "250k", "270k", "100T"):
        make(*args, "--out", tmp_path, "--tokens", limit)
        wanted = min(fineweb.parse_count("tokens", limit), read_manifest(folder / "out")["tokens"])
        assert read_manifest(tmp_path)["tokens"] == len(stream_of(tmp_path)) == wanted
        assert verify_shards(tmp_path) == [], "complete, too"
        if before is None:  # a trainer reads these shards while more are added
            before = TokenShards(tmp_path, "train", 257)
            first = before.read(0, len(before))
        assert np.array_equal(before.read(0, len(before)), first)
    assert hashes(tmp_path) == hashes(folder / "out")


def test_texts_in_the_output_folder_are_kept(tmp_path, monkeypatch):
    """Without --out, the output folder may be the folder of the texts."""
    monkeypatch.chdir(tmp_path)
    text = Path("data/mine/mine_train_000001.jsonl")
    text.parent.mkdir(parents=True)
    text.write_text((json.dumps({"text": "Once upon a time. " * 20}) + "\n") * 40)
    for _ in range(2):  # the second time the shards exist
        make("--source", "data/mine")
    assert text.exists() and verify_shards("data/mine") == []
    assert fineweb.completed(fineweb.Config()).out == Path("edu_fineweb10B")


def test_shards_without_a_manifest_are_not_overwritten(tmp_path):
    (tmp_path / "edu.txt").write_text("Once.")
    (theirs := tmp_path / "edu_train_000001.npy").write_bytes(b"somebody's")
    with pytest.raises(UserError, match="edu_train_000001.npy but no manifest.* another --out"):
        make("--source", tmp_path / "edu.txt", "--out", tmp_path)
    assert theirs.read_bytes() == b"somebody's"


def test_files_of_a_folder_that_are_not_read_are_listed(tmp_path, capsys):
    names = ["a.txt", "b.txt.bz2", "c.csv", "d.log", "sub/e.docx"]
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in names:
        (tmp_path / "in" / name).write_text("words " * 100)
    make("--source", tmp_path / "in", "--out", tmp_path / "in")  # shards and texts in one folder
    listed = (
        "in: reading 1 text file(s), skipping 4 other(s): b.txt.bz2, c.csv, d.log, sub/e.docx\n"
    )
    assert listed in capsys.readouterr().err
    assert np.array_equal(stream_of(tmp_path / "in"), plain_stream(["words " * 100]))
    (tmp_path / "in" / "f.jsonl").write_text('{"text": "words"}\n' * 90)
    for i in range(18):
        (tmp_path / "in" / f"e{i}.log").touch()
    make("--source", tmp_path / "in", "--out", tmp_path / "o")
    err = capsys.readouterr().err
    assert "1 jsonl file(s), skipping 23 other(s): a.txt, b.txt.bz2, c.csv, d.log, e0.log, " in err
    assert "e7.log and 3 more\n1 of the skipped file(s) could be read, but only one kind" in err
    (tmp_path / "in" / "f.jsonl").write_text('{"text": "words"}\n' * 9)  # fewer bytes than a.txt
    make("--source", tmp_path / "in", "--out", tmp_path / "text")
    assert "here text, which has the most bytes; move the others" in capsys.readouterr().err
    assert np.array_equal(stream_of(tmp_path / "text"), plain_stream(["words " * 100]))
    make("--source", tmp_path / "in" / "a.txt", "--out", tmp_path / "a")
    said = capsys.readouterr()
    assert "skipping" not in said.err and "less than 1 MB of text" in said.out


@pytest.mark.skipif(os.name != "posix", reason="links and FIFOs")
def test_strict_refuses_a_folder_with_files_that_would_be_skipped(tmp_path):
    def run(*more):
        flags = ["--source", "in", "--tokenizer", "bytes", "--strict", *more]
        done = run_python(ROOT / "fineweb.py", *flags, cwd=tmp_path)
        return done.returncode, done.stderr

    (folder := tmp_path / "in").mkdir()
    for name in ("a.txt", "b.md", ".hidden.csv"):
        (folder / name).write_text("words " * 100)
    assert run() == (0, "")
    for name in ("b.txt.bz2", "a.csv", "x.log", "z.jsonl.xz"):
        (folder / name).write_text("words " * 100)
    assert run("--out", "o") == (
        2,
        "fineweb.py: error: in has 4 file(s) besides the 2 text file(s) to read: a.csv, b.txt.bz2, x.log "
        "and 1 more; convert or remove them, or leave out --strict\n",
    )
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "a.txt").write_text("words " * 100)
    for make_special in (
        lambda p: p.symlink_to(tmp_path),
        lambda p: p.symlink_to("gone"),
        os.mkfifo,
    ):
        make_special(folder / "b.txt")
        status, err = run("--out", "o")
        assert status == 2 and re.fullmatch(
            "fineweb.py: error: in/b.txt is a .*; remove it, or leave out --strict\n", err
        )
        (folder / "b.txt").unlink()
    assert run("--source", "builtin", "--out", "o")[0] == 2
    assert not (tmp_path / "o").exists()


def drop_root_override():
    """In a child of root: make permissions count, as they do for other users."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
@pytest.mark.parametrize("name", ["sub", "sub/b.txt"])
def test_unreadable_files_and_folders_are_refused_and_special_files_are_listed(tmp_path, name):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for text in ("a.txt", "sub/b.txt"):
        (tmp_path / "in" / text).write_text("y " * 3000)
    os.mkfifo(tmp_path / "in" / "c.txt")
    (tmp_path / "in" / "d.txt").symlink_to("nothing")
    command = [sys.executable, ROOT / "fineweb.py", "--source", "in", "--tokenizer", "bytes"]
    how = dict(cwd=tmp_path, preexec_fn=drop_root_override, capture_output=True, text=True)
    mode = (tmp_path / "in" / name).stat().st_mode
    (tmp_path / "in" / name).chmod(0)
    done = subprocess.run(command, **how)
    (tmp_path / "in" / name).chmod(mode)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"in/{name} cannot be read: permission denied" in done.stderr, done.stderr
    done = subprocess.run(command, **how)
    assert done.returncode == 0 and "2 documents" in done.stdout, done.stderr
    for special in ("c.txt", "d.txt"):
        assert f"in/{special} is skipped: it is a dangling link, FIFO, socket" in done.stderr


def test_an_unfinished_build_is_named_as_such(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("y " * 3000)
    (tmp_path / "in" / "b.txt").write_bytes(b"caf\xe9")
    args = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "o"), "--val_tokens", "5"]
    with pytest.raises(UserError, match="not UTF-8"):
        fineweb.main([*args, "--tokenizer", "bytes"])
    with pytest.raises(UserError, match="whose build is not finished; run its command again"):
        TokenShards(tmp_path / "o", "train", 257)
    with pytest.raises(UserError, match="not UTF-8"):
        make(*args, "--out", tmp_path / "more", "--shard_tokens", 100)
    (tmp_path / "in" / "b.txt").write_text("café and more")
    with pytest.raises(
        UserError, match="has an unfinished build from other files; .*: b.txt; choose"
    ):
        make(*args, "--out", tmp_path / "more", "--shard_tokens", 100)


@pytest.mark.parametrize("val_tokens", ["5", "5000"])  # with and without a validation shard
def test_a_build_without_training_shards_starts_again_after_files_have_changed(
    tmp_path, val_tokens
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("y " * 2000)
    (tmp_path / "in" / "b.txt").write_bytes(b"caf\xe9 " * 1000)
    args = ["--source", tmp_path / "in", "--out", tmp_path / "o", "--val_tokens", val_tokens]
    with pytest.raises(UserError, match="not UTF-8"):
        make(*args)
    assert (tmp_path / "o" / "in_val_000000.npy").exists() == (val_tokens == "5")
    (tmp_path / "in" / "b.txt").unlink()
    (tmp_path / "in" / "a2.txt").write_text("café " * 1000, encoding="utf-8")
    make(*args)
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(["y " * 2000, "café " * 1000]))
    assert verify_shards(tmp_path / "o") == []


def test_a_refused_tokenizer_is_not_written_and_linked_folders_are_reported(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("y " * 3000)
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    args = ["--source", str(tmp_path / "in"), "--out", str(tmp_path / "o"), "--val_tokens", "5"]
    fineweb.main([*args, "--tokenizer", "bytes"])
    assert "linked is a link to a folder" in capsys.readouterr().err
    with pytest.raises(UserError, match="was built with tokenizer = 'bytes'"):
        fineweb.main([*args, "--tokenizer", "wordpiece"])
    assert not (tmp_path / "o" / "tokenizer.json").exists()


def test_a_changed_source_is_refused_by_what_has_changed(tmp_path):
    (source := tmp_path / "in").mkdir()
    for i in range(9):
        (source / f"{i}.txt").write_text("y " * 500)
    args = ["--source", str(source), "--out", str(tmp_path / "o"), "--val_tokens", "5"]
    fineweb.main([*args, "--tokenizer", "bytes"])
    (source / "7.txt").write_text("z " * 501)
    (source / "8.txt").rename(source / "9.txt")
    with pytest.raises(
        UserError, match=r"other files; new, changed or gone: 7.txt, 8.txt, 9.txt; "
    ):
        fineweb.main([*args, "--tokenizer", "bytes"])
    for i in range(20):
        (source / f"new{i:02}.txt").write_text("x")
    with pytest.raises(UserError, match=r"9.txt, new00.txt, .*, new06.txt and 13 more; choose"):
        fineweb.main([*args, "--tokenizer", "bytes"])


def test_builtin_text_is_the_same_in_every_process(tmp_path, builtin_text, monkeypatch):
    (theirs := tmp_path / "t" / "mine_train_000001.npy").parent.mkdir()
    theirs.write_bytes(b"somebody's")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="mine_train_000001"):
        patch.setattr(python_docs, "python_documents", lambda: ["a", "b"])
        fineweb.build_python_docs(theirs.parent)
    out = builtin_text
    manifest = fineweb.build_python_docs(out)  # which exists
    val, train = (np.load(out / f"builtin_{name}.npy") for name in ("val_000000", "train_000001"))
    assert val[0] == train[0] == 256 and verify_shards(out) == []
    assert len(val) + len(train) == manifest["tokens"] > 500_000
    # two processes with different hash seeds: one builds, the other waits
    words = command("--source", "builtin", "--out", tmp_path / "c")
    env = [os.environ | {"PYTHONHASHSEED": seed} for seed in "78"]
    both = [subprocess.Popen(words, env=e, stdout=subprocess.PIPE, text=True) for e in env]
    for process in both:
        assert f"{manifest['documents']:,} documents" in process.communicate(timeout=120)[0]
    assert hashes(tmp_path / "c") == hashes(out)


def test_built_in_text_with_another_tokenizer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs, "python_documents", lambda: ["some words of text"] * 20)
    fineweb.build_python_docs(tmp_path, "bpe:300")
    fineweb.build_python_docs(tmp_path, "bpe:300")
    with pytest.raises(UserError, match="does not match --tokenizer wordpiece"):
        fineweb.build_python_docs(tmp_path, "wordpiece")


# ---- bad input -----------------------------------------------------------------------------------

LINES = b'{"text": "good"}\n' * 500
GZIP = gzip.compress(os.urandom(50_000).hex().encode())
ZSTD = base64.b64decode(  # two lines in one raw block, and the checksum that `zstd` adds
    "KLUv/QRYwQIAeyJ0ZXh0IjogIms5WnE3WHcyTG00VnQ4UmIxWWM2TnAzSGQ1SnMwR2YifQp7InRleHQiOiAiYUIzZEU1Z0g3aks5"
    "bU4xcFE0c1Q2dlc4eVoweEMydSJ9CjfYaT8="
)
ASKED = b'{"messages": [{"role": "user", "content": "x"}]}\n'
TALK = ASKED.replace(b"}]", b'}, {"role": "assistant", "content": "y"}]')
BAD = {  # file name, content, more arguments, pattern of the error message
    "no such file": ("", b"", "--source nowhere", "nowhere does not exist"),
    "no name": ("", b"", "--source=", "--source  does not exist"),
    "tokenizer": ("a.txt", b"x", "--tokenizer none.json", r"tokenizer=none.json must be gpt2"),
    "no tokenizer": ("a.txt", b"x", "--tokenizer tokenizer.json", "no tokenizer tokenizer.json"),
    "tokenizer of built-in text": ("", b"", "--source builtin --tokenizer x", "tokenizer=x must"),
    "broken parquet": ("a.parquet", b"PAR1 and then", "", r"parquet file a\.parquet is damaged"),
    "a number": (
        "a.jsonl",
        LINES + b'{"text": 5}\n',
        "",
        r"line 501: no text under 'text', but 5;",
    ),
    "not JSON": ("a.jsonl", LINES + b'{"text": \n', "", r"a\.jsonl, line 501: not JSON"),
    "cut gzip": ("a.jsonl.gz", GZIP[: len(GZIP) // 2], "", r"a\.jsonl\.gz is damaged"),
    "another bit in zst": ("a.jsonl.zst", ZSTD.replace(b"k9Zq", b"k9Zp"), "", r"zst is damaged"),
    "unknown ending": ("a.docx", b"x", "", r"nothing to read.*\*\.jsonl"),
    "UTF-16": ("a.txt", "text\n".encode("utf-16-le"), "", r"a\.txt.* NUL.*-f UTF-16 -t UTF-8"),
    "UTF-16 and its mark": ("a.md", "text".encode("utf-16"), "", r"a\.md.* NUL.* must be UTF-8"),
    "UTF-16 lines": ("a.jsonl", LINES.decode().encode("utf-16-le"), "", r"a\.jsonl.* NUL bytes"),
    "NUL in JSON": (
        "a.jsonl",
        LINES + b'{"text": "a\\u0000b"}\n',
        "",
        r"line 501: .* NUL char.*remove",
    ),
    "NUL in a chat": (
        "a.jsonl",
        TALK * 20 + TALK.replace(b"y", b"\\u0000"),
        "",
        r"line 21: .* NUL char",
    ),
    "Latin-1": ("a.txt", b"one\nna\xefve\n", "", r"a\.txt, line 2: byte 0xef is not UTF-8.*iconv"),
    "PDF": ("a.txt", b"%PDF-1.7\n", "", r"a\.txt: is a PDF; convert it to text"),
    "empty file": ("a.jsonl", b'{"text": " "}\n', "", "the files of a contain no text"),
    "role": (
        "a.jsonl",
        ASKED.replace(b"user", b"bot"),
        "",
        r"a\.jsonl, line 1: role 'bot' in a message",
    ),
    "WordPiece": (
        "a.jsonl",
        TALK * 20,
        "--tokenizer wordpiece",
        "learns from texts, but a.jsonl has",
    ),
    "alone": ("a.jsonl", TALK, "", r"a\.jsonl must have a usable conv.* another one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, tmp_path, monkeypatch):
    name, content, more, wanted = BAD[case]
    monkeypatch.chdir(tmp_path)
    if name:
        Path(name).write_bytes(content)
        more = f"--source {name} {more}"
    with pytest.raises(UserError, match=wanted) as error:
        fineweb.main([*BYTES, "--out", "o", "--workers", "0", *more.split()])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("o/*.npy"))
    if name and Path("o").exists():  # a failed build does not affect the next one
        Path("b.jsonl").write_bytes(LINES)
        make("--source", "b.jsonl", "--out", "o")


def test_a_nul_byte_after_the_first_block_is_named_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text\n" * 10**6 + b"\0")
    with pytest.raises(UserError, match=r"a\.txt, line 1000001: contains NUL bytes"):
        make("--source", tmp_path / "a.txt", "--out", tmp_path / "o")


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary(), pa.string_view()])
def test_nul_in_parquet_is_named_with_its_row(tmp_path, type_):
    texts = ["text", None] * 1500
    texts[2500] = "a\0b"
    table = pa.table({"text": pa.array(texts).cast(type_)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1200)
    with pytest.raises(UserError, match=r"a\.parquet, row group 2, row 101: .* NUL .* remove them"):
        make("--source", tmp_path / "a.parquet", "--out", tmp_path / "o")


WRONG = [  # changes to a manifest
    lambda m: m.update(vocab_size=0), lambda m: m.pop("val_tokens"), lambda m: m["shards"].append(1),
    lambda m: m["shards"][0].update(name={}), lambda m: m["shards"][1].update(end=[0, "1", 2]),
]  # fmt: skip


def test_a_malformed_manifest_is_refused(corpus, tmp_path):
    folder, _, args = corpus
    shutil.copytree(folder / "out", tmp_path / "out")
    for wrong in WRONG:
        manifest = read_manifest(folder / "out")
        wrong(manifest)
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="manifest.json is damaged"):
            make(*args, "--out", tmp_path / "out")


def test_a_damaged_parquet_page_is_detected(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", documents(200))
    # one flipped bit in a page that can still be decoded: only the checksum shows it
    plain = dict(compression="none", use_dictionary=False, write_statistics=False)
    table = pa.table({"text": documents(200)})
    pq.write_table(table, path, write_page_checksum=True, **plain)
    path.write_bytes(path.read_bytes().replace(b"model ", b"modal ", 1))
    with pytest.raises(UserError, match=r"a\.parquet, row group 0 is damaged .*CRC"):
        make("--source", path, "--out", tmp_path / "o")


def test_changed_settings_are_refused_and_shards_stay(corpus):
    folder, _, args = corpus
    before = hashes(folder / "out")
    for more, said in {
        "--shard_tokens 5k": "shard_tokens = 100000, but now it is 5000",
        "--val_tokens 5k": "val_tokens",
        f"--source {folder / 'in' / '000.parquet'}": "source = 'in', but now it is '000'",
    }.items():
        with pytest.raises(UserError, match=said):
            make(*args, "--out", folder / "out", *more.split())
    assert hashes(folder / "out") == before


def test_ordered_map_bounds_the_pending_jobs():
    """So memory does not grow with the source."""
    read = []
    units = (read.append(i) or i for i in range(100))
    for done, (unit, result) in enumerate(ordered_map(units, str, int, depth=4)):
        assert unit == result == done and len(read) <= done + 5
    assert done == 99
