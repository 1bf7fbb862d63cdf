"""speedrun.py: the model, its optimizers and schedules, and whole runs."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, VOCAB, add_noise, differing_parts, of_kind, read_run, run_python, run_two
from test_sample import by_definition

import hellaswag
import lab.hardware
import speedrun
import train_gpt2
from lab.cli import UserError
from lab.distributed import World
from lab.inference.decode_step import supports
from lab.inference.generate import KVCache, generate
from lab.inference.streaming import make_decode_step
from lab.registry import init_from, load_model
from lab.trainer.checkpoint import restore_checkpoint
from lab.trainer.throughput import Throughput
from speedrun import GPT, GPTConfig, TrainConfig, step_tokens

TINY = dict(n_layer=3, n_head=2, n_embd=32, block_size=32, vocab_size=VOCAB)
FLAGS = (
    "--preset laptop --device cpu --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --seq_len 16 "
    "--batch_size 4 --vocab_multiple 128 --total_batch_size 128 --decay_steps 4 --val_tokens 256 "
    "--val_every 0 --sample_every 0 --checkpoint_every 3 --log_every 1 --keep_last 9 --run_name r"
).split()
EVERYTHING = dict(bigram_rows=100, value_tables=2)
PROJECTED = dict(value_tables=0, value_projection=True)
CONFIG = GPTConfig(**TINY)  # its heads have 16 channels
LONGER = dict(rope_scaling="yarn", trained_length=8)


def tiny_model(**changes):
    return add_noise(GPT(GPTConfig(**TINY | changes)))


# -------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize(
    "changes", [{}, EVERYTHING, PROJECTED, dict(rotary=False, mlp="gelu", tied=True)]
)
def test_no_output_sees_a_later_token_or_another_document(changes):
    model = tiny_model(**changes)
    idx = torch.randint(VOCAB - 1, (1, 20))

    def seen_by(place):
        """Which outputs depend on the token at `place`."""
        other = idx.clone()
        other[0, place] = (idx[0, place] + 1) % (VOCAB - 1)
        return ((model(other)[0] - model(idx)[0]).abs().amax(-1)[0] > 1e-6).tolist()

    assert seen_by(12) == [t >= 12 for t in range(20)]
    idx[0, 10] = VOCAB - 1  # a document ends
    model.config.document_mask = True
    assert seen_by(9) == [t == 9 for t in range(20)]


def scores(q, k):
    """Attention's scores (B, H, T, T) of queries and keys (B, T, H, D), not divided by sqrt(D)."""
    return torch.einsum("bqhd,bkhd->bhqk", q, k)


