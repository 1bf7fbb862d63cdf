"""Generate text with a trained model: completions of a prompt, or an interactive session.

    python sample.py "Hello, I'm a language model,"    # the newest run
    python sample.py --model gpt2-xl --num_samples 3 "Once upon a time"
    python sample.py --model log/RUN                   # asks for prompts
    python sample.py --chat                            # Ctrl-C stops an answer
    python sample.py --html page.html "The "           # shaded by probability
    echo "The import statement" | python sample.py     # one prompt per line

Each prompt is preceded by an end-of-text token, like each document in training. The text goes to stdout
and is printed as it is generated, on a terminal with the prompt in bold; everything else goes to stderr.
"""

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lab.cli import (
    UserError,
    bold,
    counted,
    eprint,
    parse_args,
    pre_import_setup,
    require,
    run_main,
    shell_quote,
)

if __name__ == "__main__":
    pre_import_setup()  # SIGINT handling and OpenMP wait policy: must run before `import torch`

import torch
from tyro.conf import Positional, arg

from lab.data.chat import STOP_STRINGS, truncate_chat
from lab.data.tokenizers import END_OF_TEXT, Tokenizer, printable
from lab.distributed import World
from lab.files import atomic_write, check_writable, read_errors
from lab.hardware import oom_hint
from lab.inference.generate import CHAT_TEMPERATURE, TEMPERATURE, KVCache, generate, prefetch_tokens
from lab.inference.streaming import (
    IncrementalDetokenizer,
    load_for_inference,
    make_decode_step,
    stream_generate,
)
from lab.inference.token_logprobs import token_logprobs
from lab.registry import chat_warning, resolve_source
from lab.templates import load_template

OOM_FIX = "pass a smaller --num_samples or another --model, or --device cpu"


@dataclass
class Config:
    """The flags of sample.py."""

    # text to continue; "": begin a new text
    prompt: Annotated[tuple[str, ...], Positional, arg(metavar="[PROMPT]")] = ()
    # run, checkpoint, Hugging Face folder, or gpt2 ... gpt2-xl; empty: the newest run
    model: str = ""
    max_new_tokens: int = 200  # maximum number of new tokens; the model may end the text earlier
    num_samples: int = 1  # texts per prompt, generated as one batch
    # 1: the model's own probabilities; lower: more predictable; 0: greedy
    temperature: Annotated[
        float | None,
        arg(
            metavar="FLOAT",
            help_behavior_hint=f"(default: {TEMPERATURE}, --chat {CHAT_TEMPERATURE})",
        ),
    ] = None
    top_k: int = 50  # sample from the k most probable tokens; 0: from all
    top_p: float = 1.0  # sample from the fewest tokens whose probabilities add up to at least this
    # the same seed, prompt and flags give the same text; the seed is printed after a text
    seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: random)")] = None
    chat: bool = False  # a conversation, for models fine-tuned on conversations
    html: str = ""  # write a page to this file in which each token is shaded by its probability
    device: str = "auto"  # cuda, cuda:N, mps or cpu
    # auto: 16 bits on a GPU, bf16 for a large model on a CPU that supports it, else fp32; int8: CPU
    # only, faster but less exact
    weights: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    # compile the decode step on a GPU: takes seconds at the start, then generates faster. Not used with
    # a PROMPT on the command line
    compile: bool = True

    def __post_init__(self) -> None:
        if self.temperature is None:
            self.temperature = CHAT_TEMPERATURE if self.chat else TEMPERATURE


def check(cfg: Config) -> None:
    """Raise UserError for values that cannot work with any model."""
    rules = {
        "temperature": (
            0 <= cfg.temperature < math.inf,
            "at least 0 (greedy)" if cfg.temperature < 0 else "a finite number",
        ),
        "top_p": (0 < cfg.top_p <= 1, "above 0 and at most 1 (all tokens)"),
        "top_k": (cfg.top_k >= 0, "at least 0 (all tokens)"),
        "seed": (0 <= (cfg.seed or 0) < 2**32, f"at least 0 and less than {2**32}"),
        "num_samples": (
            0 < cfg.num_samples <= 4096,
            "from 1 to 4096, because it is the batch size",
        ),
        "max_new_tokens": (cfg.max_new_tokens > 0, "at least 1"),
    }
    for name, (valid, rule) in rules.items():
        require(valid, f"{name}={getattr(cfg, name)} must be {rule}")
    require(not (cfg.chat and cfg.prompt), "--chat reads messages from stdin; leave out the prompt")
    require(not (cfg.chat and cfg.html), "--chat writes no page; leave out --html")
    name = " ".join(cfg.prompt)
    require(
        cfg.model or not is_model(name),
        f"prompt={name} is a run or a checkpoint; pass it as --model {shell_quote(name)}, or pass another "
        "--model to continue these words",
    )
    if cfg.html:
        # the suffix is required, so that a mistyped path does not overwrite a checkpoint
        require(cfg.html.endswith(".html"), f"html={cfg.html} must end in .html")
        check_writable(cfg.html, "html")


