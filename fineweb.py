"""Text corpora as shards of token ids: FineWeb-Edu from the hub, your own files, or the text inside Python.

    python fineweb.py                                               # FineWeb-Edu 10B tokens into edu_fineweb10B/
    python fineweb.py --source builtin                              # no network: Python's own documentation
    python fineweb.py --source my_texts/ --out data/mine            # parquet, JSONL, plain text, also .gz and .zst
    python fineweb.py --verify --out edu_fineweb10B                 # read everything again, name what is broken

A shard is a row of uint16 tokens in a .npy file, named <data>_<split>_<number>.npy; number 0 is the validation split.
Documents stand one after the other, each led by end-of-text. manifest.json beside the shards says where they came from
and how far the work is: whatever stops it, even kill -9, the same command goes on and ends with the same bytes.
"""
import ast
import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections import deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


import numpy as np

from lab.data import sources
from lab.data.chat import build_chat, is_chat
from lab.data.sources import File, NetworkTrouble, Tokens, hub_files, local_files, open_parquet, stream, tokenise, units_of
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import (
    ShardWriter,
    check_same,
    made_nothing,
    new_manifest,
    read_manifest,
    refuse_unknown,
    sha256_of,
    shard_entry,
    verify,
    write_manifest,
)
from lab.files import only_writer

# ---- the built-in text -----------------------------------------------------------------------------------------------

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}


def builtin_documents() -> list[str]:
    """The language reference and the standard library's docstrings, in an order that is fixed and mixed.

    The files are parsed, never imported. Sorting by hash mixes: the last tenth, which is validation, is like the rest.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    documents = set(topics.values())
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in files:
            if not name.endswith(".py"):
                continue
            try:
                with warnings.catch_warnings():  # about odd escapes in old files
                    warnings.simplefilter("ignore")
                    tree = ast.parse(Path(folder, name).read_text(encoding="utf-8"))
            except (SyntaxError, ValueError, OSError):  # templates, other encodings
                continue
            nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            documents.update(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, nodes))
    documents = [text for text in documents if text.strip()]
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode("utf-8", "replace")).digest())


def build_builtin(out_dir, tokenizer: str = "bytes", say=None) -> dict:
    """The built-in text as builtin_val_000000.npy and builtin_train_000001.npy; returns the manifest.

    Does nothing where both are there with the sizes in the manifest. `say` takes the lines for people, if given.
    It is a matter of seconds, and several trainers that are started together all call it: one makes it, the others wait.
    """
    with only_writer(out_dir, "", wait=True):
        return make_builtin(Path(out_dir), tokenizer, say)


def make_builtin(out_dir: Path, tokenizer: str, say) -> dict:
    manifest = read_manifest(out_dir)
    if manifest is not None:
        check_same(out_dir, manifest, data="builtin", tokenizer=tokenizer)
        sizes = [(out_dir / e["name"], e["bytes"]) for e in manifest["shards"]]
        if manifest["complete"] and all(p.exists() and p.stat().st_size == n for p, n in sizes):
            if say:
                say(f"{out_dir} is already there: {manifest['tokens']:,} tokens; --verify reads them again")
            return manifest
    tok = get_tokenizer(tokenizer)
    documents = builtin_documents()
    tokens, lengths = tok.encode_documents(documents)
    val_documents = len(documents) // 10
    val_tokens = int(lengths[-val_documents:].sum())
    source = {"kind": "builtin", "revision": f"Python {sys.version.split()[0]}"}
    manifest = new_manifest("builtin", tok, source, max(len(tokens) - val_tokens, 1), val_tokens)
    writer = ShardWriter(out_dir, manifest)
    writer.append(tokens[len(tokens) - val_tokens:])
    writer.append(tokens[:len(tokens) - val_tokens])
    text_bytes = sum(len(text.encode("utf-8", "replace")) for text in documents)
    manifest.update(documents=len(documents), text_bytes=text_bytes, tokens=len(tokens))
    writer.complete()
    if say:
        say(f"built-in text of {source['revision']}: {len(documents):,} documents, {text_bytes:,} bytes, "
            f"{len(tokens):,} tokens ({val_tokens:,} of them validation) in {out_dir}")
    return manifest


# ---- engines: tokenising units in worker processes, or on a Ray cluster ----------------------------------------------

UNDER_WAY = 512 * 2**20  # bytes of text given out and not yet written: this bounds the memory


def in_order(units, submit, result, depth: int):
    """(unit, result(submit(unit))) in the order of `units`, with at most `depth` of them under way."""
    waiting = deque()
    for unit in units:
        while waiting and (len(waiting) >= depth or sum(u.size for u, _ in waiting) + unit.size > UNDER_WAY):
            first, job = waiting.popleft()
            yield first, result(job)
        waiting.append((unit, submit(unit)))
    while waiting:
        first, job = waiting.popleft()
        yield first, result(job)


def start_worker():
    """A worker leaves Ctrl-C to the main process, and ends with it even if that was killed with no time to say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def interrupts_wait():
    """Ctrl-C comes when the body is done, in the main thread. Processes that it starts are born deaf to it, but on Windows."""
    came = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    masks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else None
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what has come meanwhile is delivered here
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


