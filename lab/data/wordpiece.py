"""The vocabulary of a WordPiece: learnt from the text at hand, or that of bert-base-uncased. It is
in tokenizer.json, the format of Hugging Face's tokenizers, beside the shards that it made."""

from collections import Counter
from pathlib import Path

from lab.cli import UserError, progress, say
from lab.data.tokenizers import SPECIAL, WORD_PIECE_FILE
from lab.data.writer import begun, check_same
from lab.files import first_line, write_whole

PUBLISHED = "bert-base-uncased"
ENOUGH = 2**28  # characters of text that a vocabulary is learnt from; more change little


def name_in(folder, wanted):
    """What get_tokenizer calls the tokenizer that is wanted: a WordPiece is a file in the folder of
    its data."""
    return str(Path(folder) / WORD_PIECE_FILE) if wanted in ("wordpiece", PUBLISHED) else wanted


def prepare(folder, wanted, texts, vocab_size):
    """name_in, of a file that is made unless it is there.

    texts: an iterable of str, of which a vocabulary of `vocab_size` pieces is learnt, or of as many
    as occur twice. Raises UserError where the folder has shards of another tokenizer.
    """
    name = name_in(folder, wanted)
    if manifest := begun(folder):  # whose shards would get another one's tokenizer
        check_same(folder, manifest, tokenizer=Path(name).name)
    if name != wanted and Path(name).exists():
        say(f"{name} is there, and is used as it is")
    elif name != wanted:
        made = download() if wanted == PUBLISHED else learn(texts, vocab_size)
        write_whole(name, made.to_str(pretty=True).encode())
    return name


def download():
    from tokenizers import Tokenizer as HuggingFace

    try:
        return HuggingFace.from_pretrained(PUBLISHED)
    except Exception as error:  # of no class of its own
        raise UserError(
            f"{PUBLISHED}'s vocabulary cannot be fetched from the hub ({first_line(error)}); go "
            "online once, or pass --tokenizer wordpiece, which learns one from the text"
        ) from error


def learn(texts, vocab_size):
    """A tokenizer as bert-base-uncased has it, but for its pieces: lower case, no accents, cut at
    blanks and around each punctuation mark."""
    from tokenizers import BertWordPieceTokenizer

    if not len(SPECIAL) < vocab_size <= 2**16:
        raise UserError(f"--vocab_size {vocab_size} must be above {len(SPECIAL)}, at most 65536")
    made = BertWordPieceTokenizer()
    # The trainer numbers letters within words as a hash table yields them, and of pairs that are as
    # frequent it joins the lower numbers first. Given in order, they make the same text the same
    # vocabulary.
    read, seen, left = [], Counter(), ENOUGH
    for text in progress(texts, "learning a vocabulary", "text"):
        read.append(text.encode("utf-8", "replace").decode())
        seen.update(made.normalize(read[-1]))
        left -= len(text)
        if left < 0:
            break
    letters = sorted(sorted(seen), key=seen.get)[-1000:]
    cut = made.pre_tokenizer.pre_tokenize_str
    inside = sorted(f"##{c}" for c in letters if len(cut(f"a{c}")) == 1 and c > " ")
    how = dict(vocab_size=vocab_size, initial_alphabet=sorted(letters), limit_alphabet=len(letters))
    how |= dict(special_tokens=SPECIAL + inside, show_progress=False)
    made.train_from_iterator(read, **how)
    return BertWordPieceTokenizer(made.get_vocab())  # anew: in use letters are not special
