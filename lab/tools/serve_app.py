"""The web application of lab serve: routes, and validation of requests.

It is a separate file because it imports FastAPI, which is optional. No route opens a file; the page's
template is read once, at the start.
"""

import asyncio
import contextlib
import json
import math
import secrets
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import AliasChoices, BaseModel, Field, field_validator, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lab.cli import UserError
from lab.data.chat import STOP_STRINGS
from lab.data.tokenizers import Tokenizer
from lab.inference.generate import CHAT_TEMPERATURE, TEMPERATURE
from lab.inference.int8 import Int8Linear
from lab.inference.prediction import inspect_prediction
from lab.inference.streaming import QueueFullError, score_tokens
from lab.templates import load_template
from lab.tools.read_log import short

MAX_NEW_TOKENS = 4096
MAX_REQUEST_BYTES = 2**20
MAX_PROMPTS = 20  # in one request
CLIENT_TIMEOUT = 60  # seconds for a client to send its request, or to take a part of the answer
RETRY_AFTER = 10  # seconds after which a refused client may ask again
# the page offers these to begin a chat; after tuning on examples/chats.jsonl, some of that file
QUESTIONS = "What is a list?", "Tell me a short story.", "Which is larger, 7 or 12?"
BUILTIN_QUESTIONS = "What is a token?", "How wide is the MLP inside a block?", "Can I stop a run?"
SECURITY_POLICY = (  # the page may send requests only to this server
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


# ------------------------------------------------------------------------------------------ requests


class GenerateRequest(BaseModel, allow_inf_nan=False):
    """The page's request. prompt: text or ids; answer: ids after the prompt, to continue from;
    likeliest: number of most probable tokens returned with each token."""

    prompt: str | list[int] = ""
    messages: list[dict] | None = Field(None, min_length=1)
    answer: list[int] = []
    max_tokens: int = Field(200, ge=1, le=MAX_NEW_TOKENS)
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(default_factory=lambda: torch.seed() % 2**31, ge=0, lt=2**32)
    stop: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field([], max_length=4)
    likeliest: int = Field(5, ge=0, le=20)

    def model_post_init(self, _: Any) -> None:
        if self.messages is not None:
            self.stop = [*self.stop, *STOP_STRINGS]


class InspectRequest(GenerateRequest):
    """The page's request for one prediction. layer, head: those of the attention weights; None: the
    mean over all layers or heads."""

    layer: int | None = Field(None, ge=0, lt=2**31)
    head: int | None = Field(None, ge=0, lt=2**31)


IGNORED_FIELDS = (  # fields of OpenAI's API that would not change the text
    "model", "user", "store", "metadata", "safety_identifier", "service_tier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "parallel_tool_calls",
)  # fmt: skip
# values with the same effect as leaving the field out; for all other fields: false, 0 and empty values
DEFAULTS = dict(n=1, best_of=1, repetition_penalty=1, response_format={"type": "text"},
                modalities=["text"], tool_choice="none")  # fmt: skip


class OpenAIRequest(GenerateRequest, extra="allow"):
    """Fields of both OpenAI routes. Unknown fields that would change the text are refused."""

    answer: list[int] = Field([], max_length=0)  # only of the page's requests
    stream: bool = False
    stream_options: dict[str, bool] | None = None  # include_usage

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, request: Any) -> Any:
        """Treat null as absent, and prefer max_completion_tokens, the newer name, to max_tokens."""
        if not isinstance(request, dict):
            return request  # pydantic raises the error
        request = {k: v for k, v in request.items() if v is not None}
        if "max_completion_tokens" in request:
            request.pop("max_tokens", None)
        return request

    @field_validator("stop", mode="before")
    @classmethod
    def stop_as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop or []

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        defaults = False, 0, "", [], {}
        for name, value in (self.model_extra or {}).items():
            is_default = value == DEFAULTS[name] if name in DEFAULTS else value in defaults
            if not is_default and name not in IGNORED_FIELDS:
                raise UserError(f"{name} is not supported; leave it out")


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: Any = Field(...)
    max_tokens: int = Field(16, ge=1, le=MAX_NEW_TOKENS)
    messages: None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt")
    @classmethod
    def check_prompt(cls, prompt: Any) -> Any:
        """Accept one prompt or a list of them."""
        prompts = prompts_of(prompt)
        if len(prompts) > MAX_PROMPTS or not all(map(is_prompt, prompts)):
            raise UserError(
                f"prompt={prompt!r:.80} must be a string, a list of token ids, or a list of at most "
                f"{MAX_PROMPTS} of either"
            )
        return prompt

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.likeliest = 0 if self.logprobs is None else max(1, self.logprobs)


