"""Conversations as tokens, for fine-tuning and for sampling: a plain-text form that GPT-2's vocabulary can write.

    <|endoftext|>System: You are brief.

    User: What is two and two?

    Assistant: Four.<|endoftext|>

    User: And twice that?

    Assistant: Eight.<|endoftext|>

A model learns what stands after "Assistant:", up to and with the end-of-text that ends each answer, so a sampler stops
there as it does after a document. No token is added to the vocabulary. Because answers end in end-of-text, a model that
is fine-tuned on several turns must not hide what lies before one (leave the trainer's document mask off).
"""
from pathlib import Path

import numpy as np

from lab.data.sources import File, records_of, units_of
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import (
    check_same,
    made_nothing,
    new_manifest,
    npy_header,
    read_manifest,
    refuse_unknown,
    sha256_of,
    shard_entry,
    shard_files,
    write_manifest,
    write_whole,
)

ROLES = {"system": "System:", "user": "User:", "assistant": "Assistant:"}


def render_chat(messages, tokenizer, answer: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Ids (uint16) of a conversation and its mask (uint8; 1: this token is to be learnt).

    `messages` is a list of {"role": "system" | "user" | "assistant", "content": text}. With `answer` the ids end in
    "Assistant:", ready for the model to go on. Raises ValueError for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError('no conversation: wanted is "messages", a list of objects with "role" and "content"')
    ids, mask, gap = [tokenizer.eot], [0], ""

    def add(new, learn):
        ids.extend(new)
        mask.extend([learn] * len(new))

    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}: it is one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"the content of a message is {type(content).__name__}, wanted is text")
        text = " " + content.strip()
        if role == "assistant":
            add(tokenizer.encode(gap + ROLES[role]), 0)
            add([*tokenizer.encode(text), tokenizer.eot], 1)
        else:
            add(tokenizer.encode(gap + ROLES[role] + text), 0)
        gap = "\n\n"
    if answer:
        add(tokenizer.encode(gap + ROLES["assistant"]), 0)
    return np.array(ids, dtype=np.uint16), np.array(mask, dtype=np.uint8)


