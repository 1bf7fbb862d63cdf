"""Conversations as tokens, for fine-tuning and for sampling: a plain-text form that GPT-2's
vocabulary can write.

    <|endoftext|>System: You are brief.

    User: What is two and two?

    Assistant: Four.<|endoftext|>

    User: And twice that?

    Assistant: Eight.<|endoftext|>

A model learns what stands after "Assistant:", up to and with the end-of-text that ends each answer,
so a sampler stops there as it does after a document. No token is added to the vocabulary. Because
answers end in end-of-text, a model that is fine-tuned on several turns must not hide what lies
before one (leave the trainer's document mask off).
"""

from pathlib import Path

import numpy as np

from lab.cli import ROOT, UserError, progress
from lab.data.shards import sha256_of
from lab.data.sources import HUB, File, all_units, local_files, records_of
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import begin, begun, check_same, new_manifest, save_shard, write_manifest
from lab.files import only_writer

ROLES = {"system": "System:", "user": "User:", "assistant": "Assistant:"}


def render_chat(messages, tokenizer, answer=False, where="messages"):
    """Ids (uint16) of a conversation and its mask (uint8; 1: this token is to be learnt).

    `messages` is a list of {"role": "system" | "user" | "assistant", "content": text}. With
    `answer` the ids end in "Assistant:", ready for the model to go on. Raises UserError for
    anything else, which begins with `where` the conversation comes from.
    """
    parts, gap = [([tokenizer.eot], 0)], ""  # (ids, 1 if they are to be learnt)
    for message in messages if messages and isinstance(messages, list) else [messages]:
        message = message if isinstance(message, dict) else {}
        role, content = message.get("role"), message.get("content")
        if role not in list(ROLES) or not isinstance(content, str):
            wrong = f"content {content!r:.60}" if role in list(ROLES) else f"role {role!r:.60}"
            raise UserError(
                f"{where}: no conversation, with {wrong}: wanted is a list of objects, "
                f'"role" one of {", ".join(ROLES)} and "content" a text'
            )
        text = " " + content.strip()
        if role == "assistant":
            parts.append((tokenizer.encode(gap + ROLES[role]), 0))
            parts.append(([*tokenizer.encode(text), tokenizer.eot], 1))
        else:
            parts.append((tokenizer.encode(gap + ROLES[role] + text), 0))
        gap = "\n\n"
    if answer:
        parts.append((tokenizer.encode(gap + ROLES["assistant"]), 0))
    ids = np.concatenate([np.array(new, np.uint16) for new, _ in parts])
    return ids, np.concatenate([np.full(len(new), learn, np.uint8) for new, learn in parts])


OPEN = 32  # rows that are looked at for room


def pack_rows(chats, context: int, eot: int):
    """Conversations (ids, mask) as rows: each goes into the fullest of the last rows with room.

    Returns ids and mask of all rows (rows, context), filled up with end-of-text that is not
    learnt, and the number of conversations in each. None of them may be longer than a row.
    """
    rows = []  # [ids, mask, conversations] of each
    for ids, mask in chats:
        fitting = [row for row in rows[-OPEN:] if len(row[0]) + len(ids) <= context]
        if fitting:
            row = max(fitting, key=lambda row: len(row[0]))
            row[:] = np.append(row[0], ids), np.append(row[1], mask), row[2] + 1
        else:
            rows.append([ids, mask, 1])
    all_ids = np.full((len(rows), context), eot, np.uint16)
    all_masks = np.zeros((len(rows), context), np.uint8)
    for i, (ids, mask, _) in enumerate(rows):
        all_ids[i, : len(ids)], all_masks[i, : len(mask)] = ids, mask
    return all_ids, all_masks, np.array([row[2] for row in rows])


def lines_of(files):
    """(where it is, the dict) of every line of JSONL files."""
    return (line for unit in all_units(files, "messages") for line in records_of(unit))


def is_chat(files: list[File], column: str) -> bool:
    """Whether the first line of JSONL files here is a conversation and not a text."""
    if files[0].kind != "jsonl" or files[0].path.startswith(HUB):
        return False
    _, first = next(lines_of(files), ("", {}))
    return isinstance(first.get("messages"), list) and not isinstance(first.get(column), str)


