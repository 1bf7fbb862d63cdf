"""Conversations as tokens, for fine-tuning and sampling. A conversation becomes this plain text:

    <|endoftext|>System: You are brief.

    User: What is two and two?

    Assistant: Four.<|endoftext|>

    User: And twice that?

    Assistant: Eight.<|endoftext|>

Only the text after "Assistant:" contributes to the loss, including the end-of-text after each answer,
so that sampling stops there. No token is added to the vocabulary. Because each answer ends with
end-of-text, fine-tuning on several turns must not use the document mask, which would hide the earlier
turns.

A source is a JSONL, JSON (one array) or parquet file; the first two may be compressed. Each record is a
conversation in one of these forms, of which find_messages converts the last three to the first:

- OpenAI: {"messages": [{"role": "user", "content": "..."}, ...]}
- ShareGPT: {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
- Alpaca: {"instruction": "...", "input": "...", "output": "..."}; "history" has earlier pairs
- {"prompt": ..., "completion": ...}, both texts or lists of messages; only the completion contributes
  to the loss

The last three may also have a text under "system". In all of them:

- An assistant turn with `"weight": 0` is context and does not contribute to the loss.
- An assistant turn with "tool_calls" or "function_call" (whose "content" may be null or empty) cannot
  be expressed in this format. It is an error, as is the role "tool" or "function".
- Any other blank answer would teach the model to say nothing. Such a conversation is skipped and
  counted in the manifest as `no_answer`, as is one in which no turn contributes to the loss.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lab.cli import ROOT, UserError, eprint, progress
from lab.data.manifest import (
    Manifest,
    check_manifest_matches,
    init_output_dir,
    load_partial_manifest,
    new_manifest,
    sha256_of,
    write_manifest,
)
from lab.data.shards import save_shard
from lab.data.sources import HUB, File, all_units, local_files, nul_error, records_of
from lab.data.tokenizers import TOKENIZER_FILE, Tokenizer, get_or_train, get_tokenizer
from lab.files import dir_lock

ROLES = {"system": "System:", "user": "User:", "assistant": "Assistant:"}


# what render_chat writes after the first end-of-text, for programs that read an export
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ '\\n\\n' if not loop.first }}"
    "{{ {'system': 'System: ', 'user': 'User: ', 'assistant': 'Assistant: '}[m.role] }}"
    "{{ m.content | trim }}{{ '<|endoftext|>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '\\n\\nAssistant:' if add_generation_prompt }}"
)


def render_chat(
    messages: Any,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    where: str = "messages",
) -> tuple[np.ndarray, np.ndarray]:
    """Ids (uint16) of a conversation and its loss mask (uint8; 1: contributes to the loss).

    messages: list of {"role": "system" | "user" | "assistant", "content": text}; an assistant turn
    may have "weight" 0 or 1. add_generation_prompt: end with "Assistant:", so that the model
    answers. Raises UserError, whose message begins with `where`, for messages of any other form.
    """
    parts, gap = [([tokenizer.eot], 0)], ""  # (ids, mask)
    for message in messages if messages and isinstance(messages, list) else [None]:
        role, text, weight = check_message(message, where)
        text = " " + text.strip()
        if role == "assistant":
            parts.append((tokenizer.encode(gap + ROLES[role]), 0))
            parts.append(([*tokenizer.encode(text), tokenizer.eot], weight))
        else:
            parts.append((tokenizer.encode(gap + ROLES[role] + text), 0))
        gap = "\n\n"
    if add_generation_prompt:
        parts.append((tokenizer.encode(gap + ROLES["assistant"]), 0))
    ids = np.concatenate([np.array(new, np.uint16) for new, _ in parts])
    return ids, np.concatenate([np.full(len(new), mask, np.uint8) for new, mask in parts])


def find_messages(record: dict) -> list | None:
    """The messages of a record in one of the forms above; None if it is in none of them."""

    def pair(question: Any, answer: Any) -> list[dict]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    match record:
        case {"messages": list(turns)} | {"conversations": list(turns)}:
            messages = [from_sharegpt(turn) for turn in turns]
        case {"instruction": str(question), "output": str(answer)}:
            more, history = record.get("input") or "", record.get("history") or []
            if not isinstance(more, str) or not isinstance(history, list):
                return None
            messages = []
            for earlier in history:
                if not isinstance(earlier, list) or len(earlier) != 2:
                    return None
                messages += pair(*earlier)
            # if `more` is empty, render_chat strips the blank line
            messages += pair(f"{question}\n\n{more}", answer)
        case {"prompt": str(prompt), "completion": str(completion)}:
            messages = pair(prompt, completion)
        case {"prompt": list(prompt), "completion": list(completion)}:
            context = [turn | {"weight": 0} if isinstance(turn, dict) else turn for turn in prompt]
            messages = context + completion
        case _:
            return None
    system = record.get("system")
    return ([{"role": "system", "content": system}] if system else []) + messages


def from_sharegpt(turn: Any) -> Any:
    """A turn with "from" and "value" as one with "role" and "content"; any other as it is."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker = turn["from"]  # any JSON value, so perhaps not hashable
    role = {"human": "user", "gpt": "assistant"}.get(str(speaker), speaker)
    return {"role": role, "content": turn.get("value"), "weight": turn.get("weight")}


