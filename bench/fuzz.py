"""Damaged and hostile files of every kind that is read here: nothing but our own errors comes out.

    python bench/fuzz.py --count 10000                      # so many files of each kind
    python bench/fuzz.py --kind npy --seed 1234 --count 1   # one file again, with what its reader raised

A good file is changed as its seed says and read as the commands read it, by a child process that may
take 2 GiB more memory, 20 seconds, no other program and no network. It may be read, or be refused by a
UserError. Whatever else happens is a finding: it is printed, and the exit status is 1.
"""

import contextlib
import dataclasses
import gzip
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from records import random_shards

import bert
import fineweb
import hellaswag
import train_gpt2
from lab import models
from lab.cli import UserError, command, in_words, parse
from lab.data import TokenShards, get_tokenizer
from lab.data.hellaswag import read_examples
from lab.run import folder, settings
from lab.run.spikes import Spikes
from lab.tools import plot, replay, report
from lab.tools.export import export
from lab.world import World

SECONDS, MEMORY, BATCH = 20, 2 * 2**30, 100  # of a file; of a child, which reads so many files
FORBIDDEN = "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"
PRESETS = train_gpt2.PRESETS
TEXTS = [f"Text {i} says naïve things. " * (i % 5) for i in range(40)]
ROWS = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
YES = {"role": "assistant", "content": "Yes."}
CHATS = [{"messages": [{"role": "user", "content": text}, YES]} for text in TEXTS]
SHADES = [{"text": "a", "name": "'a'", "p": 0.5, "id": 97, "likeliest": [[98, "'b'", 0.1]]}]
ENDINGS = {"ctx": "A man", "endings": ["runs.", "is", "eats a shoe", "flew"], "label": 2, "ind": 1}

# --------------------------------------------------------------------------------- 1. changed files

ODD = [None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x",
       "x" * 100_000, "\ud800", "../../etc/passwd", [], {}, [[]], ["a", 1], {"a": {}}, "DEEP"]  # fmt: skip
DEEP = "[" * 100_000


def nodes(tree, path=()):
    """The places of all values in nested dicts and lists."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*path, key)
        yield from nodes(tree[key], (*path, key))


def change_tree(tree, rng, odd=ODD):
    """One value of nested dicts and lists is another, has gone, or has company; or all is another."""
    places = list(nodes(tree))
    if not places or rng.random() < 0.05:
        return rng.choice(odd)
    *way, key = rng.choice(places)
    at = tree
    for step in way:
        at = at[step]
    if rng.random() < 0.2:
        del at[key]
    elif isinstance(at, dict) and rng.random() < 0.1:
        at[rng.choice(["x", "", "../x", "__class__"])] = rng.choice(odd)
    else:
        at[key] = rng.choice(odd)
    return tree


def change_json(data, rng):
    """A JSON file, or one line of a file of them, as text that json.dumps may not write."""
    try:
        json.loads(data)
        lines = [data]
    except ValueError:
        lines = data.strip().split(b"\n")
    i = rng.randrange(len(lines))
    tree = change_tree(json.loads(lines[i]), rng)
    lines[i] = json.dumps(tree).replace('"DEEP"', DEEP).encode()
    return b"\n".join(lines)


def change_safetensors(data, rng):
    size = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def change_checkpoint(data, rng):
    """What torch.save makes of a changed tree: its checksums are right."""
    nan = torch.full((32, 32), float("nan"))
    tensors = torch.zeros(0), torch.zeros(3), nan, nan.bool(), torch.zeros(1).to_sparse()
    tree = torch.load(io.BytesIO(data), weights_only=True)
    tree = change_tree(tree, rng, [*ODD, *tensors])
    torch.save(tree, out := io.BytesIO())
    return out.getvalue()


def zstd(*flags):
    """With checksums, as the zstd command makes them and pyarrow does not."""
    return lambda data: (
        subprocess.run(["zstd", "-qc", *flags], input=data, stdout=-1, check=True).stdout
    )


def change_bytes(data, rng):
    """Bits, bytes or blocks of it; the first and last bytes, where headers are, more often."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        size, n = len(data), rng.choice([1, 2, 8, 64, 1000])
        near = min(size, 200)
        at = rng.choice([rng.randrange(size), rng.randrange(near), size - 1 - rng.randrange(near)])
        block = data[at : at + n]
        number = rng.choice([0, 1, 2**31 - 1, 2**32, 2**63 - 1, 2**64 - 1])
        end, new = rng.choice(
            [
                (at + 1, bytes([data[at] ^ 1 << rng.randrange(8)])),
                (size, b""),
                (at, rng.randbytes(n)),
                (at, block * rng.choice([1, 100])),
                (at + n, bytes(len(block))),
                (at + n, b""),
                (at + 8, number.to_bytes(8, "little")),
            ]
        )
        data[at:end] = new
        if not data:
            break
    return bytes(data)


