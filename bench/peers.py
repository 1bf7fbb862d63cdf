"""Compare the training throughput of train_gpt2.py and other GPT-2 trainers on one GPU.

    python bench/peers.py --nanogpt ../nanoGPT --build_nanogpt ../build-nanogpt
    python bench/peers.py --nanogpt ../nanoGPT --variants    # also nanoGPT with biases
    python bench/peers.py --table                            # print the recorded results; needs no GPU
    python bench/peers.py --nanogpt ../nanoGPT --tiny --out try.jsonl    # a small model on the CPU

Each program trains GPT-2 124M in its own process: bf16 autocast, torch.compile, 524,288 tokens per step
in micro-steps of 64 x 1024, gradient clipping, fused AdamW, a linear warmup of 715 steps and an
embedding of 50,304 rows. All read the same tokens, which are random unless --data is given. GPUs of the
same type differ by a few percent, and the speed of one GPU drifts within minutes. Therefore the programs
alternate (A B C A B C ...), and the result is the ratio of tokens/s within each round.

The programs differ as follows; the ratios include these differences:

    train_gpt2                 residual stream in bf16
    train_gpt2_fp32_residual   residual stream in fp32, as in the peers (--no_bf16_residual)
    nanogpt                    no biases in linear layers and LayerNorm (its default), exact GELU
    nanogpt_bias               biases, as in GPT-2 and in the other programs (--variants)
    build_nanogpt              use_compile = True (the published file has False)

Step times are those that each program logs: wall-clock time with one device synchronization per step. They
include logging in train_gpt2.py and nanoGPT, but not in build-nanogpt. tokens/s is that of the median
step after the first --skip steps, which include compilation. Each finished run is one line in --out, with
all step times. A program that fails is reported and not run again.

The checkouts are never changed: EDITS is applied to a temporary copy. It was written for nanoGPT 3adf61e
and build-nanogpt 6104ab1.
"""

import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from records import (  # isort: skip
    ROOT, RUNS, append_record, check_out, gpu_name, grouped, origin, print_rows, random_shards,
    read_records, recorded, run_program,
)  # fmt: skip

from lab.cli import RunError, UserError, parse_args, run_main

PEAK = 'print("peak_gib", torch.cuda.max_memory_allocated() / 2**30)'  # 0 without CUDA
END = "if ddp:\n    destroy_process_group()"  # the last lines of both programs

# {checkout: {file: [(old, new), ...]}}, with a reason above each pair. Each `old` must occur exactly once.
# In `new`, {name} is a field of Sizes.
EDITS = {
    "nanogpt": {
        "train.py": [
            # print the peak memory, which the program does not
            (END, f"{PEAK}\n{END}")
        ]
    },
    "build_nanogpt": {
        "train_gpt2.py": [
            # importing hellaswag.py loads a tokenizer from the network; HellaSwag is not evaluated
            # when the model is compiled
            ("from hellaswag import render_example, iterate_examples\n", ""),
            # the tokenizer is also downloaded; only sampling needs it, which is also off when compiled
            ("import tiktoken\n", ""),
            ('enc = tiktoken.get_encoding("gpt2")\n', ""),
            # sizes are constants in the file; the values are the same unless --tiny is given
            ("total_batch_size = 524288 ", "total_batch_size = {total_batch_size} "),
            ("B = 64 ", "B = {batch_size} "),
            ("T = 1024 ", "T = {seq_len} "),
            (
                "GPTConfig(vocab_size=50304)",
                "GPTConfig(vocab_size=50304, block_size={seq_len}, n_layer={n_layer}, "
                "n_head={n_head}, n_embd={n_embd})",
            ),
            # the file leaves compilation off because HellaSwag and sampling do not work with it
            ("use_compile = False", "use_compile = True"),
            # --tiny does not compile
            ("model = torch.compile(model)", "model = torch.compile(model, disable=not {compile})"),
            # validation at step 0 would be included in the time of the first step
            ("if step % 250 == 0 or last_step:", "if False:"),
            # stop early, with the published learning rate schedule
            ("for step in range(max_steps):", "for step in range({max_steps}):"),
            # print the peak memory, which the program does not
            (END, f"{PEAK}\n{END}"),
        ]
    },
}

OURS = """train_gpt2.py --preset gpt2 --data data --n_layer {n_layer} --n_head {n_head} --n_embd {n_embd}
    --block_size {seq_len} --seq_len {seq_len} --batch_size {batch_size}
    --total_batch_size {total_batch_size} --max_steps {max_steps} --warmup_steps 715 --log_every 1
    --val_every 0 --hellaswag_every 0 --sample_every 0 --checkpoint_every 0 --log_dir log --run_name run"""