def tokenise_in_processes(units, tokenizer: str, column: str, workers: int):
    """On this machine. Processes are spawned, which is the one way that is safe on every system; 0: in this process."""
    if workers == 0:
        for unit in units:
            yield unit, tokenise(unit, tokenizer, column)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=start_worker)

    def submit(unit):
        with interrupts_wait():  # the first one starts the workers, which would print a traceback each while they import
            return pool.submit(tokenise, unit, tokenizer, column)

    try:
        yield from in_order(units, submit, lambda job: job.result(), depth=4 * workers)
    except BrokenExecutor as error:
        raise OSError("a worker process was killed, most likely for want of memory: run the same command with fewer "
                      "--workers, it goes on where it was") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def tokenise_on_ray(units, tokenizer: str, column: str, workers: int):
    """On the Ray cluster that RAY_ADDRESS names, or on `workers` cores here. A task whose worker dies is run again.

    The code travels with the tasks; local files must lie under the same path on every machine.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install ray, or leave the flag out") from error
    for module in (sources, sys.modules[get_tokenizer.__module__]):
        ray.cloudpickle.register_pickle_by_value(module)
    names = ("TIKTOKEN_CACHE_DIR", "HF_ENDPOINT", "HF_TOKEN", "FINEWEB_TRIES")
    here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": max(workers, 1), "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="error",
             runtime_env={"env_vars": {n: os.environ[n] for n in names if n in os.environ}}, **here)
    try:
        task = ray.remote(num_cpus=1, max_retries=10)(tokenise)
        yield from in_order(units, lambda unit: task.remote(unit, tokenizer, column), ray.get,
                            depth=4 * int(ray.cluster_resources()["CPU"]))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray gave up ({type(error).__name__}); the same command goes on where it was") from error
    finally:
        ray.shutdown()


ENGINES = {"processes": tokenise_in_processes, "ray": tokenise_on_ray}

# ---- a corpus becomes shards -----------------------------------------------------------------------------------------

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
BYTES_PER_TOKEN = {"gpt2": 4.4, "bytes": 1.0}  # of English; for guesses before the start
UNPACKED = 3.5  # how much larger text is than its .gz or .zst, roughly
LENGTH_BINS = 96  # document lengths are counted four bins to an octave


def find_source(cfg, manifest: dict | None) -> tuple[dict, list[File]]:
    """What the manifest says about the source, and its files. A corpus that was begun keeps its revision."""
    if cfg.source != "hub":
        files = local_files(cfg.source)
        return {"kind": "local", "text_column": cfg.text_column, "files": [[f.name, f.size] for f in files]}, files
    name = cfg.name or ("sample-10BT" if cfg.dataset == FINEWEB_EDU else "")
    begun = manifest["source"] if manifest and manifest["source"].get("dataset") == cfg.dataset else {}
    revision, files = hub_files(cfg.dataset, name, cfg.split, begun.get("revision", cfg.revision))
    return {"kind": "hub", "text_column": cfg.text_column, "dataset": cfg.dataset, "name": name, "split": cfg.split,
            "revision": revision, "files": len(files)}, files


def guess_tokens(files: list[File], tokenizer: str, column: str) -> int:
    """How many tokens the files hold, roughly: for the bar, the disk and the size of the validation shard."""
    size = sum(f.size * (UNPACKED if f.packing else 1) for f in files)
    if files[0].kind == "parquet" and files[0].size:
        parquet = open_parquet(files[0], column)
        text = sum(sources.column_bytes(parquet, column, group) for group in range(parquet.num_row_groups))
        size *= text / files[0].size
    return max(int(size / BYTES_PER_TOKEN[tokenizer]), 1)


def check_disk(out_dir: Path, needed: int, say):
    """Says how much is needed and there is; ValueError where it is too little."""
    there = next(p for p in [out_dir.absolute(), *out_dir.absolute().parents] if p.exists())
    free = shutil.disk_usage(there).free
    say(f"disk: {out_dir} needs about {needed / 1e9:,.2f} GB more, {free / 1e9:,.1f} GB are free")
    if needed > free:
        raise ValueError(f"{out_dir} needs about {needed / 1e9:,.1f} GB and only {free / 1e9:,.1f} GB are free: choose "
                         "an --out on a larger disk, or fewer --tokens")


def counted(at: dict, new: Tokens, keep: int) -> dict:
    """The totals `at` with the first `keep` tokens of `new` added; a document counts where it begins, bytes pro rata."""
    share = min(keep / max(len(new.ids), 1), 1)
    lengths = new.lengths[np.cumsum(new.lengths) - new.lengths < keep]
    bins = np.minimum(4 * np.log2(np.maximum(lengths, 1)), LENGTH_BINS - 1).astype(int)
    return at | {"documents": at["documents"] + len(lengths), "tokens": at["tokens"] + min(keep, len(new.ids)),
                 "text_bytes": at["text_bytes"] + round(share * new.text_bytes), "empty": at["empty"] + new.empty,
                 "lengths": (np.array(at["lengths"]) + np.bincount(bins, minlength=LENGTH_BINS)).tolist()}


def begin_corpus(cfg, say) -> tuple[dict, list[File], int]:
    """The manifest to go on with (complete: there is nothing to do), the files, and the number of tokens expected."""
    out_dir, manifest = Path(cfg.out), read_manifest(Path(cfg.out))
    manifest = None if manifest is not None and made_nothing(manifest) else manifest
    source, files = find_source(cfg, manifest)
    settings = {"tokenizer": cfg.tokenizer, "data": data_name(cfg), "source": source}
    if files[0].kind == "bin":
        if manifest is not None:
            check_same(out_dir, manifest, **settings)
        return manifest, files, 0
    limit, shard_tokens = parse_count("tokens", cfg.tokens), parse_count("shard_tokens", cfg.shard_tokens)
    val_tokens = parse_count("val_tokens", cfg.val_tokens)
    guess = guess_tokens(files, cfg.tokenizer, cfg.text_column)
    expected = min(limit, guess) if limit else guess
    if manifest is None:
        # Validation is the first shard, or a tenth of a corpus that is too small to give it a whole shard.
        val_tokens = val_tokens or min(shard_tokens, max(expected // 10, 1))
        manifest = new_manifest(data_name(cfg), get_tokenizer(cfg.tokenizer), source, shard_tokens, val_tokens)
        manifest["resume"] |= {"file": 0, "unit": 0, "exhausted": False, "documents": 0, "text_bytes": 0, "tokens": 0,
                               "empty": 0, "lengths": [0] * LENGTH_BINS}
    else:
        check_same(out_dir, manifest, **settings, shard_tokens=shard_tokens,
                   **({"val_tokens": val_tokens} if val_tokens else {}))
        there = manifest["resume"]["tokens"]
        if limit and limit < there and not manifest["complete"]:
            raise ValueError(f"--tokens {cfg.tokens} is less than the {there:,} that {out_dir} holds already: ask for at least "
                             "so many, or choose another --out")
        manifest["complete"] &= manifest["resume"]["exhausted"] or bool(limit and manifest["tokens"] >= limit)
        for entry in manifest["shards"][:None if manifest["complete"] else manifest["resume"]["part_index"]]:
            path = out_dir / entry["name"]
            if not path.exists() or path.stat().st_size != entry["bytes"]:
                raise ValueError(f"{path} is missing or not as long as manifest.json says: put it back, or delete "
                                 f"{out_dir} and start again")
    if not manifest["complete"]:
        check_disk(out_dir, 2 * max(expected - manifest["resume"]["tokens"], 0), say)
    return manifest, files, expected


def build_corpus(cfg, say) -> dict:
    """The source as shards in cfg.out, from where the manifest there says it is; returns the complete manifest."""
    manifest, files, expected = begin_corpus(cfg, say)
    if files[0].kind == "bin":
        return download_shards(cfg, manifest, files, say)
    if manifest["complete"]:
        say(f"{cfg.out} is already there: {manifest['tokens']:,} tokens; --verify reads them again")
        return manifest
    limit = parse_count("tokens", cfg.tokens) or sys.maxsize
    at = {key: value for key, value in manifest["resume"].items() if not key.startswith("part_")}
    if at["tokens"]:
        say(f"going on after {at['tokens']:,} tokens of {at['documents']:,} documents")
    writer = ShardWriter(Path(cfg.out), manifest)
    units = (unit for i in range(at["file"], len(files))
             for unit in units_of(files[i], i, cfg.text_column, at["unit"] if i == at["file"] else 0))
    workers = os.cpu_count() if cfg.workers < 0 else cfg.workers
    noted, total = time.monotonic(), at
    with (contextlib.closing(ENGINES[cfg.engine](units, cfg.tokenizer, cfg.text_column, workers)) as results,
          contextlib.closing(writer.file),
          progress_bar(expected, at["tokens"], "tok") as bar):
        try:
            for unit, new in results:
                keep = limit - at["tokens"]
                total = counted(at, new, keep)
                if len(new.ids) >= keep:  # a larger --tokens can go on from this note
                    writer.note(**at)
                    writer.append(new.ids[:keep])
                    break
                with interrupts_wait():  # between these two it would be unknown how far the shard is
                    writer.append(new.ids)
                    at = total = total | {"file": unit.file_index, "unit": unit.index + 1}
                bar.set_postfix_str(f"{at['documents']:,} documents, {at['text_bytes'] / 1e6:,.0f} MB", refresh=False)
                bar.update(len(new.ids))
                if time.monotonic() - noted > cfg.note_every:
                    writer.note(**at)
                    noted = time.monotonic()
            else:
                writer.note(**at | {"exhausted": True})
        except KeyboardInterrupt:
            if writer.holds(at["tokens"]):
                writer.note(**at)
            raise
        if not total["tokens"]:
            raise ValueError(f"{cfg.source} holds no text: {total['empty']:,} documents, all of them empty")
        manifest.update({key: total[key] for key in ("documents", "text_bytes", "tokens", "empty", "lengths")})
        writer.complete()
    return manifest


def download_shards(cfg, manifest: dict | None, files: list[File], say) -> dict:
    """Ready-made llm.c shards from the hub: the validation shard and as many others as --tokens asks for."""
    out_dir, limit = Path(cfg.out), parse_count("tokens", cfg.tokens) or sys.maxsize
    if cfg.tokenizer != "gpt2":
        raise ValueError(f"--dataset {cfg.dataset} holds GPT-2 tokens: leave out --tokenizer {cfg.tokenizer}")
    chosen, tokens = [], 0
    for file in sorted(files, key=lambda f: ("_val_" not in f.name, f.name)):
        if re.fullmatch(r".+_(train|val)_\d+\.bin", Path(file.name).name) and tokens < limit:
            chosen.append(file)
            tokens += (file.size - 1024) // 2
    if not chosen:
        raise ValueError(f"--dataset {cfg.dataset} has .bin files, but none named <data>_<train|val>_<number>.bin")
    if manifest is None:
        source, _ = find_source(cfg, None)
        manifest = new_manifest(data_name(cfg), get_tokenizer("gpt2"), source, 0, 0)
    refuse_unknown(out_dir, manifest["data"], Path(chosen[0].name).name.rsplit("_", 2)[0])
    here = {e["name"]: e for e in manifest["shards"] if (out_dir / e["name"]).exists()
            and (out_dir / e["name"]).stat().st_size == e["bytes"]}
    missing = [f for f in chosen if Path(f.name).name not in here]
    manifest |= {"complete": False, "shards": list(here.values())}
    check_disk(out_dir, sum(f.size for f in missing), say)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_manifest(out_dir, manifest)  # what lies here from now on is ours
    with progress_bar(sum(f.size for f in missing), 0, "B") as bar:
        for file in missing:
            path = out_dir / Path(file.name).name
            part = path.with_name(path.name + ".part")
            with open(part, "ab") as out:
                bar.update(out.tell())
                for piece in stream(file.path, out.tell(), file.size):
                    out.write(piece)
                    bar.update(len(piece))
                out.flush()
                os.fsync(out.fileno())
            if file.sha256 and sha256_of(part) != file.sha256:
                part.unlink()
                raise ValueError(f"{path.name} arrived damaged (its SHA-256 is not the hub's): run the command again")
            os.replace(part, path)
            manifest["shards"].append(shard_entry(path, manifest["eot"]))
            manifest["shards"].sort(key=lambda e: ("_val_" not in e["name"], e["name"]))
            write_manifest(out_dir, manifest)
    manifest |= {"complete": True, "tokens": sum(e["tokens"] for e in manifest["shards"]),
                 "documents": sum(e["documents"] for e in manifest["shards"])}
    write_manifest(out_dir, manifest)
    return manifest


# ---- what people see -------------------------------------------------------------------------------------------------


def progress_bar(total: int, initial: int, unit: str):
    from tqdm import tqdm
    return tqdm(total=total, initial=initial, unit=unit, unit_scale=True, dynamic_ncols=True, smoothing=0.1)


def summary(manifest: dict, out_dir: Path, seconds: float) -> str:
    train = sum(e["split"] == "train" for e in manifest["shards"])
    text = (f"{out_dir}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens in {train} training and "
            f"{len(manifest['shards']) - train} validation shards, {seconds:,.0f} s")
    if manifest["text_bytes"]:
        text += f"; {manifest['text_bytes'] / manifest['tokens']:.2f} bytes per token"
    if manifest["empty"]:
        text += f"; {manifest['empty']:,} empty documents were left out"
    if not train:
        text += "\nAll of it went into the validation shard: a smaller --val_tokens leaves some for training"
    return text


def chat_summary(manifest: dict, out_dir: Path) -> str:
    rows = manifest["tokens"] // manifest["context"]
    return (f"{out_dir}: {manifest['documents']:,} conversations in {rows:,} rows of {manifest['context']} tokens, "
            f"{manifest['tokens']:,} tokens, of which {manifest['targets']:,} are to be learnt and {manifest['padding']:,} "
            f"are padding; left out: {manifest['too_long']:,} too long, {manifest['no_answer']:,} without an answer")


def plot_lengths(manifest: dict, path: Path):
    """The histogram of document lengths as a picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    counts = np.array(manifest["lengths"])
    edges = 2 ** (np.arange(LENGTH_BINS + 1) / 4)
    middle = edges[np.searchsorted(np.cumsum(counts), counts.sum() / 2)] * 2 ** 0.125
    longer = counts[40:].sum() / counts.sum()  # 2 ** (40 / 4) = 1024
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.stairs(counts, edges, fill=True)
    axes.axvline(1024, color="black", linestyle="--", label="1024, GPT-2's context")
    used = np.flatnonzero(counts)
    axes.set_xscale("log", base=2)  # before the rest, which it would undo
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlim=(min(edges[used[0]], 1024) / 1.2, max(edges[used[-1] + 1], 1024) * 1.2),
             xlabel="length of a document (tokens, with its end-of-text)", ylabel="documents (per quarter octave)",
             title=f"{manifest['data']}: a typical document has {middle:,.0f} tokens, {longer:.0%} have 1024 or more")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---- command line ----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    """Turns text into shards of token ids for train_gpt2.py. Stopped at any moment, the same command goes on."""

    source: str = "hub"
    """hub, builtin (the documentation inside Python), or a file or folder of parquet, JSONL or text (.gz, .zst)."""
    out: str = ""
    """Folder for the shards; by default edu_fineweb10B for FineWeb-Edu, else data/<name of the source>."""
    tokens: str = ""
    """Stop after this many tokens, validation included: 500M, 10B, 1.3T. A larger number later goes on from there."""
    tokenizer: Literal["gpt2", "bytes"] | None = None
    """gpt2: 50257 tokens, two files are downloaded once; the default, but for the built-in text. bytes: 256 and
    end-of-text, needs nothing."""
    dataset: str = FINEWEB_EDU
    """Data set on the hub. One of ready-made token shards (kjj0/finewebedu10B-gpt2) is downloaded as it is."""
    name: str = ""
    """Its configuration; for FineWeb-Edu sample-10BT, sample-100BT, sample-350BT or default (1.3T tokens)."""
    split: str = "train"
    """Its split."""
    revision: str = "main"
    """Its branch, tag or commit. The commit is kept in the manifest, and a corpus that was begun stays with it."""
    text_column: str = "text"
    """Column (parquet) or key (JSONL) that holds the text."""
    chat: bool = False
    """JSONL lines are conversations ("messages" with roles): make rows of --context tokens and masks for fine-tuning.
    Found out by itself where the first line has messages and no text."""
    context: int = 1024
    """Tokens in a row of chat data; longer conversations are dropped and counted."""
    shard_tokens: str = "100M"
    """Tokens in a shard."""
    val_tokens: str = ""
    """Tokens in the validation shard, the first; by default as many as in a shard, at most a tenth of all."""
    workers: int = -1
    """Processes that tokenise; -1: one for each core, 0: none, all in the main process. The shards stay the same."""
    engine: Literal["processes", "ray"] = "processes"
    """ray: tokenise on the Ray cluster that RAY_ADDRESS names (or on this machine); needs pip install ray."""
    note_every: float = 5.0
    """Seconds between two notes in the manifest of how far the work is: what kill -9 can cost."""
    verify: bool = False
    """Read all shards in --out again, compare them with the manifest, name what is broken (exit status 1)."""


