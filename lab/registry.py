"""Find and load models: runs, checkpoints, Hugging Face folders and models on the hub.

The class of a model is the one recorded in its checkpoint (lab/program.py); published weights are
loaded into train_gpt2.py's GPT or bert.py's Bert.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch

from lab.cli import UserError, command_for, require, shell_quote
from lab.config_file import build_config
from lab.data.chat import CHAT_TEMPLATE
from lab.data.manifest import read_manifest, sha256_of
from lab.data.tokenizers import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    Tokenizer,
    get_tokenizer,
    printable,
    tokenizer_for_vocab_size,
)
from lab.files import check_keys, read_errors, read_json, read_lenient
from lab.hf.gpt2 import PUBLISHED
from lab.hf.load import check_finite, copy_into, download, parse_checkpoint, read_hugging_face
from lab.program import class_path, code_hash, find_class, program_file, warn_if_edited
from lab.trainer.checkpoint import checkpoint_files, read_checkpoint, read_newest
from lab.trainer.run_dir import newest_run, program_of

# config fields that may differ when weights are reused, because no weight depends on them
IGNORED_FIELDS = (
    "attention", "bf16_residual", "activation_checkpointing", "document_mask", "mlm_probability",
    "tokenizer", "eot_id",
)  # fmt: skip


# ----------------------------------------------------------------------------------------- loading


def resolve_source(source: str, log_dir: str | Path = "log") -> str:
    """Resolve `source` to what load_model reads: a .pt file, a Hugging Face folder or a hub name.

    "" is the newest run in log_dir that generates text. A run's folder, or its name in log_dir,
    becomes its newest undamaged checkpoint. Raises UserError for a run without a checkpoint.
    """
    path = Path(source) if source else newest_run(log_dir, lambda run: run["generates_text"])
    if not path.exists() and source not in PUBLISHED:  # a bare "gpt2" means OpenAI's weights
        path = Path(log_dir) / path
    if (path / "log.jsonl").exists() and not checkpoint_files(path):
        best = path / "model_best.pt"
        hint = "choose another: `ls log` lists the runs"
        if best.exists():
            hint = f"its best weights are {best}"
        raise UserError(f"{path} is a run without a checkpoint; {hint}")
    return str(read_newest(path)[0]) if checkpoint_files(path) else source or str(path)


def is_checkpoint(path: str) -> bool:
    return Path(path).is_file() or str(path).endswith(".pt")


def load_model(source: str, model_class: type | None = None) -> Any:
    """Load the model that `source` names (see resolve_source), on the CPU.

    model_class: load the weights into this class instead of the recorded one. Raises UserError if there
    is nothing to load or the weights don't fit.
    """
    path, saved, program = resolve_source(source), {}, None
    if is_checkpoint(path):
        checkpoint = read_checkpoint(path)
        if isinstance(checkpoint, dict):
            saved, program = checkpoint.get("model_config"), checkpoint.get("program")
        # a checkpoint of this project: the model is that of its config. A tensor has no truth value
        if not isinstance(program, dict | None) or program:
            with read_errors(path, "checkpoint", "choose another: `ls log` lists the runs"):
                check_keys(program, model=str, config=str)
            config = build_config(find_class(program["config"], path), saved, path)
            try:
                config.validate()  # a damaged file could have billions of layers
            except UserError as error:
                raise UserError(f"{path}: {error}") from error
            cls = model_class or find_class(program["model"], path)
            if not model_class:
                warn_if_edited(program, cls, path)
            model = cls(config)
            load_state_strict(model, checkpoint.get("model"), path)
            return model
        shape, state = parse_checkpoint(checkpoint, path)
    else:
        shape, state = read_hugging_face(path)
    # published weights or another project's file: infer the shape from the tensors
    model_path = "bert.py:Bert" if "segments" in shape else "train_gpt2.py:GPT"
    published = find_class(model_path, path)
    cls = model_class or published
    if hasattr(cls, "generate") != hasattr(published, "generate"):
        raise UserError(f"{path} contains weights of {model_path}, which do not fit {cls.__name__}")
    config_class = find_class(f"{model_path}Config", path)
    config = config_class(**vars(build_config(config_class, saved, path)) | shape)
    with torch.device("meta"):  # skips the random initialization
        model = cls(config)
    if list(model.buffers()):  # of an edited model: without a value on torch's meta device
        model = cls(config)
    copy_into(model, state, path)
    return model


def load_state_strict(model: torch.nn.Module, state: Any, source: Any) -> None:
    """Load a state dict that has exactly the model's names. Raises UserError if it does not fit or
    contains numbers that are not finite."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:  # wrong shapes, values, names
        detail = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source} does not fit the model class as it is defined now: {detail}"
        ) from error
    for name, p in model.named_parameters():
        check_finite(p, name, source)