# --------------------------------------------------------------------------- 2. good files, readers


def small_run(batch_size=2, **settings):
    random_shards("data", 257, 2000, 500)
    model = train_gpt2.GPTConfig(1, 2, 16, 16, 257, vocab_multiple=1)
    sizes = dict(total_batch_size=32 * batch_size, batch_size=batch_size, seq_len=16)
    what = dict(data="data", run_name="r", optimizer="adamw", device="cpu")
    cfg = dataclasses.replace(PRESETS["laptop"][1], **sizes, **what, **settings)
    run = train_gpt2.set_up(model, cfg, World("cpu"))
    run.folder.mkdir(parents=True)
    return run


def make_run():
    """A run's folder log/r with a checkpoint, a config.json and a log.jsonl, and its data."""
    run = small_run()
    folder.note_settings(run)
    run.update()
    run.save()
    run.writer.finish()
    about = dict(log_v=5.5, unigram=3.5, tokens=0, train_tokens=2000)
    said = [{"kind": "start", "step": 0} | about]
    for step in range(1, 5):
        said += [{"kind": "train", "step": step, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0,
                  "tokens": 64 * step, "dt_ms": 3.0, "tok_per_s": 100.0, "forward_ms": 1.0}]  # fmt: skip
    said += [{"kind": "val", "step": 4, "loss": 5.0, "bits_per_byte": 2.0}]
    said += [{"kind": "hella", "step": 4, "acc_norm": 0.3, "acc_norm_stderr": 0.01}]
    said += [{"kind": "sample", "step": 4, "texts": ["a"], "shaded": ["T", SHADES]}]
    said += [{"kind": "end", "step": 4, "reason": "done"}]
    lines = [json.dumps(record | {"time": 100.0 + i}) for i, record in enumerate(said)]
    Path("log/r/log.jsonl").write_text("\n".join(lines) + "\n")


def read_run(updates=1):
    """The model, the report's settings, and --resume as far as the first update."""
    models.load("log/r")
    report.write_page([Path("log/r")], Path("report.html"))
    reason, model, cfg = settings.choose_defaults(["--resume", "--run_name", "r"], PRESETS, "gpt2")
    settings.check(model, cfg)
    world = World("cpu")
    model, cfg, state = settings.resolve(model, cfg, world, PRESETS)
    run = train_gpt2.set_up(model, cfg, world, state)
    if updates:
        run.update()


def read_log():
    folder.is_finished(Path("log/r"))
    report.write_page([Path("log/r")], Path("report.html"))
    plot.draw([Path("log/r")], "loss.png")


def make_spike():
    """A run with spike_000001.json and .pt, as if its first update had been one."""
    run = small_run(64, on_spike="record")  # where a size is lost, its default is soon made too
    guard, losses = Spikes(run), torch.zeros(2)
    guard.recorder.begin()
    run.update()
    guard.report(1, guard.numbers, losses, range(run.loader.step_sequences))


