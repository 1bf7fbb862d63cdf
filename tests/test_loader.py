"""The data loader: which process reads which tokens, in which order; errors for bad shards."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, VOCAB, equal_bits, run_python, write_shards

from lab.cli import UserError
from lab.data.loader import TokenLoader, feistel_permutation
from lab.data.manifest import new_manifest, verify_shards
from lab.data.shards import TokenShards, save_shard
from lab.data.tokenizers import get_tokenizer

BIG = 65536  # a vocabulary so large that each token of the stream can have its own id


def numbered_shards(folder, sizes, suffix=".npy"):
    """Shards in which token i of the stream has id i."""
    folder.mkdir(exist_ok=True)
    ids = np.arange(sum(sizes), dtype=np.uint16)
    for i, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        write_shard(folder / f"x_train_{i:06d}{suffix}", part)
    return TokenShards(folder, "train", BIG)


def write_shard(path, tokens):
    if path.suffix == ".bin":
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
        return
    with path.open("wb") as file:  # a .mask keeps its name
        np.save(file, tokens)


def make_loader(shards, batch_size=2, rank=0, world_size=1, transform=None, **settings):
    cfg = dict(total_batch_size=8 * 16, seq_len=16, shuffle=True, seed=1337, align_documents=False)
    world = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    return TokenLoader(shards, SimpleNamespace(**cfg | settings), world, batch_size, transform)


def one_step(loaders):
    """x, y and the set of num_targets of a step, with the sequences of all processes in global order."""
    parts = [it.next_batch() for _ in range(loaders[0].grad_accum_steps) for it in loaders]
    x, y, num_targets = zip(*parts)
    return torch.cat(x), torch.cat(y), set(num_targets)


def steps(shards, n, batch_size=2, world_size=1, **settings):
    ranks = range(world_size)
    loaders = [make_loader(shards, batch_size, rank, world_size, **settings) for rank in ranks]
    return [one_step(loaders) for _ in range(n)]


def state_after(loader, n):
    """The loader's part of a checkpoint after n steps, as plain values."""
    for _ in range(n):
        one_step([loader])
    return json.loads(json.dumps(loader.state_dict()))


def resumed(shards, state, batch_size=2, **settings):
    loader = make_loader(shards, batch_size, **settings)
    loader.next_batch()  # a state can also be loaded by a used loader
    loader.load_state_dict(state)
    return loader


ORDERS = pytest.mark.parametrize(
    "settings", [{"shuffle": False}, {"shuffle": True}, {"shuffle": True, "align_documents": True}]
)
# the sum, 601, is prime, so no sequence ends at the end of a shard or of the data
SIZES = (301, 77, 1, 222)


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_y_is_x_shifted_by_one_and_unshuffled_order_is_the_order_on_disk(tmp_path, suffix):
    shards = numbered_shards(tmp_path, SIZES, suffix)
    assert shards.where(601 + 301) == f"x_train_000001{suffix}:0"
    for shuffle in (True, False):
        done = steps(shards, 12, shuffle=shuffle)  # 2.5 epochs, across every shard
        for x, y, num_targets in done:
            assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
            assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y, (x + 1) % 601)
            assert num_targets == {8 * 16}
    stream = torch.cat([x.flatten() for x, _, _ in done])
    assert torch.equal(stream, torch.arange(12 * 128) % 601)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, (512, 256), (17,)])
