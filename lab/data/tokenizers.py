"""Tokenizers: GPT-2's byte pair encoding, plain bytes, a custom byte-level BPE, and BERT's WordPiece.

fineweb.py encodes documents with them; everything that prints text decodes with them:

    tokenizer = get_tokenizer("gpt2")  # or "bytes", which needs no file and no network
    tokenizer.decode(tokenizer.encode("Hello, I'm a language model,"))
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.cli import UserError, command_for, eprint, progress
from lab.files import atomic_write, first_line, read_errors

if TYPE_CHECKING:  # both packages are slow to import, and training needs neither
    import pyarrow as pa
    from tokenizers import BertWordPieceTokenizer
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Base class. strings: the bytes of each id; not used by WordPiece.

    name: the argument of get_tokenizer. vocab_size: number of ids, at most 2^16, so that ids fit in
    uint16. eot: id of end-of-text, which precedes each document; the last id except in a WordPiece.
    """

    name: str
    vocab_size: int
    eot: int

    def __init__(self, name: str, strings: list[bytes]):
        self.name, self._bytes = name, strings
        self.vocab_size, self.eot = len(strings), len(strings) - 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Special tokens are not parsed: "<|endoftext|>" is encoded as characters."""
        raise NotImplementedError

    def encode_documents(self, texts: "list[str] | pa.Array | pa.ChunkedArray") -> np.ndarray:
        """Ids (uint16) of all documents, concatenated, each preceded by end-of-text."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, which must be below vocab_size. Bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        assert not wrong, (
            f"not ids of {self.name}: {wrong[:3]}; sample from logits[..., :vocab_size]"
        )
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one id. A character may span several ids."""
        return self._bytes[token]

    def token_bytes(self) -> np.ndarray:
        """Number of text bytes of each id (V,), 0 for end-of-text; for bits per byte."""
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
        # UTF-8 never contains the byte 255, so it can mark the beginning of documents
        raw = b"".join(b"\xff" + text.encode() for text in to_arrow(texts).to_pylist())
        tokens = np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)
        tokens[tokens == 255] = self.eot
        return tokens


# GPT-2 splits text into words before it merges bytes. Its pattern contains `\s+(?!\S)`: of several
# whitespace characters before a word, the last one belongs to the word. This look-ahead prevents the
# regex engine from using its fast automaton. FAST_PATTERN has no look-ahead. It gives the same split if
# a mark is inserted before that last character. The mark is a special token of the fast encoder, and is
# removed afterwards.
FAST_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
# Unicode's White_Space
BLANK = r"\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# control characters; a text that contains them is encoded without FAST_PATTERN
MARK = "\x1d\x1e\x1f\x1e\x1d"


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50257 tokens. Uses tiktoken, which downloads two files once (1.5 MB)."""

    def __init__(self):
        import tiktoken  # slow, and not needed for training

        try:
            self._plain = plain = tiktoken.get_encoding("gpt2")
        except Exception as error:  # its type depends on the HTTP library
            raise UserError(
                f"GPT-2's tokenizer files could not be downloaded ({type(error).__name__}); pass "
                "--tokenizer bytes to fineweb.py, which needs no files, connect to the internet once, or set "
                "TIKTOKEN_CACHE_DIR to a folder that contains them"
            ) from error
        super().__init__("gpt2", [plain.decode_single_token_bytes(i) for i in range(plain.n_vocab)])
        self._fast = tiktoken.Encoding(
            "gpt2_fast", pat_str=FAST_PATTERN, mergeable_ranks=plain._mergeable_ranks,
            special_tokens={MARK: plain.n_vocab},
        )  # fmt: skip

    def encode(self, text):
        return self._plain.encode_ordinary(text)

    def encode_documents(self, texts):
        import pyarrow.compute as pc  # slow, and not needed for training

        compute: Any = pc  # its functions are generated on import, so type checkers cannot see them
        texts = to_arrow(texts)
        blanks = f"([{BLANK}])([{BLANK}][^{BLANK}])"
        marked = compute.replace_substring_regex(texts, blanks, rf"\1{MARK}\2").to_pylist()
        has_mark = compute.match_substring(texts, MARK).to_pylist()
        arrays = [np.zeros(0)]
        for i, text in enumerate(marked):
            if has_mark[i]:
                ids = np.array(self.encode(texts[i].as_py()))
            else:
                ids = self._fast.encode_to_numpy(
                    text, allowed_special={MARK}, disallowed_special=()
                )
                if MARK in text:
                    ids = ids[ids != self.vocab_size]
            arrays += [np.array([self.eot]), ids]
        return np.concatenate(arrays, dtype=np.uint16, casting="unsafe")


