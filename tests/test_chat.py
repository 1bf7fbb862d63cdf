"""chat.py: how conversations are written, packed into rows, and what of them is learnt."""

import json
import re

import numpy as np
from test_fineweb import BYTES, call, hashes

from lab.data import get_tokenizer
from lab.data.chat import render_chat
from lab.data.shards import TokenShards, read_manifest
from lab.data.writer import verify
from lab.run.settings import SFT

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
    ids, mask = render_chat(say("What is a token?"), tok, answer=True)
    assert tok.decode(ids) == END + SFT["sample_prompt"] and not mask.any()


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
    assert "297 conversations" in got.stdout and "2 too long, 1 without an answer" in got.stdout
    manifest, tok, found = read_manifest(out), get_tokenizer("bytes"), []
    assert (manifest["context"], manifest["documents"]) == (200, 297) and verify(out) == []
    names = [e["name"] for e in manifest["shards"]]
    assert names[:2] == ["chat_val_000000.npy", "chat_train_000001.npy"] and len(names) > 3
    for name in names:
        ids = np.load(out / name)
        with open((out / name).with_suffix(".mask"), "rb") as file:
            mask = np.load(file)
        assert mask.dtype == np.uint8 and (len(ids) <= 5000 or "val" in name)
        for row, learnt in zip(ids.reshape(-1, 200), mask.reshape(-1, 200), strict=True):
            text = tok.decode(row)
            answers = re.findall(r"Assistant:(.*?<\|endoftext\|>)", text)
            assert tok.decode(row[learnt == 1]) == "".join(answers)
            here = re.findall(r"User: (.*?)\n\nAssistant: (.*?)<\|endoftext\|>", text)
            assert row[0] == row[-1] == 256, "filled up with end-of-text"
            assert len(here) == text.count("User:"), "none goes over an edge"
            held_out = [int(question.split("?")[0].split()[1]) % 10 == 0 for question, _ in here]
            assert held_out == ["val" in name] * len(here), "whatever else is left out"
            found += here
    wanted = [(t[0]["content"], t[1]["content"]) for i, t in enumerate(talks) if i not in (6, 7, 8)]
    assert sorted(found) == sorted(wanted)
    used = sum(len(render_chat(say(*pair), tok)[0]) for pair in wanted)
    assert used > 0.8 * manifest["tokens"], "rows are filled"
    assert TokenShards(out, "train", 257).masks
    before = hashes(out)
    (out / manifest["shards"][1]["mask"]["name"]).write_bytes(b"")
    assert call("--verify", "--out", out).returncode == 1
    cut = manifest | {"complete": False, "shards": manifest["shards"][:2]}  # killed on its way
    (out / "manifest.json").write_text(json.dumps(cut))
    got = call(*args, "--shard_tokens", 9000)  # would leave shards of both
    assert got.returncode == 2 and "shard_tokens = 5000, now it is 9000" in got.stderr
    assert call(*args).returncode == 0 and hashes(out) == before
