"""Fuzz the readers of all kinds of files: a damaged or malicious file must be read or raise UserError.

    python bench/fuzz.py --count 10000                      # number of files of each kind
    python bench/fuzz.py --count 10000 --workers 64 --seconds 1200 --out found.jsonl   # continues later
    python bench/fuzz.py --kind npy --seed 1234 --count 1   # repeat one file and show its traceback

A valid file is randomly mutated (reproducible by seed) and read by the code of the commands, in a child
process that is limited to 2 GiB of additional memory and 20 seconds of CPU time, and that may not start
programs or use the network. The outcomes are counted:

    refused    with a UserError of one sentence
    same       accepted, with the contents of the valid file
    changed    accepted, with other contents
    wrong      accepted, although the format has a checksum of the changed bytes
    traceback  any other exception
    hang       no result after 20 seconds of CPU time or 200 seconds in total
    crash      the process died

An example of each different fault (the last four) is printed, and the exit status is then 1. With --out, the
results are saved after each batch of files, and the same command continues after an interruption.
`--count 0 --out found.jsonl` prints the table again.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from records import random_shards, read_records
from safetensors.torch import load_file

import bert
import blimp
import fineweb
import hellaswag
import train_gpt2
from lab.cli import UserError, eprint, format_error, is_oom, parse_args, run_main
from lab.config import choose_defaults, resolve_config, resolve_vocabulary
from lab.data.manifest import verify_shards
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.files import atomic_write, check_writable
from lab.hf.export import export
from lab.registry import load_model
from lab.tools import plot, replay, report
from lab.trainer.run_dir import is_finished, write_config

# seconds of CPU time per file; bytes of memory, and files, per child process
SECONDS, MEMORY, BATCH = 20, 2 * 2**30, 100
FAULTS = "wrong", "traceback", "hang", "crash"
OUTCOMES = "refused", "same", "changed", *FAULTS
FORBIDDEN = "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"
PRESETS = train_gpt2.PRESETS
TEXTS = [f"Text {i} says naïve things. " * (i % 5) for i in range(40)]
ROWS = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
YES = {"role": "assistant", "content": "Yes."}
CHATS = [{"messages": [{"role": "user", "content": text}, YES]} for text in TEXTS]
SHADES = [{"text": "a", "name": "'a'", "p": 0.5, "id": 97, "likeliest": [[98, "'b'", 0.1]]}]
PAIRS = [("human", "gpt")[i % 2] for i in range(4)]
SHAREGPT = [
    {"conversations": [{"from": who, "value": text or "x"} for who in PAIRS]} for text in TEXTS
]
ALPACA = [
    {"instruction": text, "input": "", "output": "Yes.", "history": [["a", "b"]]} for text in TEXTS
]
PROMPTS = [{"prompt": [{"role": "user", "content": text}], "completion": [YES]} for text in TEXTS]
ENDINGS = {"ctx": "A man", "endings": ["runs.", "is", "eats a shoe", "flew"], "label": 2, "ind": 1}

PAIRS_OF_BLIMP = [
    {"sentence_good": f"Cats {verb}.", "sentence_bad": f"Cats {verb}s.", "UID": "agreement",
     "linguistics_term": "s-selection", "pairID": "1"}
    for verb in ("run", "sleep", "eat") * 3
]  # fmt: skip

# ------------------------------------------------------------------------------------- 1. mutations

ODD = [None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "x",
       "x" * 100_000, "\ud800", "../../etc/passwd", [], {}, [[]], ["a", 1], {"a": {}}, "DEEP"]  # fmt: skip
DEEP = "[" * 100_000


def paths(tree, path=()):
    """Yield the path (keys and indices) of every value in nested dicts and lists."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*path, key)
        yield from paths(tree[key], (*path, key))