# ------------------------------------------------------------------------- custom byte-level BPE

TOKENIZER_FILE = "tokenizer.json"  # Hugging Face's format; in the folder of shards or of a run
MAX_TRAIN_CHARS = 2**28  # of text to learn a vocabulary from; more text changes little
MIN_VOCAB_SIZE = 257  # all bytes, and end-of-text


def byte_names() -> list[str]:
    """GPT-2's printable character for each byte: its Latin-1 character if that is visible, else one from
    U+0100 on (encoder.py of Radford et al. 2019)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def byte_bpe(vocab: dict[str, int] | None = None) -> "HuggingFaceTokenizer":
    """A tokenizer of the tokenizers package that splits words like GPT-2. vocab: in byte_names."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers  # slow: training does not need them

    tokenizer = HuggingFaceTokenizer(models.BPE(vocab=vocab or {}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def first_texts(texts: Iterable[str]) -> Iterator[str]:
    """The texts to learn a vocabulary from, with a progress bar: the first MAX_TRAIN_CHARS of `texts`."""
    remaining = MAX_TRAIN_CHARS
    for text in progress(texts, "learning a vocabulary", "text"):
        yield text.encode("utf-8", "replace").decode()
        remaining -= len(text)
        if remaining < 0:
            break


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> "HuggingFaceTokenizer":
    """Learn at most vocab_size ids from `texts`: 256 bytes, merges, and end-of-text.

    Repeatedly merges the most frequent pair of adjacent tokens (Sennrich et al. 2016; on bytes, Radford et
    al. 2019). A pair must occur at least twice. The same texts give the same tokenizer.
    Raises UserError for a vocab_size out of range.
    """
    from tokenizers import trainers  # slow: training does not need it

    if not MIN_VOCAB_SIZE < vocab_size <= 2**16:
        raise UserError(
            f"--tokenizer bpe:{vocab_size} must have more than {MIN_VOCAB_SIZE} ids (the bytes and "
            "end-of-text) and at most 65536; try bpe:4096"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, initial_alphabet=sorted(byte_names()),
        show_progress=False,
    )  # fmt: skip
    tokenizer = byte_bpe()
    tokenizer.train_from_iterator(first_texts(texts), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])  # after training, so that it gets the last id
    return tokenizer


class FileTokenizer(Tokenizer):
    """Base class of tokenizers read from a tokenizer.json. fast: the tokenizers package's object."""

    fast: "HuggingFaceTokenizer"

    def read(self, path: str | Path) -> dict[str, Any]:
        """Set name, fast and vocab_size. Returns the contents of the file."""
        text = Path(path).read_text(encoding="utf-8")
        from tokenizers import Tokenizer as HuggingFaceTokenizer  # slow: few programs need it

        self.name, self.fast = str(path), HuggingFaceTokenizer.from_str(text)
        self.vocab_size = self.fast.get_vocab_size()
        if self.vocab_size > 2**16:
            raise ValueError(f"it has {self.vocab_size} ids, but at most 65536 are possible")
        self.fast.no_truncation()
        self.fast.no_padding()
        self.fast.encode_special_tokens = True  # "[MASK]" in a text is not a special token
        return json.loads(text)

    def encode(self, text):
        text = text.encode("utf-8", "replace").decode()
        return self.fast.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts):
        texts, arrays = to_arrow(texts).to_pylist(), [np.zeros(0, np.uint16)]
        for encoding in self.fast.encode_batch_fast(texts, add_special_tokens=False):
            arrays.append(np.array([self.eot, *encoding.ids], dtype=np.uint16))
        return np.concatenate(arrays)


