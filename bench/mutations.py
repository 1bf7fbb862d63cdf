"""Plant known faults one at a time, and check that the tests catch each of them.

    python bench/mutations.py                        # all faults: 22 minutes on two busy CPU cores
    python bench/mutations.py --only 3 41            # two of them, by number
    python bench/mutations.py --only 3 --all_tests   # any test may catch it

Each fault replaces one piece of text in a temporary copy of this folder, and pytest runs the test files
or tests named beside it until one fails. The table names that one. At the end, the tests that caught
a fault must pass without it. The exit status is 1 if a fault is not caught. If you change a line that a
fault replaces, update the fault.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from records import ROOT  # isort: skip

from lab.cli import RunError, UserError, parse_args, require, run_main

SECONDS = 1800  # longest time for the tests of one fault


class Fault(NamedTuple):
    what: str
    file: str
    old: str  # text that occurs exactly once in the file
    new: str
    tests: (
        str  # what should catch it: "train" is tests/test_train.py, "train::test_x" one test in it
    )

    def paths(self) -> list[str]:
        parts = [name.partition("::") for name in self.tests.split()]
        return [f"tests/test_{file}.py{colons}{test}" for file, colons, test in parts]


ONCE = "distributed::test_ddp_all_reduces_once_per_step"
RESUMING = "runs::test_resuming_a_complex_run_is_bit_equal"
TRAIN, LOADER, SHARDS = "train_gpt2.py", "lab/data/loader.py", "lab/data/shards.py"
GENERATE, CHECKPOINT, FILES = (
    "lab/inference/generate.py",
    "lab/trainer/checkpoint.py",
    "lab/files.py",
)
KERNELS, MUON, ZERO1 = "lab/kernels/__init__.py", "lab/optim/muon.py", "lab/optim/zero1.py"

# fmt: off
FAULTS = [
    # one update
    Fault("loss: not divided by the step's targets", TRAIN,
          "self.world.world_size / num_targets", "self.world.world_size", "train"),
    Fault("loss: divided by the micro-batch's targets", TRAIN,
          "self.world.world_size / num_targets", "self.world.world_size / (y >= 0).sum()", "train"),
    Fault("loss: not multiplied by world_size under DDP", TRAIN,
          "self.world.world_size / num_targets", "1 / num_targets",
          "distributed::test_two_processes_equal_one[ddp]"),
    Fault("DDP: gradients reduced in every micro-step", TRAIN,
          'last or not hasattr(self.model, "no_sync")', "True", ONCE),
    Fault("DDP: forward pass outside no_sync", TRAIN,
          '_, loss = self.model(x, y, reduction="sum")',
          'self.model.require_backward_grad_sync = True\n'
          '                    _, loss = self.model(x, y, reduction="sum")', ONCE),
    Fault("DDP: gradients reduced in all micro-steps but the last", TRAIN,
          'last or not hasattr(self.model, "no_sync")', 'not last', ONCE),
    Fault("clipping: by the largest norm of a parameter's gradient", TRAIN,
          "norm = global_grad_norm([p.grad for p in params])",
          "norm = torch.stack([p.grad.norm() for p in params]).max()",
          "train::test_clipping_limits_the_update_and_logs_the_norm_before_it"),
    Fault("clipping: gradients still scaled for fp16", TRAIN,
          "self.precision.scaler.unscale_(self.optimizer)", "pass",
          "train::test_loss_scaling_changes_no_update"),
    Fault("gradients: not set to zero after an update", TRAIN,
          "self.optimizer.zero_grad(set_to_none=True)", "pass",
          "train::test_gradients_of_one_update_are_not_added_to_those_of_the_next"),
    # learning rate and weight decay
    Fault("learning rate: one step late", TRAIN,
          "get_lr(self.step, self.cfg)", "get_lr(max(0, self.step - 1), self.cfg)", "train"),
    Fault("learning rate: one step early", TRAIN,
          "get_lr(self.step, self.cfg)", "get_lr(self.step + 1, self.cfg)", "train"),
    Fault("learning rate: set after the update", TRAIN,
          "        for group in self.optimizer.param_groups:\n"
          '            group["lr"] = get_lr(self.step, self.cfg) * group["lr_scale"]\n'
          "        precision.scaler.step(self.optimizer)\n",
          "        precision.scaler.step(self.optimizer)\n"
          "        for group in self.optimizer.param_groups:\n"
          '            group["lr"] = get_lr(self.step, self.cfg) * group["lr_scale"]\n', "train"),
    Fault("learning rate: warmup begins at 0", TRAIN,
          "cfg.lr * (step + 1) / warmup", "cfg.lr * step / warmup", "train"),
    Fault("learning rate: wsd decays one step too early", TRAIN,
          "cfg.max_steps - decay)", "cfg.max_steps - decay - 1)", "train"),
    Fault("learning rate: the log shows Muon's, not AdamW's", TRAIN,
          'trainer.optimizer.param_groups[-1]["lr"]', 'trainer.optimizer.param_groups[0]["lr"]',
          "train"),
    Fault("AdamW: beta1 and beta2 exchanged", TRAIN,
          "betas=(cfg.beta1, cfg.beta2)", "betas=(cfg.beta2, cfg.beta1)",
          "train::test_resuming_uses_the_optimizer_flags_of_the_new_command"),
    Fault("weight decay: on biases and gains, too", TRAIN,
          'if p.dim() < 2], "weight_decay": 0.0', 'if p.dim() < 2], "weight_decay": weight_decay',
          "model"),
    Fault("Muon: no factor for tall matrices", MUON,
          "* max(1.0, m / n) ** 0.5", "", "muon"),
    Fault("Muon: momentum is not Nesterov's", MUON,
          'torch._foreach_lerp(grads, momenta, group["momentum"])', "momenta", "muon"),
    Fault("ZeRO-1: updated shards not gathered", ZERO1,
          "s.all_gather_params(s.comm_dtype)", "pass",
          "distributed::test_two_processes_equal_one[zero1]"),
    # model
    Fault("attention: a token sees the next one", TRAIN,
          "device=x.device).tril(S - T)", "device=x.device).tril(S - T + 1)", "model"),
    Fault("attention: scores times 1 / D, not 1 / sqrt(D)", TRAIN,
          "q.size(-1) ** -0.5", "q.size(-1) ** -1.0", "model"),
    Fault("attention: end-of-text belongs to the document before", "lab/data/document_mask.py",
          "(idx == eot).cumsum(1)", "(idx == eot).cumsum(1) - (idx == eot).long()", "model"),
    Fault("GELU: erf's, not tanh's", TRAIN,
          'approximate="tanh"))  # tanh', 'approximate="none"))  # tanh', "weights"),
    Fault("padding rows: part of the loss", TRAIN,
          "F.linear(x, weight)[:, : self.vocab_size]", "F.linear(x, weight)", "model"),
    Fault("padding rows: among the logits that are sampled", TRAIN,
          "return logits[..., : self.config.vocab_size], None", "return logits, None", "model"),
    Fault("padding rows: exported", "lab/hf/gpt2.py",
          "p.detach()[: c.vocab_size] if name in model.vocab_rows else p.detach()", "p.detach()",
          "weights::test_round_trip_is_bit_equal"),
    Fault("initial values: residual scale on c_fc, not c_proj", TRAIN,
          'residual = name.endswith("c_proj.weight")', 'residual = name.endswith("c_fc.weight")',
          "model"),
    Fault("kernels: an edited MLP is replaced without comparison", KERNELS,
          "[place for place in found if place[3] in fused.functions]", "found",
          "replace_modules::test_edited_mlp_is_kept"),
    Fault("kernels: an edited HeadLoss is replaced without comparison", KERNELS,
          "if head_is_replaceable(model):", "if True:",
          "replace_modules::test_edited_head_loss_is_kept"),
    # data
    Fault("loader: ranks read overlapping sequences", LOADER,
          "(micro_step * self.world_size + self.rank)", "(micro_step + self.rank)", "loader"),
    Fault("loader: epochs in the same order", LOADER,
          "self.seed * 1_000_003 + int(e)", "self.seed * 1_000_003", "loader"),
    Fault("loader: a token lost at each end of a shard", SHARDS,
          "position, length = position + count, length - count",
          "position, length = position + count + (length > count), length - count", "loader"),
    Fault("loader: targets not shifted", SHARDS,
          "rows[:, 1:].copy()", "rows[:, :-1].copy()", "loader"),
    Fault("fine-tuning: loss mask one token late", SHARDS,
          "self.loss_mask(p + 1, seq_len)", "self.loss_mask(p, seq_len)", "loader"),
    Fault("fine-tuning: the answer's end-of-text is not learned", "lab/data/chat.py",
          "parts.append(([*tokenizer.encode(text), tokenizer.eot], weight))",
          "parts += [(tokenizer.encode(text), weight), ([tokenizer.eot], 0)]", "chat"),
    # checkpoints and signals
    Fault("checkpoint: after its step is measured", TRAIN,
          "[save, validation, HellaSwag(self, stop), Blimp(self, stop), samples]",
          "[validation, HellaSwag(self, stop), Blimp(self, stop), samples, save]",
          "runs::test_checkpoint_is_saved_before_its_step_is_evaluated"),
    Fault("checkpoint: weights of the step before", CHECKPOINT,
          '"step": self.step, "best_val"', '"step": self.step + 1, "best_val"', "runs"),
    Fault("checkpoint: not a copy, so the next update changes it", CHECKPOINT,
          "self.snapshot(state) if self.cfg.async_save else (state, [])", "(state, [])",
          "runs::test_async_checkpoint_has_the_state_at_the_time_of_save"),
    Fault("checkpoint: written in place, without a rename", FILES,
          'path.with_name(path.name + ".part")', "path", "files"),
    Fault("resuming: optimizer state not restored", CHECKPOINT,
          'load_optimizer_state(self.optimizer, state["optimizer"])', "pass", RESUMING),
    Fault("resuming: position in the data not restored", CHECKPOINT,
          'self.loader.load_state_dict(state["loader"])', "pass", RESUMING),
    Fault("dropout: the same masks in each process", "train_gpt2.py",
          "self.step, self.world.rank))", "self.step))",
          "speedrun::test_each_process_and_step_has_its_own_dropout"),
    Fault("signals: a second Ctrl-C is ignored", "lab/trainer/signals.py",
          "if self.name and number == signal.SIGINT:", "if False:",
          "signals::test_signal_handlers_are_installed_and_restored "
          "signals::test_second_ctrl_c_quits_immediately"),
    # evaluation and sampling
    Fault("validation: mean over batches, not tokens", "lab/eval/validation.py",
          'model(x, y, reduction="sum")[1]', "model(x, y)[1] * y.numel()",
          "train::test_validation_loss_is_the_mean_over_val_tokens"),
    Fault("HellaSwag: mean over one token too many", "hellaswag.py",
          '("acc_norm", sums / end_len)', '("acc_norm", sums / (end_len + 1))', "hellaswag"),
    Fault("KV cache: positions begin at 0 again", GENERATE,
          "torch.arange(start, idx.size(1), device=idx.device)",
          "torch.arange(new.size(1), device=idx.device)", "sample"),
    Fault("sampling: top_k keeps one token too many", GENERATE,
          "logits.topk(top_k)", "logits.topk(top_k + 1)", "sample::test_sample_token_by_hand"),
    Fault("sampling: top_p drops the token that reaches it", GENERATE,
          "probs.cumsum(dim=-1) - probs >= top_p", "probs.cumsum(dim=-1) >= top_p",
          "sample::test_sample_token_by_hand"),
    Fault("sampling: the same seed for each prompt", "sample.py",
          "seed += 1", "seed += 0", "sample::test_samples_prompts_and_seeds"),
]
# fmt: on


def planted(fault: Fault, root: Path) -> str:
    """The text of the fault's file with the fault in it. Raises UserError if it does not fit."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    require(
        text.count(fault.old) == 1,
        f'fault "{fault.what}": its old text is in {fault.file} {text.count(fault.old)} times, but must '
        "occur once; update the fault in bench/mutations.py",
    )
    return text.replace(fault.old, fault.new)


