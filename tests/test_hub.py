"""fineweb.py, lab export --push_to_hub and the hub, replaced by a local web server that can fail in several
ways."""

import base64
import hashlib
import http.server
import json
import os
import re
import subprocess
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run_code, run_python
from test_fineweb import BYTES, call, command, documents, plain_stream, stream_of, write_parquet
from test_loader import write_shard

import bert
from lab.data.manifest import read_manifest, verify_shards
from lab.data.shards import TokenShards
from lab.data.tokenizers import train_wordpiece
from lab.registry import load_model
from lab.tools.read_log import read_log

REVISION = "c0ffee" + "0" * 34


class Hub(http.server.ThreadingHTTPServer):
    """Serves the list of a repository's files, and the files by ranges; accepts uploads with the token
    hf_good, of large files by Git LFS or, without HF_HUB_DISABLE_XET, by hf_xet into the folder hub.xet.

    Requests with `gone` in their path get status 503, as do the next `fails` requests. Of the next
    `breaks` answers it sends only half, then closes the connection.
    """

    daemon_threads = True

    def __init__(self, root, card):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root, self.card = root, card
        self.gone, self.breaks, self.fails, self.sent, self.asked = "nothing", 0, 0, 0, []
        self.repos, self.large, self.pointers, self.commits = {}, {}, {}, []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        self.env = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HUB_OFFLINE": "0"}
        self.env |= {"HF_HUB_DISABLE_XET": "1"}


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(path)
        if path.endswith("/xet-write-token/main"):  # hf_xet takes a folder for a storage server
            token = {"casUrl": f"local://{hub.root}.xet", "exp": 2**33, "accessToken": "a"}
            return self.answer(200, json.dumps(token).encode(), kind="application/json")
        path = path.replace("/api/models/me/tiny/", "/api/datasets/me/texts/")  # the same files
        path = path.replace("/me/tiny/resolve/", "/datasets/me/texts/resolve/")
        about = [self.about(p) for p in sorted(hub.root.rglob("*")) if p.is_file()]
        if path.startswith("/api/datasets/me/texts/revision/"):
            found = {"id": "me/texts", "sha": REVISION, "cardData": hub.card, "siblings": about}
            return self.answer(200, json.dumps(found).encode(), kind="application/json")
        if path.startswith(tree := f"/api/datasets/me/texts/tree/{REVISION}"):
            parent = path.removeprefix(tree).strip("/").replace("%2F", "/")
            inside = [a for a in about if os.path.dirname(a["path"]) == parent]
            return self.answer(200, json.dumps(inside).encode(), kind="application/json")
        path = path.removeprefix("/bert-base-uncased/resolve/main/")
        file = hub.root / path.removeprefix(f"/datasets/me/texts/resolve/{REVISION}/")
        if not file.is_file():
            return self.answer(404, b"")
        if hub.fails or hub.gone in self.path:
            hub.fails = max(0, hub.fails - 1)
            return self.answer(503, b"busy")
        data, start, stop = file.read_bytes(), 0, None
        if self.headers["Range"]:
            start, stop = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"]).groups()
            start, stop = int(start), int(stop) + 1 if stop else None
        part, size = data[start:stop], len(data)
        where = f"bytes {start}-{start + len(part) - 1}/{size}"
        self.answer(206 if self.headers["Range"] else 200, part, self.about(file)["oid"], where)

    do_HEAD = do_GET

    def do_POST(self):
        """What HfApi.create_repo and create_commit send: JSON, or one JSON object per line."""
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        status, home = 200, hub.env["HF_ENDPOINT"]
        if self.headers["Authorization"] != "Bearer hf_good":
            status, found = 401, {"error": "Invalid credentials in Authorization header"}
        elif path == "/api/repos/create":
            name = f"{lines[0]['organization'] or 'me'}/{lines[0]['name']}"
            status, found = 409 if name in hub.repos else 200, {"url": f"{home}/{name}"}
            hub.repos.setdefault(name, lines[0])
            if not name.startswith("me/"):
                status, found = 403, {"error": "You don't have the rights to create it there"}
        elif path.endswith("/preupload/main"):
            kinds = {True: "lfs", False: "regular"}
            found = {"files": [
                {"path": f["path"], "uploadMode": kinds[f["path"].endswith(".safetensors")],
                 "shouldIgnore": False, "oid": None} for f in lines[0]["files"]
            ]}  # fmt: skip
        elif path.endswith(".git/info/lfs/objects/batch"):
            href = {o["oid"]: {"upload": {"href": f"{home}/lfs"}} for o in lines[0]["objects"]}
            found = {"objects": [o | {"actions": href[o["oid"]]} for o in lines[0]["objects"]]}
        elif path.endswith("/commit/main"):
            hub.commits.append([line["value"].get("path") for line in lines])
            for value in (line["value"] for line in lines if line["key"] != "header"):
                if "oid" in value:
                    hub.pointers[value["path"]] = value["oid"]
                    data = hub.large.get(value["oid"], b"")
                else:
                    data = base64.b64decode(value["content"])
                hub.root.mkdir(exist_ok=True)
                (hub.root / value["path"]).write_bytes(data)
            found = {"commitUrl": f"{home}/me/tiny/commit/{REVISION}", "commitOid": REVISION}
        else:
            assert path == "/api/validate-yaml", path
            found = {}
        self.answer(status, json.dumps(found).encode(), kind="application/json")

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.large[hashlib.sha256(data).hexdigest()] = data
        self.answer(200, b"")

    def about(self, path):
        name, data = path.relative_to(self.server.root).as_posix(), path.read_bytes()
        more = {"size": len(data), "oid": hashlib.sha256(data).hexdigest()}
        return {"rfilename": name, "path": name, "type": "file", "blobId": "0", **more}

    def answer(self, status, body, etag="", where="", kind="application/octet-stream"):
        headers = {"Content-Length": len(body), "Content-Type": kind, "Content-Range": where}
        headers |= {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        headers |= {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if where and self.server.breaks and len(body) > 1000:
            self.server.breaks -= 1
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)
        self.server.sent += len(body) if where else 0


@pytest.fixture
def serve(tmp_path):
    """serve(card): a Hub with the files in tmp_path / "hub"."""
    servers = []
    yield lambda card: servers.append(Hub(tmp_path / "hub", card)) or servers[0]
    for server in servers:  # none, where a test was skipped
        server.shutdown()
        server.server_close()


TEXTS = [*documents(400), "", None, " \n "]


@pytest.fixture
def hub(tmp_path, serve):
    root = tmp_path / "hub"
    write_parquet(root / "sample/small/000.parquet", TEXTS[:150])
    write_parquet(root / "sample/small/001.parquet", TEXTS[150:])
    (root / "README.md").write_text("a data set")
    paths = {"default": "data/*", "small": ["sample/small/*"]}
    files = {name: [{"split": "train", "path": path}] for name, path in paths.items()}
    configs = [{"config_name": name, "data_files": each} for name, each in files.items()]
    return serve({"configs": configs})


ARGS = ["--dataset", "me/texts", *BYTES, "--shard_tokens", "20k", "--val_tokens", "5000"]


def test_broken_connections_make_no_difference(hub, tmp_path):
    """Truncated and refused answers do not change the tokens."""
    hub.breaks = hub.fails = 1
    args = [*ARGS, "--out", tmp_path / "o", "--name", "small"]
    got = call(*args, "--workers", 1, **hub.env)
    assert got.returncode == 0 and hub.breaks == hub.fails == 0, got.stderr
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(TEXTS))
    about = dict(dataset="me/texts", name="small", revision=REVISION)
    assert about.items() <= read_manifest(tmp_path / "o")["source"].items()
    assert not list(tmp_path.glob("o/*.parquet")), "only tokens are kept"