def read_spike():
    replay.main(["log/r/spike_000001.json", "--device", "cpu"])


def make_export():
    make_run()
    export("log/r", Path("model"))
    shutil.rmtree("log")


def make_hugging_face():
    make_export()
    Path("model/model.sha256").unlink()


def make_shards(suffix):
    random_shards("data", 257, 2000, 500)
    for path in list(Path("data").glob("*.npy")) if suffix == "bin" else ():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids := np.load(path))
        path.with_suffix(".bin").write_bytes(header.tobytes() + ids.tobytes())
        path.unlink()


def read_shards():
    for split in ("train", "val"):
        shards = TokenShards("data", split, 257)
        shards.batch(np.arange(0, 4 * len(shards), max(1, len(shards) // 4))[:16], 16)


def prepare(**more):
    """fineweb.py of the texts in `in`, or on from where its manifest is."""
    how = dict(source="in", out="data", tokenizer="bytes", shard_tokens="2000", workers=0)
    fineweb.build(fineweb.completed(fineweb.Config(**how | more)))


def make_manifest():
    write_lines("t.jsonl", ROWS)
    prepare(tokens="3000")


def make_pieces():
    write_lines("t.jsonl", ROWS)
    prepare(tokenizer="wordpiece", vocab_size=300)


def read_pieces():
    """As bert.py does."""
    tokenizer = get_tokenizer("data/tokenizer.json")
    bert.Masking(tokenizer, bert.BertConfig(vocab_size=tokenizer.vocab_size), whole_words=True)
    tokenizer.decode(tokenizer.encode(TEXTS[4]))


def read_manifest():
    fineweb.main(["--verify", "--out", "data"])
    TokenShards("data", "train", 257)
    settings.vocab_size(train_gpt2.GPTConfig(vocab_size=0), PRESETS["laptop"][1], PRESETS)
    prepare()


def write_lines(name, rows, pack=bytes):
    Path("in").mkdir()
    Path("in", name).write_bytes(pack("\n".join(map(json.dumps, rows)).encode()))


def write_parquet():
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path("in").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), "in/t.parquet", row_group_size=15)


def read_hellaswag():
    hellaswag.choose(read_examples("in/h.jsonl"), get_tokenizer("bytes"), 64)


@dataclass
class Kind:
    make: object  # writes good files into the folder that we are in
    files: str  # those that are changed
    read: object  # as the commands do
    change: object = change_bytes  # what knows the format; plain bytes are changed too


def compressed(suffix, unpack, pack):
    def change(data, rng):
        return pack(change_json(unpack(data), rng))

    return Kind(lambda: write_lines(f"t.jsonl.{suffix}", ROWS, pack), "in/*", prepare, change)


KINDS = {
    "checkpoint": Kind(make_run, "log/r/model_*.pt", read_run, change_checkpoint),
    "config": Kind(make_run, "log/r/config.json", lambda: read_run(0), change_json),
    "log": Kind(make_run, "log/r/log.jsonl", read_log, change_json),
    "spike": Kind(make_spike, "log/r/spike_*.json", read_spike, change_json),
    "recording": Kind(make_spike, "log/r/spike_*.pt", read_spike, change_checkpoint),
    "npy": Kind(lambda: make_shards("npy"), "data/*.npy", read_shards),
    "bin": Kind(lambda: make_shards("bin"), "data/*.bin", read_shards),
    "tokenizer": Kind(make_pieces, "data/tokenizer.json", read_pieces, change_json),
    "manifest": Kind(make_manifest, "data/manifest.json", read_manifest, change_json),
    "hf_config": Kind(make_hugging_face, "model/config.json", lambda: models.load("model"), change_json),
    "safetensors": Kind(make_hugging_face, "model/model.safetensors", lambda: models.load("model"),
                        change_safetensors),
    "export": Kind(make_export, "model/*", lambda: models.load("model")),
    "hellaswag": Kind(lambda: write_lines("h.jsonl", [ENDINGS] * 9), "in/*", read_hellaswag, change_json),
    "parquet": Kind(write_parquet, "in/*", prepare),
    "jsonl": Kind(lambda: write_lines("t.jsonl", ROWS), "in/*", prepare, change_json),
    "gz": compressed("gz", gzip.decompress, gzip.compress),
    "zst": compressed("zst", zstd("-d"), zstd()),
    "chat": Kind(lambda: write_lines("c.jsonl", CHATS), "in/*", prepare, change_json),
}  # fmt: skip

# ------------------------------------------------------------------------------------- 3. the child


def try_one(kind, good, seed):
    """What the reader of a kind makes of the file of this seed, in a folder of its own: "fine",
    "refused", or the traceback of what it should not have raised."""
    rng = random.Random(f"{kind}{seed}")
    with tempfile.TemporaryDirectory(prefix="fuzz") as case:
        shutil.copytree(good, case, dirs_exist_ok=True)
        os.chdir(case)
        path = rng.choice(sorted(Path().glob(KINDS[kind].files)))
        change = rng.choice([change_bytes, KINDS[kind].change])
        path.write_bytes(change(path.read_bytes(), rng))
        signal.alarm(SECONDS)
        forbid.active = True
        try:
            KINDS[kind].read()
            return "fine"
        except UserError:
            return "refused"
        except BaseException as error:
            # what every command says in a sentence: too long a path, more memory than there is at once
            said = isinstance(error, (OSError, RuntimeError)) and in_words(error)[0]
            return "refused" if said else traceback.format_exc()
        finally:
            forbid.active = False
            signal.alarm(0)
            os.chdir(good)


def forbid(event, args):
    """An audit hook: a file must not start a program, nor reach a network."""
    if forbid.active and event in FORBIDDEN:
        raise AssertionError(f"{event} {args}")


forbid.active = False


def limit():
    """What a child may do."""
    sys.addaudithook(forbid)
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)