def is_model(name: str) -> bool:
    """Whether this names a checkpoint, or a run or Hugging Face folder, which have a config.json."""
    # os.path, because Path.exists raises OSError for a long text
    if name.endswith(".pt"):
        return os.path.isfile(name)
    return bool(name.strip(".")) and any(
        os.path.exists(os.path.join(folder, "config.json")) for folder in (name, f"log/{name}")
    )


def sampling_kwargs(model: Any, cfg: Config, seed: int, cache: KVCache | None) -> dict[str, Any]:
    """The keyword arguments of generate."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    sampling = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    return sampling | dict(generator=generator, cache=cache)


def complete(
    model: Any, tokenizer: Tokenizer, prompt: str, cfg: Config, seed: int,
    emit: Callable[[str, bool], None], cache: KVCache | None = None,
) -> tuple[list[IncrementalDetokenizer], list[list[dict]]]:  # fmt: skip
    """Generate cfg.num_samples completions. Returns their detokenizers and, with --html, the
    token_logprobs of their tokens.

    emit(text, is_prompt) is called with the prompt, then with each piece of the first completion. Raises
    UserError, before the first call, for a prompt longer than the model's context.
    """
    detokenizers = [IncrementalDetokenizer(tokenizer) for _ in range(cfg.num_samples)]
    records: list[list[dict]] = [[] for _ in detokenizers]
    gen_kwargs = sampling_kwargs(model, cfg, seed, cache)
    ids = [tokenizer.eot, *tokenizer.encode(prompt)]  # as documents start in training
    idx = torch.tensor([ids] * cfg.num_samples, device=gen_kwargs["generator"].device)
    pairs = prefetch_tokens(generate(model, idx, cfg.max_new_tokens, **gen_kwargs))
    for step, (tokens, logits) in enumerate(pairs):
        if step == 0:  # not before, because generate raises if the prompt is too long
            emit(prompt, True)
        for i, token in enumerate(tokens.tolist()):
            if detokenizers[i].ended:
                continue
            new = detokenizers[i].add(token)
            if i == 0:
                emit(new, False)
            if cfg.html:
                shown = printable(new + END_OF_TEXT * detokenizers[i].ended)
                records[i].append(token_logprobs(token, logits[i], shown, tokenizer))
        if all(text.ended for text in detokenizers):
            return detokenizers, records
    rests = [text.end() for text in detokenizers]
    emit(rests[0], False)
    return detokenizers, records


def read_prompts(cfg: Config) -> Iterator[str]:
    """Yield the prompt on the command line, or the lines of stdin until its end or a typed empty line."""
    if cfg.prompt:
        yield " ".join(cfg.prompt)
        return
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            prompt = bold("You: ", sys.stderr) if cfg.chat else "prompt (empty line to quit): "
        with read_errors("from stdin", "prompt", "pipe text in UTF-8"):
            line = read_line(prompt) if interactive else sys.stdin.readline()
        if not line or (interactive and not line.strip()):
            return
        if line.strip():  # a pipe may have empty lines between prompts
            yield line.rstrip("\r\n")


def read_line(prompt: str) -> str:
    """A line that the user types, "" at the end of input. On a terminal the arrow keys move in the line and
    recall earlier ones."""
    if not sys.stdout.isatty():  # input() would write the prompt into the file
        print_status(prompt)
        return sys.stdin.readline()
    with contextlib.suppress(ImportError):  # does not exist on Windows
        import readline  # changes input()

        readline.parse_and_bind("set enable-bracketed-paste off")
        prompt = re.sub("(\033\\[[0-9]*m)", "\001\\1\002", prompt)  # codes take no room
    try:
        return input(prompt) + "\n"
    except EOFError:
        return ""


def chat_loop(model: Any, tokenizer: Tokenizer, cfg: Config, seed: int, cache: KVCache) -> None:
    """A conversation, until stdin ends or an empty line is typed. Ctrl-C stops an answer."""
    messages: list[dict[str, str]] = []
    gen_kwargs = sampling_kwargs(model, cfg, seed, cache)
    block_size = model.config.block_size
    interactive = sys.stdin.isatty()
    if interactive:
        eprint("[an empty line quits; Ctrl-C stops an answer]")
    for line in read_prompts(cfg):
        messages.append({"role": "user", "content": line})
        try:
            ids, dropped = truncate_chat(messages, tokenizer, block_size, cfg.max_new_tokens)
        except UserError as error:
            eprint(str(error))
            messages.pop()
            continue
        if dropped:
            eprint(
                f"[left out, because they no longer fit: the oldest {counted(dropped, 'message')}]"
            )
            messages = messages[dropped:]
        pieces = stream_generate(
            model, tokenizer, ids, cfg.max_new_tokens,
            stop=STOP_STRINGS, no_sliding_window=True, **gen_kwargs,
        )  # fmt: skip
        answer = ""
        if interactive:
            print_status(bold("Model: ", sys.stderr))
        try:
            for piece in pieces:
                text = piece["text"] if answer else piece["text"].lstrip()
                answer += text
                print_text(text)
                if piece["end"] == "window":
                    print_status(f" [cut: the model's context of {block_size} tokens is full]")
        except KeyboardInterrupt:
            print_status(" [stopped]")
        print_text("\n")
        messages.append({"role": "assistant", "content": answer})


def completion_loop(
    model: Any, tokenizer: Tokenizer, cfg: Config, seed: int, cache: KVCache, source: str,
    device: torch.device,
) -> None:  # fmt: skip
    """Complete each prompt, and print the speed. source: the model's name on the page of --html."""
    page_texts = []
    for prompt in read_prompts(cfg):
        t0 = time.perf_counter()
        try:
            texts, records = complete(model, tokenizer, prompt, cfg, seed, print_text, cache)
        except (KeyboardInterrupt, UserError) as error:
            if cfg.prompt or not sys.stdin.isatty():
                raise
            eprint(str(error) or " [stopped]")  # and ask for another prompt
            continue
        print_text("\n")
        for text in texts[1:]:
            print_text("---\n")
            print_text(prompt, is_prompt=True)
            print_text(f"{text.text}\n")
        seconds, count = time.perf_counter() - t0, sum(text.count for text in texts)
        speed = f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tok/s on {device}"
        shown_seed = f", seed {seed}" if cfg.temperature else ""
        eprint(f"[{speed}{shown_seed}]")
        seed += 1
        if cfg.html:
            page_texts += [(printable(prompt), tokens) for tokens in records]
            page = load_template("token_logprobs.html.j2")
            html = page.render(title=f"Samples of {source}", texts=page_texts)
            atomic_write(cfg.html, html.encode(errors="replace"))
    if page_texts:
        eprint(f"wrote {cfg.html}")


