"""The order in which training reads its tokens, from the endless stream that shards.py makes."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lab.cli import UserError


def permute(i, n, key):
    """Where a seeded shuffle of range(n) puts the indices i (uint64), without storing the shuffle.

    Cut the bits of an index into halves and replace (left, right) by (right, left xor f(right)).
    Whoever knows the result can undo that, whatever f is, so no two indices meet: it shuffles all
    numbers of so many bits (a Feistel network). Four rounds mix well. What lands at n or above is
    put in again; the shuffle's cycles come back to where they began, so one below n must follow
    (cycle walking: Black and Rogaway 2002, method 2). The shuffle of 10 billion tokens takes no
    memory and its state is one integer. f is splitmix64's (Steele et al. 2014).
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

    There is one global cursor, which counts tokens: the sequences of step s are the same for any
    number of processes and any micro-batch; those only decide who reads which. The stream is cut
    into sequences without gaps, over shard edges and over the end of the data, where the next epoch
    begins in mid-sequence: no token is dropped. Shuffling permutes the sequences that begin in the
    same epoch; the one that runs over the end of the data into its beginning is among them.
    """

    def __init__(self, shards, cfg, world, batch_size, transform=None):
        """cfg: seq_len, total_batch_size, shuffle, seed, align_documents. batch_size: sequences.

        transform(x, y, seed, sequence_ids) -> (x, y) changes each micro-batch, as by hiding words
        that are to be guessed. x, y: int64 arrays (B, T); sequence_ids (B,): where on the cursor
        each sequence begins, so no two of a run are alike, also in the next epoch. It depends on
        its arguments alone and leaves as many targets >= 0 in one sequence as in any other.
        """
        self.shards, self.transform = shards, transform
        self.rank, self.world_size, self.device = world.rank, world.world_size, world.device
        self.shuffle, self.seed = cfg.shuffle, cfg.seed
        self.position = 0  # global cursor: tokens handed out, by all processes, in whole steps
        self.micro_step = 0
        self.worker = ThreadPoolExecutor(1)  # reads one micro-batch ahead while the device computes
        self.prefetched = None  # the next micro-batch's future
        self.batch_size, self.seq_len = batch_size, seq_len = batch_size, cfg.seq_len
        context = shards.manifest.get("context")
        if len(shards) <= seq_len:
            raise UserError(
                f"{shards.folder} has {len(shards)} training tokens, a sequence takes "
                f"{seq_len + 1}: add data, or pass a --seq_len smaller than {seq_len}"
            )
        if context and seq_len != context:
            raise UserError(
                f"seq_len={seq_len} must be {context}, the length these conversations were packed "
                f"to: pass --seq_len {context} where --block_size allows it, or give --data the .jsonl "
                "itself, which is packed to fit"
            )
        self.aligned = shards.document_starts(seq_len) if cfg.align_documents else None
        self.total_batch_size = 0
        self.set_total_batch_size(cfg.total_batch_size)

    def set_total_batch_size(self, tokens):
        """Tokens of the steps from here on. The cursor and the size of a micro-batch stay."""
        if tokens == self.total_batch_size:
            return
        assert self.micro_step == 0, "a step of another size begins between two steps"
        self.prefetched = None  # it has the targets of a step of the other size
        self.total_batch_size, self.step_sequences = tokens, tokens // self.seq_len
        self.grad_accum_steps = grad_accum_steps(self, self.batch_size, self.world_size)

    @property
    def sequence(self):
        """The cursor in sequences: the number of the one with which the next step begins."""
        return -(-self.position // self.seq_len)  # rounded up: seq_len may be another run's

    def positions(self, numbers):
        """Stream positions of the sequences with these numbers (int64 array) in the run."""
        j, T, N = numbers, self.seq_len, len(self.shards)
        if self.aligned is not None:  # a stream of documents instead of tokens
            T, N = 1, len(self.aligned)
        epoch = j * T // N
        if self.shuffle:
            j = j.copy()
            for e in np.unique(epoch):
                # Epoch e has the sequences that begin at tokens e N to (e + 1) N of the endless
                # stream; -(-a // b) is a / b rounded up.
                begin, end = -(-e * N // T), -(-(e + 1) * N // T)
                members = epoch == e
                key = self.seed * 1_000_003 + int(e)
                j[members] = begin + permute(j[members] - begin, end - begin, key)
        return j * T if self.aligned is None else self.aligned[j % N]

    def numbers(self, sequence, micro_step):
        """This process's sequences in a micro-step of the step that begins with `sequence`."""
        first = sequence + (micro_step * self.world_size + self.rank) * self.batch_size
        return np.arange(first, first + self.batch_size)

    def micro_batch(self, sequence, micro_step):
        """(x, y, num_targets): this process's part of a micro-step, on the CPU, and the targets of
        the whole step, by which its loss is divided."""
        import torch  # not above: fineweb.py does without

        numbers = self.numbers(sequence, micro_step)
        x, y = self.shards.batch(self.positions(numbers), self.seq_len)
        num_targets = self.step_sequences * self.seq_len
        if self.transform:
            x, y = self.transform(x, y, self.seed, numbers * self.seq_len)
            targets = (y >= 0).sum(1)
            assert (targets == targets[0]).all(), "each sequence must have as many targets"
            num_targets = self.step_sequences * int(targets[0])
        elif self.shards.masks:
            whole = self.positions(np.arange(sequence, sequence + self.step_sequences))
            learnt = (self.shards.learnt(int(p) + 1, self.seq_len).sum() for p in whole)
            num_targets = max(1, int(sum(learnt)))
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        if self.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x, y, num_targets

    def next_batch(self):
        """The next micro-batch on the device: x, y (batch_size, seq_len), targets of the step."""
        if self.prefetched is None:
            self.prefetch()
        x, y, num_targets = self.prefetched.result()
        self.micro_step += 1
        if self.micro_step == self.grad_accum_steps:
            self.position = (self.sequence + self.step_sequences) * self.seq_len
            self.micro_step = 0
        self.prefetch()
        to = dict(device=self.device, non_blocking=True)
        return x.to(**to), y.to(**to), num_targets

    def prefetch(self):
        self.prefetched = self.worker.submit(self.micro_batch, self.sequence, self.micro_step)

    def step_positions(self, sequence, micro_step):
        """Names of what this process reads in a micro-step of the step that begins with `sequence`."""
        return [
            self.shards.where(int(p)) for p in self.positions(self.numbers(sequence, micro_step))
        ]

    def fingerprint(self, tokens):
        """A checksum of the first of so many tokens."""
        return zlib.crc32(self.shards.read(0, min(2**20, tokens)).tobytes())

    def state_dict(self):
        tokens = len(self.shards)
        return {"position": self.position, "tokens": tokens, "begin": self.fingerprint(tokens)}

    def load_state_dict(self, state):
        """Go on from the step where `state` was saved, with the tokens that there were then.

        Of data that has grown, another number of sequences would be shuffled: some would come
        twice, some never. Raises UserError for fewer tokens, and for others.
        """
        tokens = state["tokens"]
        if tokens > len(self.shards) or state["begin"] != self.fingerprint(tokens):
            raise UserError(
                f"{self.shards.folder} does not begin with the {tokens:,} tokens that this run was begun "
                f"with (it has {len(self.shards):,}, or others): leave --data out, put those back (a "
                "fineweb.py that is not finished does so when it goes on), or begin a new run with "
                "--init_from"
            )
        if tokens < len(self.shards):
            self.shards.shorten(tokens)
            if self.aligned is not None:
                self.aligned = self.shards.document_starts(self.seq_len)
        self.position, self.micro_step, self.prefetched = state["position"], 0, None

    def epoch_tokens(self):
        """Tokens that one pass over the data reads."""
        return len(self.shards) if self.aligned is None else len(self.aligned) * self.seq_len


def grad_accum_steps(cfg, batch_size, world_size):
    """Micro-steps per update. cfg: has total_batch_size and seq_len. Raises UserError where they do
    not fit."""
    n = batch_size * cfg.seq_len * world_size
    if cfg.total_batch_size % n:
        fits = batch_size > 1 and cfg.total_batch_size % (cfg.seq_len * world_size) == 0
        another = ", or pass another --batch_size" if fits else ""
        raise UserError(
            f"total_batch_size={cfg.total_batch_size} must be a multiple of batch_size * seq_len * "
            f"world_size = {batch_size} * {cfg.seq_len} * {world_size} = {n}; the next one up is "
            f"{-(-cfg.total_batch_size // n) * n}{another}"
        )
    return cfg.total_batch_size // n
