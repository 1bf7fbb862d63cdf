"""Send random signals to the three training programs at random moments and check how they end.

    python bench/signals.py --rounds 200

Each round starts a program with a tiny run, waits for a random time, which may fall into the import,
set-up, validation, sampling or saving, and sends SIGINT, SIGTERM or SIGHUP, sometimes a second one.
The exit status must be a documented one, there must be no traceback, all checkpoints must be complete,
and --resume must accept the run if it has one.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from records import random_shards

from lab.cli import ROOT, UserError, parse_args, run_main
from lab.trainer.checkpoint import checkpoint_files, read_checkpoint

PROGRAMS = "train_gpt2.py", "speedrun.py", "bert.py"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# done, stopped and saved, a second Ctrl-C, and signals before the run handles them
EXPECTED = {0, 75, 130, *(-number for number in SIGNALS)}
TINY = (
    "--preset laptop --device cpu --data data --run_name r --n_layer 1 --n_head 2 --n_embd 32 "
    "--block_size 32 --seq_len 16 --batch_size 4 --total_batch_size 128 --val_every 2 --val_tokens 256 "
    "--sample_every 3 --sample_tokens 8 --checkpoint_every 2 --no_compile"
).split()


@dataclass
class Config:
    """Send random signals to the three training programs and check how they end."""

    rounds: int = 30
    seed: int = 0  # of the first round; each further one adds 1
    seconds: float = 10  # latest time of a signal


def receive_signals():
    """In a new process: do not ignore a signal that this one ignores, because of nohup or `&`."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def one_round(seed, seconds):
    """(description, problem or "") of one round."""
    rng = random.Random(seed)
    program, number, wait = rng.choice(PROGRAMS), rng.choice(SIGNALS), rng.uniform(0, seconds)
    with tempfile.TemporaryDirectory(prefix="signals") as folder:
        command = [sys.executable, ROOT / program, *TINY, "--max_steps"]
        random_shards(Path(folder, "data"), 257, 2000, 500)
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        how = dict(
            cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        how["preexec_fn"] = receive_signals
        with subprocess.Popen([*command, "1000000"], **how) as process:
            log, late = Path(folder, "log/r/log.jsonl"), rng.random() < 0.6
            while late and process.poll() is None and not log.exists():
                time.sleep(0.05)  # in most rounds count from the end of the set-up
            time.sleep(wait)
            process.send_signal(number)
            if again := rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.5))
                process.send_signal(rng.choice(SIGNALS))
            try:
                _, said = process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                return f"{program} {number.name}", "hang"
        status, saved = process.returncode, checkpoint_files(Path(folder, "log/r"))
        when = f"{wait:.1f} s after the {'set-up' if late else 'start'}"
        text = f"{program} {number.name}{' twice' * again} {when}: status {status}"
        # no program can catch a Ctrl-C before its first line
        early = status == -signal.SIGINT and "line 0, in <module>\nKeyboardInterrupt" in said
        if status not in EXPECTED or ("Traceback" in said and not early):
            return text, said or "an undocumented status"
        try:
            step = [read_checkpoint(path)["step"] for path in saved][-1:]
        except UserError as error:
            return text, str(error)
        if step:
            resumed = [sys.executable, ROOT / program, "--resume", "--run_name", "r", "--max_steps"]
            done = subprocess.run([*resumed, str(step[0] + 1)], **how)
            return text, done.stderr if done.returncode else ""
        return text, "it says that it was saved" if status == 75 else ""


def main(argv):
    cfg, counts = parse_args(Config, argv, description=__doc__), Counter()
    for seed in range(cfg.seed, cfg.seed + cfg.rounds):
        text, problem = one_round(seed, cfg.seconds)
        counts[text.rpartition("status ")[2] if not problem else "problem"] += 1
        print(f"--seed {seed} --rounds 1: {text}{problem and ': ' + problem}", flush=True)
    print("exit statuses:", dict(counts))
    return 1 if counts["problem"] else 0


if __name__ == "__main__":
    run_main(main)
