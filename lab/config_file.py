"""Read the configs saved in config.json and checkpoints, including those of older versions."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from lab.cli import UserError
from lab.files import read_json

# {old: new} names of config fields and flags. Old files and old command lines keep working.
RENAMED_FIELDS = {
    "speed": "optimizations", "hella_every": "hellaswag_every", "hella_examples": "hellaswag_examples",
    "ckpt_every": "checkpoint_every", "small_steps": "batch_warmup_steps",
    "mask_share": "mlm_probability", "whole_words": "whole_word_masking",
}  # fmt: skip
MAX_INT = 2**48  # torch fails at 2**63


def read_config(
    run_dir: str | Path, model_class: type, train_class: type, name: str = "config.json"
) -> tuple[Any, Any, list[str]]:
    """Read a config.json. Returns (model config, run config, ignored names).

    A missing field gets its default, and an unknown one is ignored. Raises UserError for a damaged file
    or a value of the wrong type.
    """
    path = Path(run_dir) / name
    saved = read_json(path, "repair it, or pass another --run_name", model=dict, train=dict)
    model, unknown = known_fields(path, saved["model"], model_class)
    train, more_unknown = known_fields(path, saved["train"], train_class)
    return model_class(**model), train_class(**train), unknown + more_unknown


def build_config(config_class: type, saved: Any, source: Any) -> Any:
    """A config dataclass from a saved dict; if it is not a dict, all fields have defaults."""
    return config_class(
        **known_fields(source, saved if isinstance(saved, dict) else {}, config_class)[0]
    )


def known_fields(source: Any, saved: dict, config_class: Any) -> tuple[dict, list[str]]:
    """({name: value} of the saved fields that this dataclass has, names of the others)."""
    saved = {RENAMED_FIELDS.get(name, name): value for name, value in saved.items()}
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    known = {name: value for name, value in saved.items() if name in fields}
    for name, value in known.items():
        kinds = get_args(fields[name].type)
        if kinds == (int, float):  # a length in steps; older versions saved 200 as 200.0
            whole = type(value) is float and 1 <= value <= MAX_INT
            known[name] = int(value) if whole else value
        elif type(fields[name].default) is float and type(value) is int and abs(value) <= MAX_INT:
            known[name] = float(value)  # torch does not accept 1 for 1.0 everywhere
        elif type(fields[name].default) is tuple and type(value) is list:
            known[name] = tuple(value)  # JSON has no tuples
        check_value(source, fields[name], known[name])
    return known, [name for name in saved if name not in fields]


def check_value(source: Any, field: dataclasses.Field, value: Any) -> None:
    """Raise UserError if a value from a file has the wrong type for this field."""
    choices = () if type(field.default) is tuple else get_args(field.type)
    lowest = (
        -1 if field.default == -1 else 0
    )  # of integers; -1 stands for a value taken from elsewhere
    if choices == (int, float):
        choices, kinds = (), (int, float)
    else:
        kinds = (type(field.default),)
    if choices and value not in choices:
        rule = f"one of {', '.join(map(str, choices))}"
    elif type(value) not in kinds:
        rule = f"of type {' or '.join(kind.__name__ for kind in kinds)}"
    elif type(value) is int and not lowest <= value <= MAX_INT:
        rule = f"from {lowest} to {MAX_INT}"
    else:
        return
    text = json.dumps(value, default=repr)[:80]
    raise UserError(
        f"{source} has {field.name}={text}, which must be {rule}; repair the file, or choose another run"
    )