def mutate_tree(tree, rng, odd=ODD):
    """Replace, delete or add one value in nested dicts and lists, or replace the whole tree."""
    found = list(paths(tree))
    if not found or rng.random() < 0.05:
        return rng.choice(odd)
    *parents, key = rng.choice(found)
    at = tree
    for parent in parents:
        at = at[parent]
    if rng.random() < 0.2:
        del at[key]
    elif isinstance(at, dict) and rng.random() < 0.1:
        at[rng.choice(["x", "", "../x", "__class__"])] = rng.choice(odd)
    else:
        at[key] = rng.choice(odd)
    return tree


def mutate_json(data, rng):
    """Change a value of a JSON file, or of one line of a JSON Lines file."""
    try:
        json.loads(data)
        lines = [data]
    except ValueError:
        lines = data.strip().split(b"\n")
    i = rng.randrange(len(lines))
    tree = mutate_tree(json.loads(lines[i]), rng)
    lines[i] = json.dumps(tree).replace('"DEEP"', DEEP).encode()
    return b"\n".join(lines)


def mutate_safetensors(data, rng):
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def mutate_npy(data, rng):
    """Change the header of a .npy file, and sometimes its version."""
    size = int.from_bytes(data[8:10], "little")
    dtype = rng.choice(["<u2", ">u2", "<i2", "<u4", "|O", "<f8", "|V0", "<U9", "|S0", "x", ""])
    shape = rng.choice([(), (0,), (-1,), (2**40,), (2**70,), (10, 10), (1,) * 99, ("a",), 3, None])
    header = {"descr": "<u2", "fortran_order": False, "shape": (2000,)}
    header[rng.choice([*header, "x"])] = rng.choice([dtype, shape, True, None, 0.5, b"x"])
    text = rng.choice([repr(header), repr(header), "(" * 50_000, "__import__('os').system('id')"])
    version = bytes(rng.choice([(1, 0), (2, 0), (3, 0), (9, 9)]))
    length = len(text).to_bytes(2 if version == b"\1\0" else 4, "little")[-4:]
    return data[:6] + version + length + text.encode() + data[10 + size :]


def mutate_bin(data, rng):
    """Change a number in the header of one of llm.c's .bin files."""
    header = np.frombuffer(data[:1024], "<i4").copy()
    header[rng.choice([0, 1, 2, 3, 255])] = rng.choice(
        [0, 1, -1, 2, 1999, 2001, 2**31 - 1, -(2**31)]
    )
    return header.tobytes() + data[1024:]


def mutate_parquet(data, rng):
    """Change one value or a whole column, perhaps also the column's type, and write a valid file."""
    rows = pq.read_table(io.BytesIO(data)).to_pylist()
    if rng.random() < 0.5:  # in all rows, because a column has one type
        name, value = rng.choice([*rows[0]]), rng.choice(ODD)
        for row in rows:
            row[name] = value
    else:
        rows = mutate_tree(rows, rng)
    try:
        table = pa.Table.from_pylist(rows)
        out = io.BytesIO()
        pq.write_table(table, out, row_group_size=rng.choice([1, 15, 1000]))
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError, KeyError):
        return mutate_bytes(data, rng)  # a column cannot hold values of several types
    return out.getvalue()


