"""Upload an exported model to the Hugging Face hub with a model card: python -m lab export --push_to_hub.

Values of the card come from the run's config.json, log.jsonl and checkpoint; missing ones are "not
recorded".
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.cli import UserError
from lab.data.manifest import read_manifest
from lab.data.tokenizers import TOKENIZER_FILE
from lab.files import first_line, read_json
from lab.registry import is_checkpoint, tokenizer_name
from lab.tools.read_log import RunLog, read_log, tokens_at
from lab.trainer.checkpoint import read_checkpoint

MISSING = "not recorded"


def check_hub_name(name: str) -> None:
    """Raise UserError if this is no valid name, or if there is no token. Needs no connection."""
    from huggingface_hub import errors, get_token, utils  # slow to import

    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise UserError(
            f"push_to_hub={name!r} is not the name of a repository ({first_line(error)}); pass "
            "--push_to_hub NAME or USER/NAME"
        ) from error
    if not get_token():
        raise UserError(
            f"push_to_hub={name} needs a token with write access; create one at "
            "https://huggingface.co/settings/tokens, then log in with `hf auth login` or set HF_TOKEN"
        )


def push(folder: Path, name: str) -> str:
    """Upload the files of `folder` in one commit; returns the repository's address.

    The repository is created if it is missing, as a private one. Raises UserError if the hub or the
    network refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi  # slow to import

    api = HfApi()
    with push_errors(folder, name):
        repo = api.create_repo(name, private=True, exist_ok=True)
        files = [CommitOperationAdd(p.name, p) for p in sorted(folder.iterdir())]
        # one commit, so that an incomplete model can never be downloaded
        api.create_commit(repo.repo_id, files, commit_message="Export by python -m lab export")
    return str(repo)


@contextlib.contextmanager
def push_errors(folder: Path, name: str) -> Iterator[None]:
    """Convert errors of the hub and of the network to UserError."""
    from huggingface_hub import errors  # slow to import

    # the HTTP library's class, which huggingface_hub imports but does not export
    http_error = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    # RuntimeError and ValueError: an upload that failed, and a refusal such as an exceeded quota
    except (http_error, OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "server_message", None) or first_line(error)
        raise UserError(
            f"the hub did not accept {name} ({type(error).__name__}: {reason}): check the name, the "
            f"token's write access and the network; {folder} is complete, and the same command tries again"
        ) from error


def model_card(exported: Any, config: Any, source: str) -> str:
    """The text of README.md for an exported model.

    exported: the model of transformers; config: ours; source: as resolve_source returns it.
    """
    step, train, log = recorded(source)
    title = train.get("run_name") or Path(source).absolute().name
    rows = {
        "exported from": f"`{title}`" + ("" if step is None else f", step {step:,}"),
        "weights": f"{sum(p.numel() for p in exported.parameters()):,}",
        "shape": f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, "
        f"{config.block_size} positions",
        "tokenizer": tokenizer_row(config, source),
        "training data": data_row(train, log),
        "trained for": trained_row(log, step),
        "started from": f"`{train['init_from']}`" if train.get("init_from") else "",
        "validation loss": loss_row(log, step),
    }
    table = "\n".join(
        f"| {key} | {value.replace('|', '/')} |" for key, value in rows.items() if value
    )
    command = str(log.get("start", [{}])[0].get("command", "")) or MISSING
    indented = "\n".join(f"    {line}" for line in command.splitlines())
    task, kind, hint = "fill-mask", "BERT", ""
    if not hasattr(config, "segments"):
        task, kind = "text-generation", "GPT-2"
        hint = "\nDocuments begin with `<|endoftext|>` in training: put it before a prompt.\n"
    return f"""---
library_name: transformers
pipeline_tag: {task}
---

# {title}

A {kind} exported by `python -m lab export`.

| | |
|---|---|
{table}

The command that trained it:

{indented}
{hint}
License of the code that exported it: MIT. The licenses of the weights and of their training text are
not recorded.
"""


def recorded(source: str) -> tuple[int | None, dict[str, Any], RunLog]:
    """(step, TrainConfig, log) of a checkpoint and its run; None or empty if they are not recorded."""
    train: dict[str, Any] = {}
    log: RunLog = {}
    if not is_checkpoint(source):
        return None, train, log
    with contextlib.suppress(UserError):  # a checkpoint outside of its run has neither
        train = read_json(Path(source).parent / "config.json", train=dict)["train"]
        log = read_log(Path(source).parent)
    step = read_checkpoint(Path(source)).get("step")
    return step if type(step) is int else None, train, log  # another program's file has no step


def tokenizer_row(config: Any, source: str) -> str:
    """The model's tokenizer and the size of its vocabulary."""
    size = f"{config.vocab_size:,} ids"
    if hasattr(config, "segments"):
        return f"WordPiece, {size}"
    try:
        name = tokenizer_name(config, source)
    except UserError:  # neither recorded nor known from the vocabulary's size
        return f"{MISSING}, {size}"
    names = {"gpt2": "GPT-2's byte-level BPE", "bytes": "bytes and end-of-text"}
    return f"{names.get(name, f'byte-level BPE of its own, `{TOKENIZER_FILE}`')}, {size}"


def data_row(train: dict[str, Any], log: RunLog) -> str:
    """The folder of the shards, their data set if it is from the hub, and their tokens."""
    if not train.get("data"):
        return MISSING
    found = f"`{train['data']}`"
    with contextlib.suppress(UserError):  # damaged
        source = (read_manifest(train["data"]) or {}).get("source", {})
        parts = [source[key] for key in ("dataset", "name", "revision") if source.get(key)]
        found += f" ({', '.join(map(str, parts))})" if parts else ""
    tokens = log.get("start", [{}])[-1].get("train_tokens")
    return f"{found}, {tokens:,} tokens" if tokens else found


def trained_row(log: RunLog, step: int | None) -> str:
    """The training tokens up to the exported step."""
    tokens = tokens_at(log)
    return f"{tokens(step):,} tokens" if tokens and step else MISSING


def loss_row(log: RunLog, step: int | None) -> str:
    """The last validation loss up to the exported step, in nats per token and bits per byte."""
    losses = [
        r for r in log.get("val", []) if "loss" in r and step is not None and r["step"] <= step
    ]
    if not losses:
        return MISSING
    last = losses[-1]
    text = f"{last['loss']:.4f} nats per {'masked ' * ('accuracy' in last)}token"
    text += f", {last['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in last else ""
    return text if last["step"] == step else f"{text}, at step {last['step']:,}"
