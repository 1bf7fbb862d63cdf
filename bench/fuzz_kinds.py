"""The kinds of files for bench/fuzz.py: makers of valid files, readers, and a mutation for each format."""

import dataclasses
import gzip
import hashlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from records import random_shards
from safetensors.torch import load_file

from fuzz_mutations import (  # isort: skip
    mutate_bin, mutate_bytes, mutate_checkpoint, mutate_json, mutate_npy, mutate_parquet,
    mutate_safetensors, mutate_text,
)  # fmt: skip

import bert
import blimp
import fineweb
import hellaswag
import train_gpt2
from lab.cli import UserError
from lab.config import choose_defaults, resolve_config, resolve_vocabulary
from lab.data.manifest import verify_shards
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.hf.export import export
from lab.registry import load_model
from lab.tools import plot, replay, report
from lab.trainer.run_dir import is_finished, write_config

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


def zstd(*flags):
    """Return a function that runs the zstd command, which unlike pyarrow writes checksums."""
    return lambda data: (
        subprocess.run(["zstd", "-qc", *flags], input=data, stdout=-1, check=True).stdout
    )


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
