"""Generating text: the cache changes nothing, characters come whole, and the command does what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY_MODEL, VOCAB, clean_env, run_python

import sample
from lab.data.tokenizers import get_tokenizer
from lab.weights import find_model
from sample import SampleConfig, TextStream, complete
from train_gpt2 import GPT, GPTConfig, KVCache, sample_token


def noisy_gpt(**changes):
    torch.manual_seed(11)
    model = GPT(GPTConfig(**(TINY_MODEL | dict(block_size=16) | changes)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
        model.transformer.wte.weight[model.config.vocab_size :] = 0
    return model


def always(token, **changes):
    """A model that finds one token by far the likeliest, whatever came before."""
    model = noisy_gpt(**changes)
    with torch.no_grad():
        wte = model.transformer.wte.weight
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(1000 * wte[token] / wte[token].norm())
    return model


def draw(model, idx, n, use_cache, **settings):
    generator = torch.Generator().manual_seed(5)
    return torch.stack(list(model.generate(idx, n, generator=generator, use_cache=use_cache, **settings)), dim=1)


# ----------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize(
    "settings",
    [dict(temperature=0), dict(temperature=1.0), dict(temperature=0.8, top_k=20), dict(temperature=1.3, top_p=0.7)],
    ids=["greedy", "plain", "top_k", "top_p"],
)
@pytest.mark.parametrize("prompt", [1, 5, 16])
def test_cached_and_uncached_give_the_same_tokens(attention, settings, prompt):
    """For several rows, and over 60 tokens: the window of 16 is full many times."""
    model = noisy_gpt(attention=attention)
    idx = torch.randint(VOCAB, (3, prompt))
    cached, plain = (draw(model, idx, 60, use_cache, **settings) for use_cache in (True, False))
    assert cached.shape == (3, 60) and torch.equal(cached, plain)
    if settings["temperature"]:
        assert len(cached.unique()) > 10  # not a model that repeats itself whatever it sees


def test_greedy_tokens_are_the_likeliest():
    """Against the definition, written out: position by position, from the whole text so far."""
    model, text = noisy_gpt(), torch.randint(VOCAB, (2, 4))
    drawn = draw(model, text, 12, use_cache=True, temperature=0)
    for i in range(12):
        token = model(text)[0][:, -1].argmax(-1)
        assert torch.equal(token, drawn[:, i])
        text = torch.cat([text, token[:, None]], dim=1)


def test_a_full_window_keeps_its_newer_half():
    model = noisy_gpt()
    idx = torch.randint(VOCAB, (1, 16))
    first, second = draw(model, idx, 2, use_cache=True, temperature=0)[0]
    window = torch.cat([idx[0], first[None]])[-8:]
    assert second == model(window[None])[0][0, -1].argmax()


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_a_prompt_in_pieces(attention):
    """A cache that is filled by several tokens at a time: each sees those before it, and none after."""
    model, idx = noisy_gpt(attention=attention), torch.randint(VOCAB, (2, 12))
    cache = KVCache(model.config, 2, idx.device, torch.float32)
    for piece in idx.split([5, 4, 1, 2], dim=1):
        last = model(piece, cache=cache)[0]
        assert last.shape[:2] == (2, 1)
        assert torch.allclose(last[:, 0], model(idx[:, : cache.length])[0][:, -1], atol=1e-5)
    assert cache.length == 12


def test_what_the_model_is_asked():
    """With the cache it sees the prompt once and then one token at a time; nothing once all texts have ended."""
    tokenizer = get_tokenizer("bytes")
    for token, no_cache, expected in [(120, False, [5, 1, 1, 1]), (120, True, [5, 6, 7, 8]), (256, False, [5])]:
        model, sizes = always(token), []
        model.register_forward_pre_hook(lambda module, args, sizes=sizes: sizes.append(args[0].shape[1]))
        complete(model, tokenizer, "abcd", SampleConfig(max_new_tokens=4, no_cache=no_cache), 1, lambda piece: None)
        assert sizes == expected


def test_sample_token_by_hand():
    probs = torch.tensor([[0.4, 0.05, 0.3, 0.25]])
    many = probs.log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(**settings):
        return sample_token(many, generator=generator, **settings).bincount(minlength=4) / len(many)

    for settings, expected in [
        (dict(), [0.4, 0.05, 0.3, 0.25]),
        (dict(top_k=2), [4 / 7, 0, 3 / 7, 0]),
        (dict(top_k=9), [0.4, 0.05, 0.3, 0.25]),
        (dict(top_p=0.69), [4 / 7, 0, 3 / 7, 0]),  # 0.4 does not reach 0.69, 0.4 + 0.3 does
        (dict(top_p=0.71), [0.4 / 0.95, 0, 0.3 / 0.95, 0.25 / 0.95]),
        (dict(top_p=1e-6), [1, 0, 0, 0]),
        (dict(temperature=0), [1, 0, 0, 0]),
        (dict(temperature=1e-40), [1, 0, 0, 0]),
        (dict(temperature=0.5), [0.16 / 0.315, 0.0025 / 0.315, 0.09 / 0.315, 0.0625 / 0.315]),  # squares, normalised
    ]:
        got, expected = shares(**settings), torch.tensor(expected)
        assert torch.allclose(got, expected.float(), atol=0.015), settings
        assert not got[expected == 0].any(), settings


def test_pad_rows_are_never_drawn():
    model = noisy_gpt(vocab_size=50, vocab_multiple=128)
    with torch.no_grad():  # even if they had weights, and large ones
        model.transformer.wte.weight[50:] = 10 * model.transformer.wte.weight[:1]
    assert draw(model, torch.zeros(4, 1, dtype=torch.long), 100, use_cache=True, temperature=5.0).max() < 50


# ------------------------------------------------------------------------------------------------------------ the text

TEXT = "naïve café — 日本語 🙂👩‍🚀 end"


@pytest.fixture
def tokenizers(test_data, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(test_data / "tiktoken"))
    return [get_tokenizer("bytes"), get_tokenizer("gpt2")]


def test_characters_come_whole(tokenizers):
    for tokenizer in tokenizers:
        stream, ids = TextStream(tokenizer), tokenizer.encode(TEXT)
        pieces = [stream.add(token) for token in ids]
        assert "".join(pieces) + stream.end() == TEXT
        assert not any("\ufffd" in piece for piece in pieces)
        assert "" in pieces  # some tokens end within a character, in both vocabularies
        assert "\ufffd" in tokenizer.decode(ids[: pieces.index("") + 1])  # decoding token by token would show that


def test_a_character_cut_off_by_the_end():
    tokenizer = get_tokenizer("bytes")
    stream = TextStream(tokenizer)
    assert [stream.add(b) for b in "aé".encode()[:2]] == ["a", ""]
    assert stream.add(tokenizer.eot) == "\ufffd"
    assert stream.add(ord("b")) == stream.end() == ""  # nothing follows end-of-text


@pytest.mark.parametrize("num_samples", [1, 3])
def test_end_of_text_stops(num_samples):
    tokenizer, pieces = get_tokenizer("bytes"), []
    cfg = SampleConfig(max_new_tokens=50, num_samples=num_samples)
    texts, tokens, _ = complete(always(256), tokenizer, "abc", cfg, 1, pieces.append)
    assert texts == [""] * num_samples and pieces == ["abc"] and tokens == num_samples
    pieces.clear()
    texts, tokens, _ = complete(always(ord("x")), tokenizer, "abc", cfg, 1, pieces.append)
    assert texts == ["x" * 50] * num_samples and pieces == ["abc"] + ["x"] * 50 and tokens == 50 * num_samples


def test_each_sample_ends_for_itself():
    """A row that has ended is not added to while the others go on; the first is what was streamed."""
    model, tokenizer = noisy_gpt(vocab_size=VOCAB), get_tokenizer("bytes")
    with torch.no_grad():  # end-of-text often
        model.transformer.ln_f.bias.copy_(5 * model.transformer.wte.weight[256])
    cfg, pieces = SampleConfig(max_new_tokens=40, num_samples=6, top_k=0, temperature=1.0), []
    texts, tokens, _ = complete(model, tokenizer, "abc", cfg, 5, pieces.append)
    rows = draw(model, torch.tensor([[256, 97, 98, 99]] * 6), 40, True, temperature=1.0).tolist()
    ends = [row.index(256) if 256 in row else 40 for row in rows]
    assert len(set(ends)) > 2 and max(ends) == 40
    assert texts == [tokenizer.decode(row[:end]) for row, end in zip(rows, ends)]
    assert "".join(pieces) == "abc" + texts[0] and tokens == sum(min(40, end + 1) for end in ends)


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def run_folder(tmp_path):
    """A run as the trainer leaves it, and beside it an older one."""
    for name, age in (("new", 0), ("old", 1000)):
        folder = tmp_path / "log" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model": {}, "train": {}}')
        model = noisy_gpt(block_size=64) if name == "new" else always(ord("z"))
        torch.save({"model": model.state_dict(), "model_config": vars(model.config)}, folder / "model_000010.pt")
        when = (folder / "model_000010.pt").stat().st_mtime - age
        os.utime(folder / "model_000010.pt", (when, when))
    return tmp_path / "log/new"


def test_a_run_is_no_prompt(tmp_path, run_folder):
    done = run_python(ROOT / "sample.py", "log/new", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.strip() == "sample.py: error: log/new is a run, not a prompt; to sample from it: --model log/new"
    assert run_python(ROOT / "sample.py", "", "--max_new_tokens", 1, cwd=tmp_path).returncode == 0
    long = run_python(ROOT / "sample.py", "long " * 200, "--max_new_tokens", 1, cwd=tmp_path)  # longer than a path may be
    assert "the prompt has 1000 tokens" in long.stderr


def test_command_continues_with_the_newest_run(tmp_path, run_folder):
    command = [ROOT / "sample.py", "Hello", "world", "--seed", 3, "--max_new_tokens", 90, "--device", "cpu"]
    cached = run_python(*command, cwd=tmp_path)
    assert cached.returncode == 0, cached.stderr
    assert cached.stdout.startswith("Hello world") and len(cached.stdout.encode()) > 60
    assert cached.stderr.startswith(f"[{Path('log/new/model_000010.pt')}: ")
    assert "tok/s on cpu, seed 3]" in cached.stderr and cached.stderr.count("\n") == 1
    plain = run_python(*command, "--no_cache", "--model", run_folder / "model_000010.pt", cwd=tmp_path)
    assert plain.stdout == cached.stdout
    other = run_python(*command[:-4], "--seed", 4, "--max_new_tokens", 90, "--log_dir", "log", cwd=tmp_path)
    assert other.stdout != cached.stdout


def call(monkeypatch, capfd, *args, stdin=None):
    """main() as the command line calls it: (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, args)])
    if stdin is not None:
        read, write = os.pipe()
        os.write(write, stdin.encode())
        os.close(write)
        monkeypatch.setattr(sys, "stdin", os.fdopen(read, encoding="utf-8"))
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **options: None, raising=False)
    try:
        sample.main()
        status = 0
    except SystemExit as stop:
        status = stop.code
    out, err = capfd.readouterr()
    return status, out, err


