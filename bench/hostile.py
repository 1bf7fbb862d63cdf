"""Attack `python -m lab serve` with hostile clients, check its answers, and watch its memory.

    python bench/hostile.py --seconds 600

Several clients call random methods of Client at the same time; each method sends one kind of request.
The server must respond to each with a correct status, always give the same text for an ordinary
request, print no traceback, and not leak memory: after the first fifth of the time, its memory may grow
by at most --mib. If one of these checks fails, the exit status is 1.
"""

import contextlib
import http.client
import itertools
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from records import ROOT

from lab.cli import parse_args, require, run_main

TIMEOUT = 300  # seconds for an answer; a busy server and a busy machine are slow
NUMBERS = (
    "-1 0 1 2147483648 9223372036854775808 -1e308 1e308 1e309 1e-320 0.5 NaN Infinity -Infinity "
    'null "1" true [] {} [1] [-1] "\\ud800"'
).split() + ["1" + "0" * 400]
FIELDS = (
    "max_tokens temperature top_k top_p seed stop likeliest answer logprobs n stream stream_options "
    "prompt messages logit_bias"
).split()
PATHS = "/generate", "/v1/completions", "/v1/chat/completions"
ORDINARY = {"prompt": "The ", "max_tokens": 12, "seed": 1}


@dataclass
class Config:
    """Attack lab serve with hostile clients."""

    seconds: float = 60
    clients: int = 8  # at the same time
    seed: int = 0
    model: str = "examples/laptop_model"
    mib: int = 20  # allowed growth of the server's memory


class Client:
    """Sends requests to a port of this machine. Each method for an attack returns a status or "closed"."""

    def __init__(self, port, seed):
        self.port, self.rng = port, random.Random(seed)

    def send(self, path, body=None, method="", **headers):
        """(status, text) of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        with contextlib.closing(connection):
            body = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            method = method or ("GET" if body is None else "POST")
            connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def raw(self, *parts):
        """The status of the response to these bytes, or "closed"."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            # the server may refuse a request before it has read all of it
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    connection.sendall(part)
            with contextlib.suppress(ConnectionError):
                if found := re.match(rb"HTTP/1.1 (\d+)", connection.recv(100)):
                    return int(found[1])
        return "closed"

    def head(self, *lines):
        begin = "POST /generate HTTP/1.1", "Host: localhost", "Content-Type: application/json"
        return "\r\n".join([*begin, *lines, "", ""]).encode()

    def ordinary(self):
        """Send a prompt for which the text is known."""
        status, text = self.send("/v1/completions", ORDINARY)
        if status == 200 and json.loads(text)["choices"][0]["text"] != self.expected:
            return "another text"
        return status

    def leaves_early(self):
        """Request a long text, and disconnect after a part of it or immediately."""
        path = self.rng.choice(PATHS)
        body = {"max_tokens": 4000, "stream": True} | (
            {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "a"}
        )
        body = json.dumps(body if path != "/generate" else {"prompt": "a", "max_tokens": 4000})
        head = self.head(f"Content-Length: {len(body)}").replace(b"/generate", path.encode())
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            connection.sendall(head + body.encode())
            status = int(connection.recv(1000)[9:12])
            for _ in range(self.rng.randrange(5)):
                connection.recv(1000)
        return status

    def reads_slowly(self):
        """Request a long text, and read it a byte at a time for a while."""
        body = b'{"prompt": "a", "max_tokens": 4000, "likeliest": 20}'
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            connection.sendall(self.head(f"Content-Length: {len(body)}") + body)
            status = int(connection.recv(12)[9:12])
            for _ in range(20):
                connection.recv(1)
                time.sleep(self.rng.uniform(0, 0.2))
        return status

    def sends_slowly(self):
        """Send part of a request, a byte at a time."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            for byte in self.head("Content-Length: 1000")[: self.rng.randrange(200)]:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        return "closed"

    def idle_connections(self):
        """Open fifty connections and send nothing."""
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(socket.create_connection(("127.0.0.1", self.port), TIMEOUT))
            time.sleep(self.rng.uniform(0, 2))
        return "closed"

    def long_body(self):
        """Send 100 MB, with a Content-Length or in chunks."""
        block = b"a" * 2**20
        if self.rng.random() < 0.5:
            return self.raw(self.head("Content-Length: 104857600"), *[block] * 100)
        chunks = [b"100000\r\n" + block + b"\r\n"] * 100
        return self.raw(self.head("Transfer-Encoding: chunked"), *chunks)

    def deep_json(self):
        """Send nested brackets, nearly as many as fit into a request."""
        deep = self.rng.choice([b"[", b'{"a":', b'{"prompt":[']) * 60_000
        return self.send(self.rng.choice(PATHS), deep[:60_000])[0]

    def extreme_number(self):
        """Send a value that is out of range or of another type in one field."""
        path = self.rng.choice(PATHS)
        valid = {"prompt": '"a"', "max_tokens": "1"}
        if "chat" in path:
            valid = {"messages": '[{"role": "user", "content": "a"}]', "max_tokens": "1"}
        valid |= {self.rng.choice(FIELDS): self.rng.choice(NUMBERS)}
        body = ", ".join(f'"{name}": {value}' for name, value in valid.items())
        status, text = self.send(path, f"{{{body}}}".encode())
        return "NaN" if re.search(r"\bNaN|Infinity\b", text) and status == 200 else status

    def long_stop_string(self):
        """Send stop strings that are too long (a megabyte, or one character too many) or too many."""
        stop = self.rng.choice([["x" * 10**6], ["x" * 101] * 4, ["x" * 100] * 5])
        return self.send(self.rng.choice(PATHS), {"prompt": "a", "stop": stop})[0]

    def other_host(self):
        """Send the Host header of another site whose name points to this machine (DNS rebinding)."""
        return self.send(
            "/v1/models", Host=self.rng.choice(["evil.example", "127.0.0.1.evil.com", ""])
        )[0]

    def other_origin(self):
        """Send a preflight, or a request that a page of another site can send without one."""
        origin = {"Origin": "http://evil.example"}
        if self.rng.random() < 0.5:
            return self.send("/generate", method="OPTIONS", **origin)[0]
        kind = {"Content-Type": self.rng.choice(["text/plain", "multipart/form-data"])}
        return self.send("/generate", {"prompt": "a"}, **origin | kind)[0]

    def traversal(self):
        """Request paths that lead out of the server's folder."""
        prefix = self.rng.choice(["/", "//", "/" + "../" * 9, "/%2e%2e/" * 5, "/v1/models/../../"])
        name = self.rng.choice(
            ["etc/passwd", "lab/tools/serve.py", "pyproject.toml", "openapi.json"]
        )
        return self.send(prefix + name)[0]

    def garbage(self):
        """Send random bytes, which are not HTTP."""
        return self.raw(self.rng.randbytes(self.rng.randrange(1, 10**5)) + b"\r\n\r\n")