# eval_iters=0: the evaluation at iteration 0, which no flag turns off, then has no batches
NANOGPT = """train.py --n_layer={n_layer} --n_head={n_head} --n_embd={n_embd} --block_size={seq_len}
    --batch_size={batch_size} --gradient_accumulation_steps={grad_accum_steps}
    --max_iters={last_iteration} --warmup_iters=715 --eval_iters=0 --compile={compile}"""


@dataclass
class Program:
    """A program to measure."""

    checkout: str  # the flag for its checkout; "" is this repository
    command: str  # script and flags; {name} is a field of Sizes
    step: str = ""  # regular expression of a step's line in its output, with groups loss and ms
    on_cpu: str = ""  # flags added by --tiny


ITER = r"^iter \d+: loss (?P<loss>\S+), time (?P<ms>[\d.]+)ms"
STEP = r"^step +\d+ \| loss: (?P<loss>\S+) .* dt: (?P<ms>[\d.]+)ms"
ON_CPU = " --device=cpu --dtype=float32"
PROGRAMS = {
    "train_gpt2": Program("", OURS, on_cpu=" --device cpu --no_compile"),
    "train_gpt2_fp32_residual": Program(
        "", f"{OURS} --no_bf16_residual", on_cpu=" --device cpu --no_compile"
    ),
    "nanogpt": Program("nanogpt", NANOGPT, ITER, ON_CPU),
    "nanogpt_bias": Program("nanogpt", f"{NANOGPT} --bias=True", ITER, ON_CPU),
    "build_nanogpt": Program("build_nanogpt", "train_gpt2.py", STEP),
}
VARIANTS = ("nanogpt_bias",)  # only with --variants


@dataclass
class Sizes:
    """Model and step of every program; the defaults are GPT-2 124M."""

    max_steps: int
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    seq_len: int = 1024
    batch_size: int = 64
    total_batch_size: int = 524288
    compile: bool = True

    def fill(self, text):
        """`text` with {name} replaced by the field of that name, or by one of the values below."""
        return text.format(
            grad_accum_steps=self.total_batch_size // (self.batch_size * self.seq_len),
            last_iteration=self.max_steps - 1,  # nanoGPT runs iterations 0 to max_iters
            **asdict(self),
        )


TINY = dict(n_layer=2, n_head=2, n_embd=64, seq_len=64, batch_size=2, total_batch_size=256)


@dataclass
class Config:
    nanogpt: str = ""  # checkout of github.com/karpathy/nanoGPT
    build_nanogpt: str = ""  # checkout of github.com/karpathy/build-nanogpt
    variants: bool = False  # also nanoGPT with --bias=True
    rounds: int = 3  # runs of each program
    steps: int = 12  # timed steps of a run
    skip: int = 5  # steps before them; the first one compiles
    timeout: int = 120  # seconds after which a run is killed
    data: str = ""  # folder of token shards (.npy); random tokens if empty
    tiny: bool = False  # 2 layers on the CPU, not compiled; the times mean nothing
    out: str = str(RUNS / "peers.jsonl")  # file of measurements
    table: bool = False  # print the results in --out and exit


# ------------------------------------------------------------------------------------- preparation


def gpu():
    """Name and UUID of the first GPU (GPUs of the same name differ in speed), without a CUDA context."""
    words = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def commit_of(checkout):
    """The commit of a checkout, from its file COMMIT or from git."""
    note = Path(checkout, "COMMIT")
    if note.is_file():
        return note.read_text().strip()
    if not Path(checkout, ".git").exists():  # git would report that of an enclosing repository
        return "unknown"
    words = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def apply_edits(folder, edits, sizes):
    """Edit the files of a copy of a checkout. Raises UserError unless each `old` occurs exactly once."""
    for name, pairs in edits.items():
        path = Path(folder, name)
        if not path.is_file():
            raise UserError(f"{name} is not in the checkout; pass the root of the repository")
        text = path.read_text()
        for old, new in pairs:
            if (count := text.count(old)) != 1:
                raise UserError(
                    f"{name}: {old!r} occurs {count} times, but must occur once; check out the "
                    "commit given in bench/peers.py, or adapt its EDITS"
                )
            text = text.replace(old, sizes.fill(new))
        path.write_text(text)