def test_a_build_continues_after_the_hub_was_unreachable(hub, tmp_path):
    """huggingface_hub retries for half a minute (here less); then there is one error message."""
    hub.gone = "001.parquet"
    args = [*ARGS, "--name", "small", "--out", tmp_path / "o", "--workers", 0]
    wait = "import time; time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds / 100)"
    (tmp_path / "sitecustomize.py").write_text(wait)
    env = os.environ | hub.env | {"PYTHONPATH": str(tmp_path)}
    got = subprocess.run(command(*args), env=env, capture_output=True, text=True)
    assert got.returncode == 2 and "Traceback" not in got.stderr, got.stderr
    said = "the hub did not send me/texts.*--source FOLDER.* continues later"
    assert re.search(said, got.stderr), got.stderr
    noted = sum(e["tokens"] for e in read_manifest(tmp_path / "o")["shards"])
    assert 0 < noted <= len(plain_stream(TEXTS[:150]))
    hub.gone, asked = "nothing", len(hub.asked)
    got = call(*args, "--revision", "v2", **hub.env)  # ignored: the build keeps its commit
    assert got.returncode == 0 and f"continuing after {noted:,} tokens" in got.stdout, got.stderr
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(TEXTS))
    first = next(path for path in hub.asked[asked:] if "/revision/" in path)
    assert first.endswith(f"/revision/{REVISION}")


