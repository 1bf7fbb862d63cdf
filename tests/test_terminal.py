"""Output on a terminal, tested with a pseudo-terminal: width, bold and dim text, progress bars, verdicts."""

import dataclasses
import json
import math
import os
import platform
import re
import struct
import threading

import pytest
from conftest import ROOT, TINY_RUN, Process, driver, run_python, succeed, train_here, wait_for

from lab.eval.blimp_published import PUBLISHED
from lab.tools.read_log import read_log
from lab.tools.verdict import LAPTOP_LOSS, loss_verdict, lower_lr_hint

FINISHING = "finishing the current step; press Ctrl-C again to quit without saving"
ANSI = re.compile(r"\033\[[0-9;]*m")


@pytest.fixture
def on_terminal(tmp_path):
    """on_terminal(program, "--flag", ..., columns=80): (exit status, output on a terminal)."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    import fcntl
    import termios

    def run(*args, columns=80, cwd=tmp_path, **env):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        received = []

        def receive():
            try:
                while data := os.read(ours, 4096):
                    received.append(data)
            except OSError:  # the terminal was closed
                pass

        reader = threading.Thread(target=receive)
        reader.start()
        name = os.ttyname(theirs)
        process = Process(*args, cwd=cwd, out=name, err=name, **dict(TERM="xterm") | env)
        status = process.wait()
        os.close(theirs)
        reader.join()
        os.close(ours)
        return status, b"".join(received).decode().replace("\r\n", "\n")

    return run


@pytest.fixture
def tiny(shards):
    flags = [*TINY_RUN, "--data", shards, "--max_steps", 2, "--sample_every", 2, "--val_every", 2]
    return ["train_gpt2.py", *flags, "--tokenizer", "bytes", "--sample_tokens", 100]


def is_command(line):
    return re.match(r" {4}\S*python", line)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_run_fits_the_terminal_with_the_loss_in_bold(on_terminal, tiny, columns):
    status, text = on_terminal(ROOT / tiny[0], *tiny[1:], columns=columns)
    lines = ANSI.sub("", text).split("\n")
    assert status == 0 and len(lines) > 20
    wide = [line for line in lines if len(line) > columns and not is_command(line)]
    assert all(len(line.split()) == 1 for line in wide)  # a path may be wider than the terminal
    assert max(map(len, lines[:8])) > columns - 20  # not narrower than needed
    bold = re.findall(r"\033\[1m(.*?)\033\[0m", text)
    assert len(bold) == 4 and all(re.fullmatch(r"loss \d\.\d{4}", part) for part in bold)
    assert len(re.findall(r"^\033\[2mstep .*\033\[1mloss .*\033\[2m.*\033\[0m$", text, re.M)) == 4


def test_no_color_and_pipes_get_plain_text(on_terminal, tiny, tmp_path):
    _, text = on_terminal(ROOT / tiny[0], *tiny[1:], NO_COLOR="1")
    assert "\033[1m" not in text and "\033[2m" not in text and "loss" in text
    more = ("--run_name", "piped", "--vocab_multiple", 1, "--total_batch_size", 64)
    done = run_python(ROOT / tiny[0], *tiny[1:], *more, cwd=tmp_path)
    assert done.returncode == 0 and "\033" not in done.stdout + done.stderr and not done.stderr
    assert max(map(len, done.stdout.split("\n"))) > 120  # not wrapped
    assert "vocabulary of 257 tokens\nd" in done.stdout  # no padding, one process, one micro-step
    assert "\nstep   64 tokens = 4 sequences x 16 tokens\n" in done.stdout
    assert re.search(r"^step +2/2 \| loss \S+ \| lr \S+ \| grad norm ", done.stdout, re.M)


def test_first_run_says_what_the_builtin_text_is(tmp_path):
    flags = [*TINY_RUN, "--data", "data/builtin", "--tokenizer", "bytes", "--max_steps", 1]
    done = run_python(ROOT / "train_gpt2.py", *flags, cwd=tmp_path)
    version = platform.python_version()
    assert f"\ndata   data/builtin (documentation of Python {version}): " in done.stdout, (
        done.stderr
    )


def test_samples_have_one_header_per_step_and_none_of_random_weights(tiny, tmp_path):
    done = run_python(ROOT / tiny[0], *tiny[1:], cwd=tmp_path)
    headers = re.findall(r"^(?:step .*samples.*|    sample .*)$", done.stdout, re.M)
    assert headers == [
        "step     0: samples not shown, because the weights are random", "step     2: samples",
        "    sample 1 of 2", "    sample 2 of 2",
    ]  # fmt: skip


@pytest.mark.parametrize("stop", [False, True])
def test_progress_bar_between_log_lines_of_slow_steps(on_terminal, tiny, tmp_path, stop):
    patch = f"""