def check_message(message: Any, where: str) -> tuple[str, str, int]:
    """(role, content, weight) of a message. Raises UserError if one of them is invalid."""
    message = message if isinstance(message, dict) else {}
    role, content, weight = message.get("role"), message.get("content"), message.get("weight")
    if message.get("tool_calls") or message.get("function_call"):
        raise UserError(
            f"{where}: a message has a tool call, which the plain-text format cannot express; "
            "remove the conversation, or write the call as text in content"
        )
    if role not in list(ROLES) or not isinstance(content, str):
        value = f"content {content!r:.60}" if role in list(ROLES) else f"role {role!r:.60}"
        raise UserError(
            f'{where}: {value} in a message, but each message must be an object with a "role" '
            f'({", ".join(ROLES)}) and a text as "content"; correct or remove it'
        )
    if weight not in (None, 0, 1):
        raise UserError(
            f"{where}: weight {weight!r:.60} of a message must be 0 (context only) or 1 "
            "(contributes to the loss); correct or remove it"
        )
    return role, content, 1 if weight is None else int(weight)


def has_blank_answer(messages: list[dict]) -> bool:
    """Whether an assistant turn that should contribute to the loss is blank."""
    answers = (m for m in messages if m["role"] == "assistant" and m.get("weight") != 0)
    return any(not m["content"].strip() for m in answers)


PACK_WINDOW = 32  # number of recent rows that are searched for space