def print_status(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def print_text(text: str, is_prompt: bool = False) -> None:
    text = printable(text)
    print(bold(text) if is_prompt else text, end="", flush=True)


def run(cfg: Config) -> None:
    """Load the model, then complete the prompts or start a conversation."""
    device = World(cfg.device).device
    source = resolve_source(cfg.model)
    model, tokenizer = load_for_inference(source, device, cfg.weights)
    eprint(printable(f"[model: {source}{', the newest run' * (not cfg.model)}]"))
    seed = cfg.seed if cfg.seed is not None else torch.seed() % 2**31
    rows = 1 if cfg.chat else cfg.num_samples
    step = make_decode_step(model, rows, enabled=cfg.compile and not cfg.prompt)
    if step:
        eprint(
            "[the first answer takes seconds longer because of compilation; --no_compile avoids it]"
        )
    cache = KVCache(model.config.block_size, step)
    if cfg.chat:
        if warning := chat_warning(source):
            eprint(printable(f"[{warning}]"))
        return chat_loop(model, tokenizer, cfg, seed, cache)
    completion_loop(model, tokenizer, cfg, seed, cache, source, device)


def main(argv: list[str]) -> None:
    cfg = parse_args(Config, argv, __doc__)
    check(cfg)
    with oom_hint(OOM_FIX):
        run(cfg)


if __name__ == "__main__":
    run_main(main)
