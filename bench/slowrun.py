"""Train NanoGPT Slowrun's tiny program on this project's tokens, and record its validation loss.

    python bench/slowrun.py --slowrun ../slowrun --data data/mine --epochs 16
    python bench/slowrun.py --slowrun ../slowrun --data data/mine --epochs 16 --max_steps 12   # speed
    python bench/slowrun.py --table                  # print the recorded results; needs no GPU

The program is tiny/train.py of github.com/qlabs-eng/slowrun at commit bcf188f, the last one without
CUDA kernels of its own: a transformer of 317M weights for 100M tokens and 16 epochs. It runs with
PyTorch's attention where FlashAttention 3 is not installed. Its files are never changed: EDITS is
applied to a copy, and changes only what is downloaded, the number of validation tokens, and the
schedule, whose phases keep their fractions of the run (see schedule). --total_batch_size is passed
on to it: with a quarter of the text, a quarter of the batch keeps the number of updates per epoch.

Validation is on the targets that train_gpt2.py and speedrun.py are validated on with the same
--val_tokens: tokens 1 to val_tokens of the validation split, each exactly once, weighted equally. The
program cuts the split into sequences of 2049 tokens, so the first token of each would never be a
target. Therefore the file that it reads repeats the last token of each sequence. The program sees up
to 2,048 tokens of context, like speedrun.py's preset small-data.

Seconds are those of training steps, without evaluation; the first step counts as an average one. The
program reports the lowest of several losses as its result: those after each epoch, that of the moving
average of the weights, and that of the average of the last checkpoints. The record has them all. With
--blimp, the moving average is also scored on BLiMP.
"""

import re
import shutil
import socket
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from peers import commit_of

from records import (  # isort: skip
    RUNS, append_record, check_out, gpu_name, origin, print_rows, recorded, run_program,
)  # fmt: skip

import blimp
from lab.cli import UserError, parse_args, run_main
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer

T = 2048  # its sequence length
VOCAB, EOT = 50257, 50256

# Scores the pairs in pairs.pt, if there are any: rows with the good sentences, then as many with the bad
BLIMP = """if os.path.exists("pairs.pt"):
            pairs = torch.load("pairs.pt")
            sums = []
            with torch.no_grad(), autocast_ctx:
                for x, y in zip(pairs["inputs"].split(512), pairs["targets"].split(512)):
                    loss = orig_model(x.to(device), y.to(device), loss_reduction="none")
                    sums.append(loss.view(y.shape).sum(1))
            good, bad = torch.cat(sums).view(2, -1)
            blimp = ((good < bad) + 0.5 * (good == bad)).float().mean().item()
            print0(f"BLiMP: {{blimp:.6f}}")"""

# (old, new) of tiny/train.py, with the reason above each pair; each `old` must occur exactly once. In
# `new`, {name} is a field of Config.
EDITS = [
    # Weights & Biases needs an account
    ("import wandb\n", ""),
    (
        "wandb_run = DummyWandb() if not master_process else wandb.init(**_wandb_kwargs)",
        "wandb_run = DummyWandb()",
    ),
    ('if master_process:\n    wandb_run.log_code(".")\n', ""),
    # the tokenizer would be downloaded; without its byte counts, bits per byte become bits per token
    ("import tiktoken\n", ""),
    ('encoder = tiktoken.get_encoding("gpt2")\n', ""),
    ("vocab_size = encoder.n_vocab  # 50257", f"vocab_size = {VOCAB}"),
    ("eot_id = encoder._special_tokens['<|endoftext|>']", f"eot_id = {EOT}"),
    (
        "token_bytes_list.append(len(encoder.decode_single_token_bytes(i)))",
        "token_bytes_list.append(1)",
    ),
    ("EVAL_TOKENS = 10_000_000", "EVAL_TOKENS = {val_tokens}"),
    # these flags accept only whole epochs; the fractions are the published ones, 2 and 8 of 16 epochs
    (
        "round(args.wd_phase1_epoch / args.num_epochs * num_iterations)",
        "round(2 / 16 * num_iterations)",
    ),
    (
        "round(args.wd_phase2_epoch / args.num_epochs * num_iterations)",
        "round(8 / 16 * num_iterations)",
    ),
    # the weights are those of the moving average here
    ('wandb_run.log({"step": step, "val/ema_bpb": ema_bpb, "val/ema_loss": ema_loss})', BLIMP),
]
LOSS = r"([\d.]+|nan|inf)"
STEP = re.compile(r"^step (\d+) .* dt: ([\d.]+)ms", re.MULTILINE)
EPOCH = re.compile(rf"^Step (\d+) \|(?: Epoch \d+ \|)? Val BPB: .* Val Loss: {LOSS}", re.MULTILINE)
RESULTS = {
    "ema": rf"^EMA Val BPB: .* EMA Val Loss: {LOSS}",
    "average": rf"^Ckpt avg Val BPB: .* Val Loss: {LOSS}",
    "lowest": rf"^Min val Loss: {LOSS}",
    "peak_mib": r"^Peak memory: ([\d.]+)",
    "blimp": r"^BLiMP: ([\d.]+)",
}