OVERLOAD = {503}  # too many requests at the same time
REFUSED = {400, 413, 422} | OVERLOAD
ALLOWED = {  # correct results of each attack
    "ordinary": {200} | OVERLOAD, "leaves_early": {200} | OVERLOAD, "reads_slowly": {200} | OVERLOAD,
    "sends_slowly": {"closed"}, "idle_connections": {"closed"}, "long_body": {413, "closed"},
    "deep_json": REFUSED, "extreme_number": {200} | REFUSED, "long_stop_string": REFUSED,
    "other_host": {400}, "other_origin": {400, 405} | OVERLOAD, "traversal": {400, 404},
    "garbage": {400, "closed"},
}  # fmt: skip


def measure(pid):
    """(MiB in use by a process, a text with these and the numbers of open files and threads)."""
    status = Path(f"/proc/{pid}/status").read_text()
    mib = int(status.split("RssAnon:")[1].split()[0]) / 1024
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    threads = int(status.split("Threads:")[1].split()[0])
    return mib, f"{mib:.1f} MiB, {files} files, {threads} threads"


def attack(client, end, counts, lock):
    """Send random requests until the time `end`, and count the answers to each kind."""
    while time.monotonic() < end:
        name = client.rng.choice(list(ALLOWED))
        try:
            status = getattr(client, name)()
        except (OSError, ValueError, http.client.HTTPException) as error:
            status = f"{type(error).__name__}: {error}"
        with lock:
            counts[name, status] += 1


def main(argv):
    cfg = parse_args(Config, argv, description=__doc__)
    command = [
        sys.executable,
        ROOT / "lab",
        "serve",
        ROOT / cfg.model,
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    counts, lock, samples = Counter(), threading.Lock(), []
    with tempfile.TemporaryFile("w+") as errors:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
            require(found, "the server did not start")
            port = int(found[1])
            status, text = Client(port, 0).send("/v1/completions", ORDINARY)
            Client.expected = json.loads(text)["choices"][0]["text"]
            begin = time.monotonic()
            for i in range(cfg.clients):
                client = Client(port, f"{cfg.seed} {i}")
                end = begin + cfg.seconds
                threading.Thread(target=attack, args=(client, end, counts, lock)).start()
            for i in itertools.count(1):
                time.sleep(max(0, begin + i * cfg.seconds / 10 - time.monotonic()))
                mib, used = measure(server.pid)
                samples.append(mib)
                with lock:
                    total = sum(counts.values())
                print(f"{i * cfg.seconds / 10:5.0f} s: {total:6,} requests, {used}", flush=True)
                if i == 10:
                    break
            for thread in threading.enumerate():
                if thread is not threading.current_thread():
                    thread.join(TIMEOUT)
            alive = Client(port, 0).ordinary() == 200
            time.sleep(2)
            mib, used = measure(server.pid)
            samples.append(mib)
            print(f"at the end: {used}")
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(TIMEOUT)
        errors.seek(0)
        printed = errors.read()
    wrong = {key: n for key, n in counts.items() if key[1] not in ALLOWED[key[0]]}
    for name in ALLOWED:
        found = {status: n for (kind, status), n in counts.items() if kind == name}
        print(f"{name}: {dict(sorted(found.items(), key=str))}")
    grown = max(samples[2:]) - samples[1]
    print(f"{sum(counts.values()):,} requests, {sum(wrong.values())} wrong answers {wrong or ''}")
    print(
        f"memory grew by {grown:.1f} MiB after the first fifth; tracebacks: {printed.count('Traceback')}"
    )
    if "Traceback" in printed:
        print(printed[:5000])
    return 0 if alive and not wrong and "Traceback" not in printed and grown <= cfg.mib else 1


if __name__ == "__main__":
    run_main(main)
