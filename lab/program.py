"""The file and class that define a model. Checkpoints and config.json record them as "FILE:CLASS", so
that a run of a user's own copy of train_gpt2.py is sampled, evaluated and exported with its own model."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from lab.cli import ROOT, UserError

# older runs recorded only these names of programs
LEGACY_PROGRAMS = {
    name: dict(
        trainer=f"{file}:Trainer", model=f"{file}:{model}", config=f"{file}:{model}Config",
        train_config=f"{file}:{train}",
    )
    for name, file, model, train in (
        ("gpt2", "train_gpt2.py", "GPT", "TrainConfig"),
        ("bert", "bert.py", "Bert", "BertTrainConfig"),
        ("speedrun", "speedrun.py", "GPT", "TrainConfig"),
    )
}  # fmt: skip


def class_path(cls: type) -> str:
    """\"FILE:CLASS\" of a class. FILE is relative to the project folder if it is inside, and empty for a
    class defined in a notebook or an interactive session."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return f":{cls.__qualname__}"
    path = Path(file).resolve()
    path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{path.as_posix()}:{cls.__qualname__}"


def describe_program(trainer: Any) -> dict[str, str]:
    """The class_paths of a trainer, its model and the two configs."""
    model = trainer.model_class  # not type(raw_model), which FSDP2 replaces with a subclass
    config, train_config = type(trainer.raw_model.config), type(trainer.cfg)
    classes = dict(trainer=type(trainer), model=model, config=config, train_config=train_config)
    return {name: class_path(cls) for name, cls in classes.items()}


def is_trusted(path: Path) -> bool:
    """Whether a file may be imported because a checkpoint names it."""
    folder = path.parent
    ours = ROOT / "lab" in path.parents or folder in (ROOT, ROOT / "bench", Path.cwd().resolve())
    return ours and not any(folder.glob("model_*.pt"))


def import_file(file: str, source: Any) -> Any:
    """Import a Python file, unless it is already imported or the running program. Returns the module.

    Only this project's files, and those directly in its folder or in the current directory, are imported,
    and no file beside a checkpoint, because a checkpoint from somebody else may name any file. Raises
    UserError if the file is missing or is elsewhere.
    """
    found = [path.resolve() for path in (ROOT / file, Path(Path(file).name)) if path.is_file()]
    path = next(filter(is_trusted, found), None)
    if path is None:
        where = f"in {file}" if file else "in a notebook or an interactive session"
        raise UserError(
            f"the model class of {source} is defined {where}, which is not a file in {ROOT} or the "
            "current directory (subfolders don't count); put a copy of that file there, if you trust it"
        )
    for module in list(sys.modules.values()):
        if (known := getattr(module, "__file__", None)) and Path(known).resolve() == path:
            return module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_class(record: str, source: Any) -> Any:
    """The class that a class_path names. Raises UserError, naming `source`, if it cannot be found."""
    file, _, name = record.rpartition(":")
    found = import_file(file, source)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise UserError(
            f"{source} was made by class {name}, which {file} no longer defines; restore the class, or "
            "load the weights into another one with from_pretrained"
        )
    return found
