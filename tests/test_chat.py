"""chat.py: how conversations are written, packed into rows, and what of them is learnt."""

import json
import re

import numpy as np
from test_fineweb import BYTES, call, hashes

import fineweb
from lab.data.chat import RowPacker, render_chat
from lab.data.tokenizers import get_tokenizer
from lab.data.writer import read_manifest, verify


def test_render_chat():
    tok = get_tokenizer("bytes")
    ids, mask = render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two? "},
                             {"role": "assistant", "content": "Four."}, {"role": "user", "content": "Twice that?"},
                             {"role": "assistant", "content": "Eight."}], tok)
    end = "<|endoftext|>"
    assert tok.decode(ids) == (f"{end}System: Be brief.\n\nUser: Two and two?\n\nAssistant: Four.{end}\n\n"
                               f"User: Twice that?\n\nAssistant: Eight.{end}")
    assert tok.decode(ids[mask == 1]) == f" Four.{end} Eight.{end}" and mask[0] == 0
    ids, mask = render_chat([{"role": "user", "content": "Hello"}], tok, answer=True)
    assert tok.decode(ids) == f"{end}User: Hello\n\nAssistant:" and not mask.any()


def test_chat_shards(tmp_path):
    rng = np.random.default_rng(0)
    talks = [[{"role": "user", "content": f"question {i}" + "?" * int(rng.integers(1, 60))},
              {"role": "assistant", "content": f"answer {i}" + "!" * int(rng.integers(1, 60))}] for i in range(300)]
    talks[7][1]["content"] = "long " * 100
    talks[8] = talks[8][:1]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    out = tmp_path / "o"
    args = ["--source", tmp_path / "chat.jsonl", *BYTES, "--context", 200, "--shard_tokens", 5000, "--out", out]
    got = call(*args)
    assert got.returncode == 0, got.stderr
    assert "298 conversations" in got.stdout and "1 too long, 1 without an answer" in got.stdout
    manifest, tok, found = read_manifest(out), get_tokenizer("bytes"), []
    assert manifest["context"] == 200 and verify(out) == []
    assert [e["name"] for e in manifest["shards"]][:2] == ["chat_val_000000.npy", "chat_train_000001.npy"]
    for entry in manifest["shards"]:
        ids = np.load(out / entry["name"])
        with open((out / entry["name"]).with_suffix(".mask"), "rb") as file:
            mask = np.load(file)
        assert mask.dtype == np.uint8 and len(mask) == len(ids) and len(ids) % 200 == 0 and len(ids) <= 5000 + 2000
        for row, learnt in zip(ids.reshape(-1, 200), mask.reshape(-1, 200)):
            assert row[0] == 256 and learnt[0] == 0
            text = tok.decode(row)
            assert tok.decode(row[learnt == 1]) == "".join(re.findall(r"Assistant:(.*?<\|endoftext\|>)", text))
            talks_here = re.findall(r"User: (.*?)\n\nAssistant: (.*?)<\|endoftext\|>", text)
            assert len(talks_here) == text.count("User:")  # no conversation goes over an edge
            found += talks_here
    wanted = [(t[0]["content"], t[1]["content"]) for i, t in enumerate(talks) if i not in (7, 8)]
    assert sorted(found) == sorted(wanted)
    assert manifest["padding"] < 0.15 * manifest["tokens"]
    before = hashes(out)
    (out / manifest["shards"][1]["mask"]["name"]).write_bytes(b"")
    assert call("--verify", "--out", out).returncode == 1
    whole = (out / "manifest.json").read_bytes()
    (out / "manifest.json").write_text(json.dumps(json.loads(whole) | {"complete": False, "shards": []}))  # killed near the end
    assert call(*args).returncode == 0 and hashes(out) == before and (out / "manifest.json").read_bytes() == whole


def test_chat_data_that_failed_binds_nobody(tmp_path):
    talk = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    (tmp_path / "chat.jsonl").write_text(talk * 20 + "broken")
    args = ["--source", str(tmp_path / "chat.jsonl"), *BYTES, "--context", "64", "--out", str(tmp_path / "o")]
    assert fineweb.main(args) == 2
    (tmp_path / "chat.jsonl").write_text(talk * 20)
    assert fineweb.main(args) == 0 and read_manifest(tmp_path / "o")["documents"] == 20


def test_one_conversation_is_too_few(tmp_path, capsys):
    talk = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    (tmp_path / "chat.jsonl").write_text(talk)
    args = ["--source", str(tmp_path / "chat.jsonl"), *BYTES, "--context", "64", "--out", str(tmp_path / "o")]
    assert fineweb.main(args) == 2
    assert "chat.jsonl holds one conversation to learn from, and the first of every ten is for" in capsys.readouterr().err
    (tmp_path / "chat.jsonl").write_text(talk * 2)
    assert fineweb.main(args) == 0 and [e["split"] for e in read_manifest(tmp_path / "o")["shards"]] == ["val", "train"]


def test_a_file_that_failed_as_text_may_become_conversations(tmp_path):
    chats, out = tmp_path / "c.jsonl", tmp_path / "o"
    args = ["--source", chats, *BYTES, "--context", 64, "--out", out]
    chats.write_text('{"conversations": [{"from": "human", "value": "x"}]}\n')
    got = call(*args)
    assert got.returncode == 2 and "of the keys conversations); a conversation is under messages" in got.stderr
    assert [p.name for p in out.glob("*.part")] == ["c_val_000000.npy.part"]
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    chats.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": talk}) + "\n")
    (out / "c_train_000009.npy").touch()  # somebody else's: the folder is left alone
    assert call(*args).returncode == 2 and len(list(out.glob("*.part"))) == 1
    (out / "c_train_000009.npy").unlink()
    got = call(*args)
    assert got.returncode == 0 and not list(out.glob("*.part")) and not verify(out), got.stderr


def test_packer_fills_rows():
    packer = RowPacker(10, 256)
    for n in (6, 5, 4, 5, 3):
        packer.add(np.full(n, n, np.uint16), np.ones(n, np.uint8))
    ids, mask, padding = packer.take(9)
    assert ids.reshape(-1, 10).tolist() == [[6] * 6 + [4] * 4, [5] * 10, [3] * 3 + [256] * 7]
    assert padding == 7 and mask.sum() == 23
