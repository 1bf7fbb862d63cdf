"""lab serve in its own process, for tests of its API, its page and its clients. A plugin of conftest.py."""

import http.client
import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Process, wait_for


class Server:
    """A running `python -m lab serve` of a model."""

    def __init__(self, folder, model, *flags):
        from models import saved  # here, because it imports conftest.py

        self.model = model
        path = saved(model, folder / "log/r/model_000010.pt")
        self.process = Process(ROOT / "lab", "serve", path, "--port", 0, *flags, cwd=folder)
        wait_for(lambda: "http://" in self.process.stdout, self.process)
        self.url = re.search(r"http://\S+", self.process.stdout)[0]
        self.host, _, port = self.url.removeprefix("http://").partition(":")
        self.port = int(port)

    def begin(self, path, body=None, method="", **headers):
        """The response, not read yet. body: bytes, or a value that is sent as JSON. A header that is None is
        not sent."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        body = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        headers = {name: value for name, value in headers.items() if value is not None}
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        return connection.getresponse()

    def send(self, path, body=None, **headers):
        """(status, text) of the response."""
        with self.begin(path, body, **headers) as answer:
            return answer.status, answer.read().decode()

    def lines(self, **body):
        status, text = self.send("/generate", body)
        assert status == 200, text
        return list(map(json.loads, text.splitlines()))

    def generate(self, **body):
        """(scored, pieces) of /generate."""
        first, *rest = self.lines(**body)
        return first["scored"], [piece for line in rest for piece in line["pieces"]]

    def disconnect(self, answer):
        """Close the connection before the end of the response."""
        answer.fp.raw._sock.close()
        answer.close()

    def quit_while_writing(self, ctrl_c=1):
        """Press Ctrl-C, or several times, while a long text is written; no traceback may be printed."""
        long = dict(prompt=["a"] * 20, max_tokens=4096, stream=True)
        with self.begin("/v1/completions", long) as answer:
            assert answer.readline()
            for _ in range(ctrl_c):
                self.process.signal(signal.SIGINT)
                time.sleep(0.5)
            assert self.process.wait(20) in (0, 130), self.process.stderr
        assert "Traceback" not in self.process.stderr, self.process.stderr

    def memory(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024  # MiB


def endless(model):
    """The same model, changed so that it hardly ever samples end-of-text."""
    with torch.no_grad():
        model.transformer.ln_f.bias.copy_(-20 * model.transformer.wte.weight[256])
    return model


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """lab serve with a random model of the size of the preset laptop: a context of 128 bytes."""
    from models import noisy_gpt

    from train_gpt2 import PRESETS

    model = endless(noisy_gpt(**vars(PRESETS["laptop"][0])))
    server = Server(tmp_path_factory.mktemp("serve"), model)
    yield server
    server.quit_while_writing()


@pytest.fixture(scope="session")
def client(server):
    openai = pytest.importorskip("openai", reason="needs requirements-test.txt")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