@pytest.mark.parametrize("configs", [[], [{"config_name": "small", "data_dir": "sample/small"}]])
def test_a_data_set_without_a_list_of_splits_is_read_completely_and_says_so(hub, tmp_path, configs):
    hub.card = {"configs": configs}
    got = call(*ARGS, "--out", tmp_path / "o", "--workers", 0, **hub.env)
    assert got.returncode == 0 and "reading all 2 files, regardless of --split" in got.stderr
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(TEXTS))


def test_unavailable_data_is_reported_in_one_sentence(hub, tmp_path):
    for more, said in {
        "--name huge": "one of default, small",
        "--dataset me/nothing": "did not send me/nothing (RepositoryNotFoundError",
        "": "--source builtin the built-in text",
    }.items():
        env = hub.env if more else hub.env | {"HF_ENDPOINT": "http://hub.invalid"}
        got = call(*ARGS, "--out", tmp_path / "o", *more.split(), **env)
        assert got.returncode == 2 and said in got.stderr and "Traceback" not in got.stderr
    assert not (tmp_path / "o").exists(), "a build that could not start leaves no folder"


def test_only_the_text_column_of_the_default_configuration_is_transferred(hub, tmp_path):
    noise = [os.urandom(100_000).hex() for _ in range(20)]
    path = write_parquet(hub.root / "data/other.parquet", [])
    pq.write_table(pa.table({"noise": noise, "text": ["short"] * 20}), path, row_group_size=5)
    args = [*ARGS, "--val_tokens", 50, "--out", tmp_path / "o", "--workers", 0]
    got = call(*args, **hub.env)
    assert got.returncode == 0, got.stderr
    assert np.array_equal(stream_of(tmp_path / "o"), plain_stream(["short"] * 20))
    assert hub.sent < path.stat().st_size / 10


