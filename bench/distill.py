"""Distillation (Hinton et al. 2015): train a student on the mean probability of trained models, its
teachers.

    python speedrun.py --preset small-data --fp8 all --data data/mine --seed 1 --run_name seed1
    python speedrun.py --preset small-data --fp8 all --data data/mine --seed 2 --run_name seed2
    torchrun --standalone --nproc_per_node=4 bench/distill.py --teachers log/seed1 log/seed2 \\
        --preset small-data --fp8 all --data data/mine --run_name student

It measures how much of the lower loss of an ensemble (bench/ensemble.py) a single model can reach:
seven eighths of it at GPT-2's size (docs/LOG.md#distill-124m). Only the training loss differs from
speedrun.py: it is the cross-entropy with the mean probability of the teachers, in nats per token.
Validation has the usual loss, and a checkpoint is that of a speedrun.py model.

With --fp8 all the student's MLPs compute in 8 bits; its head and the teachers compute in bf16. The logged
MFU does not count the teachers, and --batch_size 0 does not count their memory.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before bench/speedrun.py

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import OptimizedModule

import speedrun
import train_gpt2
from lab.cli import require, run_main
from lab.hardware import can_run_triton
from lab.kernels.cross_entropy import loss_in_chunks, multiply_gradients, save_gradients
from lab.registry import load_model, resolve_source

CHUNK = 8192  # tokens whose logits are in memory: 0.8 GB in bf16 for each model at V = 50304


@dataclass
class TrainConfig(speedrun.TrainConfig):
    teachers: tuple[str, ...] = ()  # runs or checkpoints, all of the same width

    def validate(self, model_config):
        """Raise UserError for settings that cannot work."""
        super().validate(model_config)
        require(self.teachers, "teachers is empty, but must name runs; pass --teachers log/RUN")


PRESETS = {k: (model, TrainConfig(**vars(cfg))) for k, (model, cfg) in speedrun.PRESETS.items()}


def loss_and_grad_(
    logits: Tensor, teachers: Tensor, targets: Tensor, vocab_size: int, scale: float
) -> Tensor:  # fmt: skip
    """Return the losses (n,) of a chunk of logits (n, V), and replace the logits by scale * dloss/dlogits.
    teachers: their logits (K, n, V). Where the target (n,) is -1, the loss is 0."""
    log_q = logits[:, :vocab_size].float().log_softmax(-1)  # without padding ids
    p = teachers[..., :vocab_size].float().softmax(-1).mean(0)
    has_target = (targets >= 0)[:, None]
    losses = -(p * log_q * has_target).sum(1)
    grad = (log_q.exp() - p) * has_target * scale  # the sum of p is 1
    logits.copy_(F.pad(grad, (0, logits.size(1) - vocab_size)))
    return losses


compiled_loss_and_grad_ = torch.compile(loss_and_grad_, dynamic=False)  # compiles in its first call


# a custom op, so that torch.compile does not break the student's graph here
@torch.library.custom_op("gpt2::soft_loss", mutates_args=())
def soft_loss(
    x: Tensor, weight: Tensor, targets: Tensor, hidden: Tensor, heads: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the sum of the losses of the student's hidden states x (N, C) with its head weight (V, C),
    and the gradients dx (N, C) and dweight (V, C). targets: (N,). hidden (K, N, D), heads (K, V, D): the
    hidden states and heads of K teachers, in x's type."""
    loss = compiled_loss_and_grad_ if can_run_triton(x.device) else loss_and_grad_

    def chunk_loss_(logits, rows, scale):
        teachers = hidden[:, rows] @ heads.mT  # (K, n, V)
        return loss(logits, teachers, targets[rows], vocab_size, scale)

    return loss_in_chunks(x, weight, chunk_loss_, CHUNK)


@soft_loss.register_fake
def empty_results(x, weight, *_):
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight)


def backward(ctx, *grads):
    return *multiply_gradients(ctx, *grads), None, None


soft_loss.register_autograd(backward, setup_context=save_gradients)


class Student(speedrun.GPT):
    def forward(self, idx, targets=None, *args, teachers=None, **how):
        """See train_gpt2.GPT. teachers: hidden and heads, for soft_loss, whose sum is returned."""
        if targets is None or teachers is None:
            return super().forward(idx, targets, *args, **how)
        hidden, heads = teachers
        x, weight = self.hidden(idx).flatten(0, 1).to(heads.dtype), self.lm_head.weight
        size = self.config.vocab_size
        return None, soft_loss(x, weight, targets.flatten(), hidden, heads, size)[0]


class Trainer(speedrun.Trainer):
    model_class = Student

    def __init__(self, *args):
        super().__init__(*args)
        self.model_class = speedrun.GPT  # recorded in checkpoints; it has the same weights
        teachers = [self.load_teacher(name) for name in self.cfg.teachers]
        shapes = {tuple(teacher.lm_head.weight.shape) for teacher in teachers}
        require(len(shapes) == 1, f"teachers have heads of shapes {shapes}, which must be equal")
        self.dtype = self.precision.dtype or torch.float32
        self.heads = torch.stack([teacher.lm_head.weight.to(self.dtype) for teacher in teachers])
        self.teachers = [teacher.hidden for teacher in teachers]  # (B, T) -> (B, T, D)
        if isinstance(self.model, OptimizedModule):
            self.teachers = [torch.compile(hidden, dynamic=False) for hidden in self.teachers]
        self.model.register_forward_pre_hook(self.add_teachers, with_kwargs=True)

    def load_teacher(self, name):
        """The model of a run, on this process's device. Raises UserError if it does not fit."""
        teacher, ours = load_model(resolve_source(name, self.cfg.log_dir)), self.raw_model.config
        found = teacher.config.vocab_size, teacher.config.block_size
        require(
            found[0] == ours.vocab_size and found[1] >= self.cfg.seq_len,
            f"teachers={name} has vocab_size={found[0]} and block_size={found[1]}, but must have "
            f"{ours.vocab_size} and at least seq_len={self.cfg.seq_len}; pass another run",
        )
        return teacher.to(self.world.device).eval().requires_grad_(False)

    def add_teachers(self, model, args, kwargs):
        """Before each forward pass of training, pass the teachers' hidden states to the model."""
        if not torch.is_grad_enabled():  # validation
            return args, kwargs
        with torch.no_grad():
            hidden = torch.stack([teacher(args[0]).flatten(0, 1) for teacher in self.teachers])
        return args, kwargs | {"teachers": (hidden.to(self.dtype), self.heads)}


def main(argv):
    return train_gpt2.main(argv, PRESETS, __doc__, speedrun.build_trainer, Trainer)


if __name__ == "__main__":
    run_main(main)
