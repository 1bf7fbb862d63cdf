"""The data loader of train_gpt2.py, speedrun.py and bert.py, which decides the order of tokens.

It reads from the endless stream defined in shards.py.
"""

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lab.cli import UserError, counted
from lab.data.chat import rotate_rows
from lab.data.shards import TokenShards
from lab.distributed import World

Transform = Callable[[np.ndarray, np.ndarray, int, np.ndarray], tuple[np.ndarray, np.ndarray]]


class LoaderConfig(Protocol):
    """The settings that TokenLoader uses; see lab.config."""

    seq_len: int
    total_batch_size: int
    shuffle: bool
    seed: int
    align_documents: bool


def feistel_permutation(i: np.ndarray, n: int, key: int) -> np.ndarray:
    """The positions of the indices i in a seeded shuffle of range(n), computed without storing it.

    It is a Feistel network: the bits of an index are split into halves, and (left, right) becomes
    (right, left xor f(right)). This is invertible for any f, so it permutes the numbers with this many
    bits. Four rounds mix well. A result of n or more is permuted again until it is below n. This
    ends, because the cycle of a permutation leads back to its start (cycle walking: Black and Rogaway
    2002, method 2). So shuffling 10 billion tokens needs no memory, and the state is one integer. f is
    the mixing function of splitmix64 (Steele et al. 2014).
    """
    half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    i = np.array(i, dtype=np.uint64)
    todo = np.ones(i.shape, dtype=bool)
    while todo.any():
        left, right = i[todo] >> half, i[todo] & low
        for r in range(4):
            z = right + np.uint64((key * 4 + r + 1) * 0x9E3779B97F4A7C15 % 2**64)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & low)
        i[todo] = (left << half) | right
        todo = i >= n
    return i.astype(np.int64)