class ByteBPETokenizer(FileTokenizer):
    """Byte-level BPE, read from a tokenizer.json. Any text can be encoded without loss."""

    def __init__(self, path: str | Path):
        command = f"{command_for('fineweb.py')} --tokenizer bpe:4096 --out FOLDER"
        names = {name: byte for byte, name in enumerate(byte_names())}
        with read_errors(path, "tokenizer", f"`{command}` builds data with one"):
            check_parts(self.read(path))
            pieces: list[Any] = [self.fast.id_to_token(i) for i in range(self.vocab_size)]
            if pieces.pop() != END_OF_TEXT:
                raise ValueError(f"the last id must be {END_OF_TEXT}")
            self.fast.add_special_tokens([END_OF_TEXT])  # some files don't mark it as special
            strings = [bytes(names[char] for char in piece) for piece in pieces]
            if not set(strings) >= {bytes([i]) for i in range(256)}:
                raise ValueError("some bytes have no id")
        super().__init__(self.name, [*strings, END_OF_TEXT.encode()])


def check_parts(parts: dict[str, Any]) -> None:
    """Raise ValueError unless the parts of a tokenizer.json are those of GPT-2's tokenizer."""
    split = parts["pre_tokenizer"] or {}
    found = dict(
        model=parts["model"]["type"], normalizer=parts["normalizer"], split=split.get("type"),
        prefix=split.get("add_prefix_space"), regex=split.get("use_regex", True),
    )  # fmt: skip
    wanted = dict(model="BPE", normalizer=None, split="ByteLevel", prefix=False, regex=True)
    if found != wanted:
        raise ValueError(f"its parts are {found}, but those of GPT-2's tokenizer are {wanted}")


# -------------------------------------------------------------------------------- BERT's WordPiece

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_BASE = "bert-base-uncased"


class WordPiece(FileTokenizer):
    """BERT's tokenizer, read from a tokenizer.json.

    Each word is cut into the longest pieces in the vocabulary; pieces that continue a word begin
    with ## (Schuster and Nakajima 2012; Devlin et al. 2019). [SEP] serves as end-of-text.
    """

    def __init__(self, path: str | Path):
        command = f"{command_for('fineweb.py')} --tokenizer wordpiece --out FOLDER"
        with read_errors(path, "tokenizer", f"`{command}` builds data with one"):
            self.read(path)
            pieces = [self.fast.id_to_token(i) for i in range(self.vocab_size)]
            self.pieces = [piece for piece in pieces if piece]
            if len(self.pieces) < self.vocab_size:
                raise ValueError(f"some of its {self.vocab_size} ids have no piece")
            self.fast.encode("\u2603" * 200)  # an unknown word: raises if there is no [UNK]
        missing = [name for name in SPECIAL_TOKENS if name not in self.pieces]
        if missing:
            raise UserError(
                f"{path} has no {', '.join(missing)}, which BERT needs; use another file"
            )
        self.eot = self.id_of("[SEP]")

    def id_of(self, piece: str) -> int:
        return self.pieces.index(piece)

    def decode(self, ids):
        return self.fast.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self):
        raise UserError(
            f"{Path(self.name).name} is a WordPiece, whose tokens do not map to bytes; text is "
            "generated only with the gpt2, bytes and bpe tokenizers"
        )

    def is_special(self) -> np.ndarray:
        """(V,) bool: special tokens, such as [CLS] and [unused7]."""
        return np.array([p[0] + p[-1] == "[]" and len(p) > 2 for p in self.pieces])

    def is_continuation(self) -> np.ndarray:
        """(V,) bool: pieces that continue the word of the previous piece."""
        return np.array([p.startswith("##") and len(p) > 2 for p in self.pieces])


