"""Text to token ids and back: GPT-2's byte pair encoding, plain bytes, or BERT's WordPiece.

from lab.data import get_tokenizer
tok = get_tokenizer("gpt2")                 # or "bytes": no file and no network needed
tok.decode(tok.encode("Hello, I'm a language model,"))
"""

from pathlib import Path

import numpy as np

from lab.cli import UserError, program
from lab.files import reading

END_OF_TEXT = "<|endoftext|>"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # of a WordPiece
WORD_PIECE_FILE = "tokenizer.json"


class Tokenizer:
    """What GPT-2's and bytes share: the byte string of each id, of which the last is end-of-text.

    encode(text)               ids of `text` as ordinary text: "<|endoftext|>" in it is letters
    encode_documents(texts)    all documents (a list of str, or a pyarrow array) in a row, uint16,
                               each led by end-of-text
    """

    def __init__(self, name: str, strings: list[bytes]):
        self.name, self._bytes = name, strings
        self.vocab_size, self.eot = len(strings), len(strings) - 1

    def decode(self, ids) -> str:
        """Text of `ids`, which lie below vocab_size. Bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        assert not wrong, f"no {self.name} tokens: {wrong[:3]}; cut logits to vocab_size to sample"
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one id; a character may be spread over several."""
        return self._bytes[token]

    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, 0 for end-of-text: from nats to bits per byte."""
        sizes = np.array([len(b) for b in self._bytes], dtype=np.int64)
        sizes[self.eot] = 0
        return sizes


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8, and end-of-text."""

    def __init__(self):
        super().__init__("bytes", [bytes([i]) for i in range(256)] + [END_OF_TEXT.encode()])

    def encode(self, text):
        return list(text.encode("utf-8", "replace"))

    def encode_documents(self, texts):
        # UTF-8 has no byte 255: it marks where documents begin
        raw = b"".join(b"\xff" + text.encode() for text in as_arrow(texts).to_pylist())
        tokens = np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)
        tokens[tokens == 255] = self.eot
        return tokens


