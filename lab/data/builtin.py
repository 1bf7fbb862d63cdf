"""A text that every Python brings along: its language reference and its docstrings."""

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from pathlib import Path

from lab.data.shards import progress, read_manifest
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import check_same, new_manifest, save_shard, write_manifest
from lab.files import only_writer

SKIPPED = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages"}
SKIPPED |= {"__pycache__", "_bundled"}


def builtin_documents() -> list[str]:
    """The language reference and the standard library's docstrings, in a fixed, mixed order.

    The files are parsed, never imported. Sorting by hash mixes: the last tenth, which is
    validation, is like the rest.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    documents, files = set(topics.values()), []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in progress(files, "reading Python's documentation", "file"):
        try:
            with warnings.catch_warnings():  # about odd escapes in old files
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):  # templates, other encodings
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        documents.update(ast.get_docstring(node) or "" for node in nodes)
    documents = [text for text in documents if text.strip()]
    return sorted(documents, key=lambda t: hashlib.sha256(t.encode("utf-8", "replace")).digest())


def build_builtin(out_dir, tokenizer: str = "bytes", say=None) -> dict:
    """The built-in text as builtin_val_000000.npy and builtin_train_000001.npy in out_dir.

    Returns the manifest, and does nothing where both are there with the sizes that it says. `say`
    takes the lines for people, if given. Several trainers that are started together all call it:
    one makes it, the others wait.
    """
    out_dir = Path(out_dir)
    manifest = whole(out_dir, tokenizer)
    if manifest is None:
        with only_writer(out_dir, "", wait=True):
            manifest = whole(out_dir, tokenizer)
            if manifest is None:
                return make_builtin(out_dir, tokenizer, say)
    if say:
        say(f"{out_dir} is already there: {manifest['tokens']:,} tokens")
    return manifest


def whole(out_dir, tokenizer):
    """The manifest of built-in text that is there already, or None."""
    manifest = read_manifest(out_dir)
    if manifest is None:
        return None
    check_same(out_dir, manifest, data="builtin", tokenizer=tokenizer)
    sizes = [(out_dir / entry["name"], entry["bytes"]) for entry in manifest["shards"]]
    there = all(path.exists() and path.stat().st_size == size for path, size in sizes)
    return manifest if manifest.get("complete") and there else None


def make_builtin(out_dir, tokenizer, say):
    tok, documents = get_tokenizer(tokenizer), builtin_documents()
    tokens, lengths = tok.encode_documents(documents)
    train = len(tokens) - int(lengths[-(len(documents) // 10) :].sum())
    source = {"kind": "builtin", "revision": f"Python {sys.version.split()[0]}"}
    settings = dict(source=source, shard_tokens=train, val_tokens=len(tokens) - train)
    manifest = new_manifest("builtin", tok, **settings)
    save_shard(out_dir, manifest, [tokens[train:]])
    save_shard(out_dir, manifest, [tokens[:train]])
    size = sum(len(text.encode("utf-8", "replace")) for text in documents)
    manifest |= {"text_bytes": size, "complete": True}
    write_manifest(out_dir, manifest)
    if say:
        say(
            f"built-in text of {source['revision']}: {len(documents):,} documents, {size:,} bytes, "
            f"{len(tokens):,} tokens ({len(tokens) - train:,} of them validation) in {out_dir}"
        )
    return manifest
