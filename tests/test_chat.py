"""lab/data/chat.py: conversations as text, loss masks, and packing into rows."""

import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models import saved, tiny_gpt
from test_fineweb import BYTES, call, hashes
from test_loader import make_loader

import fineweb
from lab.cli import UserError
from lab.config import SFT
from lab.data.chat import build_chats, find_messages, render_chat
from lab.data.manifest import read_manifest, verify_shards
from lab.data.shards import TokenShards
from lab.data.tokenizers import get_tokenizer
from lab.hf.export import export
from lab.registry import is_tuned

END = "<|endoftext|>"


def say(*texts):
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_render_chat():
    tok = get_tokenizer("bytes")
    talk = [{"role": "system", "content": "Be brief."}]
    talk += say("Two and two? ", "Four.", "Twice that?", "Eight.")
    ids, mask = render_chat(talk, tok)
    assert tok.decode(ids) == (
        f"{END}System: Be brief.\n\nUser: Two and two?\n\nAssistant: Four.{END}\n\n"
        f"User: Twice that?\n\nAssistant: Eight.{END}"
    )
    assert tok.decode(ids[mask == 1]) == f" Four.{END} Eight.{END}" and mask[0] == 0
    ids, mask = render_chat(say("What is a token?"), tok, add_generation_prompt=True)
    assert tok.decode(ids) == END + SFT["sample_prompt"] and not mask.any()


def test_a_turn_of_weight_0_is_read_but_not_learned():
    """As in OpenAI's fine-tuning format."""
    tok, talk = get_tokenizer("bytes"), say("Two?", "Too.", "Two and two?", "Four.")
    ids, _ = render_chat(talk, tok)
    talk[1]["weight"], talk[3]["weight"] = 0, 1
    weighted, mask = render_chat(talk, tok)
    assert weighted.tolist() == ids.tolist() and tok.decode(ids[mask == 1]) == f" Four.{END}"
    for weight in (0.5, "0", 2):
        talk[1]["weight"] = weight
        with pytest.raises(UserError, match=f"here: weight {weight!r} .* must be 0 .* or 1"):
            render_chat(talk, tok, where="here")


@pytest.mark.parametrize("call", [{"tool_calls": [{"id": "1"}]}, {"function_call": {"name": "f"}}])
@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_tool_calls_are_refused_with_their_line(tmp_path, call, content):
    talks = [say("question", "answer") for _ in range(20)]
    talks[6] += [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": content, **call},
    ]
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (tmp_path / "chat.jsonl").write_text(lines)
    args = ["--source", str(tmp_path / "chat.jsonl"), *BYTES, "--out", str(tmp_path / "o")]
    with pytest.raises(UserError, match=r"chat.jsonl, line 7: .* tool call, .*; remove"):
        fineweb.main(args)
    assert not list(tmp_path.glob("o/*.npy"))


def test_conversations_with_blank_answers_are_skipped_and_counted(tmp_path):
    """A conversation with one blank answer, unless its weight is 0, or without any answer to learn."""
    talks = [say(f"question {i}", f"answer {i}") for i in range(20)]
    talks[3][1]["content"] = ""
    talks[4] += say("and", " \n ")
    talks[5] += say("but", "")
    talks[5][3]["weight"] = 0
    talks[6][1]["weight"] = 0
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (tmp_path / "chat.jsonl").write_text(lines)
    args = ["--source", str(tmp_path / "chat.jsonl"), *BYTES, "--out", str(tmp_path / "o")]
    assert fineweb.main(args) == 0
    manifest = read_manifest(tmp_path / "o")
    assert (manifest["documents"], manifest["no_answer"], manifest["too_long"]) == (17, 3, 0)
    ids = np.concatenate([np.load(tmp_path / "o" / e["name"]) for e in manifest["shards"]])
    found = re.findall(r"question (\d+)", get_tokenizer("bytes").decode(ids))
    assert sorted(map(int, found)) == [i for i in range(20) if i not in (3, 4, 6)]


def sharegpt(system, first, last):
    turns = [("human", first[0]), ("gpt", first[1]), ("human", last[0]), ("gpt", last[1])]
    return {
        "system": system,
        "conversations": [{"from": who, "value": text} for who, text in turns],
    }


def alpaca(system, first, last):
    question, _, more = last[0].partition("\n\n")
    return {
        "system": system,
        "history": [list(first)],
        "instruction": question,
        "input": more,
        "output": last[1],
    }


def openai(system, first, last):
    return {"messages": [{"role": "system", "content": system}, *say(*first, *last)]}


