"""Let a model write: one completion, several, or a prompt after prompt, word by word as it thinks of them.

    python sample.py "Hello, I'm a language model,"                    # the newest run
    python sample.py --model gpt2-xl --num_samples 3 "Once upon a time"
    python sample.py --model log/RUN                                   # asks for prompts; an empty line ends
    echo "The import statement" | python sample.py                     # one prompt a line

The text goes to stdout, everything else to stderr.
"""

import codecs
import contextlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Annotated

from lab.run.stop import importing, running

if __name__ == "__main__":
    importing("sample.py")

import torch
from tyro.conf import Positional, arg

from lab.data.tokenizers import get_tokenizer, name_of_size, printable
from lab.device import Precision, memory_of, out_of_memory
from lab.run.checkpoints import has_checkpoint
from train_gpt2 import World


@dataclass
class SampleConfig:
    """Let a model write: sample.py PROMPT. Without a prompt it asks for them, or reads one a line from a pipe."""

    prompt: Annotated[tuple[str, ...], Positional, arg(metavar="[PROMPT]")] = ()  # the text's beginning; "" is none
    model: str = ""  # run folder, checkpoint, Hugging Face folder, gpt2 ... gpt2-xl; the newest run if empty
    max_new_tokens: int = 200  # length, unless the model ends the text before
    num_samples: int = 1  # texts, all computed at once
    temperature: float = 0.8  # below 1 plays safe, above 1 takes risks, 0 always takes the likeliest token
    top_k: int = 50  # choose among the k likeliest tokens; 0 is all
    top_p: float = 1.0  # choose among the fewest tokens whose probabilities add up to this (nucleus sampling)
    seed: int | None = None  # same seed, prompt and settings: same text; drawn, and shown at the end, if not given
    no_cache: bool = False  # recompute all keys and values for every token: the same text, slower
    device: str = "auto"  # cuda, mps or cpu
    log_dir: str = "log"  # where the newest run is looked for


