"""The built-in text, which needs no network: Python's language reference and docstrings.

Used by `fineweb.py --source builtin`, and by training with --data data/builtin.
"""

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from pathlib import Path

from lab.cli import progress
from lab.data.manifest import (
    Manifest,
    check_manifest_matches,
    init_output_dir,
    load_partial_manifest,
    new_manifest,
    write_manifest,
)
from lab.data.shards import save_shard
from lab.data.tokenizers import check_same_tokenizer, get_or_train, get_tokenizer, tokenizer_path
from lab.files import dir_lock

SKIP_DIRS = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "_bundled"}


def python_documents() -> list[str]:
    """The texts of the language reference, and the standard library's docstrings (parsed, not imported).

    They are sorted by hash, so that the last tenth, which is used for validation, resembles the rest.
    """
    try:
        from pydoc_data.topics import topics  # optional: some distributions omit it

        documents = set(topics.values())
    except ImportError:
        documents = set()
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in SKIP_DIRS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in progress(files, "reading Python's documentation", "file"):
        try:
            with warnings.catch_warnings(action="ignore"):  # invalid escapes in old files
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):  # templates, other encodings
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                documents.add(ast.get_docstring(node) or "")
    documents = [text for text in documents if text.strip()]
    return sorted(documents, key=lambda t: hashlib.sha256(t.encode("utf-8", "replace")).digest())


def build_python_docs(
    out_dir: str | Path, tokenizer: str = "bytes", vocab_size: int = 4096
) -> Manifest:
    """Write builtin_val_000000.npy and builtin_train_000001.npy, unless out_dir has them.

    If several trainers call it at the same time, one of them builds and the others wait. vocab_size: of
    a WordPiece. Returns the manifest. Raises UserError if out_dir has other data.
    """
    with dir_lock(out_dir, "", wait=True):
        if manifest := load_partial_manifest(out_dir):
            path = tokenizer_path(out_dir, tokenizer)
            check_manifest_matches(out_dir, manifest, data="builtin", tokenizer=Path(path).name)
            if manifest["complete"]:
                if path != tokenizer:
                    check_same_tokenizer(path, tokenizer)
                return manifest
        documents = python_documents()
        first = len(documents) - len(documents) // 10  # index of the first validation document
        tok = get_tokenizer(get_or_train(out_dir, tokenizer, documents[:first], vocab_size))
        val = tok.encode_documents(documents[first:])
        train = tok.encode_documents(documents[:first])
        source = {"kind": "builtin", "revision": f"Python {sys.version.split()[0]}"}
        manifest = new_manifest(
            "builtin", tok, source=source, shard_tokens=len(train), val_tokens=len(val)
        )
        init_output_dir(out_dir, manifest)
        save_shard(out_dir, manifest, val)
        save_shard(out_dir, manifest, train)
        return write_manifest(out_dir, manifest, complete=True)