def test_ready_made_shards(serve, tmp_path, gpt2_files):
    """Downloaded unchanged, as many as --tokens needs; a later command adds the others."""
    (tmp_path / "hub").mkdir()
    for i, split in enumerate(("val", "train", "train")):
        tokens = np.concatenate([[50256], np.arange(4999) + i]).astype(np.uint16)
        write_shard(tmp_path / "hub" / f"web_{split}_{i:06d}.bin", tokens)
    hub = serve(None)
    out, args = tmp_path / "o", ["--dataset", "me/texts", "--out", tmp_path / "o"]
    out.mkdir()
    (theirs := out / "web_val_000000.bin").write_bytes(b"somebody's")
    got = call(*args, "--tokens", "9k", **hub.env)
    assert got.returncode == 2 and f"{theirs.name} but no manifest.json" in got.stderr, got.stderr
    assert theirs.read_bytes() == b"somebody's"
    theirs.unlink()
    hub.breaks = 1
    got = call(*args, "--tokens", "9k", **hub.env)
    assert got.returncode == 0 and hub.breaks == 0, got.stderr
    assert {p.name for p in out.glob("*.bin")} == {"web_train_000001.bin", "web_val_000000.bin"}
    asked = len(hub.asked)
    got = call(*args, **hub.env)
    assert got.returncode == 0 and "15,000 tokens" in got.stdout, got.stderr
    fetched = {path for path in hub.asked[asked:] if path.endswith(".bin")}
    assert fetched == {f"/datasets/me/texts/resolve/{REVISION}/web_train_000002.bin"}
    assert all(p.read_bytes() == (hub.root / p.name).read_bytes() for p in out.glob("*.bin"))
    assert verify_shards(out) == [] and read_manifest(out)["documents"] == 3
    assert len(TokenShards(out, "train", 50257)) == 10_000