def prepare(name, cfg, sizes, shards, parent):
    """Create the folder in which a program runs, with tokens in its format."""
    folder, checkout = Path(parent, name), PROGRAMS[name].checkout
    if not checkout:
        folder.mkdir()
        (folder / "data").symlink_to(shards)
        return folder
    shutil.copytree(getattr(cfg, checkout), folder, ignore=shutil.ignore_patterns(".git"))
    apply_edits(folder, EDITS[checkout], sizes)
    if checkout == "build_nanogpt":
        (folder / "edu_fineweb10B").symlink_to(shards)
        return folder
    train = sorted(shards.glob("*train*.npy"))
    if not train:
        raise UserError(f"data={shards} has no *train*.npy; nanoGPT's tokens are copied from it")
    tokens = folder / "data" / "openwebtext" / "train.bin"
    tokens.parent.mkdir(parents=True, exist_ok=True)
    np.load(train[0], mmap_mode="r").tofile(tokens)  # uint16 without a header
    return folder


# ------------------------------------------------------------------------------------------- a run


def read_log(path):
    """(losses, milliseconds of each step, peak memory in GiB) of train_gpt2.py's log.jsonl."""
    events = read_records(path)
    first = [1000 * e["seconds"] for e in events if e["kind"] == "first_step"]
    train = [e for e in events if e["kind"] == "train"]
    peak = max((e["peak_gib"] for e in train if "peak_gib" in e), default=0.0)
    return [e["loss"] for e in train], first + [e["dt_ms"] for e in train if "dt_ms" in e], peak


def read_output(text, step):
    """The same from the output of another program."""
    found = list(re.finditer(step, text, re.MULTILINE))
    losses, ms = ([float(match[group]) for match in found] for group in ("loss", "ms"))
    peak = re.search(r"^peak_gib ([\d.]+)", text, re.MULTILINE)
    return losses, ms, float(peak[1]) if peak else 0.0


def run_once(name, folder, cfg, sizes):
    """Run a program and return the numbers of its record. Raises UserError if it fails, if it does not log
    all steps, or if a loss is not finite."""
    program = PROGRAMS[name]
    words = sizes.fill(program.command + program.on_cpu * cfg.tiny).split()
    script = folder / words[0] if program.checkout else ROOT / words[0]
    # one compile cache per program: the first round compiles, later ones load
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if cfg.tiny else {}
    shutil.rmtree(folder / "log", ignore_errors=True)  # of the previous round
    t0 = time.perf_counter()
    output = run_program([script, *words[1:]], folder, timeout=cfg.timeout, env=env)
    seconds = time.perf_counter() - t0
    if program.checkout:
        losses, ms, peak = read_output(output, program.step)
    else:
        losses, ms, peak = read_log(folder / "log" / "run" / "log.jsonl")
    if not len(ms) == len(losses) == sizes.max_steps:
        raise UserError(
            f"{name} logged {len(ms)} steps instead of {sizes.max_steps}:\n{output[-1000:]}"
        )
    if not all(map(math.isfinite, losses)):
        raise UserError(f"{name}: a loss is not finite: {losses}; its times are not recorded")
    return dict(
        tok_per_s=round(1000 * sizes.total_batch_size / statistics.median(ms[cfg.skip :])),
        peak_gib=round(peak, 2) or None,
        seconds=round(seconds, 1),  # of the process, with start and compilation
        step_ms=[round(t, 2) for t in ms],
        losses=[round(loss, 4) for loss in losses],
    )


def race(names, cfg, sizes, shards, parent):
    """Run all programs alternately and record each run. Returns the records, and the names of the programs
    that failed."""
    folders = {name: prepare(name, cfg, sizes, shards, parent) for name in names}
    device = gpu_name("cpu") if cfg.tiny else gpu()
    shared = dict(bench="peers", race=time.strftime("%Y-%m-%dT%H:%M:%S"), device=device)
    shared |= dict(data=Path(cfg.data).name or "random", skip=cfg.skip, sizes=asdict(sizes))
    records, failed = [], set()
    for number in range(1, cfg.rounds + 1):
        for name in names:
            if name in failed:
                continue
            checkout = PROGRAMS[name].checkout
            peer = dict(peer_commit=commit_of(getattr(cfg, checkout)) if checkout else None)
            try:
                numbers = run_once(name, folders[name], cfg, sizes)
            except UserError as error:  # continue with the other programs
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                failed.add(name)
                continue
            records.append(shared | dict(round=number, program=name) | peer | numbers | origin())
            append_record(cfg.out, records[-1])
            print(
                f"round {number}, {name}: {numbers['tok_per_s']:,} tokens/s, "
                f"{numbers['seconds']:.0f} s in all", flush=True,
            )  # fmt: skip
    return records, failed