def test_attention_scores_depend_only_on_distance_and_direction():
    """Rotary: adding 7 to all positions changes no score, no vector changes its length, and two
    rotations equal one by twice the angle. QK-norm: longer keys have the same scores."""
    q, k = torch.randn(2, 1, 9, 2, 16)  # (B, T, H, D)
    turns = [speedrun.rotation(torch.arange(9) + start, CONFIG) for start in (0, 7)]
    turned = [(speedrun.rotate(q, turn), speedrun.rotate(k, turn)) for turn in turns]
    here, later = (scores(*pair) for pair in turned)
    assert torch.allclose(here, later, atol=1e-5)
    assert not torch.allclose(here, scores(q, k), atol=0.1)
    assert torch.allclose(turned[1][0].norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    one, two = (speedrun.rotation(torch.tensor([place]), CONFIG) for place in (1, 2))
    twice = speedrun.rotate(speedrun.rotate(q, one), one)  # (two reflections would cancel out)
    assert torch.allclose(twice, speedrun.rotate(q, two), atol=1e-5)
    still = torch.tensor(
        2 * (4 * [False] + 4 * [True])
    )  # half of the pairs of channels do not rotate
    assert ((turns[1][0] == 1).all(0) == still).all() and ((turns[1][1] == 0).all(0) == still).all()
    for normed in (True, False):
        model, idx = tiny_model(qk_norm=normed), torch.randint(VOCAB, (1, 12))
        before = model(idx)[0]
        with torch.no_grad():
            model.transformer.h[0].attn.qkv[1] *= 3
        assert torch.allclose(model(idx)[0], before, atol=1e-4) == normed


@pytest.mark.parametrize("changes", [{}, LONGER, PROJECTED, EVERYTHING | dict(document_mask=True)])
def test_cached_and_uncached_generation_give_the_same_tokens(changes):
    """Also beyond the context length, where the older half of the window is dropped."""
    torch.manual_seed(0)
    model, idx = tiny_model(**changes), torch.randint(VOCAB, (3, 5))
    torch.manual_seed(0)
    whole = tiny_model(**changes)
    cached = [token.tolist() for token, _ in generate(model, idx, 60, temperature=0)]
    assert cached == [token.tolist() for token in by_definition(whole, idx, 60, temperature=0)]


@pytest.mark.gpu
def test_compiled_decode_step_gives_the_same_tokens_on_a_gpu():
    """GPT-2's decode kernel does not support this model."""
    model = tiny_model(**EVERYTHING).cuda()
    assert not supports(model)
    cache = KVCache(32, make_decode_step(model))
    for idx in torch.randint(VOCAB, (2, 1, 5), device="cuda"):
        plain, fast = (list(generate(model, idx, 40, 0, cache=c)) for c in (None, cache))
        assert [token.item() for token, _ in fast] == [token.item() for token, _ in plain]


def test_packed_hellaswag_rows_equal_separate_ones():
    """An ending's first token follows the context, not the ending that is packed before it."""
    model = tiny_model(**EVERYTHING)
    context, *endings = (torch.randint(VOCAB, (n,)).tolist() for n in (7, 3, 5, 2, 4))
    data = hellaswag.Examples([dict(label=0)], [[context, *endings]])
    for ending, found in zip(endings, hellaswag.ending_losses(model, data, World("cpu"))[0]):
        row = torch.tensor([context + ending])
        y = row[:, 1:].clone()
        y[:, : len(context) - 1] = -1
        assert model(row[:, :-1], y, reduction="sum")[1].item() == pytest.approx(found, abs=1e-4)


def test_initial_loss_is_uniform_and_pad_rows_stay_zero():
    model = GPT(GPTConfig(**TINY))
    x = torch.randint(VOCAB, (2, 16))
    assert model(x, x)[1].item() == pytest.approx(math.log(VOCAB), abs=1e-5)
    optimizer = speedrun.make_optimizer(model, TrainConfig(), World("cpu"))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(params) == len(set(params)) and set(params) == set(model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(6):  # weights before matrices that start at 0 learn one step later
        model(x, x)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n])], "all learn"
    for p in (model.transformer.wte.weight, model.lm_head.weight):
        assert len(p) > VOCAB and not p[VOCAB:].any()


def test_an_edit_of_gpt2s_mlp_does_not_change_this_one(monkeypatch):
    monkeypatch.setattr(train_gpt2.MLP, "__init__", lambda self, config: 1 / 0)
    mlp = speedrun.MLP(CONFIG)
    assert [tuple(p.shape) for p in mlp.parameters()] == [(128, 32), (32, 128)]


@torch.no_grad()
def test_value_embeddings_are_mixed_into_the_values_with_learned_weights():
    attn, x = tiny_model().transformer.h[0].attn, torch.randn(2, 7, 32)
    turn, value = speedrun.rotation(torch.arange(7), CONFIG), torch.randn(2, 7, 32)
    attn.mix_values[:] = torch.tensor([1.0, 0.0])
    plain = attn(x, turn, None)
    assert torch.allclose(attn(x, turn, value), plain, atol=1e-6)
    attn.mix_values[:] = torch.tensor([1.0, 0.5])
    half = attn(x, turn, value)
    attn.mix_values[:] = torch.tensor([1.0, 1.0])
    assert torch.allclose(half - plain, 0.5 * (attn(x, turn, value) - plain), atol=1e-5)
    assert not torch.allclose(half, plain, atol=1e-2)


