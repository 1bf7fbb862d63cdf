"""Let a model write: one completion, several, or a prompt after prompt, word by word as it goes.

    python sample.py "Hello, I'm a language model,"            # the newest run
    python sample.py --model gpt2-xl --num_samples 3 "Once upon a time"
    python sample.py --model log/RUN                           # asks for prompts
    python sample.py --chat                                    # a conversation; Ctrl-C ends an answer
    python sample.py --html page.html "The "                   # how sure was it of each token?
    echo "The import statement" | python sample.py             # one prompt a line

The text goes to stdout, everything else to stderr.
"""

import math
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from lab.cli import UserError, before_torch, command, parse, say

if __name__ == "__main__":
    before_torch()  # how Ctrl-C ends the import, and how a CPU's threads wait

import torch
from tyro.conf import Positional, arg

from lab import models
from lab.data.chat import STOPS, fit_chat
from lab.data.tokenizers import printable
from lab.files import check_writable, reading, template, write_whole
from lab.generate import KVCache, generate, read_ahead
from lab.text_stream import Text, fast_step, pieces, ready
from lab.token_colors import shade
from lab.world import World


@dataclass
class Config:
    """Let a model write: sample.py PROMPT. Without a prompt it asks for them, or reads one a line
    from a pipe. Before each it puts end-of-text, as every document has it in training."""

    prompt: Annotated[tuple[str, ...], Positional, arg(metavar="[PROMPT]")] = ()  # "" is none
    # run, checkpoint, Hugging Face folder, gpt2 ... gpt2-xl; the newest run if empty
    model: str = ""
    max_new_tokens: int = 200  # length, unless the model ends the text before
    num_samples: int = 1  # texts, all computed at once
    temperature: float = 0.8  # below 1 plays safe, above 1 takes risks, 0 is the likeliest token
    top_k: int = 50  # choose among the k likeliest tokens; 0 is all
    top_p: float = 1.0  # choose among the fewest tokens whose probabilities add up to this
    # same seed, prompt and settings: same text; drawn, and shown, if not given
    seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: drawn)")] = None
    chat: bool = False  # a conversation: for a model that was tuned on some
    html: str = ""  # write a page to this file: each token shaded by its probability
    device: str = "auto"  # cuda, mps or cpu
    # auto: 16 bits on a GPU, and of a large model on a CPU that multiplies them, else fp32; int8 is
    # for a CPU, faster and a little less exact
    weights: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    # on a GPU, but for a single prompt: seconds before the first token, one launch for each other
    compile: bool = True


def check(cfg):
    """Raise UserError for settings that no model can follow."""
    rules = {
        "temperature": (0 <= cfg.temperature < math.inf, "a number, 0 (likeliest token) or more"),
        "top_p": (0 < cfg.top_p <= 1, "above 0 and at most 1 (all tokens)"),
        "top_k": (cfg.top_k >= 0, "0 (all tokens) or more"),
        "seed": (0 <= (cfg.seed or 0) < 2**32, f"0 or more and less than {2**32}"),
        "num_samples": (0 < cfg.num_samples <= 4096, "from 1 to 4096, as all are computed at once"),
        "max_new_tokens": (cfg.max_new_tokens > 0, "at least 1"),
    }
    for name, (right, rule) in rules.items():
        if not right:
            raise UserError(f"{name}={getattr(cfg, name)} must be {rule}")
    if cfg.chat and (cfg.prompt or cfg.html):
        raise UserError(
            "--chat takes what is typed, and makes no page: leave out prompt and --html"
        )
    if cfg.html:
        if not cfg.html.endswith(".html"):  # lest a checkpoint be overwritten
            raise UserError(f"html={cfg.html} must end in .html")
        check_writable(cfg.html, "html")