# --------------------------------------------------------------------------------------- the table


def print_tables(records):
    """For each start of this program: tokens/s of each program and round, and ratios ours / other."""
    for (started, device), runs in grouped(records, "race", "device").items():
        sizes, rounds = runs[0]["sizes"], sorted({r["round"] for r in runs})
        steps = sizes["max_steps"] - runs[0]["skip"]
        print(
            f"\n{device}, torch {runs[0]['torch']}, {started}: {sizes['n_layer']} layers, "
            f"{sizes['total_batch_size']:,} {runs[0]['data']} tokens a step, "
            f"median of {steps} steps after {runs[0]['skip']}"
        )
        rates, rows = {}, []
        for name, turns in grouped(runs, "program").items():
            rates[name] = {r["round"]: r["tok_per_s"] for r in turns}
            peaks = [r["peak_gib"] for r in turns if r["peak_gib"]]
            rows.append([name, (turns[0]["peer_commit"] or turns[0]["commit"])[:7]])
            rows[-1] += [f"{rates[name][n]:,}" if n in rates[name] else "" for n in rounds]
            rows[-1] += [f"{statistics.median(rates[name].values()):,.0f}"]
            rows[-1] += [f"{max(peaks):.2f}" if peaks else ""]
            rows[-1] += [f"{turns[0]['step_ms'][0] / 1000:.1f}"]
        head = [f"round {n}" for n in rounds]
        print_rows(["tokens/s", "commit", *head, "median", "peak GiB", "first step s"], rows)
        ours = [name for name in rates if not PROGRAMS[name].checkout]
        rows = [ratio_row(a, b, rates, rounds) for b in rates if PROGRAMS[b].checkout for a in ours]
        print_rows(["ratio of tokens/s", *head, "median", "max - min"], rows)


def ratio_row(ours, peer, rates, rounds):
    """Ratios in the rounds that both programs finished, with their median and range."""
    both = rates[ours].keys() & rates[peer].keys()
    ratios = {n: rates[ours][n] / rates[peer][n] for n in rounds if n in both}
    row = [f"{ours} / {peer}", *(f"{ratios[n]:.4f}" if n in ratios else "" for n in rounds)]
    if not ratios:
        return [*row, "", ""]
    spread = max(ratios.values()) - min(ratios.values())
    return [*row, f"{statistics.median(ratios.values()):.4f}", f"{spread:.4f}"]


def select_programs(cfg):
    """Names of the programs to run. Raises UserError if there is nothing to compare."""
    given = [flag for flag in EDITS if getattr(cfg, flag)]
    if not given:
        raise UserError(
            "there is nothing to compare with; pass a checkout: --nanogpt PATH or --build_nanogpt PATH"
        )
    for flag in given:
        if not Path(getattr(cfg, flag)).is_dir():
            raise UserError(
                f"{flag}={getattr(cfg, flag)} must be a folder; clone the repository there"
            )
    if min(cfg.rounds, cfg.steps, cfg.skip) < 1:
        raise UserError(
            f"rounds={cfg.rounds}, steps={cfg.steps} and skip={cfg.skip} must be 1 or more"
        )
    return [
        name for name, program in PROGRAMS.items()
        if program.checkout in ("", *given) and (cfg.variants or name not in VARIANTS)
    ]  # fmt: skip


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    if cfg.table:
        return print_tables(recorded(cfg.out, "peers"))
    names = select_programs(cfg)
    if not cfg.tiny and not gpu():
        raise UserError(
            "nvidia-smi finds no GPU; to run the programs on a CPU, pass --tiny --out try.jsonl"
        )
    check_out(cfg.out, cpu=cfg.tiny)
    max_steps = cfg.skip + cfg.steps
    sizes = Sizes(max_steps, **TINY, compile=False) if cfg.tiny else Sizes(max_steps)
    with tempfile.TemporaryDirectory() as parent:
        shards = Path(cfg.data).resolve()
        if not cfg.data:  # one step more than needed, so that no program reads tokens twice
            tokens = (max_steps + 1) * sizes.total_batch_size
            shards = Path(random_shards(f"{parent}/shards", 50257, max(tokens, 100_000)))
        records, failed = race(names, cfg, sizes, shards, parent)
    if not records:
        raise RunError("no run has finished; see the errors above")
    print_tables(records)
    return 1 if failed else 0


if __name__ == "__main__":
    run_main(main)