@torch.no_grad()
def test_value_projection_is_the_formula_in_every_second_block():
    model = tiny_model(**PROJECTED)
    attns = [block.attn for block in model.transformer.h]
    assert [hasattr(attn, "c_value") for attn in attns] == [True, False, True]
    idx, seen = torch.randint(VOCAB, (2, 9)), []
    attns[2].register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    model(idx)
    x = speedrun.norm(model.transformer.wte(idx))
    x = model.smear(x, torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    assert torch.allclose(seen[0], x @ attns[2].c_value.weight.mT, atol=1e-5)
    assert any(p is attns[0].c_value.weight for p in model.block_matrices())


def test_dropout_acts_on_embedding_and_blocks_in_training_only():
    model, plain, idx = tiny_model(dropout=0.25), tiny_model(), torch.randint(VOCAB, (2, 16))
    plain.load_state_dict(model.state_dict())
    exact = plain(idx)[0]
    model.eval()
    assert torch.equal(model(idx)[0], exact)
    model.train()
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    assert not torch.allclose(model(idx)[0], exact, atol=0.1)
    assert len(seen) == 1 + 2 * 3, "the embedding, and attention and MLP of three blocks"
    assert torch.equal(seen[0][0], speedrun.norm(model.transformer.wte(idx)))
    for x, y in seen:
        kept = y != 0
        assert torch.allclose(y[kept], x[kept] / 0.75) and 0.6 < kept.float().mean() < 0.9
    with pytest.raises(UserError, match="dropout=1.0 must be less than 1"):
        GPTConfig(**TINY, dropout=1.0).validate()


# ------------------------------------------------------------------------- optimizers and schedules


def in_process(tmp_path, shards, model=(), **settings):
    base = dict(
        data=str(shards), log_dir=str(tmp_path), device="cpu", total_batch_size=128, batch_size=4,
        seq_len=16, max_steps=4, decay_steps=2, compile=False, run_name="x", val_tokens=150,
    )  # fmt: skip
    model_config = GPTConfig(**TINY | dict(model))
    return speedrun.build_trainer(model_config, TrainConfig(**base | settings), World("cpu"))


def test_optimizers_follow_the_settings():
    cfg = TrainConfig(beta1=0.7, beta2=0.9, eps=1e-9, momentum=0.6, equilibrate_rows=True)
    world = SimpleNamespace(device=torch.device("cpu"), distributed=True)
    for name, beta2 in dict(normuon=0.95, muon=0.0).items():
        cfg.optimizer = name
        muon, adamw = speedrun.make_optimizer(tiny_model(), cfg, world).parts
        assert (muon.beta2, muon.world, muon.equilibrate_rows) == (beta2, world, True)
        assert {g["momentum"] for g in muon.param_groups} == {0.6}
        assert {(g["betas"], g["eps"]) for g in adamw.param_groups} == {((0.7, 0.9), 1e-9)}
    cfg.optimizer = "adamw"
    blocks = speedrun.make_optimizer(tiny_model(), cfg, world).param_groups[0]
    assert blocks["lr"] == pytest.approx(0.03 / 32**0.5)  # RMS of an orthogonal 32 x 32 matrix
    cfg.optimizer = "muon"
    theirs = train_gpt2.make_optimizer(tiny_model(), cfg, world)  # the trainer's and bert.py's
    assert theirs.parts[0].world is world


def test_decay_all_decays_embeddings_and_head(tmp_path, shards):
    run = in_process(tmp_path, shards, weight_decay=0.4, decay_all=True)
    adamw = run.optimizer.parts[1]
    run.train_step()
    before = [[p.detach().clone() for p in group["params"]] for group in adamw.param_groups]
    for p in run.raw_model.parameters():
        p.grad = torch.zeros_like(p)
    for state in adamw.state.values():
        state["exp_avg"].zero_()
    adamw.step()  # the gradient and its averages are 0, so only the decay changes weights
    for group, old, decay in zip(adamw.param_groups, before, (0, 0.4, 0.4), strict=True):
        for p, q in zip(group["params"], old):
            assert torch.allclose(p, q * (1 - decay * group["lr"]), atol=1e-6)


def test_learning_rate_momentum_and_batch_schedules(tmp_path, shards):
    plan = dict(max_steps=100, decay_steps=50, momentum_warmup=10)
    run = in_process(tmp_path, shards, **plan, batch_warmup_steps=20)
    of_muon, *others = run.optimizer.param_groups
    assert all("momentum" in g for g in run.optimizer.parts[0].param_groups)
    seen, peaks = [], {run.cfg.muon_lr, run.cfg.lr, run.cfg.embed_lr, run.cfg.scalar_lr}
    for run.step in (0, 5, 10, 50, 75, 99):
        before = run.loader.position
        run.train_step()
        rates = [group["lr"] / group["lr_scale"] for group in (of_muon, *others)]
        assert rates == pytest.approx([rates[0]] * len(rates))
        assert {round(g["lr_scale"] * run.cfg.lr, 9) for g in (of_muon, *others)} == peaks
        numbers = rates[0] / run.cfg.lr, of_muon["momentum"], run.loader.position - before
        seen.append(tuple(round(number, 6) for number in numbers))
    assert seen == [
        (1, 0.85, 64), (1, 0.9, 64), (1, 0.95, 64), (1, 0.95, 128), (0.5, 0.95, 128),
        (0.02, 0.95, 128),
    ]  # fmt: skip
    assert [step_tokens(step, run.cfg) for step in (0, 19, 20)] == [64, 64, 128]
    with pytest.raises(UserError, match="=144 must .* try 256, a smaller --batch_size, or --batch"):
        replace(run.cfg, total_batch_size=144).validate(run.raw_model.config)


def test_each_process_and_step_has_its_own_dropout(tmp_path, shards):
    def masks(rank):
        run = in_process(tmp_path / str(rank), shards, model=dict(dropout=0.5), max_steps=9)
        run.world.rank, seen = rank, []
        for _ in range(2):
            run.train_step()
            seen.append(torch.dropout(torch.ones(99), 0.5, True).tolist())
        return seen

    (a, b), (c, _) = masks(0), masks(1)
    assert a != b and a != c and masks(0) == [a, b]


def test_time_left_counts_the_tokens_of_later_steps(tmp_path, shards):
    run = in_process(tmp_path, shards, batch_warmup_steps=2)
    throughput = Throughput(run, None)
    run.train_step()
    values = throughput.read()
    assert values["seconds_left"] * values["tok_per_s"] == pytest.approx(64 + 128 + 128)


def test_spike_names_its_own_sequences_during_batch_warmup(tmp_path, shards):
    run = in_process(tmp_path, shards, batch_warmup_steps=2)
    health = run.health
    for _ in range(3):
        health.record(run.train_step()[0])
    assert [list(read) for *_, read in health.pending] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [*range(8, 16)],
    ]
    run.loader.shuffle = False
    named = health.describe_sequences(health.pending[1][-1])
    assert [s["at"] for s in named] == run.loader.sequence_names(4, 0)


