"""Tokenizers: the interface, known ids of GPT-2, and fast against plain encoding."""

import random

import numpy as np
import pyarrow as pa
import pytest
from conftest import ROOT, run_python

from lab.cli import UserError
from lab.data.tokenizers import MARK, get_tokenizer, tokenizer_for_vocab_size


@pytest.fixture(params=["bytes", "gpt2"])
def tok(request):
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_files")
    return get_tokenizer(request.param)


def test_contract(tok):
    assert tok.vocab_size == tok.eot + 1 == {"gpt2": 50257, "bytes": 257}[tok.name]
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
    """On random texts of all kinds of blanks, letters, digits, symbols, control characters and the mark."""
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
    """The error says what to do. (The proxy refuses all connections.)"""
    (tmp_path / "a.txt").write_text("a text")
    words = "fineweb.py --source a.txt --workers 0 --tokenizer gpt2 --out o".split()
    env = dict(TIKTOKEN_CACHE_DIR=tmp_path, HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="")
    got = run_python(ROOT / words[0], *words[1:], cwd=tmp_path, **env)
    assert got.returncode == 2 and "Traceback" not in got.stderr
    assert "TIKTOKEN_CACHE_DIR" in got.stderr and "--tokenizer bytes to fineweb.py" in got.stderr