def copy_tree(root: Path, folder: str) -> Path:
    """Copy the files that git tracks or would add, with uncommitted changes."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    require(not listed.returncode, f"{root} must be a checkout of git; clone the repository")
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():  # not deleted
            (target := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
    return Path(folder)


def first_failure(tree: Path, tests: list[str]) -> str:
    """The first test that fails, or "" if all pass. Raises RunError if pytest does not run them."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(tests)} did not end in {SECONDS} s; run them alone") from None
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0 or (done.returncode == 1 and failed):
        return failed[1] if failed else ""
    detail = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    raise RunError(f"pytest {' '.join(tests)} ended with status {done.returncode}: {detail}")


def run_faults(faults: dict[int, Fault], root: Path, all_tests: bool) -> int:
    """Print a row for each fault {number: fault}. Returns how many are not caught."""
    found, width = [], max(len(fault.what) for fault in faults.values())
    for fault in faults.values():
        planted(fault, root)  # refuse before anything runs
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        tree = copy_tree(root, folder)
        print(f"{'':2}  {'fault':{width}}  {'s':>4}  caught by", flush=True)
        for number, fault in faults.items():
            files = ["tests"] if all_tests else fault.paths()
            path, start = tree / fault.file, time.perf_counter()
            text = path.read_text(encoding="utf-8")
            path.write_text(planted(fault, tree), encoding="utf-8")
            caught = first_failure(tree, files)
            path.write_text(text, encoding="utf-8")
            found.append(caught)
            row = f"{number:2}  {fault.what:{width}}  {time.perf_counter() - start:4.0f}"
            print(f"{row}  {caught or 'NOT CAUGHT'}", flush=True)
        tests = sorted({*found} - {""})
        if tests and (failed := first_failure(tree, tests)):
            raise RunError(f"{failed} fails without a fault, too; repair that first")
    counts = f"{len(faults) - found.count('')} of {len(faults)} faults caught"
    print(counts + "; the tests that caught them pass without a fault" * bool(tests))
    return found.count("")


@dataclass
class Config:
    only: tuple[int, ...] = ()  # numbers of faults as in the table, from 1; all if empty
    all_tests: bool = False  # run the whole suite for each fault instead of the named test files


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    for number in cfg.only:
        if not 1 <= number <= len(FAULTS):
            raise UserError(f"only={number} must be from 1 to {len(FAULTS)}, the number of a fault")
    faults = {n: FAULTS[n - 1] for n in cfg.only or range(1, len(FAULTS) + 1)}
    return 1 if run_faults(faults, ROOT, cfg.all_tests) else 0


if __name__ == "__main__":
    run_main(main)