def is_prompt(prompt: Any) -> bool:
    ids = prompt if isinstance(prompt, list) else [None]
    return isinstance(prompt, str) or all(type(i) is int for i in ids)


def prompts_of(prompt: Any) -> list:
    """One prompt, or a list of them, as a list."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: list[dict] = Field(min_length=1)
    prompt: Literal[""] = ""  # only of the page's requests
    max_tokens: int = Field(
        200, ge=1, le=MAX_NEW_TOKENS,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens"),
    )  # fmt: skip
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("messages")
    @classmethod
    def normalize_messages(cls, messages: list[dict]) -> list[dict]:
        """Convert role "developer", the newer name of "system", and content given as text parts."""
        for message in messages:
            if message.get("role") == "developer":
                message["role"] = "system"
            if isinstance(parts := message.get("content"), list):
                message["content"] = "\n".join(map(text_of_part, parts))
        return messages

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.likeliest = max(1, self.top_logprobs or 0) if self.logprobs else 0


def text_of_part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise UserError(f"message part {part!r:.60} must be of type text; leave out other parts")


# ----------------------------------------------------------------------------------------- responses


def logprob(p: float) -> float:
    return math.log(max(p, 1e-38))  # JSON has no infinity


def to_completion_choice(
    pieces: list[dict], request: Any, text_before: str, tokenizer: Tokenizer
) -> dict:
    """Convert pieces to a choice of /v1/completions. text_before: the text of earlier pieces."""
    texts, logprobs = [piece["text"] for piece in pieces], None
    if request.logprobs is not None:
        tops = [piece["likeliest"][: request.logprobs] for piece in pieces]
        logprobs = dict(
            tokens=[json.loads(piece["name"]) for piece in pieces],
            token_logprobs=[logprob(piece["p"]) for piece in pieces],
            top_logprobs=[{json.loads(name): logprob(p) for _, name, p in top} for top in tops],
            text_offset=[len(text_before) + len("".join(texts[:i])) for i in range(len(texts))],
        )
    return dict(text="".join(texts), logprobs=logprobs)


def to_chat_choice(
    pieces: list[dict], request: Any, text_before: str, tokenizer: Tokenizer
) -> dict:
    """Convert pieces to a choice of /v1/chat/completions."""

    def token_logprob(token: int, name: str, p: float) -> dict:
        raw = list(tokenizer.bytes_of(token))
        return dict(token=json.loads(name), logprob=logprob(p), bytes=raw)

    logprobs = None
    if request.logprobs:
        content = []
        for piece in pieces:
            top = piece["likeliest"][: request.top_logprobs or 0]
            own = token_logprob(piece["id"], piece["name"], piece["p"])
            content.append(own | {"top_logprobs": [token_logprob(*one) for one in top]})
        logprobs = {"content": content}
    text = "".join(piece["text"] for piece in pieces)
    if not text_before.strip():
        text = text.lstrip()  # the model generates the space after "Assistant:"
    message = {"role": "assistant", "content": text}
    return {"delta" if request.stream else "message": message, "logprobs": logprobs}


def error_body(status: int, message: str) -> dict:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": dict(message=message, type=kind, param=None, code=None)}


NUMBER_RULES = {  # by pydantic's type of error
    "greater_than_equal": "must be {limit} or more",
    "greater_than": "must be greater than {limit}",
    "less_than_equal": "must be {limit} or less",
    "less_than": "must be less than {limit}",
    "finite_number": "must be a finite number",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
}


def number_rule(error: Any) -> str | None:
    """The rule about numbers that one of pydantic's errors names; None for errors of other kinds."""
    limit = next(iter(error.get("ctx", {}).values()), None)
    if isinstance(limit, float) and limit.is_integer():
        limit = int(limit)
    return (
        NUMBER_RULES[error["type"]].format(limit=limit) if error["type"] in NUMBER_RULES else None
    )