def tokenizer_name(model_config, source: str | Path = "") -> str:
    """The name of a model's tokenizer for get_tokenizer. A tokenizer.json is expected in the folder
    of `source`.

    Raises UserError if neither the config nor the vocabulary's size names one."""
    name = getattr(model_config, "tokenizer", "")
    name = name or tokenizer_for_vocab_size(model_config.vocab_size)
    if not name.endswith(".json"):
        return name
    path = Path(source)
    if path.exists():
        return str((path if path.is_dir() else path.parent) / name)
    return str(download(str(source)) / name)  # a model on the hub


def load_tokenizer(model_config, source: str | Path = "") -> Tokenizer:
    """The tokenizer of a model; see tokenizer_name. Raises UserError if it is missing or another model's."""
    name = tokenizer_name(model_config, source)
    hint = f"copy the {TOKENIZER_FILE} that the model was trained with"
    require(
        not name.endswith(TOKENIZER_FILE) or Path(name).exists(),
        f"there is no tokenizer {name}; {hint}",
    )
    tokenizer = get_tokenizer(name)
    require(
        tokenizer.vocab_size == model_config.vocab_size,
        f"tokenizer {name} has {tokenizer.vocab_size} ids, but the model has {model_config.vocab_size}; "
        f"{hint}",
    )
    return tokenizer


def is_tuned(source: str) -> bool | None:
    """Whether a model was fine-tuned on conversations, as the config.json of its run or the chat template
    of its export says. None: unknown. source: as resolve_source returns it."""
    if source in PUBLISHED:
        return False
    if is_checkpoint(source):
        with contextlib.suppress(UserError):  # config.json is missing, damaged or another program's
            train = read_json(Path(source).parent / "config.json", train=dict)["train"]
            if train.get("preset") == "sft":
                return True
            return bool((read_manifest(str(train.get("data", ""))) or {}).get("context"))
    return read_lenient(Path(source, "chat_template.jinja")) == END_OF_TEXT + CHAT_TEMPLATE or None


def chat_warning(source: str, public: bool = False) -> str:
    """A sentence, with the command that tunes the model in backticks, if a model was not fine-tuned on
    conversations, or may not have been; otherwise "". source: as resolve_source returns it. public: the
    sentence names no path of this machine, so it has no command."""
    tuned, name, program = is_tuned(source), source, "train_gpt2.py"
    if tuned:
        return ""
    if tuned is False and is_checkpoint(source):  # of a run, whose folder --init_from takes
        name = str(Path(source).parent)
        program = program_of(Path(name))["trainer"].partition(":")[0]
    command = f"; to tune it: `{command_for(program)} --preset sft --init_from {shell_quote(name)}`"
    if tuned is None and is_checkpoint(source):  # it may be of any program
        command = ""
    if public:
        name, command = "this model", ""
    if tuned is None:
        return f"{name} may not be tuned to answer; then it only continues the text{command}"
    return f"{name} was not tuned to answer, so it only continues the text{command}"


def tuned_on(source: str, file: Path) -> bool:
    """Whether a run's data are the conversations of this file, as they are now. source: as resolve_source
    returns it."""
    # suppressed: a file is missing, damaged or another program's
    with contextlib.suppress(UserError, LookupError, TypeError, OSError):
        config = read_json(Path(source).parent / "config.json", train=dict)
        manifest = read_manifest(str(config["train"].get("data", ""))) or {}
        return [one[2] for one in manifest["source"]["files"]] == [sha256_of(file)]
    return False


def training_data(source: str) -> str:
    """A phrase for the text that a model was trained on, as its run or its export recorded it; "" if
    unknown. source: as resolve_source returns it."""
    path = Path(source)
    file = (path if path.is_dir() else path.parent) / "config.json"
    # suppressed: a file is missing, damaged or another program's
    with contextlib.suppress(UserError, LookupError, TypeError):
        if path.is_dir():
            return str(read_json(file).get("trained_on", ""))
        data = str(read_json(file, train=dict)["train"].get("data", ""))
        manifest = read_manifest(data)
        text = manifest["source"] if manifest else {}
        if text.get("kind") == "builtin":
            return f"the documentation inside {text.get('revision', 'Python')}"
        if manifest and text.get("kind") == "chat":
            count = sum(s["documents"] for s in manifest["shards"] if s["split"] == "train")
            files = [str(file[0]) for file in text["files"]]
            return f"{count:,} conversations of {files[0] if len(files) == 1 else f'{len(files)} files'}"
        parts = [str(text[key]) for key in ("dataset", "name") if text.get(key)]
        return printable(" ".join(parts) or Path(data).name)  # do not reveal the whole path
    return ""