@dataclass
class Config:
    slowrun: str = ""  # checkout of github.com/qlabs-eng/slowrun
    data: str = "edu_fineweb10B"  # folder of token shards of the GPT-2 tokenizer
    epochs: int = 16  # passes over the training split; 16 is published
    max_steps: int = 0  # stop after this many updates; 0: after the last epoch
    total_batch_size: int = 524288  # tokens per update; 524288 is published
    device_batch_size: int = 16  # sequences of 2,048 tokens per GPU and micro-step
    val_tokens: int = 1048576  # targets of the validation split
    more: str = ""  # more flags of tiny/train.py: --more="--n_layer 12 --n_embd 768 --n_head 6"
    blimp: str = ""  # BLiMP.zip or a .jsonl file of pairs
    gpus: int = 1  # one process each
    timeout: int = 7200  # seconds after which the program is killed
    log: str = ""  # copy the program's output to this file
    out: str = str(RUNS / "slowrun.jsonl")  # file of measurements
    table: bool = False  # print what the file holds, measure nothing


def schedule(epochs):
    """The schedule flags of tiny/train.py, scaled to another number of epochs. Published for 16 epochs:
    a cyclic learning rate in the last 4, and a moving average that keeps 0.15 per epoch."""
    return [
        "--num-epochs", epochs, "--swa-last-epochs", max(1, round(epochs / 4)),
        "--ema-decay-per-epoch", 0.15 ** (16 / epochs),
    ]  # fmt: skip


def apply_edits(text, values):
    """tiny/train.py with EDITS applied. Raises UserError where `old` is not found exactly once."""
    for old, new in EDITS:
        if (count := text.count(old)) != 1:
            raise UserError(
                f"tiny/train.py: {old!r} occurs {count} times, but must occur once; check out commit "
                "bcf188f, or adapt EDITS"
            )
        text = text.replace(old, new.format(**values))
    return text


def convert(shards, path, tokens=None, starts=None):
    """Write tokens (uint16; all of the shards if None) in its format: documents from each of `starts`
    (by default from each end-of-text) to the next."""
    if tokens is None:
        tokens = shards.read(0, len(shards)).astype(np.uint16)
        starts = np.unique([0, *np.flatnonzero(tokens == EOT)])
    data = {
        "tokens": torch.from_numpy(tokens), "doc_starts": torch.from_numpy(starts),
        "bos_id": EOT, "seq_shuffle_seed": 42, "seq_size": T + 1,
    }  # fmt: skip
    torch.save(data, path)


def validation_rows(shards, val_tokens):
    """Sequences (val_tokens / T, T + 1) whose targets are tokens 1 to val_tokens, each once: each
    begins with the token that ends the one before."""
    tokens = shards.read(0, val_tokens + 1).astype(np.uint16)
    return np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T]


def blimp_rows(path):
    """{"inputs", "targets"} (2N, T), int64: the good sentences of N pairs, then the bad ones. Targets that
    cancel in a pair's comparison, and padding, are -1."""
    pairs = blimp.tokenize_pairs(blimp.read_pairs(path), get_tokenizer("gpt2"), T).tokens
    rows = [(pair[0], pair[which]) for which in (1, 2) for pair in pairs]
    longest = max(len(shared) + len(rest) for shared, rest in rows) - 1
    inputs, targets = np.full((2, len(rows), longest), EOT)
    targets[:] = -1
    for i, (shared, rest) in enumerate(rows):
        sentence, start = [*shared, *rest], len(shared) - 1
        inputs[i, : len(sentence) - 1] = sentence[:-1]
        targets[i, start : start + len(rest)] = rest
    return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


