"""The paths of serve.py, and what may be asked. None of them opens a file: the page is read once."""

import asyncio
import json
import math
import secrets
import time
import uuid
from typing import Annotated

import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import AliasChoices, BaseModel, Field, field_validator, model_validator
from starlette.exceptions import HTTPException

from lab.cli import UserError
from lab.data.chat import STOPS
from lab.files import template
from lab.text_stream import Busy, scored
from lab.tools.plot_style import PAPER

LONGEST = 4096  # new tokens
LARGEST = 2**16  # bytes of a request
PATIENCE = 60  # seconds for a client to send its request, or to take a part of the answer
POLICY = (  # the page may ask this server, and nothing else
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Ask(BaseModel, allow_inf_nan=False):
    """What the page may ask. prompt: a text, or ids; answer: ids after it, to go on from."""

    prompt: str | list[int] = ""
    messages: list[dict] | None = Field(None, min_length=1, max_length=200)
    answer: list[int] = []
    max_tokens: int = Field(200, ge=1, le=LONGEST)
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**32)
    stop: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field([], max_length=4)
    likeliest: int = Field(5, ge=0, le=20)

    def model_post_init(self, _):
        self.seed = torch.seed() % 2**31 if self.seed is None else self.seed
        if self.messages is not None:
            self.stop = [*self.stop, *STOPS]


class OpenAI(Ask, extra="allow"):
    """What both of OpenAI's paths know. What would change the text and is not here is refused."""

    stream: bool = False
    stream_options: dict[str, bool] | None = None  # include_usage

    @model_validator(mode="before")
    def without_nulls(cls, request):
        """null is what is not given; the newer name of max_tokens goes before the older one."""
        if not isinstance(request, dict):
            return request  # pydantic says what it must be
        request = {k: v for k, v in request.items() if v is not None}
        if "max_completion_tokens" in request:
            request.pop("max_tokens", None)
        return request

    @field_validator("stop", mode="before")
    def several(cls, stop):
        return [stop] if isinstance(stop, str) else stop or []

    def model_post_init(self, context):
        super().model_post_init(context)
        passed_over = ("model", "user", "store", "metadata")
        without_effect = False, 0, "", [], {}, {"type": "text"}
        alone = "n", "best_of", "repetition_penalty"  # what they are where nobody sets them is 1
        for name, value in self.model_extra.items():
            usual = value == 1 if name in alone else value in without_effect
            if not usual and name not in passed_over:
                raise UserError(f"{name} is not known here; leave it out")


class Completion(OpenAI):
    prompt: str | list[int]
    max_tokens: int = Field(16, ge=1, le=LONGEST)
    messages: None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="before")
    def alone(cls, prompt):
        one = isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int)
        return prompt[0] if one else prompt

    def model_post_init(self, context):
        super().model_post_init(context)
        self.likeliest = 0 if self.logprobs is None else max(1, self.logprobs)


