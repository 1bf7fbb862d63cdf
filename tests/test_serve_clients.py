"""Clients of lab serve: hostile ones, slow ones, and many at once."""

import asyncio
import concurrent.futures
import itertools
import json
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT, run_python
from hostile import NUMBERS, Client
from models import always, noisy_gpt
from server import Server, endless

from lab.data.tokenizers import get_tokenizer
from lab.inference.generate import generate
from lab.inference.streaming import make_decode_step
from lab.tools import serve, serve_app
from lab.tools.serve_app import ChatRequest, CompletionRequest, GenerateRequest, create_app

BYTES = get_tokenizer("bytes")

# ---------------------------------------------------------------------------------- hostile clients

# of OpenAI's API, which the request models do not list
UNLISTED = "max_completion_tokens n frequency_penalty logit_bias".split()
FIELDS = {
    "/generate": [*GenerateRequest.model_fields],
    "/inspect": ["layer", "head"],  # the others are those of /generate
    "/v1/completions": [*CompletionRequest.model_fields, *UNLISTED],
    "/v1/chat/completions": [*ChatRequest.model_fields, *UNLISTED],
}


@pytest.mark.parametrize("path", FIELDS)
def test_extremes_of_every_number_are_answered_or_refused(server, path):
    """In one sentence with status 400; never with 500, and never with a number that is not finite."""
    valid = {"prompt": '"a"', "max_tokens": "1"}
    if "chat" in path:
        valid = {"messages": '[{"role": "user", "content": "a"}]', "max_tokens": "1"}
    for field, number in itertools.product(FIELDS[path], NUMBERS):
        body = ", ".join(f'"{k}": {v}' for k, v in (valid | {field: number}).items())
        status, text = server.send(path, f"{{{body}}}".encode())
        assert status in (200, 400), (field, number, text)
        assert "NaN" not in text and "Infinity" not in text, (field, number)
        if status == 400:
            message = json.loads(text)["error"]["message"]
            assert "\n" not in message and len(message) < 400, (field, number)


def test_file_paths_and_other_host_names_are_refused(server):
    files = ("etc/passwd", "lab/tools/serve.py", "log/r/model_000010.pt", "docs", "openapi.json")
    prefixes = ("/", "//", "/" + "../" * 9, "/%2e%2e/" * 5, "/generate/../../", "/v1/models/")
    for path in map("".join, itertools.product(prefixes, files)):
        assert server.send(path)[0] in (400, 404, 405), path
    assert server.send("file:///etc/passwd")[0] in (400, 404)
    status, page = server.send("/")
    assert status == 200 and "http" not in page.replace("xmlns='http:", ""), "loads from elsewhere"
    for host in ("evil.example", "127.0.0.1.evil.example"):  # DNS rebinding
        assert server.send("/v1/models", Host=host)[0] == 400


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have 127.0.0.1 only")
def test_another_loopback_address(tmp_path):
    server = Server(tmp_path, endless(noisy_gpt()), "--host", "127.0.0.2")
    statuses = [
        server.send("/", Host=host)[0] for host in ("127.0.0.2", "localhost", "evil.example")
    ]
    server.quit_while_writing(ctrl_c=2)
    assert statuses == [200, 200, 400]


def test_long_bodies_end_in_a_sentence_and_take_no_memory(server):
    client, before = Client(server.port, seed=0), server.memory()
    for _ in range(4):  # 100 MB each, with a Content-Length or in chunks
        assert client.long_body() in (413, "closed")
    assert server.send("/generate", dict(prompt="a", stop=["x" * 2**20]))[0] == 413
    status, text = server.send("/generate", dict(prompt="a", stop=["x" * 101]))
    assert status == 400 and "stop.0" in text
    assert server.memory() < before + 20, "MiB"


