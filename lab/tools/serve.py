"""Serve a model: a web page, and an API like OpenAI's.

    python -m lab serve log/RUN
    curl http://127.0.0.1:8000/v1/completions \\
        -H "Content-Type: application/json" \\
        -d '{"prompt": "The ", "max_tokens": 50}'

serve_app.py defines the routes. A single thread runs the model and generates a few tokens of each text
in turn. If a client disconnects, its generation is cancelled.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import errno
import importlib.util
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from tyro.conf import Positional, arg

from lab.cli import ROOT, UserError, parse_args
from lab.data.chat import truncate_chat
from lab.data.tokenizers import Tokenizer
from lab.hardware import oom_hint, resolve_device
from lab.inference.generate import KVCache, generate, window
from lab.inference.streaming import (
    QueueFullError,
    load_for_inference,
    make_decode_step,
    stream_generate,
)
from lab.registry import chat_warning, is_checkpoint, resolve_source, training_data, tuned_on
from lab.tools.read_log import column, read_log
from lab.trainer.checkpoint import read_checkpoint, step_of

T = TypeVar("T")

TURN_SECONDS = 0.03  # computing time of one text before the next one's turn
MAX_ACTIVE, MAX_WAITING = 4, 96  # requests with a cache, and requests that wait for one
OOM_FIX = "serve a smaller model, close other programs on this device, or pass --device cpu"


@dataclass
class Config:
    """Serve a web page for a model, and an API like OpenAI's."""

    # run, checkpoint, Hugging Face folder, or gpt2 ... gpt2-xl; empty: the newest run
    model: Annotated[str, Positional, arg(metavar="[RUN]")] = ""
    host: str = "127.0.0.1"  # 0.0.0.0 accepts connections from other machines, without a password
    port: int = 8000  # 0: any free port
    device: str = "auto"  # cuda, cuda:N, mps or cpu
    weights: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"  # int8: CPU only
    compile: bool = True  # on a GPU: takes seconds at the start, then generates faster