class TokenLoader:
    """Micro-batches of the training stream.

    One global cursor counts tokens, so the sequences of a step are the same for any number of
    processes and any micro-batch size; these decide only which process reads which sequence. The
    stream is cut into sequences without gaps, so no token is dropped: a sequence may cross the end of a
    shard, and one that crosses the end of the data continues with the first tokens of the next epoch.
    Shuffling permutes the sequences that begin in the same epoch, including the one that crosses its end.
    """

    def __init__(
        self, shards: TokenShards, cfg: LoaderConfig, world: World, batch_size: int,
        transform: Transform | None = None,
    ):  # fmt: skip
        """batch_size: sequences per process and micro-batch.

        transform(x, y, seed, sequence_ids) -> (x, y) changes each micro-batch, for example to mask
        words. x and y are int64 arrays (B, T); sequence_ids (B,) are unique in a run, even across
        epochs. The result must depend only on the arguments, and all sequences must have the same
        number of targets >= 0.

        Raises UserError if the data is too short or was packed to another seq_len, or if a
        step is not a whole number of micro-batches.
        """
        self.shards, self.transform = shards, transform
        self.rank, self.world_size, self.device = world.rank, world.world_size, world.device
        self.shuffle, self.seed = cfg.shuffle, cfg.seed
        self.position = 0  # global cursor: tokens that all processes have read, in complete steps
        self.micro_step = 0
        self.worker = ThreadPoolExecutor(1)  # reads one micro-batch ahead while the device computes
        self.prefetched: Future[tuple[Tensor, Tensor, int]] | None = None
        self.counted: tuple[tuple | None, int] = None, 0  # cache of masked_targets: (key, result)
        self.batch_size, self.seq_len = batch_size, seq_len = batch_size, cfg.seq_len
        context = shards.manifest.get("context")
        if len(shards) <= seq_len:
            raise UserError(
                f"{shards.folder} has {len(shards)} training tokens, but a sequence takes "
                f"{seq_len + 1}: add data, or pass a --seq_len below {len(shards)}, such as a power of 2"
            )
        if context and seq_len != context:
            raise UserError(
                f"seq_len={seq_len} must be {context}, the length these conversations were packed "
                f"to: pass --seq_len {context} if --block_size allows it, or pass the .jsonl file "
                "itself as --data, which is then packed to fit"
            )
        self.aligned = shards.document_starts(seq_len) if cfg.align_documents else None
        self.total_batch_size = 0
        self.set_total_batch_size(cfg.total_batch_size)

    def set_total_batch_size(self, tokens: int) -> None:
        """Set the tokens per step, from the next step on; cursor and micro-batch size are unchanged."""
        if tokens == self.total_batch_size:
            return
        assert self.micro_step == 0, "the size of a step can change only between steps"
        self.prefetched = None  # it belongs to a step of the previous size
        self.total_batch_size, self.step_sequences = tokens, tokens // self.seq_len
        self.grad_accum_steps = grad_accum_steps(self, self.batch_size, self.world_size)

    @property
    def next_sequence(self) -> int:
        """The cursor in sequences: the id of the first sequence of the current step.

        Rounded up, because a resumed run may have another seq_len.
        """
        return -(-self.position // self.seq_len)

    def sequence_offsets(self, sequence_ids: np.ndarray) -> np.ndarray:
        """Positions in the stream (int64) at which these sequences begin."""
        j, T, N = sequence_ids, self.seq_len, len(self.shards)
        if self.aligned is not None:  # a stream of documents instead of tokens
            T, N = 1, len(self.aligned)
        epoch = j * T // N
        if self.shuffle:
            j = j.copy()
            for e in np.unique(epoch):
                # Epoch e contains the sequences that begin at tokens e N to (e + 1) N of the
                # endless stream; -(-a // b) is a / b rounded up.
                begin, end = -(-e * N // T), -(-(e + 1) * N // T)
                members = epoch == e
                key = self.seed * 1_000_003 + int(e)
                j[members] = begin + feistel_permutation(j[members] - begin, end - begin, key)
        return j * T if self.aligned is None else self.aligned[j % N]

    def sequence_ids(self, first_sequence: int, micro_step: int) -> np.ndarray:
        """Ids (batch_size,) of the sequences that this process reads in a micro-step.

        first_sequence: id of the first sequence of the step.
        """
        first = first_sequence + (micro_step * self.world_size + self.rank) * self.batch_size
        return np.arange(first, first + self.batch_size)

    def micro_batch(self, first_sequence: int, micro_step: int) -> tuple[Tensor, Tensor, int]:
        """(x, y, num_targets) as from next_batch, but on the CPU. Arguments: see sequence_ids."""
        ids = self.sequence_ids(first_sequence, micro_step)
        x, y = self.shards.batch(self.sequence_offsets(ids), self.seq_len)
        num_targets = self.step_sequences * self.seq_len
        if self.transform:
            x, y = self.transform(x, y, self.seed, ids * self.seq_len)
            targets = (y >= 0).sum(1)
            assert (targets == targets[0]).all(), (
                "all sequences must have the same number of targets"
            )
            num_targets = self.step_sequences * int(targets[0])
        elif self.shards.masks:
            num_targets = self.masked_targets(first_sequence)
            if self.shards.manifest.get("context"):  # rows of packed conversations
                rotate_rows(x, y, ids * self.seq_len // len(self.shards), self.shards.eot)
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        if self.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x, y, num_targets

    def masked_targets(self, first_sequence: int) -> int:
        """Number of targets of a step over all processes, at least 1, for data with a loss mask.

        The last result is cached, so the masks are read once per step, not once per micro-step.
        """
        key = first_sequence, self.step_sequences, len(self.shards)
        if self.counted[0] != key:
            ids = np.arange(first_sequence, first_sequence + self.step_sequences)
            masks = (
                self.shards.loss_mask(int(offset) + 1, self.seq_len)
                for offset in self.sequence_offsets(ids)
            )
            self.counted = key, max(1, sum(int(mask.sum()) for mask in masks))
        return self.counted[1]

    def next_batch(self) -> tuple[Tensor, Tensor, int]:
        """The next micro-batch: x, y (batch_size, seq_len) on the device, and num_targets.

        num_targets is the number of targets (without those of -1) in the whole step, over all
        micro-steps and processes; the sum of a micro-batch's losses is divided by it.
        """
        x, y, num_targets = (self.prefetched or self.prefetch()).result()
        self.micro_step += 1
        if self.micro_step == self.grad_accum_steps:
            self.position = (self.next_sequence + self.step_sequences) * self.seq_len
            self.micro_step = 0
        self.prefetch()
        # on MPS a non-blocking copy may read x after Python has freed it (pytorch/pytorch#189690)
        x, y = (t.to(self.device, non_blocking=self.device.type == "cuda") for t in (x, y))
        return x, y, num_targets

    def prefetch(self) -> Future[tuple[Tensor, Tensor, int]]:
        """Start reading the micro-batch at the cursor in the background."""
        first = self.next_sequence
        self.prefetched = self.worker.submit(self.micro_batch, first, self.micro_step)
        return self.prefetched

    def sequence_names(self, first_sequence: int, micro_step: int) -> list[str]:
        """The places where these sequences begin, as "<file name>:<index>", for messages."""
        offsets = self.sequence_offsets(self.sequence_ids(first_sequence, micro_step))
        return [self.shards.where(int(offset)) for offset in offsets]

    def fingerprint(self, tokens: int) -> int:
        """CRC-32 of the first min(tokens, 2^20) tokens of the stream."""
        return zlib.crc32(self.shards.read(0, min(2**20, tokens)).tobytes())

    def state_dict(self) -> dict[str, Any]:
        tokens = len(self.shards)
        return {"position": self.position, "tokens": tokens, "begin": self.fingerprint(tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the step at which `state` was saved, with the tokens that existed then.

        Tokens added since are ignored, because with another number of sequences the shuffle would repeat
        some and omit others. Raises UserError if tokens are missing or have changed.
        """
        tokens = state["tokens"]
        if tokens > len(self.shards) or state["begin"] != self.fingerprint(tokens):
            raise UserError(
                f"{self.shards.folder} does not begin with the {tokens:,} tokens that this run "
                f"started with (it has {len(self.shards):,}, and some may differ); leave out --data, "
                "restore the tokens (run an interrupted fineweb.py again), or start a new run with "
                "--init_from"
            )
        if tokens < len(self.shards):
            self.shards.truncate(tokens)
            if self.aligned is not None:
                self.aligned = self.shards.document_starts(self.seq_len)
        self.position, self.micro_step, self.prefetched = state["position"], 0, None

    def epoch_tokens(self) -> int:
        """Tokens read in one epoch."""
        return len(self.shards) if self.aligned is None else len(self.aligned) * self.seq_len


class StepSize(Protocol):
    total_batch_size: int
    seq_len: int


def grad_accum_steps(cfg: StepSize, batch_size: int, world_size: int) -> int:
    """Micro-steps per update. Raises UserError unless they add up to total_batch_size."""
    n = batch_size * cfg.seq_len * world_size
    if cfg.total_batch_size % n:
        divisible = cfg.total_batch_size % (cfg.seq_len * world_size) == 0
        hint = ", or pass another --batch_size" if batch_size > 1 and divisible else ""
        raise UserError(
            f"total_batch_size={cfg.total_batch_size} must be a multiple of batch_size * seq_len * "
            f"world_size = {batch_size} * {cfg.seq_len} * {world_size} = {n}; the next one up is "
            f"{-(-cfg.total_batch_size // n) * n}{hint}"
        )
    return cfg.total_batch_size // n


def step_text(cfg: StepSize, batch_size: int, world_size: int, processes: str) -> str:
    """The tokens of an update and their factors, for a reader: "4,096 tokens = 8 sequences x 256 tokens x
    2 micro-steps". processes: what world_size counts."""
    factors = [counted(batch_size, "sequence"), counted(cfg.seq_len, "token")]
    steps = grad_accum_steps(cfg, batch_size, world_size)
    more = (world_size, processes), (steps, "micro-steps")
    factors += [f"{count} {what}" for count, what in more if count > 1]
    return f"{cfg.total_batch_size:,} tokens = {' x '.join(factors)}"