# GPT-2 splits text into words before it merges bytes. Its pattern ends in `\s+(?!\S)`: of several
# blanks before a word, the last one stays with the word. That look-ahead keeps the regex engine
# from using its fast automaton. The same split comes out of a pattern without it when each place
# "blank | blank, word" is marked beforehand, because no run of blanks is then followed by a word
# inside a piece. The mark is a special token of the fast encoder and is dropped afterwards.
FAST_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# Unicode's White_Space
BLANK = r"\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
MARK = "\x1d\x1e\x1f\x1e\x1d"  # control characters; a text that does hold them goes the plain way


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50257 tokens through tiktoken, which downloads two files once (1.5 MB)."""

    def __init__(self):
        import tiktoken

        try:
            self._plain = plain = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever the HTTP library beneath raises
            raise UserError(
                f"GPT-2's tokenizer files could not be downloaded ({type(error).__name__}): go "
                "online once, point TIKTOKEN_CACHE_DIR at a folder that holds them, or add "
                "--tokenizer bytes to the fineweb.py command, which needs none"
            ) from error
        super().__init__("gpt2", [plain.decode_single_token_bytes(i) for i in range(plain.n_vocab)])
        fast = dict(pat_str=FAST_PATTERN, special_tokens={MARK: plain.n_vocab})
        fast["mergeable_ranks"] = plain._mergeable_ranks
        self._fast = tiktoken.Encoding("gpt2_fast", **fast)

    def encode(self, text):
        return self._plain.encode_ordinary(text)

    def encode_documents(self, texts):
        import pyarrow.compute as pc

        texts = as_arrow(texts)
        blanks = f"([{BLANK}])([{BLANK}][^{BLANK}])"
        marked = pc.replace_substring_regex(texts, blanks, rf"\1{MARK}\2").to_pylist()
        has_mark = pc.match_substring(texts, MARK).to_pylist()
        special = dict(allowed_special={MARK}, disallowed_special=())
        arrays = [np.zeros(0)]
        for i, text in enumerate(marked):
            if has_mark[i]:
                ids = np.array(self.encode(texts[i].as_py()))
            else:
                ids = self._fast.encode_to_numpy(text, **special)
                if MARK in text:
                    ids = ids[ids != self.vocab_size]
            arrays += [[self.eot], ids]
        return np.concatenate(arrays, dtype=np.uint16, casting="unsafe")


class WordPiece(Tokenizer):
    """BERT's, from a tokenizer.json: words are cut into the longest pieces that the vocabulary has,
    and each piece but a word's first begins with ## (Schuster and Nakajima 2012; Devlin et al.
    2019). [SEP] leads each document."""

    def __init__(self, path):
        from tokenizers import Tokenizer as HuggingFace

        self.name = str(path)
        made_by = f"{program('fineweb.py')} --tokenizer wordpiece --out FOLDER"
        way_out = f"`{made_by}` makes data that has one"
        with reading(Path(path), "tokenizer", way_out):
            self.fast = HuggingFace.from_str(Path(path).read_text(encoding="utf-8"))
            self.vocab_size = self.fast.get_vocab_size()
            self.pieces = [self.fast.id_to_token(i) for i in range(self.vocab_size)]
            if not all(self.pieces):
                raise ValueError(f"of its {self.vocab_size} ids some have no piece")
            self.fast.encode("\u2603" * 200)  # raises where [UNK], for so odd a word, is none
        self.fast.no_truncation()
        self.fast.encode_special_tokens = True  # "[MASK]" in a text is letters in brackets
        missing = [name for name in SPECIAL if name not in self.pieces]
        if missing:
            raise UserError(f"{path} has no {', '.join(missing)}; it is no tokenizer of BERT's")
        self.eot = self.id_of("[SEP]")

    def id_of(self, piece):
        return self.pieces.index(piece)

    def encode(self, text):
        text = text.encode("utf-8", "replace").decode()
        return self.fast.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts):
        texts, arrays = as_arrow(texts).to_pylist(), [np.zeros(0, np.uint16)]
        for found in self.fast.encode_batch_fast(texts, add_special_tokens=False):
            arrays.append(np.array([self.eot, *found.ids], dtype=np.uint16))
        return np.concatenate(arrays)

    def decode(self, ids):
        return self.fast.decode([int(i) for i in ids], skip_special_tokens=False)

    def is_special(self):
        """(vocab_size,) bool: ids that stand for no text, such as [CLS] and [unused7]."""
        return np.array([p[0] + p[-1] == "[]" and len(p) > 2 for p in self.pieces])

    def goes_on(self):
        """(vocab_size,) bool: pieces that go on with the word of the piece before."""
        return np.array([p.startswith("##") and len(p) > 2 for p in self.pieces])


def as_arrow(texts):
    """A list of str, or a pyarrow array of strings, as a pyarrow array of strings."""
    import pyarrow as pa

    if isinstance(texts, (pa.Array, pa.ChunkedArray)):
        return texts
    # lone surrogates, which JSON can hold, become question marks
    texts = [text.encode("utf-8", "replace") for text in texts]
    return pa.array(texts, pa.large_binary()).cast(pa.large_string())


# Control characters but newline and tab, as pictures: a terminal would ring, or clear its screen
SHOWN = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"}
SHOWN |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


def printable(text: str) -> str:
    """Text of a model as a terminal may show it."""
    return text.translate(SHOWN)


TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called "gpt2" or "bytes", or that of a tokenizer.json. Raises UserError for
    another name."""
    if name.endswith(WORD_PIECE_FILE):
        return WordPiece(name)
    if name not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {name!r}: it is 'gpt2', 'bytes' or a tokenizer.json")
    return TOKENIZERS[name]()


def name_of_size(vocab_size: int) -> str:
    """The name of the tokenizer that has this many ids. Raises UserError where none has."""
    names = {50257: "gpt2", 257: "bytes"}
    if vocab_size not in names:
        raise UserError(f"no tokenizer has {vocab_size} ids: 50257 is GPT-2's, 257 is bytes'")
    return names[vocab_size]