def test_run_ends_with_the_moving_average_of_its_weights(tmp_path, shards):
    """Mean of the first two updates, then an exponential moving average. A run that did not keep one before
    it was resumed starts from its weights; an average of other shapes is refused."""
    model = dict(tied=True)
    runs = [in_process(tmp_path, shards, model, ema_steps=n) for n in (0, 0.5)]  # 2 of 4 steps
    wanted = list(runs[0].raw_model.parameters())
    for step in range(4):
        for run in runs:
            run.train_step()
        weights = [p.detach().clone() for p in runs[0].raw_model.parameters()]
        new = max(0.5, 1 / (step + 1))
        wanted = [new * p + (1 - new) * old for p, old in zip(weights, wanted)]
        found = runs[1].average.values()
        assert max((a - b).abs().max() for a, b in zip(found, wanted, strict=True)) < 1e-6
        used = wanted if step == 3 else weights
        pairs = zip(runs[1].raw_model.parameters(), used)
        assert max((a - b).abs().max() for a, b in pairs) < 1e-6

    state = runs[0].state_dict()
    assert "average" not in state
    restore_checkpoint(runs[1], state)
    assert all(torch.equal(t, state["model"][name]) for name, t in runs[1].average.items())
    state = runs[1].state_dict()
    state["average"] = state["average"] | {"lm_head.weight": torch.zeros(2)}
    restore_checkpoint(runs[0], state)  # without --ema_steps it is not needed
    with pytest.raises(UserError, match="lm_head.weight"):
        restore_checkpoint(runs[1], state)