def check(cfg):
    """Raise ValueError for settings that no model can follow."""
    if not 0 <= cfg.temperature < float("inf"):
        raise ValueError(f"temperature={cfg.temperature} must be a finite number, 0 (likeliest token) or more")
    if not 0 < cfg.top_p <= 1:
        raise ValueError(f"top_p={cfg.top_p} must be above 0 and at most 1 (all tokens)")
    if cfg.top_k < 0:
        raise ValueError(f"top_k={cfg.top_k} must be 0 (all tokens) or more")
    if cfg.seed is not None and not 0 <= cfg.seed < 2**32:
        raise ValueError(f"seed={cfg.seed} must be 0 or more and less than {2**32}")
    for name in ("num_samples", "max_new_tokens"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1")
    for name in ("num_samples", "top_k", "top_p"):
        if not cfg.temperature and getattr(cfg, name) != getattr(SampleConfig(), name):
            raise ValueError(f"{name}={getattr(cfg, name)} does nothing at temperature=0, where the likeliest token is always "
                             f"taken; leave it out, or raise --temperature")  # fmt: skip


class TextStream:
    """Text of token ids that come one by one. A character's bytes may be spread over several tokens in both
    vocabularies: it is given out when its last byte has come, never as halves."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoder, self.ended = tokenizer, codecs.getincrementaldecoder("utf-8")("replace"), False

    def add(self, token):
        """The text that this token completes, perhaps none. After end-of-text there is no more."""
        if self.ended or token == self.tokenizer.eot:
            return self.end()
        return self.decoder.decode(self.tokenizer.bytes_of(token))

    def end(self):
        """What is left of a character that was begun, as U+FFFD."""
        self.ended = True
        return self.decoder.decode(b"", final=True)


def complete(model, tokenizer, prompt, cfg, seed, write, precision=None):
    """Continue the prompt cfg.num_samples times; returns (texts without the prompt, tokens drawn, seconds).

    write(text) gets the prompt and the pieces of the first text as they come. Raises
    ValueError, before it writes, for a prompt or a number of samples that does not fit.
    """
    device = next(model.parameters()).device
    ids = [tokenizer.eot] + tokenizer.encode(prompt)  # in training, end-of-text leads every document
    if len(ids) > model.config.block_size:
        raise ValueError(
            f"the prompt has {len(ids) - 1} tokens, and one more for end-of-text in front; the model's context is "
            f"{model.config.block_size}: shorten it by {len(ids) - model.config.block_size}"
        )
    c, (memory, what) = model.config, memory_of(device)
    positions = len(ids) if cfg.no_cache else c.n_layer * c.block_size  # without a cache, a layer's are gone before the next's
    need = cfg.num_samples * 2 * positions * c.n_embd * 2  # bytes of keys and values, in 16 bits at least
    if need > memory:
        raise ValueError(f"num_samples={cfg.num_samples} takes {need / 2**30:,.0f} GiB for keys and values, this {what} has "
                         f"{memory / 2**30:,.0f}; lower --num_samples")  # fmt: skip
    write(prompt)
    idx = torch.tensor([ids] * cfg.num_samples, device=device)
    streams, texts = [TextStream(tokenizer) for _ in range(cfg.num_samples)], [""] * cfg.num_samples
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens, t0 = 0, time.perf_counter()
    with precision.autocast() if precision else contextlib.nullcontext():
        for row in model.generate(
            idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, generator, use_cache=not cfg.no_cache
        ):
            for i, token in enumerate(row.tolist()):
                tokens += not streams[i].ended
                piece = streams[i].add(token)
                texts[i] += piece
                if i == 0 and piece:
                    write(piece)
            if all(stream.ended for stream in streams):
                break
    seconds = time.perf_counter() - t0
    for i, stream in enumerate(streams):
        piece = stream.end()
        texts[i] += piece
        if i == 0 and piece:
            write(piece)
    return texts, tokens, seconds


def prompts(cfg):
    """The prompt of the command line, or those that are typed or piped in, up to the end of input (or an empty line typed)."""
    if cfg.prompt:
        yield " ".join(cfg.prompt)
        return
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("prompt (empty line ends): ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or (asks and not line.strip()):
            return
        if line.strip():  # a pipe may hold empty lines between its prompts
            yield line.rstrip("\r\n")


def write(text):
    print(printable(text), end="", flush=True)


def run(cfg):
    from lab.weights import find_model, load_model

    check(cfg)
    world = World(cfg.device)
    precision = Precision("auto", world.device)
    precision.prepare()
    if len(cfg.prompt) == 1 and os.path.isdir(cfg.prompt[0]) and has_checkpoint(cfg.prompt[0]):
        raise ValueError(f"{cfg.prompt[0]} is a run, not a prompt; to sample from it: --model {cfg.prompt[0]}")
    source = find_model(cfg.model, cfg.log_dir)
    model = load_model(source).to(world.device).eval()
    tokenizer = get_tokenizer(name_of_size(model.config.vocab_size))
    seed = cfg.seed if cfg.seed is not None else torch.seed() % 2**31
    n = -1
    for n, prompt in enumerate(prompts(cfg)):
        try:
            texts, tokens, seconds = complete(model, tokenizer, prompt, cfg, seed + n, write, precision)
        except ValueError as error:
            if cfg.prompt or not sys.stdin.isatty():
                raise
            print(error, file=sys.stderr)  # who types may type again
            continue
        write("\n")
        for text in texts[1:]:
            write(f"---\n{prompt}{text}\n")
        speed = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tok/s on {world.device}"
        drawn = f", seed {seed + n}" if cfg.temperature else ""
        print(f"[{source}: {speed}{drawn}]", file=sys.stderr, flush=True)
    if n < 0 and not sys.stdin.isatty():
        raise ValueError('there is no prompt; name one, as in python sample.py "The ", or pipe lines in')


def main():
    import tyro

    cfg = tyro.cli(SampleConfig, prog="sample.py", use_underscores=True, config=(tyro.conf.FlagCreatePairsOff,))
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    try:
        run(cfg)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MemoryError, RuntimeError) as error:
        if "probability tensor" in str(error):  # multinomial's: inf or nan among the model's numbers
            print("sample.py: error: the model's logits are not finite, so its weights are broken; take another checkpoint",
                  file=sys.stderr)  # fmt: skip
            sys.exit(2)
        if not out_of_memory(error):
            raise
        print("sample.py: error: the memory is too small for so many samples; lower --num_samples", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    with running("sample.py"):
        main()