def test_bert_base_uncased_is_downloaded_from_the_hub(serve, tmp_path):
    """It is saved with the shards, where bert.py finds it."""
    vocabulary = train_wordpiece(["the cat sat on the mat " * 9], 99)
    (tmp_path / "hub").mkdir()
    vocabulary.save(str(tmp_path / "hub/tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat\nsat")
    flags = "--tokenizer bert-base-uncased --val_tokens 2 --source".split()
    args = [*flags, tmp_path / "text.txt", "--out", tmp_path / "o"]
    got = call(*args, **serve(None).env, HF_HOME=str(tmp_path / "cache"))
    assert got.returncode == 0, got.stderr
    words = [vocabulary.token_to_id(word) for word in ("[SEP]", "the", "cat", "sat")]
    assert stream_of(tmp_path / "o").tolist() == words
    assert bert.WordPiece(tmp_path / "o/tokenizer.json").decode(words[1:]) == "the cat sat"
    got = call(*args[:-1], tmp_path / "p", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert got.returncode == 2 and "pass --tokenizer wordpiece, which learns one" in got.stderr


def export(*args, cwd, **env):
    env = {"HF_HOME": cwd / "cache", "HF_TOKEN": "hf_good", "no_proxy": "127.0.0.1"} | env
    return run_python(ROOT / "lab", "export", *args, cwd=cwd, **env)


@pytest.fixture
def run(run_train, tmp_path):
    """log/r with three steps, and a validation before the first and after the last."""
    trained = run_train("--max_steps", 3, "--val_every", 3)
    assert trained.returncode == 0, trained.stderr
    return tmp_path / "log/r"


def test_a_run_is_pushed_with_a_card_and_loaded_from_the_hub(run, serve, tmp_path):
    hub = serve(None)
    args = ["log/r", "--out", "out", "--push_to_hub", "tiny"]
    pushed = export(*args, cwd=tmp_path, **hub.env)
    assert pushed.returncode == 0, pushed.stderr
    assert f"pushed to {hub.env['HF_ENDPOINT']}/me/tiny" in pushed.stdout
    assert hub.repos["me/tiny"]["visibility"] == "private"
    files = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert files == {p.name: p.read_bytes() for p in hub.root.iterdir()}
    assert list(hub.large.values()) == [files["model.safetensors"]]
    assert len(hub.commits) == 1 and sorted(hub.commits[0][1:]) == sorted(files)

    card, log = files["README.md"].decode(), read_log(run)
    loss, start = log["val"][-1]["loss"], log["start"][0]
    assert log["val"][-1]["step"] == 3 and start["command"].endswith("--val_every 3")
    model = load_model(str(tmp_path / "out"))
    weights = 257 * 32 + 32 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32  # without padding rows
    for line in (
        "library_name: transformers", "pipeline_tag: text-generation", "# r", f"    {start['command']}",
        "| exported from | `r`, step 3 |", f"| weights | {weights:,} |",
        "| shape | 2 layers, 2 heads, 32 channels, 32 positions |",
        "| tokenizer | bytes and end-of-text, 257 ids |",
        f"| training data | `{tmp_path / 'data'}`, {start['train_tokens']:,} tokens |",
        "| trained for | 384 tokens |", f"| validation loss | {loss:.4f} nats per token",
        "License of the code that exported it: MIT.",
    ):  # fmt: skip
        assert f"\n{line}" in card, (line, card)

    text = "import os; from lab.registry import load_model; m = load_model('me/tiny')\n"
    text += "print(sum(p.double().sum().item() for p in m.parameters()))"
    env = hub.env | {"HF_HOME": tmp_path / "other", "no_proxy": "127.0.0.1"}
    loaded = run_code(text, cwd=tmp_path, **env)
    assert loaded.returncode == 0, loaded.stderr
    total = sum(p.double().sum().item() for p in model.parameters())
    assert float(loaded.stdout) == total

    again = export(*args, cwd=tmp_path, **hub.env)  # replaces the folder, and adds a commit
    assert again.returncode == 0 and len(hub.commits) == 2, again.stderr


def test_weights_are_uploaded_by_xet(run, serve, tmp_path):
    """The protocol that huggingface_hub prefers. Its storage server is replaced by a folder."""
    pytest.importorskip("hf_xet")
    hub = serve(None)
    args = ["log/r", "--out", "out", "--push_to_hub", "tiny"]
    pushed = export(*args, cwd=tmp_path, **hub.env | {"HF_HUB_DISABLE_XET": "0"})
    assert pushed.returncode == 0, pushed.stderr
    weights = (tmp_path / "out/model.safetensors").read_bytes()
    assert hub.pointers == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    stored = [p.stat().st_size for p in (tmp_path / "hub.xet/xet/xorbs/xorbs").iterdir()]
    assert not hub.large and 0.5 * len(weights) < sum(stored) < 1.1 * len(weights)


def test_a_card_says_what_is_not_recorded(run, serve, tmp_path):
    """For a checkpoint outside of its run there is neither log.jsonl nor config.json."""
    (run / "model_000003.pt").rename(tmp_path / "model.pt")
    args = ["model.pt", "--out", "out", "--push_to_hub", "me/tiny"]
    pushed = export(*args, cwd=tmp_path, **serve(None).env)
    assert pushed.returncode == 0, pushed.stderr
    card = (tmp_path / "hub/README.md").read_text()
    for row in ("training data", "trained for", "validation loss"):
        assert f"| {row} | not recorded |" in card, card
    assert "The command that trained it:\n\n    not recorded\n" in card
    assert "| exported from | `model.pt`, step 3 |" in card


def test_a_refused_push_gives_one_sentence(run, serve, tmp_path):
    hub = serve(None)
    for name, env, said, kept in (
        ("a b", {}, "push_to_hub='a b' is not the name of a repository", False),
        ("tiny", {"HF_TOKEN": ""}, "needs a token with write access", False),
        ("tiny", {"HF_TOKEN": "hf_bad"}, "Invalid credentials", True),
        ("other/tiny", {}, "You don't have the rights", True),
        ("tiny", {"HF_ENDPOINT": "http://hub.invalid"}, "the same command tries again", True),
    ):
        got = export("log/r", "--out", "out", "--push_to_hub", name, cwd=tmp_path, **hub.env | env)
        assert got.returncode == 2 and said in got.stderr, (name, env, got.stderr)
        assert "Traceback" not in got.stderr and got.stderr.splitlines()[-1].count(said) == 1
        assert (tmp_path / "out/model.safetensors").exists() == kept
    assert not hub.commits and not hub.large
    got = export("log/r", "--html", "a.html", "--push_to_hub", "tiny", cwd=tmp_path, **hub.env)
    assert got.returncode == 2 and "pass --out FOLDER instead of --html" in got.stderr