def download_wordpiece() -> "HuggingFaceTokenizer":
    """Download the tokenizer of bert-base-uncased from the hub."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer  # slow: only bert.py needs it

    try:
        return HuggingFaceTokenizer.from_pretrained(BERT_BASE)
    except Exception as error:  # the library has no exception class for it
        raise UserError(
            f"{BERT_BASE}'s vocabulary could not be downloaded ({first_line(error)}); connect to "
            "the internet once, or pass --tokenizer wordpiece, which learns one from the text"
        ) from error


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> "BertWordPieceTokenizer":
    """Learn a WordPiece vocabulary of at most vocab_size pieces from `texts`.

    A piece must occur at least twice. As in bert-base-uncased, texts are converted to lower case without
    accents, and split at whitespace and around punctuation. The same texts give the same vocabulary.
    Raises UserError for a vocab_size out of range.
    """
    from tokenizers import BertWordPieceTokenizer  # slow: only bert.py needs it

    if not len(SPECIAL_TOKENS) < vocab_size <= 2**16:
        raise UserError(
            f"vocab_size={vocab_size} must be above {len(SPECIAL_TOKENS)} and at most 65536; "
            "pass another --vocab_size"
        )
    trainer = BertWordPieceTokenizer()
    # The trainer numbers the letters inside words in the order of a hash table, which differs between
    # processes, and if two pairs are equally frequent it merges the one with lower numbers first.
    # Passing the letters as special tokens, in sorted order, makes the result reproducible.
    used, counts = [], Counter()
    for text in first_texts(texts):
        used.append(text)
        counts.update(trainer.normalize(text))
    letters = sorted(sorted(counts), key=lambda letter: counts[letter])[-1000:]
    split = trainer.pre_tokenizer.pre_tokenize_str
    inside = sorted(f"##{c}" for c in letters if len(split(f"a{c}")) == 1 and c > " ")
    trainer.train_from_iterator(
        used, vocab_size=vocab_size, initial_alphabet=sorted(letters), limit_alphabet=len(letters),
        special_tokens=[*SPECIAL_TOKENS, *inside], show_progress=False,
    )  # fmt: skip
    # a new tokenizer with this vocabulary, in which the letters are not special tokens
    return BertWordPieceTokenizer(trainer.get_vocab())


# ----------------------------------------------------------------------------------------- lookup


def to_arrow(texts: "list[str] | pa.Array | pa.ChunkedArray") -> Any:
    """`texts` as a pyarrow array of strings."""
    import pyarrow as pa  # slow, and not needed for training

    if isinstance(texts, (pa.Array, pa.ChunkedArray)):
        return texts
    # lone surrogates, which JSON can contain, become question marks
    encoded = [text.encode("utf-8", "replace") for text in texts]
    return pa.array(encoded, pa.large_binary()).cast(pa.large_string())


# printable() replaces control characters, which terminals interpret, except newline and tab
CONTROL_PICTURES = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"}
CONTROL_PICTURES |= {127: 0x2421} | dict.fromkeys(range(128, 160), 0xFFFD)


def printable(text: str) -> str:
    """Replace control characters and what is not UTF-8, so that a text is safe to print on a terminal."""
    return text.translate(CONTROL_PICTURES).encode(errors="replace").decode()


TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def tokenizer_path(folder: str | Path, wanted: str) -> str:
    """The name to pass to get_tokenizer: `wanted` if it is built in, otherwise the path of tokenizer.json
    in `folder`, the folder of the data. Raises UserError for an unknown name."""
    size = wanted.removeprefix("bpe:")
    files = wanted in ("wordpiece", BERT_BASE) or wanted.endswith(TOKENIZER_FILE)
    if not (files or wanted in TOKENIZERS or (size != wanted and size.isdecimal())):
        raise UserError(
            f"tokenizer={wanted} must be gpt2, bytes, bpe:SIZE such as bpe:4096, wordpiece, {BERT_BASE} "
            f"or the path of a {TOKENIZER_FILE}"
        )
    return wanted if wanted in TOKENIZERS else str(Path(folder) / TOKENIZER_FILE)


def get_or_train(folder: str | Path, wanted: str, texts: Iterable[str], vocab_size: int) -> str:
    """Like tokenizer_path, but learn, download or copy a tokenizer if its file is missing.

    texts: for learning a vocabulary; read only if needed. vocab_size: of a WordPiece. Raises UserError
    if the folder has the file of another tokenizer.
    """
    path = tokenizer_path(folder, wanted)
    if path == wanted:  # built in, or that file itself
        return path
    if Path(path).exists():
        check_same_tokenizer(path, wanted)
    elif wanted.endswith(TOKENIZER_FILE):
        get_tokenizer(wanted)  # raises UserError for a file that cannot be used
        atomic_write(path, Path(wanted).read_bytes())
    else:
        if wanted == BERT_BASE:
            new = download_wordpiece()
        elif wanted == "wordpiece":
            new = train_wordpiece(texts, vocab_size)
        else:
            new = train_byte_bpe(texts, int(wanted.removeprefix("bpe:")))
        atomic_write(path, new.to_str(pretty=True).encode())
    return path


def check_same_tokenizer(path: str, wanted: str) -> None:
    """Raise UserError if the tokenizer.json at `path` is not the one that `wanted` describes, else print that
    it is used. With bpe:SIZE it may have fewer than SIZE ids, because a small text yields fewer."""
    found = get_tokenizer(path)
    if wanted.endswith(TOKENIZER_FILE):
        get_tokenizer(wanted)  # raises UserError if it is missing
        same = Path(path).read_bytes() == Path(wanted).read_bytes()
    elif wanted.startswith("bpe:"):
        size = int(wanted.removeprefix("bpe:"))
        same = isinstance(found, ByteBPETokenizer) and found.vocab_size <= size
    else:
        same = isinstance(found, WordPiece)
    if not same:
        kind = "WordPiece" if isinstance(found, WordPiece) else "byte-level BPE"
        raise UserError(
            f"{path} is a {kind} with {found.vocab_size} ids, which does not match --tokenizer {wanted}; "
            f"choose another --out, or delete {Path(path).parent}"
        )
    eprint(f"using {path} ({found.vocab_size:,} ids), which is already there")


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer named "gpt2" or "bytes", or the byte-level BPE or WordPiece in a tokenizer.json.

    Raises UserError for any other name, or if a file of the tokenizer is missing.
    """
    if name.endswith(TOKENIZER_FILE):
        return WordPiece(name) if is_wordpiece(name) else ByteBPETokenizer(name)
    if name not in TOKENIZERS:
        raise UserError(
            f"tokenizer={name!r} must be 'gpt2', 'bytes' or the path of a {TOKENIZER_FILE}; "
            "pass one of these"
        )
    return TOKENIZERS[name]()


def is_wordpiece(path: str | Path) -> bool:
    """Whether a tokenizer.json holds a WordPiece."""
    command = f"{command_for('fineweb.py')} --tokenizer bpe:4096 --out FOLDER"
    with read_errors(path, "tokenizer", f"`{command}` builds data with one"):
        return json.loads(Path(path).read_text(encoding="utf-8"))["model"]["type"] == "WordPiece"


def tokenizer_for_vocab_size(vocab_size: int) -> str:
    """Name of the tokenizer with this vocabulary size, for data without a manifest.

    Raises UserError if there is none.
    """
    names = {50257: "gpt2", 257: "bytes"}
    if vocab_size not in names:
        raise UserError(
            f"no tokenizer has {vocab_size} ids (gpt2 has 50257, bytes has 257); for another "
            "tokenizer, add its tokenizer.json to the model's folder, or the manifest.json to the data's"
        )
    return names[vocab_size]
