"""bench/slowrun.py: Slowrun's program trains on our tokens and is validated on our programs' targets."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import slowrun
from conftest import ROOT, run_python, write_shards

from lab.cli import UserError
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.distributed import World
from lab.eval.validation import evaluate
from lab.precision import Precision

# A small stand-in for Slowrun's program: the lines that bench/slowrun.py edits, the output that it reads,
# the loader and the evaluation. The loss of its model depends only on a token and the next one.
PROGRAM = """
import argparse, os, sys
import numpy as np, torch
import wandb
import tiktoken
parser = argparse.ArgumentParser()
for name in ("num-epochs", "swa-last-epochs", "max-train-steps", "total-batch-size", "device-batch-size"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--ema-decay-per-epoch", type=float)
parser.add_argument("--run-name")
args = parser.parse_args()
args.wd_phase1_epoch, args.wd_phase2_epoch = 2, 8
assert os.environ["WORLD_SIZE"] == "1" and os.environ["RANK"] == "0"
EVAL_TOKENS = 10_000_000
master_process = True
class DummyWandb:
    pass
wandb_run = DummyWandb() if not master_process else wandb.init(**_wandb_kwargs)
if master_process:
    wandb_run.log_code(".")
encoder = tiktoken.get_encoding("gpt2")
vocab_size = encoder.n_vocab  # 50257
eot_id = encoder._special_tokens['<|endoftext|>']
token_bytes_list = []
for i in range(vocab_size):
    if i == eot_id:
        token_bytes_list.append(0)
    else:
        token_bytes_list.append(len(encoder.decode_single_token_bytes(i)))

def load(split):
    data = torch.load(f"fineweb_data/fineweb_{split}.pt", weights_only=True)
    tokens = data["tokens"].long()
    starts = data["doc_starts"].long()
    assert data["bos_id"] == 50256
    ends = torch.cat([starts[1:], torch.tensor([tokens.numel()])])
    return [tokens[s:e] for s, e in zip(starts.tolist(), ends.tolist())], data["seq_shuffle_seed"]

documents, _ = load("train")
tokens = sum(map(len, documents))
num_iterations = tokens * args.num_epochs // 2049
print("documents", [len(d) for d in documents], "sum", int(torch.cat(documents).sum()))
print("decay", round(args.wd_phase1_epoch / args.num_epochs * num_iterations))
print("decay", round(args.wd_phase2_epoch / args.num_epochs * num_iterations))
print("flags", args.num_epochs, args.swa_last_epochs, round(args.ema_decay_per_epoch, 6))
B, T = args.device_batch_size, 2048
documents, seed = load("val")
val = torch.cat(documents)
rows = val[: len(val) // (T + 1) * (T + 1)].view(-1, T + 1)
rows = rows[torch.from_numpy(np.random.RandomState(seed).permutation(len(rows)))]
batches = rows[: len(rows) // B * B].view(-1, B, T + 1)
loss = count = 0
for i in range(EVAL_TOKENS // (B * T)):
    x, y = batches[i][:, :-1], batches[i][:, 1:]
    loss, count = loss + ((x * 7 + y * 3) % 11).sum().item(), count + y.numel()
print(f"Step 00000 | Val BPB: 15.6 | Val Loss: {loss / count:.6f}")
print0, device, autocast_ctx = print, "cpu", torch.autocast("cpu", enabled=False)
def orig_model(x, y, loss_reduction):
    return torch.where(y < 0, 0, (x * 7 + y * 3) % 11).float().flatten()
for step, ms in ((1, 9000), (2, 100), (3, 300)):
    print(f"step {step:05d} (9.00%) | loss: 9.0 | dt: {ms:.2f}ms | tok/sec: 9 | bf16_mfu: 0.10%")
print("Step 00003 | Epoch 1 | Val BPB: 1.100000 | Val Loss: 4.250000")
wandb_run.log = lambda _: None
if True:
    if True:
        print("EMA Val BPB: 1.100000 | EMA Val Loss: 4.125000")
        ema_bpb, ema_loss = 1.1, 4.125
        wandb_run.log({"step": step, "val/ema_bpb": ema_bpb, "val/ema_loss": ema_loss})
print("Ckpt avg Val BPB: 1.1 | Val Loss: 4.500000")
print("Peak memory: 2048.00 MiB\\nMin val BPB: 1.100000\\nMin val Loss: 4.125000")
os.makedirs("runs/run")
open("runs/run/terminal.log", "w").write("all of it")
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "slowrun" / "tiny").mkdir(parents=True)
    (tmp_path / "slowrun" / "tiny" / "train.py").write_text(PROGRAM)
    (tmp_path / "slowrun" / "COMMIT").write_text("abc123\n")
    return tmp_path / "slowrun"


@pytest.fixture
def data(tmp_path):
    """Shards of GPT-2's 50257 ids; both training shards begin in the middle of a document."""
    folder = write_shards(tmp_path / "d", (1501, 997), 9000, slowrun.VOCAB)
    first = folder / "x_train_000000.npy"
    np.save(first, np.load(first)[5:])
    return folder


def run(checkout, data, tmp_path, *flags, status=0):
    flags = ["--slowrun", checkout, "--data", data, "--out", "o.jsonl", *flags]
    sizes = ["--device_batch_size", 2, "--total_batch_size", 8192, "--val_tokens", 8192]
    done = run_python(ROOT / "bench" / "slowrun.py", *sizes, *flags, cwd=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_both_programs_are_validated_on_the_same_targets(checkout, data, tmp_path):
    said = run(checkout, data, tmp_path, "--epochs", 8, "--log", "all.log")
    assert "abc123" in said and (tmp_path / "all.log").read_text() == "all of it"
    record = json.loads((tmp_path / "o.jsonl").read_text())

    def model(x, y, reduction):
        losses = (x * 7 + y * 3) % 11
        return None, losses[y >= 0].sum()

    shards, world = TokenShards(data, "val", slowrun.VOCAB), World("cpu")
    cfg = SimpleNamespace(val_tokens=8192, seq_len=100, data=data)
    sums = evaluate(model, shards, cfg, 3, world, Precision("fp32", world.device))
    ours = sums["loss"] / sums["targets"]
    assert sums["targets"] == 8192
    assert record["curve"][0] == [0.0, 0, pytest.approx(ours, abs=1e-6)]
    # the first step counts as the mean of the others
    assert record["curve"][1:] == [[0.6, 3, 4.25]] and record["seconds"] == 0.6
    assert (record["ema"], record["average"], record["lowest"]) == (4.125, 4.5, 4.125)
    assert (record["step_ms"], record["peak_mib"], record["tokens"]) == (200, 2048, 3 * 8192)
    assert run_table(tmp_path).split()[-4:] == ["4.2500", "4.1250", "4.5000", "4.1250"]


def test_blimp_compares_the_summed_losses_of_whole_sentences(checkout, data, tmp_path, gpt2_files):
    words = "the cat cats sees see a dog dogs near never".split()

    def sentence(i, k):
        return " ".join(words[(i * k + j * j) % 10] for j in range(4 + i % 5)) + "."

    pairs = [(sentence(i, 3), sentence(i, 7)) for i in range(1, 40)]
    lines = [
        {"sentence_good": good, "sentence_bad": bad, "UID": "x", "linguistics_term": "x"}
        for good, bad in pairs
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run(checkout, data, tmp_path, "--blimp", "pairs.jsonl")
    encode = get_tokenizer("gpt2").encode

    def loss(text):
        tokens = np.array([slowrun.EOT, *encode(" " + text)])
        return ((tokens[:-1] * 7 + tokens[1:] * 3) % 11).sum()

    right = [(loss(g) < loss(b)) + 0.5 * (loss(g) == loss(b)) for g, b in pairs]
    assert 0.2 < np.mean(right) < 0.8
    record = json.loads((tmp_path / "o.jsonl").read_text())
    assert record["blimp"] == pytest.approx(np.mean(right), abs=1e-6)


def run_table(tmp_path):
    done = run_python(ROOT / "bench" / "slowrun.py", "--table", "--out", "o.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_slowrun_trains_on_all_documents_and_its_schedule_is_scaled(checkout, data, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slowrun, "read_output", lambda output, _: output)
        cfg = slowrun.Config(str(checkout), str(data), 8, device_batch_size=2, val_tokens=4096)
        said = slowrun.measure(cfg).splitlines()
    tokens = np.concatenate([np.load(data / f"x_train_00000{i}.npy") for i in range(2)]).astype(int)
    edges = [0, *np.flatnonzero(tokens == slowrun.EOT).tolist(), len(tokens)]
    lengths = [b - a for a, b in zip(edges, edges[1:])]
    assert lengths[0] == 56 and said[0] == f"documents {lengths} sum {tokens.sum()}"
    updates = len(tokens) * 8 // 2049
    assert said[1:3] == [f"decay {round(updates / 8)}", f"decay {round(updates / 2)}"]
    assert said[3] == f"flags 8 2 {round(0.15**2, 6)}"


def test_other_versions_and_sizes_are_refused(checkout, data, tmp_path):
    assert "at most 8192 with this data" in run(
        checkout, data, tmp_path, "--val_tokens", 12288, status=2
    )
    said = run(checkout, data, tmp_path, "--total_batch_size", 4097, status=2)
    assert "total_batch_size=4097 must be a multiple of 4096" in said
    program = checkout / "tiny" / "train.py"
    program.write_text(PROGRAM.replace("EVAL_TOKENS = 10_000_000", "EVAL_TOKENS = 5"))
    said = run(checkout, data, tmp_path, status=2)
    assert "'EVAL_TOKENS = 10_000_000' occurs 0 times, but must occur once; check out" in said
    program.unlink()
    assert "must be a checkout of" in run(checkout, data, tmp_path, status=2)
    assert not (tmp_path / "o.jsonl").exists()
    with pytest.raises(UserError, match="logged 1 steps"):
        slowrun.read_output("step 00001 (0.1%) | loss: 9 | dt: 9.00ms | tok", 1)