def test_each_difference_can_be_turned_off(tmp_path, shards):
    """The model trains with each flag on and off, and each flag changes the losses."""

    def losses(model=(), **settings):
        run = in_process(tmp_path, shards, model, **settings)
        return [run.train_step()[0].sum().item() for _ in range(4)]

    assert losses() == (usual := losses())
    changes = {k: not v for k, v in vars(GPTConfig()).items() if isinstance(v, bool)}
    del changes["bf16_residual"]  # only changes runs in 16 bits
    del changes["value_projection"]  # blocks that have a value table keep it
    assert losses(PROJECTED) != losses(dict(value_tables=0))
    changes |= dict(mlp="gelu", value_tables=0, bigram_rows=99, dropout=0.1)
    for name, value in changes.items():
        assert losses({name: value}) != usual, name
    for settings in (
        dict(optimizer="muon"), dict(optimizer="adamw"), dict(momentum_warmup=100),
        dict(batch_warmup_steps=2), dict(weight_decay=1.0), dict(weight_decay=1.0, decay_all=True),
    ):  # fmt: skip
        assert losses(**settings) != usual, settings


def test_compiled_equals_eager_without_recompiling_after_warmup(tmp_path, shards, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(lab.hardware, "compile_unsupported_reason", lambda *_: "")
    torch._dynamo.reset()
    counters.clear()
    staged, graphs = dict(batch_warmup_steps=2), set()
    runs = [in_process(tmp_path, shards, compile=c, **staged) for c in (False, True)]
    for _ in range(4):
        a, b = (run.train_step()[0].sum().item() for run in runs)
        assert a == pytest.approx(b, abs=1e-4)
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1 and 0 not in graphs, "recompiled after the first step"


# --------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def run_speedrun(tmp_path, shards):
    """run_speedrun("--max_steps", 5, ...): the real command on the tiny shards."""

    def run(*flags, status=0):
        base = [] if "--resume" in flags else [*FLAGS, "--data", shards]
        done = run_python(ROOT / "speedrun.py", *base, *flags, cwd=tmp_path)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return run


def test_resumed_run_equals_uninterrupted_one_and_tools_read_it(tmp_path, run_speedrun):
    """With a batch warmup that ends after the checkpoint that it resumes from."""
    more = "--max_steps 6 --batch_warmup_steps 4 --bigram_rows 100 --val_every 6 --dropout 0.1 --ema_steps 3"
    said, folder = run_speedrun(*more.split(), "--weight_decay", 0.1), tmp_path / "log/r"
    whole = read_run(folder)
    assert [e["tokens"] for e in of_kind(whole, "train")] == [64, 128, 192, 256, 384, 512]
    timed = [e for e in of_kind(whole, "train") if "dt_ms" in e]  # not the first
    assert [round(e["tok_per_s"] * e["dt_ms"] / 1000) for e in timed] == [64, 64, 64, 128, 128]
    for words in (
        "128 tokens = ",
        "half as many in the first 4 steps",
        f"reads {512 / 2498:.2f} epochs",
    ):
        assert words in said
    assert whole.losses[0] == pytest.approx(math.log(VOCAB), abs=1e-4)
    assert whole.losses[-1] < whole.losses[0] - 0.2 and "speedrun.py --resume" in said
    (folder / "model_000006.pt").unlink()
    assert "half as many in the next step\n" in run_speedrun("--resume")
    again = read_run(folder)
    assert again.losses[-3:] == whole.losses[3:]
    for start in of_kind(again, "start"):  # of a whole step
        assert start["grad_accum_steps"] * start["batch_size"] * 16 == 128
    assert not differing_parts(whole.checkpoints[6], again.checkpoints[6])
    assert not differing_parts(whole.checkpoints[6], again.checkpoints[6], ["average"])

    model, state = load_model(str(folder)), whole.checkpoints[6]["model"]
    assert type(model).__module__ == "speedrun" and model.config.bigram_rows == 100
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())
    for command, status, words in (
        ("sample.py ab --max_new_tokens 5 --model log/r", 0, "ab"),
        ("lab export --out o log/r", 2, "is not a GPT-2 or BERT"),
    ):
        program, *flags = command.split()
        done = run_python(ROOT / program, *flags, cwd=tmp_path)
        assert done.returncode == status and words in done.stdout + done.stderr, done.stderr
    run_speedrun("--max_steps", 1, "--log_dir", "other", "--init_from", folder)
    # with its differences to GPT-2, as well as its shape
    assert read_run(tmp_path / "other/r").losses[0] < whole.losses[0] - 0.2
    said = run_speedrun("--resume", "--max_steps", 7, "--checkpoint_every", 0)
    assert "checkpoint_every=0, so the steps after 6 are not saved\n" in said