def write_records(path, records):
    """As JSON Lines, one JSON array or parquet, compressed or not, according to the file's name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
        return
    lines = "".join(json.dumps(record) + "\n" for record in records)
    text = json.dumps(records, indent=2) if ".json" in path.suffixes else lines
    pack = {".gz": gzip.compress, ".zst": pa.compress}.get(path.suffix, bytes)
    more = {"codec": "zstd", "asbytes": True} if path.suffix == ".zst" else {}
    path.write_bytes(pack(text.encode(), **more))


def chat_shards(path, out):
    """(ids, masks) of the shards that fineweb.py makes of a file."""
    assert fineweb.main(["--source", str(path), *BYTES, "--context", "200", "--out", str(out)]) == 0
    names = [out / entry["name"] for entry in read_manifest(out)["shards"]]
    masks = [np.frombuffer(name.with_suffix(".mask").read_bytes(), np.uint8) for name in names]
    return [np.load(name).tolist() for name in names], [mask.tolist() for mask in masks]


TALKS = [
    (f"Be {i}.", (f"first {i}", f"one {i}"), (f"last {i}\n\nwith more", f"two {i}"))
    for i in range(20)
]


@pytest.mark.parametrize("form", [openai, sharegpt, alpaca])
@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.jsonl.gz", "c.json.zst", "c.parquet"])
def test_all_forms_and_files_of_conversations_give_the_same_rows(tmp_path, form, name):
    write_records(tmp_path / "plain.jsonl", [openai(*talk) for talk in TALKS])
    write_records(tmp_path / name, [form(*talk) for talk in TALKS])
    wanted = chat_shards(tmp_path / "plain.jsonl", tmp_path / "o")
    assert chat_shards(tmp_path / name, tmp_path / "p") == wanted


@pytest.mark.parametrize("name", ["c.jsonl", "c.parquet"])
def test_of_prompt_and_completion_only_the_completion_is_learned(tmp_path, name):
    texts = [{"prompt": first[0], "completion": first[1]} for _, first, _ in TALKS]
    talks = [{"prompt": say(*a, b[0]), "completion": say(*b)[1:]} for _, a, b in TALKS]
    tok = get_tokenizer("bytes")
    for number, (records, learned) in enumerate([(texts, " one 3"), (talks, " two 3")]):
        write_records(tmp_path / name, records)
        chat_shards(tmp_path / name, tmp_path / f"{number}")
        ids, mask = render_chat(find_messages(records[3]), tok)
        assert tok.decode(ids[mask == 1]) == learned + END


@pytest.mark.parametrize(
    "record, said",
    [
        ({"chosen": "a", "rejected": "b"}, "no conversation in a record with chosen, rejected"),
        ({"instruction": "a", "output": "b", "input": 3}, "no conversation in a record with"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "no conversation in a record with"),
        ({"conversations": [{"from": "observation", "value": "a"}]}, "role 'observation'"),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r"role \['gpt'\]"),
        ({"conversations": ["a"]}, "role None"),
        ({"prompt": ["a"], "completion": say("a")}, "role None"),
        ({"messages": say("a", "b"), "system": 3}, "content 3"),
    ],
)  # fmt: skip
def test_other_records_among_conversations_are_named(tmp_path, record, said):
    write_records(tmp_path / "c.jsonl", [openai(*TALKS[0]), openai(*TALKS[1]), record])
    with pytest.raises(UserError, match=f"c.jsonl, line 3: .*{said}"):
        chat_shards(tmp_path / "c.jsonl", tmp_path / "o")


def test_a_column_that_is_no_text_is_named_and_not_called_damaged(tmp_path):
    write_records(tmp_path / "c.parquet", [{"turns": [{"a": "b"}]}] * 9)
    for column, said in (
        ("turns", "has type list<.* pass one that contains text"),
        ("x", "no column"),
    ):
        args = ["--source", str(tmp_path / "c.parquet"), *BYTES, "--out", str(tmp_path / "o")]
        with pytest.raises(UserError, match=said):
            fineweb.main([*args, "--text_column", column])


def test_chat_shards(tmp_path):
    rng = np.random.default_rng(0)
    lengths = enumerate(rng.integers(1, 60, (300, 2)))
    talks = [say(f"question {i}" + "?" * a, f"answer {i}" + "!" * b) for i, (a, b) in lengths]
    talks[6][1]["content"] = talks[7][1]["content"] = "long " * 100
    talks[8] = talks[8][:1]
    source, out = tmp_path / "chat.jsonl", tmp_path / "o"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    args = ["--source", source, *BYTES, "--context", 200, "--shard_tokens", 5000, "--out", out]
    got = call(*args)
    assert got.returncode == 0, got.stderr
    assert (
        "--preset sft --init_from RUN --seq_len 200\nRUN must have a context of at least 200"
        in got.stdout
    )
    assert "297 conversations" in got.stdout and "2 too long, 1 without an answer" in got.stdout
    manifest, tok, found = read_manifest(out), get_tokenizer("bytes"), []
    assert (manifest["context"], manifest["documents"]) == (200, 297) and verify_shards(out) == []
    names = [e["name"] for e in manifest["shards"]]
    assert names[:2] == ["chat_val_000000.npy", "chat_train_000001.npy"] and len(names) > 3
    for name in names:
        ids = np.load(out / name)
        with open((out / name).with_suffix(".mask"), "rb") as file:
            mask = np.load(file)
        assert mask.dtype == np.uint8 and (len(ids) <= 5000 or "val" in name)
        for row, learned in zip(ids.reshape(-1, 200), mask.reshape(-1, 200), strict=True):
            text = tok.decode(row)
            answers = re.findall(r"Assistant:(.*?<\|endoftext\|>)", text)
            assert tok.decode(row[learned == 1]) == "".join(answers)
            here = re.findall(r"User: (.*?)\n\nAssistant: (.*?)<\|endoftext\|>", text)
            assert row[0] == row[-1] == 256, "padded with end-of-text"
            assert len(here) == text.count("User:"), "no conversation is split"
            held_out = [int(question.split("?")[0].split()[1]) % 10 == 0 for question, _ in here]
            assert held_out == ["val" in name] * len(here), "no matter which lines are skipped"
            found += here
    wanted = [(t[0]["content"], t[1]["content"]) for i, t in enumerate(talks) if i not in (6, 7, 8)]
    assert sorted(found) == sorted(wanted)
    used = sum(len(render_chat(say(*pair), tok)[0]) for pair in wanted)
    assert used > 0.8 * manifest["tokens"], "rows are mostly full"
    assert TokenShards(out, "train", 257).masks
    before = hashes(out)
    (out / manifest["shards"][1]["mask"]["name"]).write_bytes(b"")
    assert call("--verify", "--out", out).returncode == 1
    cut = manifest | dict(complete=False, shards=manifest["shards"][:2])  # as after a kill
    (out / "manifest.json").write_text(json.dumps(cut))
    got = call(*args, "--shard_tokens", 9000)  # would mix shards of both
    assert got.returncode == 2 and "shard_tokens = 5000, but now it is 9000" in got.stderr
    assert call(*args).returncode == 0 and hashes(out) == before


def test_files_with_texts_and_conversations_are_read_as_texts_with_a_note(tmp_path):
    record = dict(instruction="a", output="b", text="### a\n\n### b")
    write_records(tmp_path / "c.parquet", [record] * 20)
    done = call("--source", tmp_path / "c.parquet", *BYTES, "--out", tmp_path / "o")
    assert done.returncode == 0 and "c.parquet holds texts (--text_column text) and" in done.stderr


def test_each_conversation_is_the_first_of_its_row_in_some_epoch(tmp_path):
    talks = [say(f"question {i}", f"answer {i}") for i in range(30)]
    talks[3] += say("more?", "no.")  # an end-of-text inside of a conversation
    for talk in talks[5:20]:
        talk += say("thanks", "")[:1]  # a last turn without an answer
    source, out, tok = tmp_path / "chat.jsonl", tmp_path / "o", get_tokenizer("bytes")
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert call("--source", source, *BYTES, "--context", 130, "--out", out).returncode == 0
    shards, first = TokenShards(out, "train", 257), set()
    rows = len(shards) // 130
    loader = make_loader(shards, rows, seq_len=130, total_batch_size=rows * 130)
    for _ in range(4):
        x, y, num_targets = loader.next_batch()  # an epoch
        seen = []
        for row, targets in zip(x.numpy(), y.numpy()):
            text = tok.decode(row)
            here = re.findall(
                r"User: (question \d+)\n\nAssistant: (answer \d+)<\|endoftext\|>", text
            )
            assert text.startswith(f"{END}User: {here[0][0]}\n")
            answers = "".join(re.findall(r"Assistant:(.*?<\|endoftext\|>)", text))
            assert tok.decode(targets[targets >= 0]) == answers
            assert (targets[:-1] == row[1:])[targets[:-1] >= 0].all()
            seen, first = seen + here, first | {here[0]}
        wanted = {(t[0]["content"], t[1]["content"]) for i, t in enumerate(talks) if i % 10}
        assert len(seen) == len(wanted) == 27 and set(seen) == wanted
        assert num_targets == int((y >= 0).sum())
    assert rows < 14 and first == wanted


def test_a_chat_file_may_have_a_long_name_and_a_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = 80 * "\u8bdd" + ".jsonl"  # 246 bytes, of at most 255
    talks = [json.dumps({"messages": say(f"question {i}", "answer")}) for i in range(20)]
    (tmp_path / name).write_text("\n".join(talks))
    assert read_manifest(build_chats(name, "bytes", 64))["documents"] == 20
    for copy in ("a.jsonl", "a.v2.jsonl"):
        (tmp_path / copy).write_text("\n".join(talks))
        assert read_manifest(build_chats(copy, "bytes", 64))["documents"] == 20


def test_an_export_of_a_model_tuned_for_chat_formats_conversations(tmp_path):
    from transformers import AutoTokenizer

    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Two and two?"},
        {"role": "assistant", "content": "Four."}, {"role": "user", "content": "Why?"},
    ]  # fmt: skip
    path = saved(tiny_gpt(257, 128), tmp_path / "log/r/model_000001.pt")
    for preset, tuned in (("laptop", False), ("sft", True)):
        (tmp_path / "log/r/config.json").write_text(json.dumps({"train": {"preset": preset}}))
        export(path, tmp_path / "out")
        theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert bool(theirs.chat_template) == tuned
        assert is_tuned(str(tmp_path / "out")) == (tuned or None), "as its export says"
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids, _ = render_chat(messages, get_tokenizer("bytes"), add_generation_prompt=True)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids.tolist()
