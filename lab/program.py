"""The file and class that define a model. Checkpoints and config.json record them as "FILE:CLASS", so
that a run of a user's own copy of train_gpt2.py is sampled, evaluated and exported with its own model."""

import ast
import functools
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lab.cli import ROOT, UserError, eprint, torchrun_env

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
PROGRAMS = [ROOT / name for name in ("train_gpt2.py", "speedrun.py", "bert.py")]


def class_path(cls: type) -> str:
    """\"FILE:CLASS\" of a class. FILE is relative to the project folder if it is inside, and empty for a
    class defined in a notebook or an interactive session."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return f":{cls.__qualname__}"
    path = Path(file).resolve()
    path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{path.as_posix()}:{cls.__qualname__}"


def program_file(cls: type) -> str:
    """The FILE of a class_path."""
    return class_path(cls).rpartition(":")[0]


def describe_program(trainer: Any) -> dict[str, str]:
    """The class_paths of a trainer, its model and the two configs, and the model's code_hash."""
    model = trainer.model_class  # not type(raw_model), which FSDP2 replaces with a subclass
    config, train_config = type(trainer.raw_model.config), type(trainer.cfg)
    classes = dict(trainer=type(trainer), model=model, config=config, train_config=train_config)
    return {name: class_path(cls) for name, cls in classes.items()} | {"code": code_hash(model)}


@functools.cache  # describes the code that was imported, even if the file is edited during the run
def code_hash(cls: type) -> str:
    """A hash of a model class and of all classes and functions that it uses, as far as they are defined in
    programs, not in lab/ or packages. Comments, docstrings and formatting don't count. Empty for a class
    that is not defined in a program."""
    todo: list[Any] = [cls]
    code: dict[str, str] = {}
    while todo:
        item = todo.pop()
        module = sys.modules.get(item.__module__)
        node, name = definitions(module).get(item.__name__), f"{file_of(module)}:{item.__name__}"
        if node is None or name in code:
            continue
        code[name] = ast.unparse(node)
        for part in ast.walk(node):
            used = None
            if isinstance(part, ast.Name):
                used = getattr(module, part.id, None)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                used = getattr(getattr(module, part.value.id, None), part.attr, None)
            if isinstance(used, type | FunctionType):
                todo.append(used)
    text = "\n".join(code[name] for name in sorted(code))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def file_hash(path: str) -> str:
    """A hash of a program's code. Comments and formatting don't count."""
    text = ast.unparse(ast.parse(Path(path).read_bytes()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_of(module: ModuleType | None) -> str:
    return Path(getattr(module, "__file__", None) or "").name


@functools.cache
def definitions(module: ModuleType | None) -> dict[str, ast.AST]:
    """The classes and functions of a program, by name, without docstrings; empty for other modules."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if path.suffix != ".py" or path.parent not in (ROOT, Path.cwd().resolve()):
        return {}
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}


def warn_if_edited(program: Any, cls: type, source: Any) -> None:
    """Print a warning if the model's code is not the code with which `source` was saved, as the program
    recorded in its checkpoint says."""
    saved = program.get("code") if isinstance(program, dict) else None
    if saved and torchrun_env()[0] == 0 and saved != code_hash(cls):
        eprint(
            f"warning: the model's code in {program_file(cls)} differs from the code with which {source} "
            "was saved, so its weights may now compute something else; to compare two versions of a model, "
            "edit a copy of the file"
        )


def is_trusted(path: Path, source: Any) -> bool:
    """Whether a file may be imported because the file `source`, a checkpoint for example, names it."""
    folder = path.parent
    if ROOT / "lab" in path.parents or folder == ROOT / "bench" or path in PROGRAMS:
        return True
    return folder in (ROOT, Path.cwd().resolve()) and folder != Path(source).resolve().parent


def import_file(file: str, source: Any) -> Any:
    """Import a Python file, unless it is already imported or the running program. Returns the module.

    Only this project's files, and those directly in its folder or in the current directory, are imported,
    and no other file beside `source`, because a checkpoint from somebody else may name any file. Raises
    UserError if the file is missing or is elsewhere.
    """
    found = [path.resolve() for path in (ROOT / file, Path(Path(file).name)) if path.is_file()]
    path = next((path for path in found if is_trusted(path, source)), None)
    if path is None:
        where = f"in {file}" if file else "in a notebook or an interactive session"
        raise UserError(
            f"the model class of {source} is defined {where}, which is not a file in {ROOT} or the "
            "current directory (subfolders and the checkpoint's folder don't count); put a copy of that "
            "file there, if you trust it"
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