def outcomes(kind, good, seeds):
    """Yield (seed, what try_one says, or that it ended the child) of each."""
    seeds, fork = list(seeds), multiprocessing.get_context("fork")
    while seeds:
        with ProcessPoolExecutor(1, fork, limit) as pool:
            for seed in seeds[:BATCH]:
                try:
                    found = pool.submit(try_one, kind, good, seeds.pop(0)).result()
                except BrokenProcessPool:
                    found = "the child has ended: it hung, or was aborted"
                yield seed, found
                if found.startswith("the child"):
                    break


# ------------------------------------------------------------------------------- 4. command line


@dataclass
class Config:
    kind: Literal[("", *KINDS)] = ""  # one kind of file; all if empty
    count: int = 200  # files of each kind
    seed: int = 0  # of the first file; the next has the next


def main(argv):
    cfg, found = parse(Config, argv, description=__doc__), {}
    for kind in [cfg.kind] if cfg.kind else KINDS:
        with tempfile.TemporaryDirectory(prefix="fuzz") as good, contextlib.chdir(good):
            with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as copy:
                KINDS[kind].make()
                shutil.copytree(good, copy, dirs_exist_ok=True)
                with contextlib.chdir(copy):
                    KINDS[kind].read()  # good files are; and what it imports, no child has to
            counts = Counter()
            for seed, outcome in outcomes(kind, good, range(cfg.seed, cfg.seed + cfg.count)):
                ours = outcome in ("fine", "refused")
                counts[outcome if ours else "FOUND"] += 1
                where = [line for line in outcome.splitlines() if line.startswith("  File")][-1:]
                key = kind, outcome.splitlines()[-1][:60], *where
                if not ours and key not in found:
                    found[key] = seed
                    print(f"--kind {kind} --seed {seed} --count 1: {outcome}", flush=True)
            print(kind, dict(counts), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    command(main)