def test_pages_of_other_sites_can_send_nothing(server):
    """They may send requests without a preflight, but not as JSON, and may not read the answers."""
    site, ask = {"Origin": "http://evil.example"}, {"prompt": "a", "max_tokens": 1}
    preflight = site | {"Access-Control-Request-Method": "POST"}
    paths = "/generate", "/v1/completions", "/v1/models", "/"
    asked = [server.begin(path, method="OPTIONS", **preflight) for path in paths]
    assert {answer.status for answer in asked} == {405}
    types = [
        {"Content-Type": kind} for kind in (None, "text/plain", "application/x-www-form-urlencoded")
    ]
    sent = [server.begin("/generate", ask, **site | kind) for kind in types]
    assert {answer.status for answer in sent} == {400}
    allowed = server.begin("/generate", ask, **site)
    assert allowed.status == 200, "only the type was refused"
    for answer in (*asked, *sent, allowed):
        assert not any("access-control" in name.lower() for name in answer.headers)


@pytest.mark.slow
def test_hostile_clients_change_neither_answers_nor_memory(tmp_path):
    done = run_python(ROOT / "bench" / "hostile.py", "--seconds", 20, cwd=tmp_path)
    assert done.returncode == 0 and " 0 wrong answers" in done.stdout, done.stdout + done.stderr


# ------------------------------------------------------------------------------------- many at once


def test_fifty_concurrent_requests(server):
    ask = dict(prompt="abc", max_tokens=20, seed=1, temperature=1.0)
    alone = server.generate(**ask)[1]

    def one(i):
        if i % 10 == 9:
            return server.send("/v1/completions", dict(prompt="a" * 128))[0] == 400
        if i % 10 == 8:
            return server.disconnect(server.begin("/generate", ask | {"max_tokens": 4000})) is None
        return server.generate(**ask)[1] == alone

    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        assert all(threads.map(one, range(50)))
        before = server.memory()
        assert all(threads.map(one, range(50)))
    assert server.memory() < before + 5, "MiB"


def test_turns_are_fair_and_disconnected_clients_are_cancelled(server):
    t0 = time.perf_counter()
    server.generate(prompt="a", max_tokens=300)
    each = (time.perf_counter() - t0) / 300
    answer = server.begin("/generate", dict(prompt="a", max_tokens=2000))
    answer.readline()  # it is active
    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        long = threads.submit(answer.read)
        server.generate(prompt="b", max_tokens=20)
        assert not long.done(), "the short text waited for the long one"
        long.result()
        ask = dict(prompt="a", max_tokens=4000)
        # all at once, in case the check and the count of requests are not atomic
    with concurrent.futures.ThreadPoolExecutor(200) as threads:
        all = list(threads.map(lambda _: server.begin("/generate", ask), range(200)))
    accepted, refused = ([a for a in all if a.status == status] for status in (200, 503))
    assert (len(accepted), len(refused)) == (100, 100)
    assert {answer.getheader("Retry-After") for answer in refused} == {"10"}
    assert b"100 requests are active or waiting" in refused[0].read()
    list(map(server.disconnect, accepted))
    t0 = time.perf_counter()
    server.generate(prompt="b", max_tokens=20)
    assert time.perf_counter() - t0 < 4000 * each, "it waited for the texts of disconnected clients"


def test_each_token_is_sent_before_the_next_ones_are_computed(monkeypatch):
    """Not only at the end of a turn, in which a small model computes many tokens."""
    monkeypatch.setattr(serve, "TURN_SECONDS", 1e9)
    model, calls, sent = always(97), itertools.count(), threading.Event()
    forward = model.forward

    def blocked(*args, **kwargs):
        assert next(calls) < 4 or sent.wait(20), "no token was sent during the turn"
        return forward(*args, **kwargs)

    model.forward = blocked
    engine = serve.Engine(model, BYTES)

    async def stream(whole_turns):
        counts = []
        with engine.lend(await engine.caches.get()) as cache:
            request = GenerateRequest(max_tokens=9)
            async for new in engine.stream(request, [256], cache, whole_turns):
                counts.append(len(new))
                sent.set()
        return counts

    counts = asyncio.run(stream(whole_turns=False))
    assert len(counts) > 1 and sum(counts) == 9
    assert asyncio.run(stream(whole_turns=True)) == [9]  # for answers that are not streamed


