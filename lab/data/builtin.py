"""A text that every Python brings along: its language reference and its docstrings."""

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from pathlib import Path

from lab.cli import progress
from lab.data.tokenizers import get_tokenizer
from lab.data.wordpiece import name_in, prepare
from lab.data.writer import begin, begun, check_same, new_manifest, save_shard, write_manifest
from lab.files import only_writer

SKIPPED = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "_bundled"}


def builtin_documents() -> list[str]:
    """The language reference and the standard library's docstrings; its files are not imported.
    Sorting by hash mixes them: the last tenth, which is validation, is like the rest."""
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
            with warnings.catch_warnings(action="ignore"):  # about odd escapes in old files
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):  # templates, other encodings
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        documents.update(ast.get_docstring(node) or "" for node in nodes)
    documents = [text for text in documents if text.strip()]
    return sorted(documents, key=lambda t: hashlib.sha256(t.encode("utf-8", "replace")).digest())


def build_builtin(out_dir, tokenizer: str = "bytes", vocab_size: int = 4096) -> dict:
    """The built-in text as builtin_val_000000.npy and builtin_train_000001.npy in out_dir.

    Returns the manifest, and does nothing where it is complete. Several trainers that are started
    together all call it: one makes it, the others wait. vocab_size: of a WordPiece.
    """
    with only_writer(out_dir, "", wait=True):
        if manifest := begun(out_dir):
            check_same(
                out_dir, manifest, data="builtin", tokenizer=Path(name_in(out_dir, tokenizer)).name
            )
            if manifest["complete"]:
                return manifest
        documents = builtin_documents()
        first = len(documents) - len(documents) // 10  # of validation
        tok = get_tokenizer(prepare(out_dir, tokenizer, documents[:first], vocab_size))
        val, train = map(tok.encode_documents, (documents[first:], documents[:first]))
        source = {"kind": "builtin", "revision": f"Python {sys.version.split()[0]}"}
        sizes = dict(shard_tokens=len(train), val_tokens=len(val))
        manifest = new_manifest("builtin", tok, source=source, **sizes)
        begin(out_dir, manifest)
        save_shard(out_dir, manifest, val)
        save_shard(out_dir, manifest, train)
        return write_manifest(out_dir, manifest, complete=True)