fast = train_gpt2.Trainer.train_step
def slow(self):
    time.sleep(1.1)
    if {stop} and self.step == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return fast(self)
train_gpt2.Trainer.train_step = slow
"""
    flags = [*tiny[1:], "--max_steps", 4, "--log_every", 4, "--sample_every", 0, "--val_every", 0]
    status, text = on_terminal(driver(tmp_path, patch), *flags)
    assert status == 75 * stop and re.search(r"until step 4: .*\| [23]/4 ", text), text
    # the bar is erased before other lines, except by Ctrl-C's handler, which starts a new line
    shown = [line.rpartition("\r")[2] for line in text.split("\n")]
    pairs = zip(shown, shown[1:])
    assert {after for bar, after in pairs if "until step" in bar} <= {FINISHING}, text


def val_log(*losses, train=(1.0,)):
    """A log of validation losses every 10 steps; the vocabulary has 20 tokens, the unigram loss is 2."""
    return {
        "start": [{"step": 0, "log_v": math.log(20), "unigram": 2.0}],
        "val": [{"step": 10 * i, "loss": loss} for i, loss in enumerate(losses)],
        "train": [{"step": step, "loss": loss} for step, loss in enumerate(train)],
    }


def resumed(log, step, rate):
    """The log with a resume at `step`, after which the learning rate is `rate` instead of 0.1."""
    train = [{"step": step, "loss": 1.0, "lr": 0.1}, {"step": step + 9, "loss": 1.0, "lr": rate}]
    start = log["start"][0]
    return log | {"start": [start, start | {"step": step}], "train": train}


@pytest.mark.parametrize(
    "log, init_from, verdict",
    [
        (val_log(3, 1.2), "", "1.2000, is good (below two thirds of the unigram loss, 2.000). It is like"
         " guessing among 3.3 equally likely tokens (the perplexity); a model without context (unigram) has"
         " 7.4, a uniform guess 20.0."),
        (val_log(3, 1.5), "", "1.5000, is a start (below the unigram loss, 2.000, but not below two thirds"
         " of it). It is like guessing among 4.5 equally likely tokens "),
        (val_log(3, 2.5), "", "2.5000, is not good yet (not below the unigram loss, 2.000). It is like"
         " guessing among 12.2 "),
        (val_log(3, 3.5, train=(3.4,)), "", "3.5000, is bad: a uniform guess has 2.996; try a lower --lr (and"
         " --muon_lr)."),
        (val_log(3, 1.1, 1.2), "", "1.2000, is above its minimum of 1.1000 after step 10; train for fewer"
         " steps or on more data."),
        (val_log(3, 1.1, 1.2, train=(1.5, 1.5)), "", "1.1000 after step 10; try a lower --lr "),
        (val_log(3, 3.5, train=(0.1, 0.1)), "", "guess has 2.996; train for fewer steps or on more"),
        (val_log(1.2, 1.3), "log/base", "of 1.2000 after step 0; try a lower --lr "),
        (resumed(val_log(3, 1.1, 1.2), 10, rate=0.1), "", "of 1.1000 after step 10; train for fewer steps "),
        (resumed(val_log(3, 1.1, 1.2), 10, rate=0.3), "", "of 1.1000 after step 10; the learning rate"
         " rose again when the run was resumed, so let it finish."),
        (val_log(1.5, 1.2), "log/base", "is good: 0.300 below 1.5000, the loss before training."),
        (val_log(1.2, 1.205), "log/base", "is not better than 1.2000 at step 0; try a lower --lr "),
        ({}, "", ""),
        (val_log(), "", ""),
        (val_log(3), "", ""),  # before the first update
    ],
)  # fmt: skip
def test_verdict_on_the_loss(log, init_from, verdict):
    import train_gpt2

    cfg = dataclasses.replace(train_gpt2.PRESETS["laptop"][1], init_from=init_from)
    text = loss_verdict(log, vars(cfg))
    assert verdict in text and bool(text) == bool(verdict)
    tuned = loss_verdict(log, vars(cfg) | {"preset": "sft"})
    assert ("by heart" in tuned) == ("fewer" in verdict)  # overfitting is usual there


@pytest.mark.parametrize(
    "loss, vocab_size, data, more, compared",
    [
        (2.0, 257, "data/builtin", {}, True), (1.32, 257, "data/builtin", {}, False),
        (2.0, 1025, "data/builtin", {}, False), (2.0, 257, "data/mine", {}, False),
        (2.0, 257, "data/builtin", {"accuracy": 0.5}, False),
    ],
)  # fmt: skip
def test_make_train_is_named_only_for_higher_losses_on_the_same_bytes(
    loss, vocab_size, data, more, compared
):
    log = val_log(5, loss)
    log["start"][0]["log_v"] = math.log(vocab_size)
    log["val"][1] |= more
    reaches = "; `make train` reaches about 1.31 nats per byte on this text."
    assert loss_verdict(log, {"data": data}).endswith(reaches) == compared
    record = read_log(ROOT / "readme.assets/runs/laptop_builtin.jsonl")["val"][-1]
    assert (record["step"], round(record["loss"], 2)) == (1000, LAPTOP_LOSS)


def test_a_run_ends_with_a_verdict_and_commands_in_one_piece(on_terminal, tiny, tmp_path):
    _, text = on_terminal(ROOT / tiny[0], *tiny[1:], columns=60)
    summary = text[text.index("\nThe validation loss after step 2, ") :]
    assert "is not good yet" in summary and "\nNext:\n" in summary
    commands = re.findall(r"^  (\w.*)\n    (\S.*)$", summary, re.M)  # wider than 60 columns
    purposes = (
        "generate text|try it in a browser|export it as a web page|see curves and samples|"
        "train it further"
    )
    assert "|".join(purpose for purpose, _ in commands) == purposes
    done = run_python(ROOT / tiny[0], *tiny[1:], cwd=tmp_path / "data")
    lines = dict(re.findall(r"^  (\w.*?) {2,}(\S.*)$", done.stdout, re.M))
    assert list(lines.items()) == commands  # in a pipe, on one line each
    assert done.stdout.endswith("TOTAL\nTOTAL counts all steps, including the 2 already done.\n")
    assert done.stdout.count(" bits per byte\n") == 2
    assert done.stdout.count(" bits per byte\n       (1 bit = 0.69 nats; ") == 1


def test_commands_name_the_best_checkpoint_if_the_last_loss_is_clearly_higher(tiny, tmp_path):
    flags = ["--max_steps", 6, "--val_every", 1, "--checkpoint_every", 1, "--run_name"]
    rates = ["--schedule", "constant", "--warmup_steps", 0, "--optimizer", "adamw", "--lr"]
    for name, lr, model in (("a", 0.001, "log/a"), ("b", 1, "log/b/model_best.pt")):
        done = run_python(ROOT / tiny[0], *tiny[1:], *flags, name, *rates, lr, cwd=tmp_path)
        commands = dict(re.findall(r"^  (\w.*?) {2,}(\S.*)$", done.stdout, re.M))
        assert commands["generate text"].endswith(f"--model {model}"), done.stdout
        assert commands["try it in a browser"].endswith(f"serve {model}")
        assert ("train it further" in commands) == (name == "a")  # not after a rising loss


def test_errors_are_wrapped_but_not_the_commands_in_them(on_terminal, tmp_path):
    status, text = on_terminal(ROOT / "train_gpt2.py", "--preset", "gpt2", "--data", "absent")
    lines = text.rstrip("\n").split("\n")
    commands = [line for line in lines if "`" in line]
    assert status == 2 and len(commands) == 2, text
    assert all(re.search("`.*fineweb.py.*`", line) for line in commands)
    assert all(len(line) <= 80 for line in lines if line not in commands)
    done = run_python(ROOT / "train_gpt2.py", "--preset", "gpt2", "--data", "absent", cwd=tmp_path)
    assert done.stderr == " ".join(lines) + "\n"


def test_plan_begins_with_the_verdict_and_exits_with_3_if_it_does_not_fit(tmp_path):
    plan = [ROOT / "lab", "plan", "--preset", "gpt2-xl", "--gpu"]
    for flags, status, verdict, table in (
        ("H100", 0, "batch_size=16 fits, with ", "GiB "),
        ("RTX_4090 --batch_size 64", 3, "batch_size=64 does not fit; it needs ", "GiB "),
    ):
        flags = [flag.replace("_4090", " 4090") for flag in flags.split()]
        done = run_python(*plan, *flags, cwd=tmp_path)
        assert done.returncode == status and done.stdout.startswith(f"verdict {verdict}")
        assert done.stdout.index(f"\n{table}") > done.stdout.index("\nplan  ")


def test_help_has_common_flags_first_and_fits_the_terminal(on_terminal, tmp_path):
    for program in ("train_gpt2.py", "speedrun.py", "bert.py"):
        status, text = on_terminal(ROOT / program, "--help", NO_COLOR="1")
        assert "\033" not in text
        assert status == 0 and max(map(len, text.split("\n"))) <= 80
        groups = re.findall(r"^╭─ (\w+) options", text, re.M)
        assert groups == ["common", "model", "training", "run"]
        assert len(re.findall(r"^│ --lr ", text, re.M)) == 1
        # a comment that the formatter moved to the next line would leave its flag without a help text
        for option in re.split("^│ --", text, flags=re.M)[1:]:
            words = " ".join(option.replace("│", " ").split())
            assert not re.match(r"(\w+, --)?\w+( [A-Z|]+| {[^}]*})? \(default", words)


@pytest.mark.parametrize(
    "program", "sample.py fineweb.py hellaswag.py blimp.py lab/export lab/plan lab/plot lab/replay"
    " lab/report lab/serve".split(),
)  # fmt: skip
def test_help_shows_examples_on_their_own_lines(on_terminal, program):
    file, _, tool = program.partition("/")
    status, text = on_terminal(ROOT / file, *[tool] * bool(tool), "--help", NO_COLOR="1")
    description = text.partition("usage:")[0] if tool != "plan" else text.partition("options:")[0]
    assert status == 0 and max(map(len, description.split("\n"))) <= 80
    command = f"python -m lab {tool} " if tool else f"python {file} "
    assert len(re.findall(rf"^    {command}", description, re.M)) >= 1
    assert f"usage: {command if tool else f'{file} '}" in text


def test_advice_names_the_flags_that_a_program_has():
    import bert
    import speedrun
    import train_gpt2

    for program, flags in (
        (train_gpt2, {"lr", "muon_lr"}),
        (speedrun, {"lr", "muon_lr", "embed_lr"}),
    ):
        assert {*re.findall(r"--(\w+)", lower_lr_hint(vars(program.PRESETS["laptop"][1])))} == flags
    adamw = train_gpt2.PRESETS["gpt2"][1]
    assert lower_lr_hint(vars(adamw)) == "try a lower --lr"
    cfg = bert.PRESETS["laptop"][1]
    assert all(hasattr(cfg, flag) for flag in re.findall(r"--(\w+)", lower_lr_hint(vars(cfg))))


@pytest.fixture
def runs(tmp_path, shards):
    """The runs base and tuned, which has the same weights but the preset of fine-tuning in its config."""
    for name, preset in (("base", "laptop"), ("tuned", "sft")):
        model = dict(tokenizer="bytes", block_size=64)
        train_here(tmp_path / "log", shards, name, model, max_steps=1, preset=preset)


def test_prompt_is_bold_on_a_terminal_only(on_terminal, runs, tmp_path):
    ask = [ROOT / "sample.py", "The end", "--model", "log/base", "--max_new_tokens", 3, "--seed", 1]
    _, text = on_terminal(*ask, "--num_samples", 2)
    assert text.count("\033[1mThe end\033[0m") == 2
    assert run_python(*ask, cwd=tmp_path).stdout.startswith("The end")


def test_arrow_keys_edit_a_typed_prompt(runs, start):
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    ours, theirs = pty.openpty()
    ask = [ROOT / "sample.py", "--model", "log/base", "--max_new_tokens", "3", "--device", "cpu"]
    name = os.ttyname(theirs)
    process = start(*ask, inp=name, out=name, err=name, TERM="xterm")
    keys, seen = [b"Hi\033[D\033[D!\r", b"\r"], b""  # left, left
    try:
        while data := os.read(ours, 4096):
            if not seen:  # the program has opened it
                os.close(theirs)
            seen += data
            if keys and seen.count(b"line to quit): ") == 3 - len(keys):
                os.write(ours, keys.pop(0))
    except OSError:  # the program has ended
        pass
    assert process.wait() == 0 and b"\033[1m!Hi\033[0m" in seen, seen
    os.close(ours)


def test_chat_labels_speakers_and_warns_of_models_not_tuned(
    on_terminal, ask_sample, runs, tmp_path
):
    chat = ["--chat", "--max_new_tokens", 3, "--device", "cpu", "--model"]
    process = ask_sample(*chat, "log/base")
    wait_for(lambda: "You: " in process.stderr, process)
    process.type("Hi\n")
    wait_for(lambda: process.stderr.count("You: ") == 2, process)
    process.type("\n")
    process.wait()
    model, warning, hint, talk, *_ = process.stderr.split("\n")
    assert (
        model == "[model: log/base/model_000001.pt]"
        and "an empty line quits" in hint
        and talk == "You: Model: You: "
    )
    assert warning.startswith(
        "[log/base was not tuned to answer, so it only continues the text; to tune"
    )
    command = re.search("`(.*)`]", warning)[1]
    assert command.endswith(f"{ROOT}/train_gpt2.py --preset sft --init_from log/base")
    _, text = on_terminal(ROOT / "sample.py", *chat, "log/base")
    assert f"\n`{command}`]\n" in text  # not wrapped
    done = run_python(ROOT / "sample.py", *chat, "log/tuned", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "[model: log/tuned/model_000001.pt]\n")


def test_blimp_names_its_model_clears_its_bar_and_fits_80_columns(on_terminal, runs, tmp_path):
    rows = [
        dict(sentence_good=good, sentence_bad="It are.", UID=name, linguistics_term=name)
        for name in PUBLISHED for good in ("It is.", "It are." if name == "binding" else "It is.")
    ]  # fmt: skip
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, text = on_terminal(ROOT / "blimp.py", "--model", "base", "--data", "x.jsonl")
    model, head, *lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert model == "[model: log/base/model_000001.pt]" and head.split()[0] == "pairs", text
    assert {len(line) for line in (head, *lines[:13])} == {77} and max(map(len, lines)) <= 80
    assert "; ties, which count one half: 1" in text
    assert lines[0].split()[-1] == "99.3%" and lines[0].startswith("anaphor_agreement ")


def test_closing_list_names_the_chat_after_fine_tuning(tmp_path, shards):
    model = dict(tokenizer="bytes", block_size=64)
    train_here(tmp_path / "log", shards, "base", model, max_steps=1)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    (tmp_path / "c.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    flags = (
        "--preset sft --init_from base --data c.jsonl --device cpu --total_batch_size 256 --max_steps 2 "
        "--seq_len 64 --batch_size 4 --sample_every 0 --run_name chat"
    )
    text = succeed("train_gpt2.py", *flags.split(), cwd=tmp_path)
    commands = dict(re.findall(r"^  (\w.*?) {2,}(\S.*)$", text, re.M))
    assert commands["chat with it"].endswith("sample.py --chat --model log/chat")
    assert "generate text" not in commands
    assert commands["try it in a browser"].endswith("lab serve log/chat")