class Engine:
    """A model and the single thread that runs it, in the order of its queue."""

    def __init__(self, model: Any, tokenizer: Tokenizer, step: Callable | None = None):
        """step: the `step` of its KVCaches, from make_decode_step."""
        self.model, self.tokenizer = model, tokenizer
        self.block_size, self.device = model.config.block_size, next(model.parameters()).device
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.caches: asyncio.Queue[KVCache] = asyncio.Queue()
        idx = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        for _ in range(MAX_ACTIVE):
            cache = KVCache(self.block_size, step)
            if step:  # the second and third token compile the step and record the CUDA graph
                self.thread.submit(list, generate(model, idx, 3, cache=cache)).result()
            self.caches.put_nowait(cache)
        self.num_requests = 0  # number of active and waiting requests

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Await function(*args) in the engine's thread. Raises UserError if memory runs out."""

        def work() -> T:
            with oom_hint(OOM_FIX):
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Context manager: count a request as active or waiting. Raises QueueFullError at the limit."""
        if self.num_requests >= MAX_ACTIVE + MAX_WAITING:
            raise QueueFullError(
                f"{self.num_requests} requests are active or waiting, which is the maximum; try again "
                "in a minute"
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def prompt_ids(self, request: Any) -> tuple[list[int], int]:
        """(ids to continue from, number of old messages that were dropped to fit the context). Raises
        UserError for a request that does not fit."""
        eot, dropped = self.tokenizer.eot, 0
        if request.messages is not None and not request.prompt:
            ids, dropped = truncate_chat(
                request.messages, self.tokenizer, self.block_size, request.max_tokens
            )
        elif isinstance(request.prompt, str):
            ids = [eot, *self.tokenizer.encode(request.prompt)]  # as documents in training start
        else:
            ids = request.prompt if request.prompt[:1] == [eot] else [eot, *request.prompt]
        if len(ids) > self.block_size:
            raise UserError(
                f"a prompt of {len(ids)} tokens is longer than the model's context of "
                f"{self.block_size}; shorten it"
            )
        ids, last = [*ids, *request.answer], self.tokenizer.vocab_size - 1
        if wrong := [i for i in ids if not 0 <= i <= last]:
            raise UserError(f"token {wrong[0]} must be an id of this model, 0 to {last}")
        if request.messages is not None and len(ids) >= self.block_size:
            raise UserError(
                f"the answer fills the model's context of {self.block_size} tokens; start a new chat"
            )
        return window(ids, self.block_size), dropped

    @contextlib.contextmanager
    def lend(self, cache: KVCache) -> Iterator[KVCache]:
        """Context manager: put a cache from `caches` back at the end.

        It is not an async one that also waits for the cache: asyncio would close its generator at Ctrl-C,
        perhaps before the code inside, which would then end in an error."""
        try:
            yield cache
        finally:  # a cancelled turn may still be running, but ends before the cache is used again
            self.caches.put_nowait(cache)

    async def stream(
        self, request: Any, ids: list[int], cache: KVCache, whole_turns: bool = False
    ) -> AsyncIterator[list[dict]]:
        """Yield lists of new pieces (see lab.inference.streaming) as soon as they are computed or, if
        whole_turns, after each turn, which takes less CPU time."""
        generator = torch.Generator(self.device).manual_seed(request.seed)
        pieces = stream_generate(
            self.model, self.tokenizer, ids, request.max_tokens, request.likeliest, request.stop,
            no_sliding_window=request.messages is not None, temperature=request.temperature,
            top_k=request.top_k, top_p=request.top_p, generator=generator, cache=cache,
        )  # fmt: skip
        new: collections.deque[dict] = collections.deque()
        arrived, loop, more = asyncio.Event(), asyncio.get_running_loop(), True

        def add(piece: dict) -> None:  # in the engine's thread
            new.append(piece)
            if not whole_turns:
                loop.call_soon_threadsafe(arrived.set)

        while more:
            turn = asyncio.ensure_future(self.compute(take_turn, pieces, add))
            turn.add_done_callback(lambda _: arrived.set())
            while new or not turn.done():
                await arrived.wait()
                arrived.clear()
                if ready := [new.popleft() for _ in range(len(new))]:
                    yield ready
            more = turn.result()


def take_turn(pieces: Iterator[dict], add: Callable[[dict], None]) -> bool:
    """Call add(item) for each item that an iterator yields within TURN_SECONDS, and for at least one item.
    Returns whether there may be more."""
    deadline = time.perf_counter() + TURN_SECONDS
    for piece in pieces:
        add(piece)
        if time.perf_counter() > deadline:
            return True
    return False


def checkpoint_step(source: str) -> int | None:
    """The training step of a run's checkpoint, None for other models. source: as resolve_source returns
    it."""
    path = Path(source)
    if not is_checkpoint(source):
        return None
    if path.stem == "model_best":  # its step may be before that of the lowest loss
        saved = read_checkpoint(path)
        step = saved.get("step") if isinstance(saved, dict) else None
        return step if isinstance(step, int) else None
    return step_of(path) if path.stem.removeprefix("model_").isdecimal() else None


def validation_loss(source: str) -> tuple[float, int] | None:
    """(nats per token, step) of the last validation up to a checkpoint's step, from its run's log. None if
    there is no such log. source: as resolve_source returns it."""
    run = Path(source).parent
    if not (is_checkpoint(source) and (run / "log.jsonl").exists()):
        return None
    with contextlib.suppress(UserError):  # no measurement yet
        steps, losses = column(read_log(run), "val", "loss")
        if (last := checkpoint_step(source)) is not None:
            return next((row for row in reversed([*zip(losses, steps)]) if row[1] <= last), None)
    return None


def main(argv: list[str]) -> None:
    cfg = parse_args(Config, argv)
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} must be installed; run: "
            f"{sys.executable} -m pip install -r requirements-serve.txt"
        )
    with oom_hint(OOM_FIX):
        serve(cfg)


def serve(cfg: Config) -> None:
    """Load the model and serve it until Ctrl-C."""
    import uvicorn  # optional dependencies: requirements-serve.txt

    from lab.tools.serve_app import BUILTIN_QUESTIONS, QUESTIONS, create_app

    device = resolve_device(cfg.device, 0)
    source = resolve_source(cfg.model)
    try:
        server_socket = socket.create_server((cfg.host, cfg.port))
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {cfg.port} is in use, perhaps by another lab serve; pass --port 0 for any free one"
            ) from error
        raise UserError(
            f"host={cfg.host} port={cfg.port} cannot be opened ({error}); choose another --host or --port"
        ) from error
    model, tokenizer = load_for_inference(source, device, cfg.weights)
    t0, step = time.perf_counter(), make_decode_step(model, enabled=cfg.compile)
    engine = Engine(model, tokenizer, step)
    if step:
        print(f"compiled in {time.perf_counter() - t0:.0f} s", flush=True)
    host, port = server_socket.getsockname()
    # refuse other host names, so that pages of other sites cannot use a local server (DNS rebinding)
    local = host.startswith("127.")
    hosts = [host, "127.0.0.1", "localhost"] if local else ["*"]
    name = "/".join(Path(source).parts[-2:]).removesuffix(".pt")  # do not reveal the whole path
    builtin = tuned_on(source, ROOT / "examples/chats.jsonl")
    app = create_app(
        engine, name, hosts, validation_loss(source), chat_warning(source, public=not local),
        training_data(source), BUILTIN_QUESTIONS if builtin else QUESTIONS, checkpoint_step(source),
    )  # fmt: skip
    print(f"{source} on {device}: http://{host}:{port}   (press Ctrl-C to quit)", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        limit_concurrency=1000,
        timeout_graceful_shutdown=2,
        lifespan="off",
    )
    uvicorn.Server(config).run(sockets=[server_socket])