def test_all_processes_together_use_each_token_once_per_epoch(tmp_path, sizes, shuffle):
    shards = numbered_shards(tmp_path, sizes)
    N = len(shards)
    epochs = math.lcm(N, 128) // N
    counts = torch.zeros(N, dtype=torch.int64)
    done = steps(shards, epochs * N // 128, 1, world_size=2, shuffle=shuffle, seed=3)
    for s, (x, _, _) in enumerate(done):
        counts += torch.bincount(x.flatten(), minlength=N)
        finished = (s + 1) * 128 // N  # epochs
        if not shuffle:  # a shuffled epoch may lack tokens until its last sequences are read
            assert counts.min() >= finished and counts.max() <= finished + 1
    assert (counts == epochs).all()


def test_each_shuffled_epoch_holds_the_sequences_that_begin_in_it(tmp_path):
    """Each epoch and each seed has its own order."""
    shards = numbered_shards(tmp_path, SIZES)
    edges = [math.ceil(e * 601 / 16) for e in range(5)]
    orders = []
    for seed in (1, 2):
        loader = make_loader(shards, seed=seed)
        for begin, end in zip(edges, edges[1:]):
            positions = loader.sequence_offsets(np.arange(begin, end))
            assert sorted(positions) == [16 * j for j in range(begin, end)]
            orders.append(tuple(p // 16 - begin for p in positions))
    assert len({order[:30] for order in orders}) == 8
    assert all(list(order) != sorted(order) for order in orders)


@ORDERS
@pytest.mark.parametrize("batch_size, world_size", [(1, 1), (8, 1), (4, 2), (1, 2), (2, 4), (1, 8)])
def test_a_step_has_the_same_tokens_for_any_world_size_and_micro_batch(
    tmp_path, settings, batch_size, world_size
):
    shards = TokenShards(write_shards(tmp_path), "train", VOCAB)
    one = steps(shards, 25, 2, 1, **settings)
    assert equal_bits(one, steps(shards, 25, batch_size, world_size, **settings))


def test_feistel_permutation_is_a_permutation_for_any_size():
    for n in range(1, 201):
        assert sorted(feistel_permutation(np.arange(n), n, key=n)) == list(range(n)), n
    for n in (1_000_003, 10**13):  # far more than could be stored
        out = feistel_permutation(np.arange(n - 1_000_000, n), n, key=7)
        assert len(np.unique(out)) == 1_000_000 and out.min() >= 0 and out.max() < n
        # neighbors end up far apart, and half of all neighboring pairs end up in reverse order
        assert np.abs(np.diff(out)).mean() == pytest.approx(n / 3, rel=0.01)
        assert (np.diff(out) < 0).mean() == pytest.approx(0.5, abs=0.005)


@ORDERS
def test_resuming_on_grown_data_keeps_the_order(tmp_path, settings):
    """As when fineweb.py adds data: the last shard grows, and others are added."""
    folder = write_shards(tmp_path)
    before = TokenShards(folder, "train", VOCAB)
    whole, state = steps(before, 30, **settings), state_after(make_loader(before, **settings), 13)
    second = resumed(before, state, batch_size=4, **settings)
    assert equal_bits(whole[13:], [one_step([second]) for _ in range(17)]), "unchanged data"
    last, more = folder / "x_train_000001.npy", np.full(900, VOCAB - 1, np.uint16)
    longer = np.concatenate([np.load(last), more[:500]])
    np.save(last, longer)
    np.save(folder / "x_train_000002.npy", more)
    grown = TokenShards(folder, "train", VOCAB)
    second = resumed(grown, state, **settings)
    assert equal_bits(whole[13:], [one_step([second]) for _ in range(17)])
    assert grown.ignored_tokens == 1400
    (folder / "x_train_000002.npy").unlink()
    np.save(last, longer[:700])
    said = (
        "not begin with the 2,498 tokens .*it has 2,201.* restore the tokens .* or start a new run"
    )
    with pytest.raises(UserError, match=said):
        resumed(TokenShards(folder, "train", VOCAB), state, **settings)


def guess_a_fifth(x, y, seed, sequence_ids):
    """A transform like that of bert.py: 3 of 16 tokens must be predicted."""
    x, targets = x.copy(), np.full_like(y, -1)
    for row, number in enumerate(sequence_ids):
        places = np.random.default_rng([seed, number]).permutation(x.shape[1])[: x.shape[1] // 5]
        targets[row, places], x[row, places] = x[row, places], VOCAB
    return x, targets


@ORDERS
def test_a_transform_gives_the_same_result_for_any_world_size(tmp_path, settings):
    shards = TokenShards(write_shards(tmp_path), "train", VOCAB)
    plain, settings = steps(shards, 60, **settings), settings | {"transform": guess_a_fifth}
    one = steps(shards, 60, **settings)
    for (x, y, num_targets), (plain_x, _, _) in zip(one, plain):
        assert num_targets == {8 * 3} == {int((y >= 0).sum())}
        assert torch.equal(torch.where(y >= 0, y, x), plain_x)
    assert equal_bits(one, steps(shards, 60, 1, 4, **settings))
    second = resumed(shards, state_after(make_loader(shards, **settings), 40), 8, **settings)
    assert equal_bits(one[40:], [one_step([second]) for _ in range(20)])


def test_a_transform_differs_from_epoch_to_epoch(tmp_path):
    shards = numbered_shards(tmp_path, (512, 256))  # 6 steps
    done = steps(shards, 12, shuffle=False, transform=guess_a_fifth)
    for (_, first, _), (_, second, _) in zip(done, done[6:]):
        assert ((first >= 0) != (second >= 0)).any(dim=1).sum() > 6  # of 8 sequences


SIZES_OF_STEPS = {0: 8 * 16, 5: 12 * 16, 11: 4 * 16}  # {first step: tokens per step}


def sized_steps(loaders, first, last):
    """Steps first to last - 1 with SIZES_OF_STEPS."""
    out = []
    for step in range(first, last):
        for loader in loaders:
            loader.set_total_batch_size(SIZES_OF_STEPS[max(s for s in SIZES_OF_STEPS if s <= step)])
        out.append(one_step(loaders))
    return out


@ORDERS
def test_resuming_between_steps_of_different_sizes(tmp_path, settings):
    shards = TokenShards(write_shards(tmp_path), "train", VOCAB)
    whole = sized_steps([make_loader(shards, 4, **settings)], 0, 20)
    assert [len(x) for x, _, _ in (whole[4], whole[5], whole[19])] == [8, 12, 4]
    assert all(num_targets == {x.numel()} for x, _, num_targets in whole)
    two = [make_loader(shards, 1, rank, 2, **settings) for rank in (0, 1)]
    assert equal_bits(whole, sized_steps(two, 0, 20)), "for any number of processes"
    for step in (4, 5, 6, 11, 15):
        first = make_loader(shards, **settings)
        sized_steps([first], 0, step)
        second = resumed(shards, first.state_dict(), 1, **settings)
        assert equal_bits(whole[step:], sized_steps([second], step, 20))


def test_masks_become_targets_of_minus_one(tmp_path):
    numbered_shards(tmp_path, SIZES)
    mask = (np.random.default_rng(0).random(601) < 0.3).astype(np.uint8)
    for i, part in enumerate(np.split(mask, np.cumsum(SIZES)[:-1])):
        write_shard(tmp_path / f"x_train_{i:06d}.mask", part)
    shards, learn = TokenShards(tmp_path, "train", BIG), torch.from_numpy(mask)
    results = steps(shards, 12, batch_size=1, world_size=2)
    for x, y, num_targets in results:
        wanted = (x + 1) % 601
        assert torch.equal(y, torch.where(learn[wanted] == 1, wanted, -1))
        assert num_targets == {int((y >= 0).sum())}, "the number of the whole step"
    assert len({n for _, _, (n,) in results}) > 3
    assert equal_bits(results, steps(shards, 12, batch_size=8))


class CountingFile:
    """A shard file that counts its reads."""

    def __init__(self, file):
        self.file, self.reads = file, 0

    def read(self, start, count):
        self.reads += 1
        return self.file.read(start, count)


def test_a_step_reads_the_loss_mask_twice_however_many_micro_steps_it_has(tmp_path):
    """Of each of its 8 sequences: once for the targets of the step, once for the micro-batch."""
    numbered_shards(tmp_path, (600,))
    write_shard(tmp_path / "x_train_000000.mask", (np.arange(600) % 3 == 0).astype(np.uint8))
    for batch_size in (8, 2, 1):
        shards = TokenShards(tmp_path, "train", BIG)
        mask = CountingFile(shards.masks[0])
        shards.masks = [mask]
        loader = make_loader(shards, batch_size, shuffle=False)
        for step in (1, 2, 3):
            first = 8 * (step - 1)
            parts = [loader.micro_batch(first, i) for i in range(loader.grad_accum_steps)]
            wanted = sum(int((y >= 0).sum()) for _, y, _ in parts)
            assert {num_targets for _, _, num_targets in parts} == {wanted}
            assert mask.reads == step * (8 + 8), batch_size


def test_targets_of_a_step_are_counted_again_after_resuming_with_fewer_tokens(tmp_path):
    """The shuffle, and so the sequences of step 0, depend on the number of tokens."""
    for n, folder in ((600, tmp_path / "small"), (900, tmp_path / "grown")):
        numbered_shards(folder, (n,))
        mask = (np.random.default_rng(0).random(900) < 0.3).astype(np.uint8)[:n]
        write_shard(folder / "x_train_000000.mask", mask)
    small = make_loader(TokenShards(tmp_path / "small", "train", BIG))
    grown = make_loader(TokenShards(tmp_path / "grown", "train", BIG))
    assert grown.micro_batch(0, 0)[2] != small.micro_batch(0, 0)[2]
    grown.load_state_dict(small.state_dict())
    assert equal_bits(grown.micro_batch(0, 0), small.micro_batch(0, 0))


@pytest.mark.parametrize("shuffle", [False, True])
def test_aligned_sequences_begin_at_end_of_text(tmp_path, shuffle):
    shards = TokenShards(write_shards(tmp_path), "train", VOCAB)  # at every 61st token
    loader = make_loader(shards, align_documents=True, shuffle=shuffle)
    count = sum(len(range(0, n, 61)) for n in (1501, 997))
    first, second = np.split(loader.sequence_offsets(np.arange(2 * count)), 2)
    assert len(loader.aligned) == count
    assert sorted(first) == sorted(second) == sorted(loader.aligned), "each document once an epoch"
    assert (list(first) == sorted(first)) == (list(first) == list(second)) == (not shuffle)
    for x, y, _ in steps(shards, 10, align_documents=True, shuffle=shuffle):
        assert (x[:, 0] == VOCAB - 1).all() and torch.equal(x[:, 1:], y[:, :-1])
    # a sequence longer than a document is followed by one that begins at the next end-of-text
    starts = shards.document_starts(100)
    assert (np.diff(starts) >= 100).all(), "none overlap"
    assert all(shards.read(int(p), 1)[0] == VOCAB - 1 for p in starts)
    eot = int(shards.read(5, 1)[0])  # as with --eot_id
    other = TokenShards(tmp_path, "train", VOCAB, eot)
    assert 5 in other.document_starts(4)


def as_bin(path, change):
    tokens = np.load(path)
    path.unlink()
    write_shard(path.with_suffix(".bin"), tokens)
    path.with_suffix(".bin").write_bytes(change(path.with_suffix(".bin").read_bytes()))


FAULTS = {  # (damage to a shard, pattern of the error message)
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "damaged"),
    "other type": (lambda p: np.save(p, np.load(p).astype(np.int32)), "int32.*uint16"),
    "cut .bin": (lambda p: as_bin(p, lambda data: data[:-100]), "truncated"),
    "no .bin": (lambda p: as_bin(p, lambda data: b"1" + data[1:]), "20240520"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_shard_is_refused_by_name(tmp_path, fault):
    folder, (do, said) = write_shards(tmp_path), FAULTS[fault]
    do(folder / "x_train_000000.npy")
    with pytest.raises(UserError, match=f"x_train_000000.*{said}"):
        TokenShards(folder, "train", VOCAB)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_many_shards_do_not_exhaust_file_descriptors(tmp_path):
    for i in range(300):
        write_shard(tmp_path / f"x_train_{i:06d}.npy", np.full(7, i, np.uint16))
        write_shard(tmp_path / f"x_train_{i:06d}.mask", np.ones(7, np.uint8))
    code = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from lab.data.shards import TokenShards
        shards = TokenShards(sys.argv[1], "train", 300)
        x, y = shards.batch([7 * i for i in range(300)], 6)
        assert (x == y).all() and x[:, 0].tolist() == list(range(300))
    """
    got = run_python("-c", code, tmp_path, cwd=ROOT)
    assert got.returncode == 0, got.stderr


def test_a_shard_truncated_while_in_use_raises_an_error(tmp_path):
    shards = TokenShards(write_shards(tmp_path), "train", VOCAB)
    shards.paths[0].write_bytes(shards.paths[0].read_bytes()[:200])
    with pytest.raises(UserError, match="x_train_000000.npy .*cut short"):
        shards.batch([1000], 16)


def made(folder):
    """Write shards with masks of ones, and a manifest, as fineweb.py does."""
    folder.mkdir()
    manifest = new_manifest("x", get_tokenizer("bytes"), source={}, shard_tokens=0, val_tokens=0)
    for size in (700, 1501, 997):
        save_shard(folder, manifest, np.zeros(size, np.uint16), np.ones(size, np.uint8))
    return folder


def test_every_shard_must_have_a_valid_mask_if_one_has(tmp_path):
    folder = made(tmp_path / "made")
    (folder / "manifest.json").unlink()
    mask = folder / "x_train_000001.mask"
    for length, value, said in (
        (1500, 1, "a mask in .* has a different length than its shard"),
        (1501, 255, "x_train_000001.* contains the byte 255, but must be 1"),
    ):
        write_shard(mask, np.full(length, value, np.uint8))
        with pytest.raises(UserError, match=said):
            TokenShards(folder, "train", VOCAB).batch([0], 16)
    mask.unlink()
    with pytest.raises(UserError, match="there is no shard .*x_train_000001.mask"):
        TokenShards(folder, "train", VOCAB)


def test_a_token_outside_the_vocabulary_is_reported_with_its_shard(tmp_path):
    folder = write_shards(tmp_path, sizes=(1501, 997, 500))  # only the first is checked on opening
    tokens = np.load(folder / "x_train_000001.npy")
    tokens[500] = VOCAB
    np.save(folder / "x_train_000001.npy", tokens)
    said = "257.*x_train_000001.npy.*vocabulary of 257.* pass its size as --vocab_size"
    with pytest.raises(UserError, match=said):  # there is no manifest, which would have the size
        steps(TokenShards(folder, "train", VOCAB), 20, shuffle=False)


@pytest.mark.parametrize("kind", ["npy", "mask"])
def test_changed_shards_are_detected_by_size_and_hash(tmp_path, kind):
    folder = made(tmp_path / "made")
    stray = folder / "x_train_000099.npy"
    shutil.copy(folder / "x_train_000001.npy", stray)
    assert verify_shards(folder)[1:] == [
        f"{stray} is not in manifest.json, but training would read it; move it away"
    ]
    stray.unlink()
    path, said = folder / f"x_train_000001.{kind}", f"x_train_000001.{kind} has changed since"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    TokenShards(folder, "train", VOCAB)  # one flipped bit, same size: only the hash detects it
    assert said in verify_shards(folder)[1]
    path.write_bytes(data[:-2])
    with pytest.raises(UserError, match=said):
        TokenShards(folder, "train", VOCAB)


def test_chat_data_requires_its_own_seq_len(tmp_path):
    shards = numbered_shards(tmp_path, SIZES)
    shards.manifest = {"context": 32}
    with pytest.raises(UserError, match=r"seq_len=16 must be 32, .* pass --seq_len 32"):
        make_loader(shards)