def parse_count(flag: str, text: str) -> int:
    """500M, 10B, 1.3T or a plain number as int; 0 for no text."""
    if not text:
        return 0
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kKMBT]?)", text.strip())
    count = round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[found[2].lower()]) \
        if found else 0
    if count < 1:
        raise ValueError(f"--{flag} {text}: wanted is a number of tokens of at least 1, such as 500M or 10B")
    return count


def data_name(cfg) -> str:
    """The first part of the shards' names."""
    if cfg.source == "hub" and cfg.dataset == FINEWEB_EDU:
        return "edufineweb"
    name = cfg.dataset.split("/")[-1] if cfg.source == "hub" else Path(cfg.source).resolve().name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "text"


def default_out(cfg) -> str:
    if cfg.source == "hub" and cfg.dataset == FINEWEB_EDU:
        return f"edu_fineweb{(cfg.name or 'sample-10BT').removeprefix('sample-').removesuffix('T')}"
    return f"data/{data_name(cfg)}"


def remove_if_empty(folder: Path):
    with contextlib.suppress(OSError):
        folder.rmdir()


def run(cfg: Config) -> int:
    cfg.out = cfg.out or default_out(cfg)
    cfg.tokenizer = cfg.tokenizer or ("bytes" if cfg.source == "builtin" else "gpt2")
    t0, out_dir = time.monotonic(), Path(cfg.out)
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"out={cfg.out} is a file and must be a folder for the shards; name another with --out")
    if cfg.verify:
        if not out_dir.exists():
            raise ValueError(f"out={cfg.out} is not there, so there is nothing to verify; name a folder of shards with --out")
        if not (out_dir / "manifest.json").exists() and not any(out_dir.glob("*_*_*.*")):
            raise ValueError(f"out={cfg.out} holds no shards, so there is nothing to verify; name another with --out")
        problems = verify(out_dir)
        print("\n".join(problems) or f"{out_dir}: all shards are whole")
        return 1 if problems else 0
    for flag in ("tokens", "shard_tokens", "val_tokens"):
        parse_count(flag, getattr(cfg, flag))
    if cfg.workers < -1:
        raise ValueError(f"--workers {cfg.workers}: wanted is a number of processes, or -1 for one on each core")
    if not cfg.note_every >= 0:
        raise ValueError(f"--note_every {cfg.note_every}: wanted are seconds, 0 or more")
    heeded, why = {f.name for f in dataclasses.fields(cfg)}, ""
    if cfg.source == "builtin":
        heeded, why = {"source", "out", "tokenizer", "workers", "note_every", "verify"}, "one small text, made whole"
    elif cfg.source != "hub":
        heeded, why = heeded - {"dataset", "name", "split", "revision"}, "as it is about data sets on the hub"
    for f in dataclasses.fields(cfg):
        if f.name not in heeded and getattr(cfg, f.name) != f.default:
            raise ValueError(f"--{f.name} does nothing for --source {cfg.source}, {why}; leave it out")
    if cfg.source == "builtin":
        build_builtin(out_dir, cfg.tokenizer, say=print)
        return 0
    if cfg.context < 2:
        raise ValueError(f"--context {cfg.context}: wanted are 2 tokens or more")
    chat = cfg.source != "hub" and (cfg.chat or is_chat(local_files(cfg.source, say=True)[0], cfg.text_column))
    refusal = (f"another fineweb.py is writing {out_dir}, and only one may at a time: run this again when it has ended, or "
               "choose another --out")  # fmt: skip
    with contextlib.ExitStack() as at_end:
        if not out_dir.exists():
            at_end.callback(remove_if_empty, out_dir)
        at_end.enter_context(only_writer(out_dir, refusal))
        if chat:
            shard_tokens = parse_count("shard_tokens", cfg.shard_tokens)
            manifest = build_chat(local_files(cfg.source), out_dir, cfg.tokenizer, cfg.context, shard_tokens)
            print(chat_summary(manifest, out_dir))
            return 0
        manifest = build_corpus(cfg, say=print)
        print(summary(manifest, out_dir, time.monotonic() - t0))
        if manifest.get("lengths"):
            plot_lengths(manifest, out_dir / "documents.png")
            print(f"document lengths: {out_dir / 'documents.png'}")
    return 0


