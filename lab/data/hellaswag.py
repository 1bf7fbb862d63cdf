"""HellaSwag's file: found or downloaded, and read line by line."""

import json
from pathlib import Path

from lab.cli import UserError
from lab.files import first_line, reading

FILE = Path("data/hellaswag/hellaswag_val.jsonl")  # the split whose scores are published
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/master/data/{FILE.name}"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def locate(data=""):
    """Path of the file: `data` (a file, or a folder that holds it), else FILE, downloaded if it is
    not there. Raises UserError, saying how to do it by hand."""
    path = Path(data or FILE)
    if path.is_dir():
        path = path / FILE.name
    if not data and not path.exists():
        import pooch  # downloads under another name, checks the hash, then renames

        try:
            where = {"path": path.parent, "fname": path.name}
            pooch.retrieve(URL, f"sha256:{SHA256}", progressbar=True, **where)
        except (OSError, ValueError) as error:  # ValueError: another hash
            raise UserError(
                f"cannot download {URL} ({first_line(error)}); download it by hand to "
                f"{path} (hellaswag.py also takes a copy: --data FILE)"
            ) from error
    return path


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
        raise UserError(f"{path} holds no examples; it should have one a line. Download it again")
    return examples


def check_example(example):
    """It, its label an integer. Raises TypeError or KeyError where it is not as it has to be."""
    ctx, endings, label = (example[key] for key in ("ctx", "endings", "label"))
    texts = len(endings) == 4 and all(isinstance(text, str) for text in [ctx, *endings])
    known = str(label) in ("0", "1", "2", "3")  # the hub's copy has the label as a text
    if not (texts and known and all(text.strip() for text in endings)):
        raise TypeError("wanted are a ctx, 4 endings that are not empty, and a label from 0 to 3")
    return example | {"label": int(label)}
