"""Talk to a model in a browser, or through OpenAI's interface: python -m lab serve log/RUN.

    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "The ", "max_tokens": 50}'

serve_app.py has the paths. Everybody's text is computed by one thread, a few tokens at a time in
turn; for who leaves, nothing more is computed.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from tyro.conf import Positional, arg

from lab import models
from lab.cli import UserError, parse
from lab.data.chat import fit_chat
from lab.device import find_device
from lab.generate import KVCache, generate
from lab.text_stream import Busy, fast_step, pieces, ready

TURN = 0.03  # seconds of computing, then the next one's turn
AT_ONCE, WAITING = 4, 96  # texts: each of the first has a cache, the others wait for one


@dataclass
class Config:
    """A page to talk to a model, and OpenAI's interface to it."""

    # run, checkpoint, Hugging Face folder, gpt2 ... gpt2-xl; the newest run if empty
    model: Annotated[str, Positional, arg(metavar="[RUN]")] = ""
    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines in: there is no password
    port: int = 8000  # 0 takes any that is free
    device: str = "auto"  # cuda, mps or cpu
    weights: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"  # int8: on a CPU
    compile: bool = True  # on a GPU: seconds of warm-up, then a token is one launch


class Engine:
    """A model, and the one thread that computes with it: its queue is the order of turns."""

    def __init__(self, model, tokenizer, step=None):
        """step: of its caches, see lab.generate."""
        self.model, self.tokenizer = model, tokenizer
        self.block_size, self.device = model.config.block_size, next(model.parameters()).device
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.caches = asyncio.Queue()
        idx = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        for _ in range(AT_ONCE):
            cache = KVCache(self.block_size, step)
            if step:  # three tokens, for which it is compiled, and recorded for each cache
                self.thread.submit(list, generate(model, idx, 3, cache=cache)).result()
            self.caches.put_nowait(cache)
        self.texts = 0  # being written, or waiting

    async def compute(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    async def begin(self, ask):
        """What ids_of says. Raises Busy where too many wait."""
        if self.texts >= AT_ONCE + WAITING:
            raise Busy(f"{self.texts} texts are being written or wait; try again in a minute")
        return await self.compute(self.ids_of, ask)

    def ids_of(self, ask):
        """(ids to go on from, how many messages were dropped for them). Raises UserError for what
        does not fit."""
        eot, dropped = self.tokenizer.eot, 0
        if ask.messages is not None:
            ids, dropped = fit_chat(ask.messages, self.tokenizer, self.block_size, ask.max_tokens)
        else:
            text = isinstance(ask.prompt, str)
            ids = self.tokenizer.encode(ask.prompt) if text else ask.prompt
            ids = ids if not text and ids[:1] == [eot] else [eot, *ids]  # it leads every document
        if len(ids) > self.block_size:
            raise UserError(
                f"a prompt of {len(ids)} tokens is longer than the model's context of "
                f"{self.block_size}; shorten it"
            )
        ids = [*ids, *ask.answer]
        if wrong := [i for i in ids if not 0 <= i <= eot]:
            raise UserError(f"token {wrong[0]} is not one of this model's, 0 to {eot}")
        if ask.messages is not None and len(ids) >= self.block_size:
            raise UserError(f"the answer fills the model's context of {self.block_size} tokens")
        # a full window keeps its newer half, as in lab.generate
        return ids if len(ids) <= self.block_size else ids[-(self.block_size // 2) :], dropped

    @contextlib.asynccontextmanager
    async def place(self):
        """A cache, as soon as one is free."""
        self.texts += 1
        try:
            cache = await self.caches.get()
            try:
                yield cache
            finally:  # a turn that still computes ends before the next one's begins: one thread
                self.caches.put_nowait(cache)
        finally:
            self.texts -= 1

    async def write(self, ask, ids, cache):
        """Yield lists of pieces (see lab.text_stream), one of each turn."""
        generator = torch.Generator(self.device).manual_seed(ask.seed)
        how = dict(temperature=ask.temperature, top_k=ask.top_k, top_p=ask.top_p)
        how |= dict(generator=generator, cache=cache, likeliest=ask.likeliest, stop=ask.stop)
        how["one_window"] = ask.messages is not None
        steps = pieces(self.model, self.tokenizer, ids, ask.max_tokens, **how)
        while new := await self.compute(one_turn, steps):
            yield new


def one_turn(steps):
    """What comes of an iterator in TURN seconds; nothing at its end."""
    new, until = [], time.perf_counter() + TURN
    for step in steps:
        new.append(step)
        if time.perf_counter() > until:
            break
    return new


def main(argv):
    cfg = parse(Config, argv)
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be installed to serve: pip install -r requirements-serve.txt"
        )
    import uvicorn

    from lab.tools.serve_app import application

    device = find_device(cfg.device, 0)
    source = models.find(cfg.model)
    try:
        door = socket.create_server((cfg.host, cfg.port))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"host={cfg.host} port={cfg.port} cannot be opened ({error}); choose another --host or --port"
        ) from error
    model, tokenizer = ready(source, device, cfg.weights)
    t0, step = time.perf_counter(), fast_step(model, wanted=cfg.compile)
    engine = Engine(model, tokenizer, step)
    if step:
        print(f"compiled in {time.perf_counter() - t0:.0f} s", flush=True)
    host, port = door.getsockname()
    # a page of another site may not ask us under a name of its own (DNS rebinding)
    hosts = ["127.0.0.1", "localhost"] if host.startswith("127.") else ["*"]
    name = "/".join(Path(source).parts[-2:]).removesuffix(".pt")  # not where it lies
    app = application(engine, name, hosts)
    print(f"{source} on {device}: http://{host}:{port}   (Ctrl-C ends it)", flush=True)
    options = dict(log_level="warning", limit_concurrency=1000, timeout_graceful_shutdown=2)
    uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[door])
