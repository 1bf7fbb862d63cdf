"""Tokenizers: the interface, known ids of GPT-2, and fast compared with plain encoding."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT, TINY_RUN, fail, read_run, run_python, succeed
from tokenizers import BertWordPieceTokenizer

from lab.cli import UserError
from lab.data.tokenizers import MARK, get_or_train, get_tokenizer, tokenizer_for_vocab_size
from lab.hf.export import write_gpt2_tokenizer
from lab.registry import load_tokenizer
from train_gpt2 import GPTConfig

TEXTS = ["the theme of the other thesis, don't they?\n\n  12 12 naïve 日本語 🙂\n"] * 30


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    """A tokenizer.json with 290 ids."""
    texts = tmp_path_factory.mktemp("texts")
    return get_or_train(texts, "bpe:290", TEXTS, 0)


@pytest.fixture(params=["bytes", "gpt2", "bpe"])
def tok(request):
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_files")
    if request.param == "bpe":
        return get_tokenizer(request.getfixturevalue("bpe_file"))
    return get_tokenizer(request.param)


def test_contract(tok):
    assert tok.vocab_size == tok.eot + 1 == {"gpt2": 50257, "bytes": 257}.get(tok.name, 290)
    if not tok.name.endswith(".json"):
        assert tokenizer_for_vocab_size(tok.vocab_size) == tok.name
    with pytest.raises(UserError, match="no tokenizer has 300 ids"):
        tokenizer_for_vocab_size(300)
    text = "Hello, I'm a language model, naïve\n\n  and 日本語 <|endoftext|> too"
    ids = tok.encode(text)
    assert tok.eot not in ids and tok.decode(ids) == text
    sizes = tok.token_bytes()
    assert len(sizes) == tok.vocab_size and sizes[tok.eot] == 0 and sizes[: tok.eot].min() == 1
    assert sizes[ids].sum() == len(text.encode())
    assert tok.decode([164]) == "�", "half a character"
    for bad in (tok.vocab_size, 50303, -1):
        with pytest.raises(AssertionError, match=str(bad)):
            tok.decode([0, bad])


@pytest.mark.parametrize("tok", ["bytes", "gpt2"], indirect=True)
def test_known_ids(tok):
    text = "Hello, I'm a language model,"
    gpt2 = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert tok.encode(text) == {"gpt2": gpt2, "bytes": list(text.encode())}[tok.name]


def test_documents_begin_with_end_of_text(tok):
    texts = ["one", "", "two words", "a?b"]
    tokens = tok.encode_documents([*texts[:3], "a\ud800b"])  # a lone surrogate, as JSON can hold
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [i for text in texts for i in [tok.eot, *tok.encode(text)]]
    assert len(tok.encode_documents([])) == 0


def test_fast_encoding_equals_plain_encoding(tok):
    """On random texts of whitespace, letters, digits, symbols, control characters and the mark."""
    rng = random.Random(0)
    alphabet = list(
        " \n\t\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b\ufeff"
        "abcXYZ'sté1٣²,.!<|>_λж字😀"
    ) + ["  ", "\n\n", " \n", "'ll", "'re", MARK, "<|endoftext|>"]
    texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 40))) for _ in range(20_000)]
    plain = [i for text in texts for i in [tok.eot, *tok.encode(text)]]
    assert tok.encode_documents(texts).tolist() == plain
    assert tok.encode_documents(pa.chunked_array([texts[:7], texts[7:]])).tolist() == plain


def test_missing_files_give_one_sentence(tmp_path):
    """The error says how to fix it. (The proxy refuses all connections.)"""
    (tmp_path / "a.txt").write_text("a text")
    words = "fineweb.py --source a.txt --workers 0 --tokenizer gpt2 --out o".split()
    env = dict(TIKTOKEN_CACHE_DIR=tmp_path, HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="")
    got = run_python(ROOT / words[0], *words[1:], cwd=tmp_path, **env)
    assert got.returncode == 2 and "Traceback" not in got.stderr
    assert "TIKTOKEN_CACHE_DIR" in got.stderr and "--tokenizer bytes to fineweb.py" in got.stderr


# ------------------------------------------------------------------------- custom byte-level BPE


def write_texts(folder, lines=400):
    """A file of sentences with frequent words."""
    rng, words = (
        random.Random(0),
        "the cat sat on a mat and then another cat, naïvely, ate it".split(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = [" ".join(rng.choices(words, k=rng.randint(5, 20))) + "." for _ in range(lines)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
    return folder


def test_bpe_with_gpt2s_merges_gives_gpt2s_ids(tmp_path, gpt2_files):
    write_gpt2_tokenizer(tmp_path, 1024)
    ours, theirs = get_tokenizer(str(tmp_path / "tokenizer.json")), get_tokenizer("gpt2")
    text = "Hello,  I'm\n\n\tnaïve 日本語 🙂 x = [22]\r\n <|endoftext|>"
    assert (ours.vocab_size, ours.eot) == (50257, 50256) and ours.encode(text) == theirs.encode(
        text
    )
    assert np.array_equal(ours.token_bytes(), theirs.token_bytes())


def test_the_most_frequent_pairs_are_merged_first(bpe_file):
    """ "he", then "the"; with thirty more ids, rarer words are one token too."""
    (small := Path(bpe_file).parent / "small").mkdir()
    tok = get_tokenizer(get_or_train(small, "bpe:260", TEXTS, 0))
    assert [tok.bytes_of(i) for i in (256, 257)] == [b"he", b"the"] and tok.vocab_size == 260
    assert len(get_tokenizer(bpe_file).encode("the theme")) < len(tok.encode("the theme")) < 9


def test_the_same_texts_give_the_same_tokenizer_in_every_process(tmp_path):
    write_texts(tmp_path / "texts")
    files = []
    for seed in "78":
        flags = f"--source texts --tokenizer bpe:320 --workers 0 --out {seed}".split()
        done = run_python(ROOT / "fineweb.py", *flags, cwd=tmp_path, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        files.append((tmp_path / seed / "tokenizer.json").read_bytes())
    assert files[0] == files[1] and b'"the"' in files[0]


def test_a_run_with_its_own_tokenizer_from_the_text_to_the_export(tmp_path):
    """Shards, training, samples, BLiMP, export, fine-tuning: all use the tokenizer of the shards."""
    from transformers import AutoTokenizer

    write_texts(tmp_path / "texts")
    flags = "--source texts --tokenizer bpe:320 --workers 0 --out data/own"
    succeed("fineweb.py", *flags.split(), cwd=tmp_path)
    tok = get_tokenizer(str(tmp_path / "data/own/tokenizer.json"))
    val, train = (
        np.load(path) for path in sorted((tmp_path / "data/own").glob("*.npy"), reverse=True)
    )
    lines = [
        json.loads(line)["text"] for line in (tmp_path / "texts/a.jsonl").read_text().splitlines()
    ]
    ids = np.concatenate([val, train])
    assert [tok.decode(part) for part in np.split(ids, np.flatnonzero(ids == tok.eot))[1:]] == [
        f"<|endoftext|>{line}" for line in lines
    ]
    more = (
        "--data data/own --max_steps 40 --lr 1e-2 --val_every 40 --sample_every 40 --block_size 64"
    )
    said = succeed("train_gpt2.py", *TINY_RUN, *more.split(), cwd=tmp_path)
    assert "no samples and no bits per byte" not in said
    assert "seq_len=16 is less than block_size=64: later positions are not trained" in said
    run = read_run(tmp_path / "log/r")
    (val_event,) = [e for e in run.events if e["kind"] == "val" and e["step"] == 40]
    nats_per_byte = val_event["loss"] / tok.token_bytes()[val[1:257]].mean()
    assert val_event["bits_per_byte"] == pytest.approx(nats_per_byte / np.log(2), rel=1e-3)
    assert (run.dir / "tokenizer.json").read_bytes() == Path(tok.name).read_bytes()
    sample = "--max_new_tokens 20 --temperature 0 --model".split()
    text = succeed("sample.py", "the cat", *sample, "r", cwd=tmp_path)
    assert set(text.split()) <= set(" ".join(lines).split()), text
    folder = ROOT / "tests/fixtures/blimp"
    assert "argument_structure" in succeed(
        "blimp.py", "--model", "r", "--data", folder, cwd=tmp_path
    )

    succeed("lab", "export", "r", "--out", "out", cwd=tmp_path)
    for _ in range(2):  # without our mark in config.json, as transformers saves a model
        assert succeed("sample.py", "the cat", *sample, "out", cwd=tmp_path) == text
        config = json.loads((tmp_path / "out/config.json").read_text())
        config.pop("tokenizer", None)
        (tmp_path / "out/config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode(lines[0]) == tok.encode(lines[0])
    assert theirs.encode("<|endoftext|>the") == [tok.eot, *tok.encode("the")]
    assert theirs.decode(tok.encode("naïve , 日本")) == "naïve , 日本"

    chats = [{"prompt": "the cat", "completion": "sat"}] * 20
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    tune = "--preset sft --data chats.jsonl --device cpu --max_steps 3 --total_batch_size 64 --init_from"
    succeed("train_gpt2.py", *tune.split(), "r", "--run_name", "chat", cwd=tmp_path)
    assert (tmp_path / "log/chat/tokenizer.json").read_bytes() == Path(tok.name).read_bytes()
    assert succeed("sample.py", "User: the cat", *sample, "chat", cwd=tmp_path)
    # data of another tokenizer with as many ids
    (tmp_path / "data/own/tokenizer.json").write_bytes(
        Path(tok.name).read_bytes().replace(b'"cat"', b'"cta"')
    )
    wrong = fail(
        "train_gpt2.py",
        *TINY_RUN,
        *more.split(),
        "--init_from",
        "r",
        "--run_name",
        "s",
        cwd=tmp_path,
    )
    assert "has another vocabulary than data/own; build the data with `" in wrong


def test_settings_in_a_tokenizer_file_do_not_change_the_tokens_of_documents(tmp_path, bpe_file):
    parts, path = json.loads(Path(bpe_file).read_text()), tmp_path / "tokenizer.json"
    parts["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    parts["truncation"] = {
        "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    parts["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(parts))
    texts = ["the theme", "other <|endoftext|> thesis and more of the same"]
    found, wanted = (get_tokenizer(str(p)).encode_documents(texts) for p in (path, bpe_file))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("large/tokenizer.json", "it has 65605 ids, but at most 65536 are possible"),
        ("bpe:257", "must have more than 257 ids"),
        ("bpe:65537", "at most 65536"),
        ("bpe:", "must be gpt2, bytes, bpe:SIZE such as bpe:4096"),
        ("bpe", "must be gpt2, bytes, bpe:SIZE such as bpe:4096"),
        ("missing/tokenizer.json", "there is no tokenizer missing/tokenizer.json"),
        ("odd/tokenizer.json", "is damaged or of another format"),
        ("bpe:270", "is a byte-level BPE with 290 ids, which does not match --tokenizer bpe:270"),
        (
            "wordpiece",
            "is a byte-level BPE with 290 ids, which does not match --tokenizer wordpiece",
        ),
    ],
)
def test_wrong_tokenizers_are_refused(tmp_path, bpe_file, flags, message):
    write_texts(tmp_path / "texts")
    parts = json.loads(Path(bpe_file).read_text())
    parts["normalizer"] = {"type": "Lowercase"}  # it would not keep the text
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/tokenizer.json").write_text(json.dumps(parts))
    (tmp_path / "large").mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(65600))]
    large = BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)})
    large.save(str(tmp_path / "large/tokenizer.json"))  # as large as that of multilingual BERT
    out = tmp_path / "out"
    if "does not match" in message:
        out = Path(bpe_file).parent
    args = ["--source", str(tmp_path / "texts"), "--out", str(out), "--workers", "0"]
    wrong = fail("fineweb.py", *args, "--tokenizer", flags, cwd=tmp_path)
    assert message in wrong and not list(out.glob("*.npy"))


def test_shards_keep_their_tokenizer(tmp_path):
    """A new tokenizer.json beside shards of another vocabulary would make them meaningless."""
    args = ["--source", str(write_texts(tmp_path / "texts")), "--workers", "0", "--tokenizer"]
    succeed("fineweb.py", *args, "bpe:320", "--out", "own", cwd=tmp_path)
    assert "or delete own" in fail("fineweb.py", *args, "bpe:280", "--out", "own", cwd=tmp_path)
    wrong = fail("fineweb.py", *args, "missing/tokenizer.json", "--out", "own", cwd=tmp_path)
    assert "there is no tokenizer missing/tokenizer.json" in wrong
    (tmp_path / "own/tokenizer.json").unlink()
    wrong = fail("fineweb.py", *args, "bpe:280", "--out", "own", cwd=tmp_path)
    assert "own/tokenizer.json is missing, " in wrong
    assert not (tmp_path / "own/tokenizer.json").exists()


def test_a_tokenizer_file_is_used_again(tmp_path, bpe_file):
    """For further texts; conversations must use the tokenizer of their model."""
    args = ["--source", str(write_texts(tmp_path / "texts")), "--workers", "0"]
    succeed("fineweb.py", *args, "--tokenizer", bpe_file, "--out", "again", cwd=tmp_path)
    assert (tmp_path / "again/tokenizer.json").read_bytes() == Path(bpe_file).read_bytes()
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    wrong = fail("fineweb.py", "--source", "chats.jsonl", "--tokenizer", "bpe:300", cwd=tmp_path)
    assert "pass the tokenizer.json of the run that you want to fine-tune" in wrong


def test_a_tokenizer_of_another_model_is_refused(bpe_file):
    """Its ids may be beyond the model's embedding, or the model's ids beyond its vocabulary."""
    folder = Path(bpe_file).parent
    config = GPTConfig(vocab_size=290, tokenizer="tokenizer.json")
    assert load_tokenizer(config, folder).vocab_size == 290
    config.vocab_size = 300
    with pytest.raises(UserError, match="tokenizer.json has 290 ids, but the model has 300"):
        load_tokenizer(config, folder)