def test_several_samples_and_prompts_from_a_pipe(tmp_path, run_folder, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(monkeypatch, capfd, "ab", "--model", "log/old", "--num_samples", 3, "--max_new_tokens", 5)
    assert (status, out) == (0, "abzzzzz\n---\nabzzzzz\n---\nabzzzzz\n")
    assert err.startswith(f"[{Path('log/old/model_000010.pt')}: 15 tokens")
    assert call(monkeypatch, capfd, "ab", "--model", "old", "--max_new_tokens", 5)[1] == "abzzzzz\n", "a name that ls log shows"
    (tmp_path / "log/old").rename(tmp_path / "log/gpt2")
    assert find_model("gpt2", "log") == "gpt2", "OpenAI's weights, whatever a run is called"
    (tmp_path / "log/gpt2").rename(tmp_path / "log/old")
    for lines in ("one\n\ntwo\n", "one\ntwo"):  # an empty line is passed over
        status, out, err = call(monkeypatch, capfd, "--model", "log/old", "--max_new_tokens", 3, stdin=lines)
        assert (status, out) == (0, "onezzz\ntwozzz\n") and err.count("tok/s") == 2
    status, out, _ = call(monkeypatch, capfd, "", "--model", "log/old", "--max_new_tokens", 3)
    assert (status, out) == (0, "zzz\n")  # the model begins by itself


def test_seeds(tmp_path, run_folder, monkeypatch, capfd):
    """The seed that is shown repeats the text, whether it was given or drawn."""
    monkeypatch.chdir(tmp_path)
    _, first, err = call(monkeypatch, capfd, "ab")
    seed = err.split("seed ")[1].split("]")[0]
    assert call(monkeypatch, capfd, "ab", "--seed", seed)[1] == first
    assert call(monkeypatch, capfd, "ab")[1] != first


def test_broken_weights_are_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    weights = noisy_gpt(vocab_size=257, vocab_multiple=1).state_dict()
    torch.save(weights | {"transformer.ln_f.bias": weights["transformer.ln_f.bias"] * float("nan")}, "nan.pt")
    status, _, err = call(monkeypatch, capfd, "ab", "--model", "nan.pt")
    assert status == 2 and "the model's logits are not finite" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["ab", "--temperature", "-1"], "temperature=-1.0 must be a finite number, 0 (likeliest token) or more"),
        (["ab", "--temperature", "nan"], "temperature=nan must be a finite number"),
        (["ab", "--temperature", "0", "--num_samples", "2"], "num_samples=2 does nothing at temperature=0"),
        (["ab", "--temperature", "0", "--top_k", "5"], "top_k=5 does nothing at temperature=0"),
        (["ab", "--temperature", "0", "--top_p", "0.5"], "top_p=0.5 does nothing at temperature=0"),
        (["ab", "--top_p", "0"], "top_p=0.0 must be above 0"),
        (["ab", "--top_p", "1.5"], "top_p=1.5 must be above 0"),
        (["ab", "--top_k", "-3"], "top_k=-3 must be 0"),
        (["ab", "--seed", "99999999999999999999"], "seed=99999999999999999999 must be 0 or more and less than"),
        (["ab", "--num_samples", "0"], "num_samples=0 must be at least 1"),
        (["ab", "--num_samples", "10000000000"], "GiB for keys and values, this machine has"),
        (["ab", "--max_new_tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["a" * 64], "the prompt has 64 tokens"),
        (["ab", "--model", "nowhere.pt"], "no checkpoint nowhere.pt"),
        (["ab", "--model", "log/nowhere"], "there is no log/nowhere"),
        (["ab", "--model", "log"], "no checkpoint in log"),
        (["ab", "--model", "half"], "half has weights but no config.json"),
        (["ab", "--model", "odd"], "holds no pytorch_model.bin"),
        (["ab", "--model", "odd.pt"], "no tokenizer has 101 ids"),
        (["ab", "--model", "broken.pt"], "broken.pt cannot be read"),
        (["ab", "--log_dir", "empty"], "no run with a checkpoint in empty"),
        (["ab", "--device", "cuda:99"], "cuda:99"),
        (["ab", "--top_z", "1"], "top_z"),
        (["ab", "--top_k", "many"], "many"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path, run_folder, monkeypatch, capfd, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half/model.safetensors").write_bytes(b"")
    (tmp_path / "odd/config.json").write_text('{"model_type": "gpt2"}')
    torch.save(noisy_gpt(vocab_size=101, vocab_multiple=1).state_dict(), tmp_path / "odd.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 not a checkpoint")
    status, out, err = call(monkeypatch, capfd, *flags)
    assert status == 2 and out == "" and message in err, err
    assert {"--top_z", "many"} & set(flags) or (err.startswith("sample.py: error: ") and err.count("\n") == 1)


def test_without_a_cache_there_is_nothing_to_hold_keys_and_values(tmp_path, run_folder, monkeypatch, capfd):
    """In a machine whose memory the cache of a thousand samples would fill."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sample, "memory_of", lambda device: (2**20, "machine"))
    words = "ab", "--model", "log/old", "--num_samples", 1000, "--max_new_tokens", 2
    status, out, err = call(monkeypatch, capfd, *words)
    assert status == 2 and "num_samples=1000 takes 0 GiB for keys and values, this machine has 0; lower" in err
    status, out, err = call(monkeypatch, capfd, *words, "--no_cache")
    assert status == 0 and out.count("abzz") == 1000, err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_asks_on_a_terminal(tmp_path, run_folder):
    import pty

    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "sample.py"), "--model", "log/old", "--max_new_tokens", "3", "--device", "cpu"],
        cwd=tmp_path, env=clean_env(), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.write(terminal, b"one\n" + b"a" * 16 + b"\ntwo\n\n")
    out, err = process.communicate(timeout=120)
    os.close(terminal), os.close(theirs)
    assert (process.returncode, out) == (0, "onezzz\ntwozzz\n"), err
    assert err.count("prompt (empty line ends): ") == 4
    assert "the prompt has 16 tokens" in err  # and the next one is asked for


def test_a_reader_that_leaves(tmp_path, run_folder):
    """`sample.py ... | head` ends without a traceback."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "sample.py"), "hello", "--model", "log/old", "--max_new_tokens", "99999"],
        cwd=tmp_path, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.read(5) == b"hello"
    process.stdout.close()
    assert process.stderr.read().decode() == ""
    assert process.wait(timeout=120) == 0


def test_help():
    done = run_python(ROOT / "sample.py", "--help", cwd=ROOT)
    assert done.returncode == 0
    for flag in ("PROMPT", "--model", "--temperature", "--top_k", "--top_p", "--seed", "--num_samples", "--no_cache"):
        assert flag in done.stdout