def by_hand(cfg) -> str:
    """What to do when the hub cannot be reached."""
    name = cfg.name or ("sample-10BT, in sample/10BT" if cfg.dataset == FINEWEB_EDU else "all of it")
    other = f" --tokens {cfg.tokens}" * bool(cfg.tokens) + f" --tokenizer {cfg.tokenizer}" * (cfg.tokenizer != "gpt2")
    return (f"The same command goes on where it was. Or download {name} by hand from https://huggingface.co/datasets/"
            f"{cfg.dataset}/tree/main into a folder and run: python fineweb.py --source FOLDER --out {cfg.out}{other}. With no "
            "network at all: python fineweb.py --source builtin")


def main(argv=None) -> int:
    import tyro
    cfg = tyro.cli(Config, args=argv, prog="fineweb.py", use_underscores=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(cfg)
    except BrokenPipeError:  # | head
        os._exit(1)
    except NetworkTrouble as error:
        print(f"fineweb.py: error: {error}. {by_hand(cfg)}", file=sys.stderr)
    except (ValueError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.errno is not None:  # the system's, which says neither why nor what to do
            text = (f"{error.filename or cfg.out} cannot be read or written ({error.strerror}); when that is mended, the same "
                    "command goes on")
        print(f"fineweb.py: error: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        print("fineweb.py: stopped" + "; the same command goes on where it was" * (not cfg.verify), file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    with running("fineweb.py"):
        status = main()
    with contextlib.suppress(KeyboardInterrupt):
        for thread in threading.enumerate():  # the pool's: if the interpreter ended first, it would wake a thread that ends
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    sys.exit(status)