def first_validation_error(error: RequestValidationError) -> str:
    """One sentence about the first error that pydantic found."""
    first = error.errors()[0]
    if first["type"] == "json_invalid" or isinstance(first["input"], bytes):
        return "the request must be JSON, sent with Content-Type: application/json"
    field = ".".join(str(part) for part in first["loc"][1:]) or "request"
    value = "" if first["type"] == "missing" else f"={first['input']!r:.80}"
    rule = number_rule(first)
    return f"{field}{value} {rule}" if rule else f"{field}{value}: {first['msg']}"


def handle_error(error: Any) -> JSONResponse:
    """The response for an error of one of the types in HANDLED_ERRORS, or QueueFullError."""
    status, message, headers = 400, str(error), {}
    if isinstance(error, RequestValidationError):
        message = first_validation_error(error)
    elif isinstance(error, QueueFullError):
        status, headers = 503, {"Retry-After": str(RETRY_AFTER)}
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    return JSONResponse(error_body(status, message), status, headers)


HANDLED_ERRORS = UserError, RequestValidationError, HTTPException


async def encode(
    items: AsyncIterator[dict], before: str, after: str, last: str = ""
) -> AsyncIterator[str]:
    """The JSON of each item between `before` and `after`, then `last`, or the error that ended them."""
    try:
        async for item in items:
            yield f"{before}{json.dumps(item)}{after}"
        if last:
            yield last
    except UserError as error:  # out of memory, when the status has already been sent
        yield f"{before}{json.dumps(error_body(500, str(error)))}{after}"


async def generate_lines(
    engine: Any, body: GenerateRequest, ids: list[int], dropped: int
) -> AsyncIterator[dict]:
    """The lines of POST /generate: {"scored", "dropped", "seed"}, then {"pieces", "seconds"} for each turn.
    scored: token_logprobs of the prompt, or of the last token of `answer`."""
    with engine.lend(await engine.caches.get()) as cache:
        scored = await engine.compute(score_tokens, engine.model, engine.tokenizer, ids)
        scored = scored[-1:] if body.answer else scored
        yield dict(scored=scored, dropped=dropped, seed=body.seed)
        t0 = time.perf_counter()
        async for new in engine.stream(body, ids, cache):
            yield dict(pieces=new, seconds=time.perf_counter() - t0)


