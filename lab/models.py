"""Models by name: which file holds a model's program, where its weights are, and the model itself.

Nothing in lab imports a program but by its name here.
"""

import dataclasses
import importlib
from pathlib import Path

import torch

from lab import weights
from lab.cli import UserError
from lab.cli import program as command_of
from lab.data.document_mask import hide_other_documents
from lab.run.checkpoints import checkpoint_files, read_checkpoint, read_newest
from lab.run.folder import PROGRAMS, known_settings, newest_run

WRITE_TEXT = ("gpt2", "speedrun")
WITH_PUBLISHED_WEIGHTS = ("gpt2", "bert")  # which tell their shape
# settings of a model that may change while it is trained; the others say which function it is
FREE = ("attention", "bf16_residual", "activation_checkpointing", "document_mask", "mask_share")


def find(source, log_dir="log"):
    """What load reads for `source`: a .pt file, a Hugging Face folder, or a hub name as it is.

    "" is the newest run in log_dir that writes text. A run's folder, or its name in log_dir, is its
    newest checkpoint that is whole."""
    path = Path(source) if source else newest_run(log_dir, *WRITE_TEXT)
    if not path.exists() and source not in weights.PUBLISHED:  # gpt2 is OpenAI's
        path = Path(log_dir) / path
    if (path / "log.jsonl").exists() and not checkpoint_files(path):
        best = path / "model_best.pt"
        way = f"its best is {best}" if best.exists() else "train it further, or name another"
        raise UserError(f"{path} is a run that has no checkpoint to go on from; {way}")
    return str(read_newest(path)[0] if checkpoint_files(path) else source)


def load(source):
    """The model that `source` names (see find), with its own settings, on the CPU.

    Raises UserError where there is nothing to read, or where it fits no model of this project.
    """
    path = find(source)
    if not Path(path).is_file() and not path.endswith(".pt"):
        shape, state = weights.read_hugging_face(path)
        return build("bert" if "segments" in shape else "gpt2", {}, shape, state, path)
    checkpoint = read_checkpoint(path)
    found = checkpoint if isinstance(checkpoint, dict) else {}
    # checkpoints from before programs had names are GPT-2's, and so are those of others
    name = found.get("program", "gpt2")
    if name in WITH_PUBLISHED_WEIGHTS:
        shape, state = weights.unpack(checkpoint, path)
    else:
        shape, state = {}, found.get("model")
    return build(name, found.get("model_config"), shape, state, path)


def build(name, settings, shape, state, source):
    """The model of the program called `name`. settings: its config, as far as it has the fields
    still; shape: those of GPT-2's that its weights tell."""
    if name not in list(PROGRAMS):
        known = ", ".join(PROGRAMS)
        raise UserError(f"{source} is of a program called {name!r}; known are {known}")
    program = importlib.import_module(PROGRAMS[name])
    settings = settings if isinstance(settings, dict) else {}
    model_class, config_class = program.Run.model_class, config_classes(program)[0]
    known, _ = known_settings(source, settings, config_class)
    config = config_class(**known | shape)
    if name in WITH_PUBLISHED_WEIGHTS:
        with torch.device("meta"):  # drawing random weights takes longer than reading others
            model = model_class(config)
        weights.copy_into(model, state, source)
    else:
        model = model_class(config)
        load_exactly(model, state, source)
    if config.document_mask:
        hide_other_documents(model)
    return model


def config_classes(program):
    """The classes of the two configurations of a program, the model's and the run's."""
    return [type(config) for config in next(iter(program.PRESETS.values()))]


def load_exactly(model, state, source):
    """A state dict of a program of ours, whose names are the model's. Raises UserError where it does
    not fit or is not finite."""
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:  # of odd shapes, values, names
        what = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source} does not fit the model of its program, as this version has it: {what}"
        ) from error
    for name, p in model.named_parameters():
        weights.check_finite(p, name, source)


def shape_of(source, log_dir="log", program=""):
    """{name: value} of the model config of what `source` names (see find), as far as it is known.
    Raises UserError for a checkpoint of another program than this."""
    path = find(source, log_dir)
    if not Path(path).is_file() and not path.endswith(".pt"):
        if program not in ("", *WITH_PUBLISHED_WEIGHTS):
            raise UserError(
                f"{path} is no run of {PROGRAMS[program]}.py, whose --init_from begins with nothing "
                "else; `ls log` shows the runs"
            )
        shape = weights.read_hugging_face(path)[0]
        made_by = "bert" if "segments" in shape else "gpt2"
        if program in ("", made_by):
            return shape
        file = f"{PROGRAMS[made_by]}.py"
    else:
        model = load(path)
        ours = importlib.import_module(PROGRAMS[program]).Run.model_class if program else object
        if isinstance(model, ours):
            return dataclasses.asdict(model.config)
        file = f"{type(model).__module__}.py"
    raise UserError(f"{path} is a model of {file}; `{command_of(file)} --init_from` begins with it")


def check_same(source, theirs, model_config, *free):
    """Raise UserError where a model's settings (a dict) are of another function than a config's."""
    ours = {k: v for k, v in vars(model_config).items() if k not in FREE + free}
    theirs = vars(type(model_config)()) | theirs  # an old one may lack a setting
    pairs, ways = [], []
    for name, value in ours.items():
        if type(theirs[name]) is not type(value) or theirs[name] != value:
            pairs.append(f"{name}={theirs[name]} (here {value})")
            if name == "vocab_size":  # other words
                ways.append("--data with shards of its tokenizer, without --vocab_size")
            elif type(value) is bool:
                ways.append(f"--{name}" if theirs[name] is True else f"--no_{name}")
            else:
                ways.append(f"--{name} {theirs[name]}")
    if pairs:
        raise UserError(f"{source} is another model: {', '.join(pairs)}; pass {' and '.join(ways)}")


def start_from(source, model, log_dir="log"):
    """Give a new model the weights that `source` names (see find), which must be another such one."""
    path = find(source, log_dir)
    other = load(path)
    if hasattr(model, "from_pretrained"):  # GPT-2's weights come from many places
        check_same(path, vars(other.config), model.config, "vocab_multiple")
        weights.copy_into(model, other.state_dict(), path)  # with more or fewer pad rows
    else:
        check_same(path, vars(other.config), model.config)
        load_exactly(model, other.state_dict(), path)
