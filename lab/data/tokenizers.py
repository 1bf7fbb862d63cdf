"""Text to token ids and back: GPT-2's byte pair encoding, or plain bytes.

    from lab.data.tokenizers import get_tokenizer
    tok = get_tokenizer("gpt2")                 # or "bytes": no file and no network needed
    tok.decode(tok.encode("Hello, I'm a language model,"))

Both have `name`, `vocab_size`, `eot` (end-of-text, which leads every document), `encode`, `decode`, `token_bytes` and,
for corpora, `encode_documents`, which goes from many texts to one array without a Python list of ints in between.
"""
import numpy as np

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """What both tokenizers share. `_bytes[i]` is the byte string of id i; end-of-text is the last id."""
    name: str
    _bytes: list[bytes]

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def eot(self) -> int:
        return len(self._bytes) - 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as ordinary text: the letters "<|endoftext|>" in it do not become the end-of-text token."""
        raise NotImplementedError

    def encode_documents(self, texts) -> tuple[np.ndarray, np.ndarray]:
        """All documents in a row, each led by end-of-text (uint16), and the length of each with that token (int64).

        `texts` is a list of str or a pyarrow string array.
        """
        raise NotImplementedError

    def decode(self, ids) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; an id outside the vocabulary is a ValueError."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the {self.name} vocabulary: ids go from 0 to "
                                 f"{self.vocab_size - 1}; cut the logits to vocab_size before sampling")
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one id; a character may be spread over several."""
        return self._bytes[token]

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for, 0 for end-of-text: turns nats per token into bits per byte."""
        sizes = np.array([len(b) for b in self._bytes], dtype=np.int64)
        sizes[self.eot] = 0
        return sizes


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8, and end-of-text."""
    name = "bytes"

    def __init__(self):
        self._bytes = [bytes([i]) for i in range(256)] + [END_OF_TEXT.encode()]

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_documents(self, texts):
        raw = [_utf8(text if isinstance(text, str) else text.as_py()) for text in texts]
        lengths = np.array([1 + len(r) for r in raw], dtype=np.int64)
        tokens = np.full(lengths.sum(), self.eot, dtype=np.uint16)
        inside = np.ones(len(tokens), dtype=bool)
        inside[np.cumsum(lengths) - lengths] = False
        tokens[inside] = np.frombuffer(b"".join(raw), dtype=np.uint8)
        return tokens, lengths


# GPT-2 splits text into words before it merges bytes. Its pattern ends in `\s+(?!\S)`: of several blanks before a word,
# the last one stays with the word. That look-ahead keeps the regex engine from using its fast automaton. The same split
# comes out of a pattern without it when each place "blank | blank, word" is marked beforehand, because no run of blanks
# is then followed by a word inside a piece. The mark is a special token of the fast encoder and is dropped afterwards.
# (What this gains is printed by bench/tokenize.py; that it changes nothing is asserted there and in the tests.)
FAST_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
BLANK = r"\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"  # Unicode White_Space
MARK = "\x1d\x1e\x1f\x1e\x1d"  # control characters; a text that does hold them goes the plain way


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50257 tokens through tiktoken, which downloads two files once (1.5 MB)."""
    name = "gpt2"

    def __init__(self):
        import tiktoken
        try:
            self._plain = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken lets out whatever its HTTP library raises
            raise OSError(
                f"GPT-2's tokenizer files could not be downloaded ({type(error).__name__}): go online once, or point "
                "TIKTOKEN_CACHE_DIR at a folder that holds them, or make bytes of the text, which need none: add "
                "--tokenizer bytes to the fineweb.py command") from error
        ranks = self._plain._mergeable_ranks
        self._bytes = [b for b, _ in sorted(ranks.items(), key=lambda item: item[1])] + [END_OF_TEXT.encode()]
        self._fast = tiktoken.Encoding("gpt2_fast", pat_str=FAST_PATTERN, mergeable_ranks=ranks,
                                       special_tokens={MARK: len(self._bytes)})

    def encode(self, text: str) -> list[int]:
        return self._plain.encode_ordinary(text)

    def encode_documents(self, texts):
        import pyarrow as pa
        import pyarrow.compute as pc
        if not isinstance(texts, (pa.Array, pa.ChunkedArray)):
            texts = pa.array([_utf8(text) for text in texts], pa.large_binary()).cast(pa.large_string())
        marked = pc.replace_substring_regex(texts, f"([{BLANK}])([{BLANK}][^{BLANK}])", rf"\1{MARK}\2")
        has_mark = pc.match_substring_regex(texts, MARK).to_pylist()
        eot, mark = np.array([self.eot], dtype=np.uint32), self.vocab_size
        arrays, lengths = [], np.empty(len(texts), dtype=np.int64)
        for i, text in enumerate(marked.to_pylist()):
            if has_mark[i]:
                ids = np.array(self.encode(texts[i].as_py()), dtype=np.uint32)
            else:
                ids = self._fast.encode_to_numpy(text, allowed_special={MARK}, disallowed_special=())
                if MARK in text:
                    ids = ids[ids != mark]
            arrays += [eot, ids]
            lengths[i] = 1 + len(ids)
        return np.concatenate(arrays or [eot[:0]], dtype=np.uint16, casting="unsafe"), lengths


def _utf8(text: str) -> bytes:
    """UTF-8 of a string, with lone surrogates (JSON can hold them) as U+FFFD and pairs joined, as tiktoken does."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")


# Control characters but newline and tab, as pictures of themselves: a terminal would ring, or clear its screen
SHOWN = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


def printable(text: str) -> str:
    """Text of a model as a terminal may show it."""
    return text.translate(SHOWN)


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called "gpt2" or "bytes"."""
    if name == "gpt2":
        return GPT2Tokenizer()
    if name == "bytes":
        return ByteTokenizer()
    raise ValueError(f"unknown tokenizer {name!r}: it is 'gpt2' or 'bytes'")


def name_of_size(vocab_size: int) -> str:
    """The name of the tokenizer that has this many ids. Raises ValueError where none has."""
    names = {50257: "gpt2", 257: "bytes"}
    if vocab_size not in names:
        raise ValueError(f"no tokenizer has {vocab_size} ids; known are 50257 (GPT-2) and 257 (bytes)")
    return names[vocab_size]