class Chat(OpenAI):
    messages: list[dict] = Field(min_length=1, max_length=200)
    max_tokens: int = Field(
        200, ge=1, le=LONGEST, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("messages")
    def ours(cls, messages):
        """A developer is the system by a newer name, and parts of text are one text."""
        for message in messages:
            if message.get("role") == "developer":
                message["role"] = "system"
            if isinstance(parts := message.get("content"), list):
                message["content"] = "\n".join(map(text_of, parts))
        return messages

    def model_post_init(self, context):
        super().model_post_init(context)
        self.likeliest = max(1, self.top_logprobs or 0) if self.logprobs else 0


def text_of(part):
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise UserError(f"a message's part {part!r:.60} is not of type text, which alone is read here")


def log(p):
    return math.log(max(p, 1e-38))  # JSON knows no infinity


def in_completions(pieces, ask, before, tokenizer):
    """Pieces as a choice of /v1/completions; before: the text so far."""
    texts, logprobs = [piece["text"] for piece in pieces], None
    if ask.logprobs is not None:
        tops = [piece["likeliest"][: ask.logprobs] for piece in pieces]
        logprobs = dict(
            tokens=[json.loads(piece["name"]) for piece in pieces],
            token_logprobs=[log(piece["p"]) for piece in pieces],
            top_logprobs=[{json.loads(name): log(p) for _, name, p in top} for top in tops],
            text_offset=[len(before) + len("".join(texts[:i])) for i in range(len(texts))],
        )
    return dict(text="".join(texts), logprobs=logprobs)


def in_chat(pieces, ask, before, tokenizer):
    """Pieces as a choice of /v1/chat/completions."""

    def said(id, name, p):
        return dict(token=json.loads(name), logprob=log(p), bytes=list(tokenizer.bytes_of(id)))

    logprobs = None
    if ask.logprobs:
        tops = [[said(*one) for one in x["likeliest"][: ask.top_logprobs or 0]] for x in pieces]
        owns = [said(piece["id"], piece["name"], piece["p"]) for piece in pieces]
        logprobs = {"content": [own | {"top_logprobs": top} for own, top in zip(owns, tops)]}
    content = "".join(piece["text"] for piece in pieces)
    if not before.strip():
        content = content.lstrip()  # of "Assistant: ", the blank is the model's
    said_by = {"role": "assistant", "content": content}
    return {"delta" if ask.stream else "message": said_by, "logprobs": logprobs}


def refusal(status, sentence):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": dict(message=sentence, type=kind, param=None, code=None)}, status)


def first_wrong(error):
    """A sentence of what pydantic found first."""
    first = error.errors()[0]
    if first["type"] == "json_invalid" or isinstance(first["input"], bytes):
        return "the request must be JSON, sent with Content-Type: application/json"
    place = ".".join(str(part) for part in first["loc"][1:]) or "request"
    shown = "" if first["type"] == "missing" else f"={first['input']!r:.80}"
    return f"{place}{shown}: {first['msg']}"


REFUSALS = {
    UserError: lambda request, error: refusal(400, str(error)),
    Busy: lambda request, error: refusal(503, str(error)),
    RequestValidationError: lambda request, error: refusal(400, first_wrong(error)),
    HTTPException: lambda request, error: refusal(error.status_code, str(error.detail)),
}


def application(engine, name, hosts):
    """The FastAPI application. hosts: names under which it may be asked, ["*"] for any."""
    no_docs = dict(docs_url=None, redoc_url=None, openapi_url=None)
    app = FastAPI(**no_docs, exception_handlers=REFUSALS)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.add_middleware(Limits)
    page = template("serve.html.j2")
    about = dict(model=name, context=engine.block_size, longest=LONGEST, paper=PAPER)
    model = dict(id=name, object="model", created=int(time.time()), owned_by="you")

    @app.get("/")
    async def index():
        nonce = secrets.token_urlsafe(16)  # of the page's own script, which alone may run
        headers = {"Content-Security-Policy": f"script-src 'nonce-{nonce}'; {POLICY}"}
        return HTMLResponse(page.render(about, nonce=nonce), headers=headers)

    @app.get("/v1/models")
    async def models():
        return dict(object="list", data=[model])

    @app.post("/generate")
    async def generate(ask: Ask):
        """Lines: {"scored", "dropped", "seed"}, then {"pieces", "seconds"} ...; scored is the prompt,
        or the last token of the answer to go on from."""
        ids, dropped = await engine.begin(ask)

        async def lines():
            async with engine.place() as cache:
                shades = await engine.compute(scored, engine.model, engine.tokenizer, ids)
                shades = shades[-1:] if ask.answer else shades
                yield dict(scored=shades, dropped=dropped, seed=ask.seed)
                t0 = time.perf_counter()
                async for new in engine.write(ask, ids, cache):
                    yield dict(pieces=new, seconds=time.perf_counter() - t0)

        said = (json.dumps(line) + "\n" async for line in lines())
        return StreamingResponse(said, media_type="application/x-ndjson")

    async def answer(request, ask, kind, form):
        ids, dropped = await engine.begin(ask)
        head = dict(id=uuid.uuid4().hex, object=kind, created=int(time.time()), model=name)
        head |= {"dropped_messages": dropped} if dropped else {}  # not OpenAI's: clients pass it on

        def choice(new, before=""):
            end = "length" if new[-1]["end"] == "window" else new[-1]["end"]
            own = dict(index=0, finish_reason=end)
            return head | {"choices": [own | form(new, ask, before, engine.tokenizer)]}

        def usage(count):
            total = len(ids) + count
            return dict(prompt_tokens=len(ids), completion_tokens=count, total_tokens=total)

        async def parts():
            before, count = "", 0
            async with engine.place() as cache:
                async for new in engine.write(ask, ids, cache):
                    yield f"data: {json.dumps(choice(new, before))}\n\n"
                    before += "".join(piece["text"] for piece in new)
                    count += len(new)
            if (ask.stream_options or {}).get("include_usage"):
                last = head | dict(choices=[], usage=usage(count))
                yield f"data: {json.dumps(last)}\n\n"
            yield "data: [DONE]\n\n"

        if ask.stream:
            return StreamingResponse(parts(), media_type="text/event-stream")
        all = []
        async with engine.place() as cache:
            async for new in engine.write(ask, ids, cache):
                all += new
                if await request.is_disconnected():
                    return Response(status_code=499)  # nobody reads it
        return choice(all) | {"usage": usage(len(all))}

    @app.post("/v1/completions")
    async def completions(request: Request, ask: Completion):
        return await answer(request, ask, "text_completion", in_completions)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, ask: Chat):
        kind = "chat.completion.chunk" if ask.stream else "chat.completion"
        return await answer(request, ask, kind, in_chat)

    return app


class Limits:
    """No request is larger than LARGEST, and no client keeps us waiting for longer than PATIENCE."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        size, more = 0, True

        async def limited():
            nonlocal size, more
            if not more:  # it was read; what may come is that the client leaves
                return await receive()
            message = await asyncio.wait_for(receive(), PATIENCE)
            size, more = size + len(message.get("body", b"")), message.get("more_body")
            if size > LARGEST:
                sentence = f"a request may have {LARGEST} bytes at most; send a shorter one"
                raise HTTPException(413, sentence)
            return message

        async def patient(message):
            await asyncio.wait_for(send(message), PATIENCE)

        await self.app(scope, limited, patient)