def build_chat(files: list[File], out_dir, tokenizer: str, context: int, shard_tokens: int) -> dict:
    """Conversations as rows of `context` tokens: shards, each with a mask of what is to be learnt.

    What is left of a row is end-of-text with mask 0. Lines 1, 11, 21 ... are validation, whatever
    is left out elsewhere. Chat data is small: it is held in memory, and what was stopped is made
    again. Returns the manifest.
    """
    if not 8 <= context <= shard_tokens:
        raise UserError(
            f"--context {context} must be at least 8 and at most --shard_tokens {shard_tokens}"
        )
    rows_per_shard = shard_tokens // context
    source = {"kind": "chat", "files": [[f.name, f.size, sha256_of(f.path)] for f in files]}
    settings = dict(source=source, context=context, shard_tokens=rows_per_shard * context)
    manifest, tok = begun(out_dir), get_tokenizer(tokenizer)
    if manifest:
        check_same(out_dir, manifest, data="chat", tokenizer=tokenizer, **settings)
        if manifest["complete"]:
            return manifest
    manifest = new_manifest("chat", tok, val_tokens=0, **settings)
    lines = progress(lines_of(files), "reading", "line")
    found = [render_chat(line.get("messages"), tok, where=where) for where, line in lines]
    answered = [(i, ids, mask) for i, (ids, mask) in enumerate(found) if mask.any()]
    chats = [chat for chat in answered if len(chat[1]) <= context]
    no_answer, too_long = len(found) - len(answered), len(answered) - len(chats)
    val, train = ([(ids, mask) for i, ids, mask in chats if bool(i % 10) == t] for t in (0, 1))
    if not val or not train:
        raise UserError(
            f"{files[0].path} must hold two conversations or more, one to learn from and one, of "
            f"the lines 1, 11, 21 ..., for validation; left out: {no_answer:,} without an answer, "
            f"{too_long:,} longer than {context} tokens (--context; in a run --seq_len)"
        )
    begin(out_dir, manifest)
    for part in (val, train):
        ids, mask, counts = pack_rows(part, context, tok.eot)
        size = rows_per_shard if part is train else len(ids)
        for i in range(0, len(ids), size):
            here = slice(i, i + size)
            count = int(counts[here].sum())
            save_shard(out_dir, manifest, ids[here].ravel(), mask[here].ravel(), documents=count)
    return write_manifest(out_dir, manifest, complete=True, too_long=too_long, no_answer=no_answer)


def build_chats(path, tokenizer, context):
    """build_chat of one .jsonl file for trainers, of which several may ask at once. Returns the
    folder, under data/; another text has another folder."""
    own = ROOT / path  # the project's, from any folder
    path = own if own.exists() and not Path(path).exists() else path
    if not Path(path).exists():
        raise UserError(f"there is no file {path}; name another with --data")
    name = f"{Path(path).stem}_{tokenizer}_{context}_{sha256_of(path)[:8]}"
    folder = Path("data", name)
    with only_writer(folder, "", wait=True):
        build_chat(local_files(str(path)), folder, tokenizer, context, 100_000_000)
    return str(folder)


# A model that does not end its answer goes on in another's name: there the answer ends too.
STOPS = tuple(f"\n\n{role}" for role in ROLES.values())


def fit_chat(messages, tokenizer, block_size, max_new_tokens):
    """Ids of a conversation that waits for its answer, and how many of its oldest messages had to
    go so that the answer has room: max_new_tokens, or a quarter of the context if that is less. A
    system message at its beginning stays.

    Raises UserError where the newest message alone is too long, or what render_chat does.
    """
    room = block_size - min(max_new_tokens, block_size // 4)
    render_chat(messages[-1:], tokenizer)  # is there one?
    first = messages[0].get("role") == "system" and len(messages) > 1
    system, turns, fits = messages[:first], messages[first:], None
    for start in reversed(range(len(turns))):
        ids, _ = render_chat(system + turns[start:], tokenizer, answer=True)
        if len(ids) > room:
            break
        if start == 0 or turns[start]["role"] == "user":
            fits = ids.tolist(), start
    if fits is None:
        raise UserError(
            f"the newest message takes {len(ids)} tokens with its roles, and there is room for "
            f"{room} beside the answer; shorten it"
        )
    return fits