def prepare(cfg, folder):
    """Make the folder in which the program runs: the edited copy, and both splits in its format."""
    source = Path(cfg.slowrun, "tiny", "train.py")
    if not cfg.slowrun or not source.is_file():
        raise UserError(
            f"slowrun={cfg.slowrun} must be a checkout of github.com/qlabs-eng/slowrun that has tiny/train.py"
        )
    train, val = (TokenShards(cfg.data, split, VOCAB) for split in ("train", "val"))
    batch = cfg.device_batch_size * T * cfg.gpus
    most = (len(val) - 1) // batch * batch
    if cfg.val_tokens < 1 or cfg.val_tokens % batch or cfg.val_tokens > most:
        raise UserError(
            f"val_tokens={cfg.val_tokens} must be a multiple of {batch} (device_batch_size * {T} * gpus), "
            f"at most {most} with this data; pass --val_tokens {most} or a smaller --device_batch_size"
        )
    (folder / "fineweb_data").mkdir()
    convert(train, folder / "fineweb_data" / "fineweb_train.pt")
    rows = validation_rows(val, cfg.val_tokens).flatten()
    convert(val, folder / "fineweb_data" / "fineweb_val.pt", rows, np.zeros(1, np.int64))
    if cfg.blimp:
        torch.save(blimp_rows(cfg.blimp), folder / "pairs.pt")
    (folder / "train.py").write_text(apply_edits(source.read_text(), asdict(cfg)))


def read_output(text, total_batch_size):
    """The numbers of a record from the program's output. Raises UserError if it measured nothing."""
    steps = [(int(n), float(ms)) for n, ms in STEP.findall(text)]
    if len(steps) < 2:
        raise UserError(f"the program logged {len(steps)} steps, not two or more:\n{text[-1000:]}")
    times = [ms / 1000 for _, ms in steps]
    times[0] = statistics.fmean(times[1:])  # the first one compiles
    seconds = [0.0, *np.cumsum(times).tolist()]
    curve = [(round(seconds[int(n)], 3), int(n), float(loss)) for n, loss in EPOCH.findall(text)]
    found = {name: re.search(line, text, re.MULTILINE) for name, line in RESULTS.items()}
    numbers = {name: float(match[1]) if match else None for name, match in found.items()}
    return dict(
        curve=curve, **numbers, run_steps=steps[-1][0], tokens=steps[-1][0] * total_batch_size,
        seconds=round(seconds[-1], 2), step_ms=round(1000 * statistics.median(times), 2),
    )  # fmt: skip


def measure(cfg):
    """Train once and return the record."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(cfg, Path(folder))
        flags = [*schedule(cfg.epochs), "--max-train-steps", cfg.max_steps, *cfg.more.split()]
        flags += ["--total-batch-size", cfg.total_batch_size, "--run-name", "run"]
        flags += ["--device-batch-size", cfg.device_batch_size]
        env = {}
        if cfg.gpus == 1:  # its optimizer needs a process group
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
            env["MASTER_PORT"] = str(port)
        try:
            output = run_program(
                ["train.py", *flags], folder, cfg.gpus, timeout=cfg.timeout, env=env
            )
        finally:  # also of a run that was ended
            log = Path(folder, "runs", "run", "terminal.log")
            if cfg.log and log.exists():
                shutil.copyfile(log, cfg.log)
        return read_output(output, cfg.total_batch_size)


def print_table(records):
    rows = []
    for r in records:
        s, last = r["settings"], r["curve"][-1][2] if r["curve"] else None
        losses = [
            f"{loss:.4f}" if loss else "" for loss in (last, r["ema"], r["average"], r["lowest"])
        ]
        rows.append([
            f"{Path(s['data']).name} {s['more']}".strip(), r["peer_commit"][:7], s["epochs"], r["run_steps"],
            f"{r['seconds'] * s['gpus']:.0f}", f"{r['step_ms']:.0f}", *losses,
            f"{r['blimp']:.1%}" if r.get("blimp") else "",
        ])  # fmt: skip
    head = "data and flags,commit,epochs,steps,GPU-seconds,ms per step,last epoch,EMA,average,lowest,BLiMP"
    print_rows(head.split(","), rows)


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if cfg.table:
        return print_table(recorded(cfg.out, "slowrun"))
    if min(cfg.epochs, cfg.gpus, cfg.device_batch_size) < 1:
        raise UserError(
            f"epochs={cfg.epochs}, gpus={cfg.gpus} and device_batch_size={cfg.device_batch_size} must be "
            "1 or more"
        )
    per_step = cfg.device_batch_size * T * cfg.gpus
    if cfg.total_batch_size < 1 or cfg.total_batch_size % per_step:
        raise UserError(
            f"total_batch_size={cfg.total_batch_size} must be a multiple of {per_step} (device_batch_size "
            f"* {T} * gpus); pass another --device_batch_size"
        )
    check_out(cfg.out, cpu=not torch.cuda.is_available())
    record = dict(bench="slowrun", device=gpu_name(), settings=asdict(cfg))
    record |= dict(peer_commit=commit_of(cfg.slowrun)) | measure(cfg) | origin()
    append_record(cfg.out, record)
    print_table([record])
    return 0


if __name__ == "__main__":
    run_main(main)