def test_trained_run_is_extended_and_resumed(tmp_path, run_speedrun):
    """--init_from with a longer context and --rope_scaling, which no weight depends on."""
    run_speedrun("--max_steps", 2)
    longer = (
        "--init_from log/r --run_name longer --block_size 64 --seq_len 64 --batch_size 2".split()
    )
    how = "--rope_scaling yarn --trained_length 32 --max_steps 4 --checkpoint_every 2".split()
    run_speedrun(*longer, *how)
    whole = read_run(tmp_path / "log/longer")
    (tmp_path / "log/longer/model_000004.pt").unlink()
    run_speedrun("--resume", "--run_name", "longer")
    again = read_run(tmp_path / "log/longer")
    assert not differing_parts(whole.checkpoints[4], again.checkpoints[4])
    other = "--resume --run_name longer --max_steps 9 --rope_scaling ntk".split()
    assert "is a different model: rope_scaling=yarn (here ntk)" in run_speedrun(*other, status=2)

    model = load_model(str(tmp_path / "log/longer"))
    assert model.config.rope_scaling == "yarn" and model.config.block_size == 64
    names = ("none", "linear", "ntk", "yarn")
    shapes = [replace(model.config, rope_scaling=name) for name in names]
    x, losses = torch.randint(VOCAB, (2, 64)), set()
    for shape in shapes:
        other = GPT(shape)
        init_from(str(tmp_path / "log/r"), other)
        losses.add(other(x, x)[1].item())
    assert len(losses) == 4, "the same weights, with other rotations"
    for changes, differences in (
        (dict(n_head=4), r"n_head=2 \(here 4\); pass --n_head 2"),
        (
            dict(qk_norm=False, tied=True),
            r"qk_norm=True .*, tied=False .*; pass --qk_norm and --no_tied",
        ),
        (dict(rotary=False), r"block_size=32 \(here 64\)"),  # learned positions: a row for each
    ):
        with pytest.raises(UserError, match=f"different model: {differences}"):
            init_from(str(tmp_path / "log/r"), GPT(replace(model.config, **changes)))


def test_two_processes_equal_one(tmp_path, shards, run_speedrun):
    """With gradient accumulation. Orthogonal steps enlarge rounding errors in directions without a
    gradient, so the first gradients agree to 1e-5, and later losses less closely."""
    flags = ["--max_steps", 4, "--val_every", 4]
    args = [*FLAGS, "--data", shards, *flags, "--batch_size", 2]
    run_two(ROOT / "speedrun.py", *args, cwd=tmp_path)
    run_speedrun(*flags, "--batch_size", 8, "--log_dir", "one")
    one, two = read_run(tmp_path / "one" / "r"), read_run(tmp_path / "log" / "r")
    assert one.losses == pytest.approx(two.losses, abs=1e-3)
    assert one.losses[:2] == pytest.approx(two.losses[:2], abs=1e-5)
    assert one.norms[0] == pytest.approx(two.norms[0], abs=1e-5)
    assert one.val == pytest.approx(two.val, abs=1e-3)
    assert one.checkpoints[4]["loader"] == two.checkpoints[4]["loader"]
    flags = "--resume --log_dir one --max_steps 5 --batch_size 2".split()
    run_two(ROOT / "speedrun.py", *flags, cwd=tmp_path)