def pack_rows(
    chats: Iterable[tuple[np.ndarray, np.ndarray]], context: int, eot: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack conversations (ids, mask) into rows; each goes into the fullest recent row with enough space.

    Returns ids and mask (rows, context), padded with end-of-text and mask 0, and the number of
    conversations in each row. No conversation may be longer than a row.
    """
    rows = []  # [ids, mask, conversations] of each
    for ids, mask in chats:
        fitting = [row for row in rows[-PACK_WINDOW:] if len(row[0]) + len(ids) <= context]
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


def rotate_rows(x: np.ndarray, y: np.ndarray, turns: np.ndarray, eot: int) -> None:
    """Rotate rows of packed conversations in place, so that conversation turns[i] of row i (modulo their
    number) is the first one. x, y (B, T): tokens and targets; turns (B,).

    In use, every conversation is the first of its context. One that is later in its row in all epochs
    would only be learned at those positions."""
    for row, target, turn in zip(x, y, turns):
        is_eot = row == eot
        end = np.flatnonzero(~is_eot)[-1] + 2  # after the end-of-text of the last answer
        # a conversation begins with an end-of-text, and the answer before it ends with another
        later = np.flatnonzero(is_eot[:-2] & is_eot[1:-1] & ~is_eot[2:]) + 1
        starts = [0, *later]
        for tokens in (row, target):
            tokens[:end] = np.roll(tokens[:end], -starts[turn % len(starts)])


def records_in(files: list[File]) -> Iterator[tuple[str, dict]]:
    """("<file>, line <number>", the object) of every record of JSONL or parquet files."""
    return (record for unit in all_units(files, "") for record in records_of(unit))


def is_chat(files: list[File], column: str) -> bool:
    """Whether these are local files whose first record is a conversation, not a text."""
    if files[0].kind not in ("jsonl", "parquet") or files[0].path.startswith(HUB):
        return False
    _, first = next(records_in(files), ("", {}))
    if find_messages(first) is None:
        return False
    if isinstance(first.get(column), str):
        eprint(
            f"{files[0].name} holds texts (--text_column {column}) and conversations: reading the texts; to "
            "fine-tune on the conversations, pass the file itself as --data to --preset sft"
        )
        return False
    return True


def read_chats(
    files: list[File], tokenizer: Tokenizer, context: int
) -> tuple[dict[str, list[tuple[np.ndarray, np.ndarray]]], dict[str, int]]:
    """The conversations (ids, mask) of each split, and the numbers of those skipped because they are too
    long or have no answer.

    Records 1, 11, 21 ... are for validation; skipped records keep their numbers. Raises UserError for a
    record that is not a conversation, or if one of the splits would be empty.
    """
    splits: dict[str, list] = {"val": [], "train": []}
    skipped = dict(too_long=0, no_answer=0)
    for i, (where, record) in enumerate(progress(records_in(files), "reading", "line")):
        messages = find_messages(record)
        if messages is None:
            raise UserError(
                f"{where}: no conversation in a record with {', '.join(record)[:200] or 'no keys'}; its "
                "keys must include messages, conversations, instruction and output, or prompt and completion "
                "(for plain texts, build shards with fineweb.py --source and pass their folder as --data)"
            )
        ids, mask = render_chat(messages, tokenizer, where=where)
        if any("\0" in message["content"] for message in messages):
            raise nul_error(where)
        if not mask.any() or has_blank_answer(messages):
            skipped["no_answer"] += 1
            continue
        end = len(mask) - int(mask[::-1].argmax())  # nothing is learned from the turns after it
        if end > context:
            skipped["too_long"] += 1
        else:
            splits["train" if i % 10 else "val"].append((ids[:end], mask[:end]))
    if not splits["val"] or not splits["train"]:
        longer = (
            " or pass a larger --context (to a training program: --seq_len, at most --block_size)"
        )
        raise UserError(
            f"{files[0].path} must have a usable conversation in line 1, 11, 21 ... for validation and "
            f"another one to train on, but {skipped['no_answer']:,} without an answer and "
            f"{skipped['too_long']:,} of more than {context} tokens were skipped; add conversations"
            + (longer if skipped["too_long"] else "")
        )
    return splits, skipped


def build_chat(
    files: list[File], out_dir: str | Path, tokenizer: str, context: int, shard_tokens: int
) -> Manifest:
    """Write conversations, packed into rows of `context` tokens, as shards with masks.

    Chat data is small, so it is held in memory, and an interrupted build starts again. Returns the
    manifest; if it is already complete, nothing is written. Raises UserError as read_chats does.
    """
    if not 8 <= context <= shard_tokens:
        raise UserError(
            f"context={context} must be at least 8 and at most shard_tokens={shard_tokens}; pass "
            "another --context"
        )
    rows_per_shard = shard_tokens // context
    manifest, tok = load_partial_manifest(out_dir), get_tokenizer(tokenizer)
    same: dict[str, Any] = dict(
        source={"kind": "chat", "files": [[f.name, f.size, sha256_of(f.path)] for f in files]},
        context=context, shard_tokens=rows_per_shard * context,
    )  # fmt: skip
    if manifest:
        check_manifest_matches(
            out_dir, manifest, data="chat", tokenizer=Path(tokenizer).name, **same
        )
        if manifest["complete"]:
            return manifest
    manifest = new_manifest("chat", tok, **same, val_tokens=0)
    splits, skipped = read_chats(files, tok, context)
    init_output_dir(out_dir, manifest)
    for split, chats in splits.items():
        ids, mask, counts = pack_rows(chats, context, tok.eot)
        size = rows_per_shard if split == "train" else len(ids)
        for i in range(0, len(ids), size):
            rows = slice(i, i + size)
            count = int(counts[rows].sum())
            save_shard(out_dir, manifest, ids[rows].ravel(), mask[rows].ravel(), documents=count)
    manifest["too_long"], manifest["no_answer"] = skipped["too_long"], skipped["no_answer"]
    return write_manifest(out_dir, manifest, complete=True)


def build_chats(path: str, tokenizer: str, context: int) -> str:
    """build_chat for one file. Trainers call it, possibly several at the same time. tokenizer: a name for
    get_tokenizer.

    Returns the folder, in data/; its name depends on the content of the file.
    """
    shipped = ROOT / path  # the project's own files are found from any folder
    file = shipped if shipped.exists() and not Path(path).exists() else Path(path)
    if not file.exists():
        raise UserError(f"there is no file {file}; choose another with --data")
    label = tokenizer  # of the tokenizer; a file by its content
    if tokenizer.endswith(TOKENIZER_FILE):
        label = f"tokenizer-{sha256_of(tokenizer)[:8]}"
    # 40, because names have at most 255 bytes, and a character has up to 4
    name = f"{file.name[:40]}_{label}_{context}_{sha256_of(file)[:8]}"
    folder = Path("data", name)
    with dir_lock(folder, "", wait=True):
        tokenizer = get_or_train(folder, tokenizer, [], 0)  # copies a file into the folder
        build_chat(local_files(str(file)), folder, tokenizer, context, 100_000_000)
    return str(folder)


# instead of end-of-text, a model may write the next speaker's turn; the answer ends before that turn
STOP_STRINGS = tuple(f"\n\n{role}" for role in ROLES.values())


def truncate_chat(
    messages: list[dict], tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> tuple[list[int], int]:
    """Drop a conversation's oldest messages so that the answer fits in the context.

    Space is reserved for max_new_tokens, but at most a quarter of block_size. A system message at the
    beginning is kept. Returns (ids up to "Assistant:", number of dropped messages). Raises
    UserError if the newest message alone is too long, or as render_chat does.
    """
    space = block_size - min(max_new_tokens, block_size // 4)
    render_chat(messages[-1:], tokenizer)  # raises if there is no valid message
    first = messages[0].get("role") == "system" and len(messages) > 1
    system, turns, fits, ids = messages[:first], messages[first:], None, []
    for start in reversed(range(len(turns))):
        ids, _ = render_chat(system + turns[start:], tokenizer, add_generation_prompt=True)
        if len(ids) > space:
            break
        if start == 0 or turns[start]["role"] == "user":
            fits = ids.tolist(), start
    if fits is None:
        raise UserError(
            f"the newest message takes {len(ids)} tokens with its roles and any system message, "
            f"but must fit in {space} to leave space for the answer; shorten it"
        )
    return fits