# --------------------------------------------------------------- starting from another run's weights


def config_of(source: str, log_dir: str | Path = "log", trainer_class: Any = None) -> dict:
    """{field: value} of the model config of `source` (see resolve_source), as far as known.

    trainer_class: raise UserError unless the weights fit its model.
    """
    path = resolve_source(source, log_dir)
    ours = trainer_class.model_class if trainer_class else None
    if is_checkpoint(path):
        model = load_model(path)
        shape, cls = dataclasses.asdict(model.config), type(model)
        file = program_file(cls)
        fits = ours is None or class_path(cls) == class_path(ours) or same_parameters(model, ours)
    else:
        if ours and not hasattr(ours, "from_pretrained"):
            program = Path(program_file(ours)).name
            raise UserError(
                f"{path} is not a run, and --init_from of {program} takes only runs of the same program; "
                "`ls log` lists the runs"
            )
        shape = read_hugging_face(path)[0]
        file = "bert.py" if "segments" in shape else "train_gpt2.py"
        fits = ours is None or (file == "bert.py") != hasattr(ours, "generate")
    if not fits:
        raise UserError(
            f"{path} is a model of {file}; start from it with `{command_for(file)} --init_from`"
        )
    return shape


def same_parameters(model: Any, model_class: type) -> bool:
    """Whether another class, built from the model's config, has parameters with the same names."""
    try:
        with torch.device("meta"):
            other = model_class(model.config)
    except Exception:  # a class that needs other config fields
        return False
    return other.state_dict().keys() == model.state_dict().keys()


def check_same_model(source: Any, theirs: dict, model_config: Any, *ignored: str) -> None:
    """Raise UserError if a saved model config (a dict) describes a different model than model_config."""
    ours = {k: v for k, v in vars(model_config).items() if k not in IGNORED_FIELDS + ignored}
    theirs = vars(type(model_config)()) | theirs  # an old one may lack a field
    pairs, fixes = [], []
    for name, value in ours.items():
        if type(theirs[name]) is not type(value) or theirs[name] != value:
            pairs.append(f"{name}={theirs[name]} (here {value})")
            if name == "vocab_size":
                fixes.append("--data with shards of its tokenizer, without --vocab_size")
            elif type(value) is bool:
                fixes.append(f"--{name}" if theirs[name] is True else f"--no_{name}")
            else:
                fixes.append(f"--{name} {theirs[name]}")
    if pairs:
        raise UserError(
            f"{source} is a different model: {', '.join(pairs)}; pass {' and '.join(fixes)}"
        )


def init_from(source: str, model: Any, log_dir: str | Path = "log") -> None:
    """Initialize a new model with the weights of `source`. Raises UserError if they don't fit."""
    path = resolve_source(source, log_dir)
    other = load_model(path)
    warn_if_edited({"code": code_hash(type(other))}, type(model), path)
    if hasattr(model, "from_pretrained"):  # also accepts published weights, with any padding
        check_same_model(path, vars(other.config), model.config, "vocab_multiple")
        copy_into(model, other.state_dict(), path)
    else:
        changeable = getattr(model, "changeable_fields", ())
        check_same_model(path, vars(other.config), model.config, *changeable)
        load_state_strict(model, other.state_dict(), path)


def check_same_vocabulary(source: str, data: str) -> None:
    """Raise UserError if a model and the data for it have different tokenizer files. source: as
    resolve_source returns it; one without such a file is accepted."""
    path = Path(source)
    theirs = (path if path.is_dir() else path.parent) / TOKENIZER_FILE
    files = theirs, Path(data) / TOKENIZER_FILE
    if not (path.exists() and all(file.exists() for file in files)):
        return
    models = [read_json(file, "build the data again", model=dict)["model"] for file in files]
    if models[0].get("vocab") != models[1].get("vocab"):
        command = f"{command_for('fineweb.py')} --tokenizer {shell_quote(theirs)}"
        raise UserError(
            f"{source} has another vocabulary than {data}; build the data with `{command} --out FOLDER`"
        )


def check_program(run_dir: Path, trainer_class: type) -> None:
    """Raise UserError if a run was made by a program other than this trainer's."""
    made_by = program_of(run_dir)["trainer"]
    file, _, name = made_by.rpartition(":")
    our_file, _, our_name = class_path(trainer_class).rpartition(":")
    # by file name, because a user's file may have moved
    require(
        (Path(file).name, name) == (Path(our_file).name, our_name),
        f"{run_dir} is a run of {file}; resume it with `{command_for(file)} --resume` and the same flags "
        "(if you renamed that file, give it its old name)",
    )
