"""HellaSwag's file: found or downloaded, and read line by line."""

import json
import sys
from pathlib import Path

from lab.cli import UserError
from lab.data.shards import sha256_of
from lab.files import first_line, reading

FOLDER = Path("data/hellaswag")  # where what is downloaded goes
BASE = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/"
PUBLISHED = {  # SHA-256; the test split has no labels
    "hellaswag_val.jsonl": "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
    "hellaswag_train.jsonl": "dae5e69249868cb9fe4e23ff925c60b66169564cfb7072d793cd7356a2b69f8d",
}


def locate(data="", split="val"):
    """Path of the split's file: `data` (a file, or a folder that holds it), else FOLDER's,
    downloaded if it is not there. Raises UserError, saying how to do it by hand."""
    name = f"hellaswag_{split}.jsonl"
    path = Path(data or FOLDER)
    if path.is_dir() or not data:
        path = path / name
    if not data and not path.exists():
        import pooch  # downloads under another name, checks the hash, then renames

        files = pooch.create(FOLDER, base_url=BASE, registry=PUBLISHED, retry_if_failed=2)
        try:
            files.fetch(name, progressbar=sys.stderr.isatty())
        except (OSError, ValueError) as error:  # ValueError: another hash
            raise UserError(
                f"cannot download {BASE}{name} ({first_line(error)}); download it by hand to "
                f"{path} (hellaswag.py also takes a copy: --data FILE)"
            ) from error
    return path


def is_published(path):
    return sha256_of(path) in PUBLISHED.values()


def read_examples(path):
    """The examples of a HellaSwag file as dicts, `line` added. Raises UserError naming the first
    line that is wrong."""
    way_out = "name one with --data, or leave --data out to download it"
    with reading(path, "HellaSwag file", way_out):
        lines = Path(path).read_bytes().split(b"\n")
    examples = []
    for number, raw in enumerate(lines, start=1):
        if raw.strip():
            with reading(f"{path} line {number}", "HellaSwag example", "mend it or take it out"):
                examples.append(check_example(json.loads(raw)) | {"line": number})
    if not examples:
        raise UserError(f"{path} holds no examples; it should have one a line")
    return examples


def check_example(example):
    """It, its label an integer. Raises TypeError where it is not as it has to be."""
    ctx, endings, label = map(dict(example).get, ("ctx", "endings", "label"))
    four = isinstance(endings, list) and len(endings) == 4
    texts = four and all(isinstance(text, str) for text in [ctx, *endings])
    known = str(label) in ("0", "1", "2", "3")  # the hub's copy has the label as a text
    if not (texts and known and all(text.strip() for text in endings)):
        raise TypeError("wanted are a ctx, 4 endings that are not empty, and a label from 0 to 3")
    return example | {"label": int(label)}


def source_of(example):
    """Where it came from: "activitynet" or "wikihow". The published file says so ("wikihow~123").
    In a copy that does not, what goes on in mid-sentence, with a ctx_b, is ActivityNet's."""
    guess = "activitynet" if example.get("ctx_b") else "wikihow"
    return str(example.get("source_id") or guess).split("~")[0]
