"""Models by name: which file holds a model's program, where its weights are, and the model itself.

Nothing in lab imports a program but by its name here.
"""

import dataclasses
import importlib
from pathlib import Path

import torch

from lab import weights
from lab.cli import UserError
from lab.data.documents import hide_other_documents
from lab.run.checkpoints import has_checkpoint, newest_checkpoint, newest_run, read_checkpoint
from lab.run.settings import same_shape

# what a checkpoint calls its program: the file that has the class
PROGRAMS = {"gpt2": "train_gpt2"}


def find(source, log_dir="log"):
    """What load reads for `source`: a .pt file, a Hugging Face folder, or a hub name as it is.

    "" is the newest run in log_dir. A run's folder, or its name in log_dir, is its newest
    checkpoint."""
    path = Path(source) if source else newest_run(log_dir)
    if not path.exists() and source not in weights.PUBLISHED:  # gpt2 is OpenAI's
        run = Path(log_dir) / path
        path = run if has_checkpoint(run) else path
    return str(newest_checkpoint(path) if has_checkpoint(path) else source or path)


def load(source, log_dir="log"):
    """The model that `source` names (see find), with its own settings, on the CPU.

    Raises UserError where there is nothing to read, or where it fits no model of this project.
    """
    path = find(source, log_dir)
    if not path.endswith(".pt"):
        return build("gpt2", {}, *weights.read(path), path)
    checkpoint = read_checkpoint(path)
    shape, state = weights.unpack(checkpoint, path)
    # checkpoints from before programs had names are GPT-2's
    name, settings = checkpoint.get("program", "gpt2"), checkpoint.get("model_config", {})
    return build(name, settings, shape, state, path)


def build(name, settings, shape, state, source):
    """The model of the program called `name`. settings: its config's other fields, as far as it has
    them still."""
    if name not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        raise UserError(f"{source} is of a program called {name!r}; known are {known}")
    program = importlib.import_module(PROGRAMS[name])
    fields = {field.name for field in dataclasses.fields(program.GPTConfig)}
    kept = {key: value for key, value in settings.items() if key in fields}
    with torch.device("meta"):  # drawing random weights takes longer than reading others
        model = program.GPT(program.GPTConfig(**kept | shape))
    weights.copy_into(model, state, source)
    if model.config.document_mask:
        hide_other_documents(model)
    return model


def shape_of(source, log_dir="log"):
    """n_layer, n_head, n_embd, block_size and vocab_size of what `source` names (see find)."""
    return weights.read(find(source, log_dir))[0]


def start_from(source, model, log_dir="log"):
    """Give a new model the weights that `source` names (see find), which must be of its shape."""
    path = find(source, log_dir)
    shape, state = weights.read(path)
    same_shape(path, shape, model.config)
    weights.copy_into(model, state, path)