def drawing(model, cfg, seed, cache):
    """How generate is to draw."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p)
    return how | dict(generator=generator, cache=cache)


def complete(model, tokenizer, prompt, cfg, seed, write, cache=None):
    """The prompt's cfg.num_samples Texts. write(text) gets the prompt and the pieces of the first
    text as they come. Raises UserError, before it writes, for a prompt that does not fit."""
    how, texts = drawing(model, cfg, seed, cache), [Text(tokenizer) for _ in range(cfg.num_samples)]
    ids = [tokenizer.eot] + tokenizer.encode(prompt)  # it leads every document in training
    idx = torch.tensor([ids] * cfg.num_samples, device=how["generator"].device)
    written = read_ahead(generate(model, idx, cfg.max_new_tokens, **how))
    for i, (tokens, logits) in enumerate(written):
        if i == 0:  # it fits
            write(prompt)
        for text, token, row in zip(texts, tokens.tolist(), logits):
            if text.ended:
                continue
            piece = text.add(token)
            if text is texts[0]:
                write(piece)
            if cfg.html:
                shown = piece + "<|endoftext|>" * text.ended
                text.shades.append(shade(token, row, printable(shown), tokenizer))
        if all(text.ended for text in texts):
            return texts
    rests = [text.end() for text in texts]
    write(rests[0])
    return texts


def prompts(cfg):
    """The prompt of the command line, or those that are typed or piped in, up to the end of input
    (or an empty line typed)."""
    if cfg.prompt:
        yield " ".join(cfg.prompt)
        return
    asks = sys.stdin.isatty()
    while True:
        if asks:
            note("prompt (empty line ends): ")
        with reading("from stdin", "prompt", "pipe text in UTF-8"):
            line = sys.stdin.readline()
        if not line or (asks and not line.strip()):
            return
        if line.strip():  # a pipe may hold empty lines between its prompts
            yield line.rstrip("\r\n")


def talk(model, tokenizer, cfg, seed, cache):
    """A conversation, up to the end of input or an empty line. Ctrl-C ends an answer."""
    messages, how = [], drawing(model, cfg, seed, cache)
    size, most = model.config.block_size, cfg.max_new_tokens
    if sys.stdin.isatty():
        say("[models that --preset sft has tuned answer, others go on writing]")
    for line in prompts(cfg):
        messages.append({"role": "user", "content": line})
        try:
            ids, dropped = fit_chat(messages, tokenizer, size, most)
        except UserError as error:
            say(error)
            messages.pop()
            continue
        if dropped:
            say(f"[the oldest {dropped} messages no longer fit and are left out]")
            messages = messages[dropped:]
        answer = ""
        try:
            for piece in pieces(model, tokenizer, ids, most, stop=STOPS, one_window=True, **how):
                text = piece["text"] if answer else piece["text"].lstrip()
                answer += text
                write(text)
                if piece["end"] == "window":
                    note(f" [cut: the model's context of {size} tokens is full]")
        except KeyboardInterrupt:
            note(" [stopped]")
        write("\n")
        messages.append({"role": "assistant", "content": answer})


def note(text):
    print(text, end="", file=sys.stderr, flush=True)


def write(text):
    print(printable(text), end="", flush=True)


def main(argv):
    cfg = parse(Config, argv)
    check(cfg)
    device = World(cfg.device).device
    source = models.find(cfg.model)
    model, tokenizer = ready(source, device, cfg.weights)
    seed = cfg.seed if cfg.seed is not None else torch.seed() % 2**31
    rows = 1 if cfg.chat else cfg.num_samples
    step = fast_step(model, rows, cfg.compile and not cfg.prompt)
    if step:
        say("[the first answer waits for a compiler, for seconds; --no_compile does not]")
    cache = KVCache(model.config.block_size, step)
    if cfg.chat:
        return talk(model, tokenizer, cfg, seed, cache)
    shown = []  # of the page
    for prompt in prompts(cfg):
        t0 = time.perf_counter()
        try:
            texts = complete(model, tokenizer, prompt, cfg, seed, write, cache)
        except UserError as error:
            if cfg.prompt or not sys.stdin.isatty():
                raise
            say(error)  # who types may type again
            continue
        write("\n" + "".join(f"---\n{prompt}{text.text}\n" for text in texts[1:]))
        seconds, count = time.perf_counter() - t0, sum(text.count for text in texts)
        speed = f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tok/s on {device}"
        drawn = f", seed {seed}" if cfg.temperature else ""
        say(f"[{source}: {speed}{drawn}]")
        seed += 1
        if cfg.html:
            shown += [(printable(prompt), text.shades) for text in texts]
            page = template("token_colors.html.j2").render(title=f"{source} writes", texts=shown)
            write_whole(cfg.html, page.encode())
    if shown:
        say(f"wrote {cfg.html}")


if __name__ == "__main__":
    command(main)
