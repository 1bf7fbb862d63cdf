"""fineweb.py against a data set's hub: a real web server that speaks its protocol, breaks connections and goes away."""

import hashlib
import http.server
import json
import os
import re
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_fineweb import BYTES, DATA, call, documents, plain_stream, stream_of, write_parquet

from lab.data.sources import File, tokenise, units_of
from lab.data.writer import read_manifest, verify


class Hub(http.server.ThreadingHTTPServer):
    """A web server with the two addresses of the hub that are used: what is in a data set, and its files by ranges.

    Of `breaks` answers with content it sends half and closes the connection; `fails` answers are 503.
    """
    daemon_threads = True

    def __init__(self, root, card):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root, self.card, self.breaks, self.fails, self.sent, self.paths = root, card, 0, 0, 0, []
        self.bad_sha = False
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        self.env = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "FINEWEB_TRIES": "3", "HF_HUB_OFFLINE": "0"}


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        hub.paths.append(path)
        if hub.fails:
            hub.fails -= 1
            return self.answer(503, b"busy")
        if path.startswith("/api/datasets/me/texts/revision/"):
            files = [p for p in sorted(hub.root.rglob("*")) if p.is_file()]
            return self.answer(200, json.dumps({
                "id": "me/texts", "sha": "c0ffee", "cardData": hub.card, "siblings": [
                    {"rfilename": p.relative_to(hub.root).as_posix(), "size": p.stat().st_size, "blobId": "0",
                     "lfs": {"sha256": "0" * 64 if hub.bad_sha else hashlib.sha256(p.read_bytes()).hexdigest(),
                             "size": p.stat().st_size, "pointerSize": 1}} for p in files]}).encode(), "application/json")
        file = hub.root / path.removeprefix("/datasets/me/texts/resolve/c0ffee/")
        if not file.is_file():
            return self.answer(404, b"no")
        start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        self.answer(206, file.read_bytes()[start:stop + 1])

    def answer(self, status, body, kind="application/octet-stream"):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", kind)
        self.end_headers()
        if status == 206 and self.server.breaks and len(body) > 1000:
            self.server.breaks -= 1
            body, self.close_connection = body[:len(body) // 2], True
        self.wfile.write(body)
        self.server.sent += len(body) if status == 206 else 0


@pytest.fixture(scope="module")
def texts():
    return [*documents(400), "", None, " \n "]


@pytest.fixture()
def hub(texts, tmp_path):
    root = tmp_path / "hub"
    write_parquet(root / "sample" / "small" / "000.parquet", texts[:150])
    write_parquet(root / "sample" / "small" / "001.parquet", texts[150:])
    write_parquet(root / "data" / "other.parquet", ["another configuration"])
    (root / "README.md").write_text("a data set")
    server = Hub(root, {"configs": [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/*"}]},
        {"config_name": "small", "data_files": [{"split": "train", "path": ["sample/small/*"]}]}]})
    yield server
    server.shutdown()
    server.server_close()


HUB_ARGS = ["--dataset", "me/texts", *BYTES, "--shard_tokens", "100k", "--val_tokens", "70000"]


def test_hub_with_broken_connections(hub, texts, tmp_path):
    """Answers that are cut in the middle and ones that are refused: the same tokens, and only the text has travelled."""
    hub.breaks, hub.fails = 2, 1
    got = call(*HUB_ARGS, "--name", "small", "--out", tmp_path / "o", "--workers", 1, **hub.env)
    assert got.returncode == 0, got.stderr
    assert hub.breaks == hub.fails == 0
    assert re.search(r"no answer for \S+\.parquet \(.+\); try 2 of 3 in 1 s", got.stderr), got.stderr
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(texts))
    source = read_manifest(tmp_path / "o")["source"]
    assert (source["dataset"], source["name"], source["revision"]) == ("me/texts", "small", "c0ffee")
    on_disk = sum(p.stat().st_size for p in (tmp_path / "o").iterdir())
    assert not list((tmp_path / "o").glob("*.parquet")) and on_disk < 3 * len(plain_stream(texts))
    got = call(*HUB_ARGS, "--out", tmp_path / "p", "--workers", 0, **hub.env)  # the default configuration
    assert got.returncode == 0 and np.array_equal(stream_of(tmp_path / "p"), plain_stream(["another configuration"]))


def test_hub_that_goes_away_and_comes_back(hub, texts, tmp_path):
    file = hub.root / "sample" / "small" / "001.parquet"
    content = file.read_bytes()

    class Gone(HubHandler):
        def do_GET(self):
            if "001.parquet" in self.path:
                self.server.fails = 1
            super().do_GET()

    hub.RequestHandlerClass = Gone
    args = [*HUB_ARGS, "--name", "small", "--out", tmp_path / "o", "--workers", 0, "--note_every", 0]
    got = call(*args, **{**hub.env, "FINEWEB_TRIES": "2"})
    assert got.returncode == 2 and "Traceback" not in got.stderr
    assert "001.parquet could not be read" in got.stderr and "goes on where it was" in got.stderr
    assert "by hand" in got.stderr
    assert f"python fineweb.py --source FOLDER --out {tmp_path / 'o'} --tokenizer bytes. With" in got.stderr
    noted = read_manifest(tmp_path / "o")["resume"]["tokens"]
    assert noted == len(plain_stream(texts[:150]))
    hub.RequestHandlerClass = HubHandler
    assert file.read_bytes() == content
    got = call(*args, **hub.env)
    assert got.returncode == 0 and f"going on after {noted:,} tokens" in got.stdout
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(texts))


def test_hub_names_what_there_is(hub, tmp_path):
    wanted = {("--name", "huge"): "one of default, small", ("--split", "test"): "--split is one of train",
              ("--dataset", "me/nothing"): "no data set 'me/nothing'"}
    for more, sentence in wanted.items():
        got = call(*HUB_ARGS, *more, "--out", tmp_path / "o", **hub.env)
        assert got.returncode == 2 and sentence in got.stderr and "Traceback" not in got.stderr, got.stderr
    got = call(*HUB_ARGS, "--out", tmp_path / "o", **{**hub.env, "HF_ENDPOINT": "http://127.0.0.1:9", "FINEWEB_TRIES": "1"})
    assert got.returncode == 2 and "--source builtin" in got.stderr and "Traceback" not in got.stderr
    nowhere = hub.env | {"HF_ENDPOINT": "http://hub.invalid", "FINEWEB_TRIES": "8"}  # no network: waiting longer is no use
    got = call(*HUB_ARGS, "--out", tmp_path / "o", **nowhere)
    assert got.returncode == 2 and "its address cannot be looked up), tried 3 times" in got.stderr


def test_only_the_text_column_travels(hub):
    path = hub.root / "sample" / "small" / "001.parquet"
    big = pa.table({"noise": [os.urandom(100_000).hex() for _ in range(20)], "text": ["short"] * 20})
    pq.write_table(big, path, row_group_size=5)
    url = hub.env["HF_ENDPOINT"] + "/datasets/me/texts/resolve/c0ffee/sample/small/001.parquet"
    file = File("001.parquet", url, path.stat().st_size)
    got = [tokenise(unit, "bytes", "text") for unit in units_of(file, 0, "text")]
    assert np.array_equal(np.concatenate([g.ids for g in got]), plain_stream(["short"] * 20))
    assert hub.sent < path.stat().st_size / 4


@pytest.fixture()
def bins(tmp_path):
    root = tmp_path / "hub"
    root.mkdir()
    for i, split in enumerate(("val", "train", "train")):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, 5000
        tokens = np.full(5000, 50256, "<u2")
        tokens[1:] = np.arange(4999) + i
        (root / f"web_{split}_{i:06d}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    server = Hub(root, None)
    yield server
    server.shutdown()
    server.server_close()


def test_ready_made_shards(bins, tmp_path):
    """Downloaded as they are, by the part; --tokens takes as many as are needed, later ones are added."""
    if not (DATA / "tiktoken").is_dir() and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("needs GPT-2's tokenizer files: set GPT2_TEST_DATA or TIKTOKEN_CACHE_DIR")
    env = {"TIKTOKEN_CACHE_DIR": os.environ.get("TIKTOKEN_CACHE_DIR", str(DATA / "tiktoken")), **bins.env}
    out, args, bins.breaks = tmp_path / "o", ["--dataset", "me/texts", "--out", tmp_path / "o"], 2
    out.mkdir()
    (out / "web_val_000000.bin").write_bytes(b"somebody's")
    got = call(*args, "--tokens", "9k", **env)
    assert got.returncode == 2 and "holds web_val_000000.bin but no manifest.json of theirs" in got.stderr
    assert (out / "web_val_000000.bin").read_bytes() == b"somebody's"
    (out / "web_val_000000.bin").unlink()
    bins.bad_sha = True
    got = call(*args, "--tokens", "9k", **env)
    assert got.returncode == 2 and "web_val_000000.bin arrived damaged" in got.stderr
    bins.bad_sha = False
    got = call(*args, "--tokens", "9k", **env)
    assert got.returncode == 0, got.stderr
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "web_train_000001.bin", "web_val_000000.bin"]
    for path in out.glob("*.bin"):
        assert path.read_bytes() == (bins.root / path.name).read_bytes()
    before = len(bins.paths)
    got = call(*args, **env)
    assert got.returncode == 0 and bins.breaks == 0 and "15,000 tokens" in got.stdout
    assert [p for p in bins.paths[before:] if p.endswith(".bin")] == ["/datasets/me/texts/resolve/c0ffee/web_train_000002.bin"]
    assert verify(out) == [] and read_manifest(out)["documents"] == 3