@pytest.mark.gpu
def test_engine_decodes_interleaved_texts_on_a_gpu():
    """Each cache has its own CUDA graph, so that texts do not mix."""
    model = noisy_gpt().cuda()
    engine = serve.Engine(model, BYTES, make_decode_step(model))
    prompts = [torch.randint(257, (1, n), device="cuda") for n in (3, 5, 8, 11)]
    plain = [[t.item() for t, _ in generate(model, idx, 40, temperature=0)] for idx in prompts]
    cache = engine.caches.get_nowait
    steps = [generate(model, idx, 40, temperature=0, cache=cache()) for idx in prompts]
    written = [[] for _ in prompts]
    for _ in range(40):
        for text, step in zip(written, steps):
            text.append(engine.thread.submit(next, step).result()[0].item())
    assert written == plain


# ------------------------------------------------------------------------- the app without a server


def post_scope(path):
    """The scope of a POST request, as uvicorn passes it to an ASGI app."""
    headers = [(b"content-type", b"application/json"), (b"host", b"x")]
    return dict(
        type="http", method="POST", path=path, headers=headers, query_string=b"",
        asgi={"version": "3.0", "spec_version": "2.3"},
    )  # fmt: skip


def call_app(app, path, receive):
    """Call an ASGI app with a POST request. Returns what it sends."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(post_scope(path), receive, send), 20))
    return sent


def test_ctrl_c_while_clients_take_nothing_causes_no_error():
    """asyncio then closes the generators of the answers, in any order."""
    errors, engine = [], serve.Engine(noisy_gpt(), BYTES)
    app = create_app(engine, "m", ["*"])

    async def quit_while_sending():
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        waiting = asyncio.Semaphore(0)

        def request():
            body = json.dumps(dict(prompt="a", stream=True)).encode()
            unread = [{"type": "http.request", "body": body}]

            async def receive():
                return unread.pop() if unread else await asyncio.Event().wait()

            async def send(message):
                if message.get("body"):
                    waiting.release()
                    await asyncio.Event().wait()

            return asyncio.create_task(app(post_scope("/v1/completions"), receive, send))

        tasks = [request() for _ in range(serve.MAX_ACTIVE)]
        for _ in tasks:
            await asyncio.wait_for(waiting.acquire(), 20)

    for _ in range(5):
        asyncio.run(quit_while_sending())
    assert errors == []
    assert engine.caches.qsize() == serve.MAX_ACTIVE and engine.num_requests == 0


def test_a_client_that_sends_slowly_times_out_and_frees_its_place(monkeypatch):
    monkeypatch.setattr(serve_app, "CLIENT_TIMEOUT", 0.2)
    engine, places = serve.Engine(always(97), BYTES), []

    async def receive():  # a byte at a time, each within the timeout
        await asyncio.sleep(0.05)
        places.append(engine.num_requests)
        return {"type": "http.request", "body": b"a", "more_body": True}

    assert call_app(create_app(engine, "m", ["*"]), "/generate", receive) == []
    assert {*places} == {0}


def test_out_of_memory_gives_one_sentence_in_the_response():
    """In all kinds of responses; other errors are not changed."""
    model = noisy_gpt()
    app = create_app(serve.Engine(model, BYTES), "m", ["*"])

    def post(path, **body):
        requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            return requests.pop() if requests else await asyncio.sleep(60)

        sent = call_app(app, path, receive)
        return b"".join(message.get("body", b"") for message in sent).decode()

    def fail_with(error):
        def forward(*args, **kwargs):
            raise error

        model.forward = forward

    fail_with(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"))
    for path, more in (
        ("/generate", {}),
        ("/v1/completions", {}),
        ("/v1/completions", {"stream": True}),
    ):
        error = json.loads(post(path, prompt="a", **more).removeprefix("data: "))["error"]
        assert error["message"].startswith("out of memory (CUDA out of memory); serve a smaller"), (
            path
        )
    fail_with(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        post("/v1/completions", prompt="a")