class OpenAIAnswer:
    """The answer to an OpenAI request, streamed or whole. Several prompts are answered one by one.

    kind: its "object" in OpenAI's API; to_choice: converts pieces to a choice of that kind.
    """

    def __init__(
        self, engine: Any, model: str, body: OpenAIRequest, kind: str, to_choice: Callable
    ):
        self.engine, self.body, self.to_choice = engine, body, to_choice
        self.head: dict = dict(id=uuid.uuid4().hex, object=kind, created=int(time.time()))
        self.head["model"] = model
        self.bodies = [
            body.model_copy(update=dict(prompt=prompt, seed=body.seed + i))
            for i, prompt in enumerate(prompts_of(body.prompt))
        ]
        self.ids: list[list[int]] = []  # of each prompt

    async def respond(self, request: Request) -> Any:
        """The response. Raises UserError if a prompt does not fit."""
        for body in self.bodies:
            ids, dropped = await self.engine.compute(self.engine.prompt_ids, body)
            self.ids.append(ids)
            if dropped:  # not in OpenAI's API, but its client passes it on
                self.head["dropped_messages"] = dropped
        if not self.body.stream:
            return await self.whole(request)
        events = encode(self.chunks(), "data: ", "\n\n", last="data: [DONE]\n\n")
        return StreamingResponse(events, media_type="text/event-stream")

    async def turns(self) -> AsyncGenerator[tuple[int, list[dict]]]:
        """Yield (index of the prompt, its new pieces)."""
        with self.engine.lend(await self.engine.caches.get()) as cache:
            for index, (body, ids) in enumerate(zip(self.bodies, self.ids)):
                async for new in self.engine.stream(body, ids, cache, not self.body.stream):
                    yield index, new

    async def chunks(self) -> AsyncIterator[dict]:
        """The parts of a streamed answer."""
        texts, count = [""] * len(self.bodies), 0
        async for index, new in self.turns():
            yield self.head | {"choices": [self.choice(index, new, texts[index])]}
            texts[index] += "".join(piece["text"] for piece in new)
            count += len(new)
        if (self.body.stream_options or {}).get("include_usage"):
            yield self.head | dict(choices=[], usage=self.usage(count))

    async def whole(self, request: Request) -> Any:
        """The answer as one object."""
        pieces: list[list[dict]] = [[] for _ in self.bodies]
        async with contextlib.aclosing(self.turns()) as turns:
            async for index, new in turns:
                pieces[index] += new
                if await request.is_disconnected():
                    return Response(status_code=499)  # "client closed request"
        choices = [self.choice(index, new) for index, new in enumerate(pieces)]
        return self.head | dict(choices=choices, usage=self.usage(sum(map(len, pieces))))

    def choice(self, index: int, new: list[dict], text_before: str = "") -> dict:
        end = "length" if new[-1]["end"] == "window" else new[-1]["end"]
        made = self.to_choice(new, self.body, text_before, self.engine.tokenizer)
        return dict(index=index, finish_reason=end) | made

    def usage(self, count: int) -> dict:
        prompt = sum(map(len, self.ids))
        return dict(prompt_tokens=prompt, completion_tokens=count, total_tokens=prompt + count)


# ------------------------------------------------------------------------------------------- the app


def create_app(
    engine: Any, name: str, hosts: list[str],
    val_loss: tuple[float, int] | None = None, untuned: str = "", data: str = "",
    questions: Sequence[str] = QUESTIONS, step: int | None = None,
) -> FastAPI:  # fmt: skip
    """The FastAPI application. name: the model's, for clients; hosts: Host headers that are accepted,
    ["*"] for any. For the page: val_loss, (nats per token, step); untuned, the chat_warning; data, the
    training_data; questions, to begin a chat with; step, the checkpoint's."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for error_type in HANDLED_ERRORS:
        app.add_exception_handler(error_type, lambda _, error: handle_error(error))
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.add_middleware(RequestLimits, engine=engine)
    page = load_template("serve.html.j2")
    about = page_values(engine, name) | dict(
        facts=model_facts(engine, val_loss, data, step), untuned=untuned, questions=list(questions)
    )
    model = dict(id=name, object="model", created=int(time.time()), owned_by="you")

    @app.get("/")
    async def index() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)  # only the page's own script may run
        policy = f"script-src 'nonce-{nonce}'; {SECURITY_POLICY}"
        html = page.render(about, nonce=nonce)
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    @app.get("/v1/models")
    async def models() -> dict:
        return dict(object="list", data=[model])

    @app.get("/v1/models/{id:path}")
    async def retrieve_model(id: str) -> dict:
        if id != name:
            raise HTTPException(404, f"there is no model {id:.80}; this server has {name}")
        return model

    @app.post("/generate")
    async def generate(body: GenerateRequest) -> Response:
        ids, dropped = await engine.compute(engine.prompt_ids, body)
        lines = encode(generate_lines(engine, body, ids, dropped), "", "\n")
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @app.post("/inspect")
    async def inspect(body: InspectRequest) -> dict:
        """inspect_prediction of the token after the prompt and `answer`."""
        ids, _ = await engine.compute(engine.prompt_ids, body)
        model, tokenizer = engine.model, engine.tokenizer
        return await engine.compute(
            inspect_prediction, model, tokenizer, ids, body.layer, body.head
        )

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Any:
        answer = OpenAIAnswer(engine, name, body, "text_completion", to_completion_choice)
        return await answer.respond(request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Any:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return await OpenAIAnswer(engine, name, body, kind, to_chat_choice).respond(request)

    return app


def page_values(engine: Any, name: str) -> dict[str, Any]:
    """The values that the page's script needs, besides texts."""
    model, tokenizer = engine.model, engine.tokenizer
    seen = engine.thread.submit(
        inspect_prediction, model, tokenizer, [tokenizer.eot], None, None
    ).result()
    return dict(
        model=name, context=engine.block_size, longest=MAX_NEW_TOKENS,
        vocab_size=tokenizer.vocab_size, bytes=tokenizer.name == "bytes",
        weights=zlib.crc32(str([id for id, _, _ in seen["next"]]).encode()),
        layers=seen["layers"], heads=seen["heads"],
        temperature=TEMPERATURE, chat_temperature=CHAT_TEMPERATURE,
    )  # fmt: skip