def mutate_text(data, rng):
    """Change encoding, line ends or length, or insert bytes that are not text."""
    text, at = data.decode(), rng.randrange(len(data))
    return rng.choice(
        [
            *(text.encode(name) for name in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")),
            text.replace("\n", rng.choice(["\r\n", "\r", "", "\0", "\u2028"])).encode(),
            data[:at] + rng.choice([b"\0", b"\xff", b"\xed\xa0\x80", b"<|endoftext|>"]) + data[at:],
            data.replace(b" ", b""), data * 9, b"", b" \n" * 1000, b"a" * 10**4,
        ]
    )  # fmt: skip


def mutate_checkpoint(data, rng):
    """Change a value and save it with torch.save, so that the checksums are right."""
    nan = torch.full((32, 32), float("nan"))
    tensors = torch.zeros(0), torch.zeros(3), nan, nan.bool(), torch.zeros(1).to_sparse()
    tree = torch.load(io.BytesIO(data), weights_only=True)
    tree = mutate_tree(tree, rng, [*ODD, *tensors])
    torch.save(tree, out := io.BytesIO())
    return out.getvalue()


def zstd(*flags):
    """Return a function that runs the zstd command, which unlike pyarrow writes checksums."""
    return lambda data: (
        subprocess.run(["zstd", "-qc", *flags], input=data, stdout=-1, check=True).stdout
    )


def mutate_bytes(data, rng):
    """Change bits, bytes or blocks, more often near the beginning and end, where headers are."""
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


# ------------------------------------------------------------------------ 2. valid files and readers


def small_trainer(batch_size=2, **settings):
    random_shards("data", 257, 2000, 500)
    model_config = train_gpt2.GPTConfig(1, 2, 16, 16, 257, vocab_multiple=1)
    cfg = dataclasses.replace(
        PRESETS["laptop"][1], total_batch_size=32 * batch_size, batch_size=batch_size, seq_len=16,
        data="data", run_name="r", optimizer="adamw", device="cpu", **settings,
    )  # fmt: skip
    trainer = train_gpt2.build_trainer(model_config, cfg, World("cpu"))
    trainer.run_dir.mkdir(parents=True)
    return trainer


def make_run():
    """A run directory log/r with a checkpoint, a config.json and a log.jsonl, and its data."""
    trainer = small_trainer()
    write_config(trainer)
    trainer.train_step()
    trainer.save()
    trainer.checkpointer.finish()
    records = [{"kind": "start", "step": 0, "log_v": 5.5, "unigram": 3.5, "tokens": 0,
                "train_tokens": 2000}]  # fmt: skip
    for step in range(1, 5):
        records += [{"kind": "train", "step": step, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0,
                     "tokens": 64 * step, "dt_ms": 3.0, "tok_per_s": 100.0, "forward_ms": 1.0}]  # fmt: skip
    records += [{"kind": "val", "step": 4, "loss": 5.0, "bits_per_byte": 2.0}]
    records += [{"kind": "hella", "step": 4, "acc_norm": 0.3, "acc_norm_stderr": 0.01}]
    records += [{"kind": "sample", "step": 4, "texts": ["a"], "shaded": ["T", SHADES]}]
    records += [{"kind": "end", "step": 4, "reason": "done"}]
    lines = [json.dumps(record | {"time": 100.0 + i}) for i, record in enumerate(records)]
    Path("log/r/log.jsonl").write_text("\n".join(lines) + "\n")


def digest(arrays):
    """A checksum of the contents of arrays or tensors."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(
            repr((array.dtype, array.shape)).encode() + np.ascontiguousarray(array).tobytes()
        )
    return total.hexdigest()


def read_weights(source):
    return digest(load_model(source).state_dict().values())


def read_run(updates=1):
    """Load the model, write a report, and resume up to and including the first update."""
    weights = read_weights("log/r")
    report.write_page([Path("log/r")], Path("report.html"))
    args = ["--resume", "--run_name", "r"]
    _, model_config, cfg = choose_defaults(args, PRESETS, train_gpt2.Trainer)
    cfg.validate(model_config)
    world = World("cpu")
    model_config, cfg, state = resolve_config(model_config, cfg, world, PRESETS, train_gpt2.Trainer)
    trainer = train_gpt2.build_trainer(model_config, cfg, world, state)
    if updates:
        trainer.train_step()
    return weights + digest(trainer.raw_model.state_dict().values())


def read_log():
    is_finished(Path("log/r"))
    report.write_page([Path("log/r")], Path("report.html"))
    plot.draw([Path("log/r")], "loss.png")


def make_spike():
    """A run with spike_000001.json and .pt, as if the first update had been a spike."""
    # a large batch, so that the default for a missing batch_size is not much larger
    trainer = small_trainer(64, on_spike="record")
    health = trainer.health
    health.snapshotter.capture()
    losses, _ = trainer.train_step()
    health.report_spike(1, health.stats, losses, range(trainer.loader.step_sequences))


def read_spike():
    replay.main(["log/r/spike_000001.json", "--device", "cpu"])


def make_export():
    make_run()
    export("log/r", Path("model"))
    shutil.rmtree("log")


def make_hugging_face():
    make_export()
    Path("model/model.sha256").unlink()


def make_sharded_pickles():
    """A Hugging Face folder with two pytorch_model-*.bin and their index."""
    make_hugging_face()
    weights = Path("model/model.safetensors")
    tensors = load_file(weights)
    weights.unlink()
    index = {}
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        index |= dict.fromkeys(names, file := f"pytorch_model-{i:05d}-of-00002.bin")
        torch.save({name: tensors[name] for name in names}, f"model/{file}")
    Path("model/pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    )


def make_shards(suffix):
    random_shards("data", 257, 2000, 500)
    for path in list(Path("data").glob("*.npy")) if suffix == "bin" else ():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(ids := np.load(path))
        path.with_suffix(".bin").write_bytes(header.tobytes() + ids.tobytes())
        path.unlink()


def read_shards():
    found = []
    for split in ("train", "val"):
        shards = TokenShards("data", split, 257)
        starts = np.arange(0, 4 * len(shards), max(1, len(shards) // 4))[:16]
        found.append(shards.batch(starts, 16)[0])
    return digest(found)


def build_data(**changes):
    """Run fineweb.py on the texts in `in`, or resume from its manifest."""
    # a mutation can make four million tokens of a text; smaller shards would be so many that rewriting
    # the manifest after each of them would take 17 of the SECONDS
    flags = dict(source="in", out="data", tokenizer="bytes", shard_tokens="20k", workers=0)
    manifest = fineweb.build(fineweb.completed(fineweb.Config(**flags | changes)))
    return digest(np.load(f"data/{entry['name']}") for entry in manifest["shards"])


def make_manifest():
    write_lines("t.jsonl", ROWS)
    build_data(tokens="3000", shard_tokens="2000")


def make_wordpiece():
    write_lines("t.jsonl", ROWS)
    build_data(tokenizer="wordpiece", vocab_size=300)


def read_wordpiece():
    """Use the tokenizer as bert.py does."""
    tokenizer = get_tokenizer("data/tokenizer.json")
    bert.Masking(
        tokenizer, bert.BertConfig(vocab_size=tokenizer.vocab_size), whole_word_masking=True
    )
    tokenizer.decode(tokenizer.encode(TEXTS[4]))


def read_verified():
    """Raise UserError for a problem that fineweb.py --verify finds; otherwise build the data again."""
    if problems := verify_shards("data"):
        raise UserError(problems[0])
    return build_data(tokens="3000", shard_tokens="2000")


def read_manifest():
    fineweb.main(["--verify", "--out", "data"])
    TokenShards("data", "train", 257)
    resolve_vocabulary(train_gpt2.GPTConfig(vocab_size=0), PRESETS["laptop"][1], PRESETS)
    build_data(shard_tokens="2000")


def write_lines(name, rows, pack=bytes):
    Path("in").mkdir()
    Path("in", name).write_bytes(pack("\n".join(map(json.dumps, rows)).encode()))


def write_zip(rows):
    Path("in").mkdir()
    with zipfile.ZipFile("in/BLiMP.zip", "w") as archive:
        archive.writestr("data/p.jsonl", "\n".join(map(json.dumps, rows)))


def write_array(rows):
    Path("in").mkdir()
    Path("in/c.json").write_text(json.dumps(rows, indent=1))


def write_text():
    Path("in").mkdir()
    Path("in/t.txt").write_text("\n".join(TEXTS))


def write_parquet(rows):
    Path("in").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), "in/t.parquet", row_group_size=15)


def read_hellaswag():
    hellaswag.tokenize_examples(hellaswag.read_examples("in/h.jsonl"), get_tokenizer("bytes"), 64)


def read_blimp():
    [path] = Path("in").iterdir()
    pairs = blimp.tokenize_pairs(blimp.read_pairs(path), get_tokenizer("bytes"), 64)
    return repr((pairs.tokens, pairs.paradigms, pairs.phenomena))


@dataclass
class Kind:
    make: Callable  # writes valid files into the working directory
    files: str  # glob pattern of those that are mutated
    read: Callable  # reads them as the commands do
    mutate: Callable = mutate_bytes  # for this format; mutate_bytes is used half of the time
    checksum: bool = False  # the format has one, so that changed bytes must not change the result


def compressed(suffix, unpack, pack):
    def mutate(data, rng):
        return pack(mutate_json(unpack(data), rng))

    return Kind(
        lambda: write_lines(f"t.jsonl.{suffix}", ROWS, pack), "in/*", build_data, mutate, True
    )


KINDS = {
    "checkpoint": Kind(make_run, "log/r/model_*.pt", read_run, mutate_checkpoint, True),
    "config": Kind(make_run, "log/r/config.json", lambda: read_run(0), mutate_json),
    "log": Kind(make_run, "log/r/log.jsonl", read_log, mutate_json),
    "spike": Kind(make_spike, "log/r/spike_*.json", read_spike, mutate_json),
    "recording": Kind(make_spike, "log/r/spike_*.pt", read_spike, mutate_checkpoint),
    "npy": Kind(lambda: make_shards("npy"), "data/*.npy", read_shards, mutate_npy),
    "bin": Kind(lambda: make_shards("bin"), "data/*.bin", read_shards, mutate_bin),
    "verified": Kind(make_manifest, "data/*.npy", read_verified, mutate_npy, True),
    "tokenizer": Kind(make_wordpiece, "data/tokenizer.json", read_wordpiece, mutate_json),
    "manifest": Kind(make_manifest, "data/manifest.json", read_manifest, mutate_json),
    "hf_config": Kind(make_hugging_face, "model/config.json", lambda: read_weights("model"), mutate_json),
    "safetensors": Kind(make_hugging_face, "model/model.safetensors", lambda: read_weights("model"),
                        mutate_safetensors),
    "index": Kind(make_sharded_pickles, "model/*.index.json", lambda: read_weights("model"), mutate_json),
    "pickle": Kind(make_sharded_pickles, "model/*.bin", lambda: read_weights("model"), mutate_checkpoint,
                   True),
    "export": Kind(make_export, "model/model.safetensors", lambda: read_weights("model"),
                   mutate_safetensors, True),
    "hellaswag": Kind(lambda: write_lines("h.jsonl", [ENDINGS] * 9), "in/*", read_hellaswag, mutate_json),
    "blimp": Kind(lambda: write_lines("p.jsonl", PAIRS_OF_BLIMP), "in/*", read_blimp, mutate_json),
    "blimp_zip": Kind(lambda: write_zip(PAIRS_OF_BLIMP), "in/*", read_blimp, checksum=True),
    "text": Kind(write_text, "in/*", build_data, mutate_text),
    "parquet": Kind(lambda: write_parquet(ROWS), "in/*", build_data, mutate_parquet),
    "jsonl": Kind(lambda: write_lines("t.jsonl", ROWS), "in/*", build_data, mutate_json),
    "gz": compressed("gz", gzip.decompress, gzip.compress),
    "zst": compressed("zst", zstd("-d"), zstd()),
    "chat": Kind(lambda: write_lines("c.jsonl", CHATS), "in/*", build_data, mutate_json),
    "sharegpt": Kind(lambda: write_lines("c.jsonl", SHAREGPT), "in/*", build_data, mutate_json),
    "alpaca": Kind(lambda: write_array(ALPACA), "in/*", build_data, mutate_json),
    "chat_parquet": Kind(lambda: write_parquet(PROMPTS), "in/*", build_data, mutate_parquet),
}  # fmt: skip

# ------------------------------------------------------------------------------ 3. child processes


def prepare(kind, folder):
    """Write the valid files of this kind into a new folder. Return the result of reading them."""
    folder.mkdir()
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with contextlib.chdir(folder), silent[0], silent[1], tempfile.TemporaryDirectory() as copy:
        KINDS[kind].make()
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        with contextlib.chdir(copy):
            return KINDS[kind].read()  # this also imports modules once for all children


def read_batch(task):
    """Read the mutated files of a batch of seeds in a child process; start another if it dies.

    task: (kind, folder of prepare, result of prepare, seeds, deadline by time.monotonic). Returns
    (kind, list of Outcome), with the files that were read before the deadline.
    """
    kind, valid, expected, seeds, deadline = task
    found = []
    while len(found) < len(seeds) and time.monotonic() < deadline:
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            try:
                limit_child()
                for seed in seeds[len(found) :]:
                    try:
                        outcome = try_one(kind, valid, seed, expected)
                    except BaseException:  # a bug of this program, or a full disk
                        outcome = Outcome(seed, "traceback", 0, traceback.format_exc())
                    os.write(writer, json.dumps(dataclasses.astuple(outcome)).encode() + b"\n")
                    if time.monotonic() > deadline:
                        break
                os._exit(0)
            finally:  # for example, no memory is left for the outcome
                os._exit(1)
        os.close(writer)
        with open(reader, encoding="utf-8") as lines:
            found += [Outcome(*json.loads(line)) for line in lines]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status and len(found) < len(seeds):  # negative if a signal ended it
            hang = -status in (signal.SIGALRM, signal.SIGPROF)
            found.append(Outcome(seeds[len(found)], "hang" if hang else "crash", SECONDS * hang))
    return kind, found


@dataclass
class Outcome:
    seed: int
    name: str  # see the module's docstring
    seconds: float  # of CPU time
    text: str = ""  # traceback


def try_one(kind, valid, seed, expected):
    """Read the mutated file of this seed in a copy of the folder `valid`. Returns the Outcome.

    expected: the result of reading the valid file.
    """
    rng, this = random.Random(f"{kind}{seed}"), KINDS[kind]
    with tempfile.TemporaryDirectory() as case:
        shutil.copytree(valid, case, dirs_exist_ok=True)
        os.chdir(case)
        path = rng.choice(sorted(Path().glob(this.files)))
        mutate = rng.choice([mutate_bytes, this.mutate])
        path.write_bytes(mutate(path.read_bytes(), rng))
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # CPU time, because the machine may be busy
        signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
        forbid.active, text = True, ""
        try:
            name = "same" if this.read() == expected else "changed"
            if name == "changed" and this.checksum and mutate is mutate_bytes:
                name = "wrong"
        except UserError:
            name = "refused"
        except BaseException as error:
            # errors that all commands print as a sentence, and allocations beyond the limit
            refused = isinstance(error, (OSError, RuntimeError)) and (
                is_oom(error) or format_error(error)[0]
            )
            name, text = ("refused", "") if refused else ("traceback", traceback.format_exc())
        finally:
            forbid.active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.chdir(valid)
        return Outcome(seed, name, round(time.process_time() - begin, 3), text)


def forbid(event, args):
    """Audit hook: raise if reading a file starts a program or opens a connection."""
    if forbid.active and event in FORBIDDEN:
        raise AssertionError(f"{event} {args}")


forbid.active = False


def limit_child():
    """Set the limits of a child process and discard its output."""
    sys.addaudithook(forbid)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)


# ------------------------------------------------------------------------------------- 4. results


class Result:
    """What became of the files of one kind, over all runs with the same --out."""

    def __init__(self, kind, record=None):
        record = record or dict(seeds=[], outcomes={}, cpu_seconds=0.0, slowest=[0.0, 0], faults=[])
        self.kind, self.cpu_seconds, self.slowest = kind, record["cpu_seconds"], record["slowest"]
        self.seeds = {seed for first, last in record["seeds"] for seed in range(first, last + 1)}
        self.outcomes, self.faults = Counter(record["outcomes"]), record["faults"]

    def add(self, outcomes):
        """Count these and return the faults that differ from those already known."""
        known, new = {fault["at"] for fault in self.faults}, []
        for outcome in outcomes:
            self.seeds.add(outcome.seed)
            self.outcomes[outcome.name] += 1
            self.cpu_seconds += outcome.seconds
            self.slowest = max(self.slowest, [outcome.seconds, outcome.seed])
            lines = outcome.text.splitlines()
            where = [line.strip() for line in lines if line.startswith("  File")][-1:]
            at = " ".join([outcome.name, *lines[-1:], *where])
            if outcome.name in FAULTS and at not in known:
                known.add(at)
                new.append(dict(seed=outcome.seed, at=at, traceback=outcome.text))
        self.faults += new
        return new

    def line(self):
        """A line of JSON, which __init__ reads. slowest: CPU seconds and seed of one file."""
        ranges = []  # first and last seed of each
        for seed in sorted(self.seeds):
            if ranges and seed == ranges[-1][1] + 1:
                ranges[-1][1] = seed
            else:
                ranges.append([seed, seed])
        return json.dumps(
            dict(
                kind=self.kind, files=len(self.seeds), seeds=ranges, outcomes=self.outcomes,
                cpu_seconds=round(self.cpu_seconds, 2), slowest=self.slowest, faults=self.faults,
            )
        )  # fmt: skip


def read_results(path):
    """{kind: Result} of all kinds, from a file that earlier runs have written if there is one."""
    records = {record["kind"]: record for record in (read_records(path) if path else [])}
    return {kind: Result(kind, records.get(kind)) for kind in KINDS}


def print_table(results):
    """Print a Markdown table of the results and their total, and return the total outcomes."""
    total = sum((result.outcomes for result in results), Counter())
    print("| kind | files |", " | ".join(OUTCOMES), "|\n" + "|---" * (len(OUTCOMES) + 2) + "|")
    for kind, found in [(result.kind, result.outcomes) for result in results] + [("all", total)]:
        numbers = [found.total(), *(found[name] for name in OUTCOMES)]
        print(f"| {kind} |", " | ".join(f"{number:,}" for number in numbers), "|")
    return total


# ------------------------------------------------------------------------------- 5. command line


@dataclass
class Config:
    kind: tuple[Literal[tuple(KINDS)], ...] = ()  # kinds of files; all if empty
    count: int = 200  # number of files of each kind, including those already in --out
    seed: int = 0  # of the first file of each kind; each further file adds 1
    workers: int = 1  # number of files that are read at the same time
    seconds: float = 0  # start no further file after this time; 0: no limit
    out: str = ""  # file for the results, a line of JSON per kind; the same command continues it


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if cfg.out:
        check_writable(cfg.out, "out")
    torch.set_num_threads(1)
    deadline = time.monotonic() + cfg.seconds if cfg.seconds else math.inf
    results, context = read_results(cfg.out), multiprocessing.get_context("fork")
    kinds, seeds = cfg.kind or tuple(KINDS), range(cfg.seed, cfg.seed + cfg.count)
    if "zst" in kinds and not shutil.which("zstd"):
        eprint(
            "zst is skipped, because its files are made by the command zstd, which is not installed"
        )
        kinds = tuple(kind for kind in kinds if kind != "zst")
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        tempfile.tempdir = folder  # also of child processes, which may be killed
        valid = {kind: Path(folder, kind) for kind in kinds}
        todo = {kind: [seed for seed in seeds if seed not in results[kind].seeds] for kind in kinds}
        expected = {kind: prepare(kind, valid[kind]) for kind in kinds if todo[kind]}
        tasks = [
            (kind, valid[kind], expected[kind], todo[kind][i : i + BATCH], deadline)
            for i in range(0, cfg.count, BATCH)  # the kinds in turn, as time may be limited
            for kind in kinds
            if todo[kind][i:]
        ]
        with context.Pool(cfg.workers) as pool:
            for kind, outcomes in pool.imap_unordered(read_batch, tasks):
                for fault in results[kind].add(outcomes):
                    print(f"--kind {kind} --seed {fault['seed']} --count 1: {fault['at']}")
                    print(fault["traceback"], flush=True)
                if cfg.out:
                    lines = [result.line() + "\n" for result in results.values() if result.seeds]
                    atomic_write(cfg.out, "".join(lines).encode())
        tempfile.tempdir = None
    total = print_table([results[kind] for kind in kinds])
    return 1 if any(total[name] for name in FAULTS) else 0


if __name__ == "__main__":
    run_main(main)