class RowPacker:
    """Conversations into rows of `context` tokens: each goes into the fullest of the last OPEN rows that has room."""
    OPEN = 32

    def __init__(self, context: int, eot: int):
        self.context, self.eot, self.rows, self.room = context, eot, [], []

    def add(self, ids: np.ndarray, mask: np.ndarray):
        """`ids` must not be longer than a row."""
        first = max(len(self.rows) - self.OPEN, 0)
        fitting = [i for i in range(first, len(self.rows)) if self.room[i] >= len(ids)]
        if not fitting:
            self.rows.append([])
            self.room.append(self.context)
            fitting = [len(self.rows) - 1]
        best = min(fitting, key=lambda i: self.room[i])
        self.rows[best].append((ids, mask))
        self.room[best] -= len(ids)

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids and mask of the first `count` rows, padded with end-of-text that is not learnt, and how much of it."""
        padding = sum(self.room[:count])
        rows, self.rows, self.room = self.rows[:count], self.rows[count:], self.room[count:]
        ids = np.full((len(rows), self.context), self.eot, dtype=np.uint16)
        mask = np.zeros((len(rows), self.context), dtype=np.uint8)
        for i, row in enumerate(rows):
            at = 0
            for new_ids, new_mask in row:
                ids[i, at:at + len(new_ids)], mask[i, at:at + len(new_ids)] = new_ids, new_mask
                at += len(new_ids)
        return ids.reshape(-1), mask.reshape(-1), padding


def is_chat(file: File, column: str) -> bool:
    """Whether the first line of a JSONL file is a conversation and not a text."""
    if file.kind != "jsonl":
        return False
    first = next((record for unit in units_of(file, 0, column) for _, record in records_of(unit)), {})
    return column not in first and isinstance(first.get("messages"), list)


def build_chat(files: list[File], out_dir: Path, tokenizer: str, context: int, shard_tokens: int) -> dict:
    """Conversations as rows of `context` tokens: shards, and beside each a mask of the tokens to be learnt.

    No conversation goes over the end of a row; what is left of a row is end-of-text with mask 0. Every tenth
    conversation is validation. Chat data is small: what was stopped is made again from the start. Returns the manifest.
    """
    source = {"kind": "chat", "files": [[f.name, f.size, sha256_of(Path(f.path))] for f in files]}
    rows_per_shard = shard_tokens // context if context >= 8 else 0
    if not rows_per_shard:
        raise ValueError(f"--context {context} must be at least 8 and at most --shard_tokens {shard_tokens}")
    if files[0].kind != "jsonl":
        raise ValueError(f"chat data is made from JSONL, and {files[0].path} is {files[0].kind}: leave out --chat")
    manifest, tok = read_manifest(out_dir), get_tokenizer(tokenizer)
    left = shard_files(out_dir, manifest["data"]) if manifest is not None and made_nothing(manifest) else None
    if left is not None and all(path.suffix == ".part" for path in left):  # of the same file as text, perhaps
        for part in left:
            part.unlink()
        manifest = None
    if manifest is not None and (manifest["complete"] or manifest["data"] != "chat"):
        check_same(out_dir, manifest, data="chat", tokenizer=tokenizer, context=context, source=source,
                   shard_tokens=rows_per_shard * context)
        return manifest
    manifest = new_manifest("chat", tok, source, rows_per_shard * context, 0, context)
    manifest |= {"too_long": 0, "no_answer": 0, "targets": 0, "padding": 0}
    out_dir.mkdir(parents=True, exist_ok=True)
    refuse_unknown(out_dir, "chat")
    write_manifest(out_dir, manifest)  # what lies here from now on is ours
    for old in shard_files(out_dir, "chat"):
        old.unlink()
    packers = {"val": RowPacker(context, tok.eot), "train": RowPacker(context, tok.eot)}

    def save(split, count):
        """The first `count` rows of a split as its next shard."""
        number = sum(e["split"] == split for e in manifest["shards"]) + (split == "train")
        path = out_dir / f"chat_{split}_{number:06d}.npy"
        ids, mask, padding = packers[split].take(count)
        for target, array in ((path, ids), (path.with_suffix(".mask"), mask)):
            write_whole(target, npy_header(len(array), array.dtype.str), array.tobytes())
        entry = shard_entry(path, tok.eot) | {"rows": len(ids) // context, "targets": int(mask.sum())}
        mask_path = path.with_suffix(".mask")
        entry["mask"] = {"name": mask_path.name, "bytes": mask_path.stat().st_size, "sha256": sha256_of(mask_path)}
        manifest["shards"].append(entry)
        manifest["padding"] += padding

    for i, file in enumerate(files):
        for unit in units_of(file, i, "messages"):
            for line, record in records_of(unit):
                try:
                    ids, mask = render_chat(record.get("messages"), tok)
                except ValueError as error:
                    raise ValueError(f"{file.path}, line {line}: {error}") from error
                reason = "no_answer" if not mask.any() else "too_long" if len(ids) > context else None
                if reason:
                    manifest[reason] += 1
                    continue
                packers["val" if manifest["documents"] % 10 == 0 else "train"].add(ids, mask)
                manifest["documents"] += 1
                manifest["targets"] += int(mask.sum())
            while len(packers["train"].rows) >= rows_per_shard + RowPacker.OPEN:  # these are filled for good
                save("train", rows_per_shard)
    if not manifest["documents"]:
        raise ValueError(f"{files[0].path} holds no conversation to learn from: {manifest['no_answer']:,} without an answer, "
                         f"{manifest['too_long']:,} longer than --context {context}")
    if manifest["documents"] == 1:
        raise ValueError(f"{files[0].path} holds one conversation to learn from, and the first of every ten is for validation, "
                         "so there is none to train on; give it two or more")  # fmt: skip
    save("val", len(packers["val"].rows))
    while packers["train"].rows:
        save("train", rows_per_shard)
    manifest["shards"].sort(key=lambda entry: entry["name"][-10:])  # by number: validation is 0
    manifest |= {"tokens": sum(e["tokens"] for e in manifest["shards"]), "complete": True}
    write_manifest(out_dir, manifest)
    return manifest