def model_facts(
    engine: Any, val_loss: tuple[float, int] | None, data: str = "", step: int | None = None
) -> dict[str, str]:
    """{label: text}: facts about the model that the page shows."""
    facts, tokenizer = {}, engine.tokenizer
    if not any(isinstance(module, Int8Linear) for module in engine.model.modules()):
        facts["size"] = f"{short(engine.model.num_params())} parameters"
    if step is not None and (not val_loss or val_loss[1] != step):
        facts["step"] = f"{step:,}"
    if val_loss:
        facts["validation loss"] = f"{val_loss[0]:.2f} nats per token after {val_loss[1]:,} steps"
    facts["context"] = f"{engine.block_size:,} tokens"
    name = tokenizer.name if not tokenizer.name.endswith(".json") else "its own"
    facts["tokenizer"] = f"{name}, {tokenizer.vocab_size:,} tokens"
    if data:
        facts["trained on"] = data
    return facts


class RequestLimits:
    """ASGI middleware that reads a request of at most MAX_REQUEST_BYTES within CLIENT_TIMEOUT and counts
    it as active or waiting until it is answered."""

    def __init__(self, app: ASGIApp, engine: Any):
        self.app, self.engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def limited_send(message: Message) -> None:
            await asyncio.wait_for(send(message), CLIENT_TIMEOUT)

        try:
            async with asyncio.timeout(CLIENT_TIMEOUT):
                body = await read_body(receive)
        except HTTPException as error:
            return await handle_error(error)(scope, receive, limited_send)
        except (TimeoutError, ClientDisconnect):
            return  # the server closes the connection
        unread: list[Message] = [{"type": "http.request", "body": body}]

        async def receive_body() -> Message:  # then waits for the client to disconnect
            return unread.pop() if unread else await receive()

        try:
            with self.engine.place() if scope["method"] == "POST" else contextlib.nullcontext():
                await self.app(scope, receive_body, limited_send)
        except QueueFullError as error:
            await handle_error(error)(scope, receive, limited_send)
        except (TimeoutError, asyncio.CancelledError):
            return  # a slow client; or Ctrl-C ended the server


async def read_body(receive: Receive) -> bytes:
    """The body of an ASGI request. Raises HTTPException if it is too long, ClientDisconnect if it ends
    early."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body, more = body + message.get("body", b""), message.get("more_body")
        if len(body) > MAX_REQUEST_BYTES:
            text = f"a request must have at most {MAX_REQUEST_BYTES} bytes; send a shorter one"
            raise HTTPException(413, text)
    return body
