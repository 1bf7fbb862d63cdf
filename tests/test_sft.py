"""Fine-tuning on conversations: the preset sft and examples/chats.jsonl."""

import json
import re

import chats
import pytest
import torch
import torch.nn.functional as F
from test_chat import write_records

from conftest import (  # isort: skip
    ROOT, difference, driver, fail, read_run, run_python, succeed, train_here, write_shards,
)  # fmt: skip

from lab.cli import UserError
from lab.config import parse_flags
from lab.data.tokenizers import get_tokenizer
from lab.registry import load_model
from train_gpt2 import PRESETS, Trainer

SHIPPED = [json.loads(line) for line in open(ROOT / "examples/chats.jsonl", encoding="utf-8")]


def loss_by_hand(model, pairs):
    """Mean loss of the answers, each after its own question alone, from the definition."""
    encode, eot, losses = get_tokenizer("bytes").encode, 256, []
    for q, a in pairs:
        read = [eot, *encode(f"User: {q}\n\nAssistant:")]
        said = [*encode(f" {a}"), eot]
        logits = model(torch.tensor([[*read, *said[:-1]]]))[0][0, len(read) - 1 :]
        losses += F.cross_entropy(logits, torch.tensor(said), reduction="none").tolist()
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder, questions and answers, output of the second run).

    The run `few` has 17 micro-steps of one sequence, `many` one micro-step of 17. The shape of the
    model is not that of a preset.
    """
    folder = tmp_path_factory.mktemp("sft")
    shape = dict(n_layer=1, n_head=4, block_size=64, document_mask=True)
    train_here(folder / "log", write_shards(folder / "data"), "base", shape, max_steps=3)
    # one conversation per row, and answers of different lengths in each micro-step
    pairs = [(f"What is {i:02}?", f"It is {'so ' * (i % 7)}{i}.") for i in range(20)]
    pairs[13] = "Too long?", "y" * 70
    with open(folder / "chats.jsonl", "w") as file:
        for i, (q, a) in enumerate(pairs):
            talk = [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
            file.write(json.dumps({"messages": talk, "facts": [str(i)]}) + "\n")
    flags = "--preset sft --init_from base --data chats.jsonl --device cpu --total_batch_size 1088 "
    flags += "--max_steps 2 --lr 1e-3 --eps 1e-3 --sample_every 0 --log_every 1 --run_name"
    for name, batch_size in (("few", 1), ("many", 17)):
        more = (name, "--batch_size", batch_size)
        said = succeed("train_gpt2.py", *flags.split(), *more, cwd=folder)
    return folder, pairs, said


def test_only_answers_contribute_to_the_loss_averaged_over_the_step(tuned):
    """With one micro-step and with seventeen; validation lines do not contribute."""
    folder, pairs, _ = tuned
    base = load_model(str(folder / "log/base"))
    few, many = (read_run(folder / "log" / name) for name in ("few", "many"))
    held_out = pairs[::10]
    taught = [pair for i, pair in enumerate(pairs) if i % 10 and i != 13]
    assert few.losses[0] == pytest.approx(loss_by_hand(base, taught), abs=1e-4)
    assert few.val[0] == pytest.approx(loss_by_hand(base, held_out), abs=1e-4)
    assert few.losses == pytest.approx(many.losses, abs=1e-5) and few.losses[1] < few.losses[0]
    assert difference(few.checkpoints[2]["model"], many.checkpoints[2]["model"]) < 1e-5


def test_next_steps_chat_with_the_last_checkpoint_although_its_loss_is_higher(tuned):
    flags = "--preset sft --init_from base --data chats.jsonl --device cpu --total_batch_size 1088 --lr 1"
    flags += " --max_steps 3 --val_every 1 --checkpoint_every 1 --sample_every 0 --run_name worse"
    said = succeed("train_gpt2.py", *flags.split(), cwd=tuned[0])
    losses = list(read_run(tuned[0] / "log/worse").val.values())
    assert losses[-1] > 1.1 * min(losses), "so train_gpt2.py's other presets name model_best.pt"
    assert re.search(r"--chat --model log/worse$", said, re.MULTILINE), said


def test_samples_end_with_the_answer(tuned):
    text = "User: a\n\nAssistant: b\n<|endoftext|>\nnext"
    program = driver(
        tuned[0], f"import lab.eval.samples as s\ns.generate_samples = lambda *_: ([{text!r}], [])"
    )
    flags = "--preset sft --init_from base --data chats.jsonl --device cpu --total_batch_size 1088"
    said = succeed(program, *flags.split(), "--max_steps", 1, "--run_name", "end", cwd=tuned[0])
    assert "    | Assistant: b\n" in said and "| next" not in said


def test_shape_and_settings_follow_the_init_from_model(tuned):
    folder, _, said = tuned
    saved = json.loads((folder / "log/few/config.json").read_text())
    shape = dict(n_layer=1, n_head=4, n_embd=32, block_size=64, vocab_size=257)
    assert not saved["model"]["document_mask"], (
        "with it, earlier turns would be hidden as other documents"
    )
    assert saved["model"] | shape == saved["model"] and saved["train"]["seq_len"] == 64
    assert "with the shape of base" in said
    assert "(19 conversations; records 1, 11, 21 ... only for validation)" in said
    flags = "--preset sft --init_from base --log_dir".split() + [str(folder / "log")]
    _, model_config, cfg = parse_flags([*flags, "--n_head", "2"], PRESETS, "", Trainer)
    assert (model_config.n_head, model_config.n_embd) == (2, 32), (
        "a flag overrides the init_from model"
    )
    assert cfg.val_every % cfg.checkpoint_every == 0, "the best step must have a checkpoint"
    assert cfg.lr == pytest.approx(2e-4 * (768 / 32) * 12**0.5, rel=1e-3), (
        "scaled to width and depth"
    )
    few = "--preset sft --init_from base --data chats.jsonl --run_name x --val_tokens 3".split()
    assert "val_tokens=3 of" in fail("train_gpt2.py", *few, cwd=folder), "they contain no answer"
    assert not (folder / "log/x").exists()
    succeed("train_gpt2.py", *"--resume --run_name few --max_steps 3".split(), cwd=folder)
    assert read_run(folder / "log/few").checkpoints[3]["step"] == 3


def test_conversations_without_facts_are_not_scored(tmp_path):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    lines = [{"messages": talk, "facts": ["a"]}, {"messages": talk}, {"messages": talk}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(
        UserError, match='2 of the 3 conversations in .*mine.jsonl lack .* or "facts"'
    ):
        chats.main(["--data", str(tmp_path / "mine.jsonl")])


def test_data_may_be_a_file_of_any_kind_of_conversations(tuned):
    """And a file of texts is not taken for one."""
    folder, pairs, _ = tuned
    records = [{"instruction": q, "output": a} for q, a in pairs]
    flags = "--preset sft --init_from base --device cpu --total_batch_size 1088 --batch_size 17 "
    flags += "--max_steps 2 --lr 1e-3 --eps 1e-3 --sample_every 0 --log_every 1"
    for name in ("alpaca.json", "alpaca.parquet"):
        write_records(folder / name, records)
        more = ("--data", name, "--run_name", name)
        succeed("train_gpt2.py", *flags.split(), *more, cwd=folder)
        assert read_run(folder / "log" / name).losses == read_run(folder / "log/many").losses
    write_records(folder / "texts.jsonl.gz", [{"text": "a"}] * 20)
    more = ("--data", "texts.jsonl.gz", "--run_name", "x")
    done = run_python(ROOT / "train_gpt2.py", *flags.split(), *more, cwd=folder)
    assert done.returncode == 2 and "line 1: no conversation in a record with text" in done.stderr


def test_facts_of_the_held_out_chats_occur_in_the_training_chats():
    """Asked with a different question: no held-out question is in the training chats."""
    turns = [chats.turns(chat) for chat in SHIPPED]
    assert len(SHIPPED) >= 320 and sum(len(t) > 1 for t in turns) >= 30
    assert all(chats.holds(said, fact) for t in turns for _, said, fact in t)
    asked = [json.dumps(t[-1][0]) for t in turns]
    assert len(set(asked)) == len(asked), "a question occurs twice"
    rest = [turn for i, t in enumerate(turns) if i % 10 for turn in t]
    for _, _, fact in (turn for t in turns[::10] for turn in t):
        assert any(chats.holds(said, fact) for _, said, _ in rest), fact
