"""model_diagram draws a model from one recorded forward pass. Called from play.ipynb."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lab.cli import UserError, require
from lab.notebook.widget import Widget

if TYPE_CHECKING:  # torch is imported when a model is drawn
    from torch import Tensor, nn


@dataclass
class Call:
    """One call of a module in the recorded forward pass."""

    path: str
    module: Any
    args: tuple
    kwargs: dict
    output: Any = None

    @property
    def input(self) -> Any:
        """The first tensor that the module gets."""
        return _first_tensor((self.args, self.kwargs))


@dataclass
class Box:
    """One module of the diagram; shapes as text."""

    path: str
    kind: str  # its class
    params: int  # without those already counted in an earlier box
    details: list[str]  # one line for each parameter
    takes: str
    gives: str
    mixes: bool  # an output position depends on other input positions
    group: str = ""  # title of the frame around it
    # index of a box in the column: this box's output is added to the input of that one
    add_from: int | None = None


def model_diagram(model: "nn.Module", batch: int = 1, seq_len: int | None = None) -> Widget:
    """Diagram of a model with the shapes of one forward pass; point at a box to see its parameters.

    Runs model(idx) once, in evaluation mode and without gradients, on token ids idx (batch, seq_len)
    that are all 0. The drawing does not depend on names. An addition is drawn where a tensor equals the
    sum of a module's output and an earlier tensor. A list of modules of one class is drawn once. A module
    is marked as mixing positions if a change of its input at position 0 changes its output at other
    positions. seq_len: by default 8, or model.config.block_size if that is less.
    """
    import torch

    block_size = getattr(getattr(model, "config", None), "block_size", 8)
    device = next((p.device for p in model.parameters()), None)
    shape = (batch, seq_len or min(8, block_size))
    inputs = torch.zeros(shape, dtype=torch.long, device=device)
    with _evaluating(model):
        calls = _record(model, inputs)
        sources, column, sums = _boxes(model, calls)
    require(sources or column, "model calls none of its named children; there is nothing to draw")
    kind, total = type(model).__name__, sum(p.numel() for p in model.parameters())
    data = dict(
        sources=list(map(asdict, sources)), column=list(map(asdict, column)), total=total,
        takes=_shape(inputs), gives=_shape(calls[0].output), sources_added=sums,
    )  # fmt: skip
    lines, group = [f"{kind}: {total:,} parameters"], ""
    for box in (*sources, *column):
        if box.group != group:
            lines, group = [*lines, box.group] if box.group else lines, box.group
        note = (" +" if box.add_from is not None else "") + (
            " mixes positions" if box.mixes else ""
        )
        lines.append(f"  {box.path:<24} {box.kind:<20} {box.params:>12,}  -> {box.gives}{note}")
    return Widget("diagram.html.j2", "\n".join(lines), data, title=lines[0])


@contextlib.contextmanager
def _evaluating(model: "nn.Module") -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards each module has its former mode."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _record(model: "nn.Module", inputs: "Tensor") -> list[Call]:
    """The calls of the model and all modules in it, in the order in which they begin."""
    calls: list[Call] = []
    running: list[Call] = []

    def hook_into(path: str, module: "nn.Module") -> None:
        def before(module: Any, args: tuple, kwargs: dict) -> None:
            calls.append(Call(path, module, args, kwargs))
            running.append(calls[-1])

        def after(module: Any, args: tuple, output: Any) -> None:
            running.pop().output = output

        hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(after).remove)

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            hook_into(path, module)
        try:
            model(inputs)
        except Exception as error:
            raise UserError(
                f"model cannot run on an input of shape {_shape(inputs)} ({error}); pass another "
                "batch or seq_len"
            ) from error
    return calls


def _modules_to_draw(module: "nn.Module", path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, frame, title) of each module with a box. For a list of modules of one class, only the
    children of its first module are yielded, and frame is the path of that module; else frame is ""."""
    from torch import nn

    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        members = list(child.children())
        if not isinstance(child, nn.ModuleDict | nn.ModuleList | nn.Sequential):
            yield where, "", ""
        elif len(set(map(type, members))) == 1 and any(members[0].children()):
            first = next(iter(child.named_children()))[0]
            title = f"{name}: {len(members)} × {type(members[0]).__name__}"
            for inner, _ in members[0].named_children():
                yield f"{where}.{first}.{inner}", f"{where}.{first}", title
        else:
            yield from _modules_to_draw(child, where)


def _boxes(model: "nn.Module", calls: list[Call]) -> tuple[list[Box], list[Box], bool]:
    """(sources, column, sum). sources: modules at the start that do not take floats, such as
    embeddings. column: the others, in order. sum: whether the column's input is the sum of the sources'
    outputs."""
    frames = {path: (frame, title) for path, frame, title in _modules_to_draw(model)}
    by_path = {call.path: call for call in reversed(calls)}  # the first call of each
    shown = [call for call in calls if call.path in frames]
    owners: dict[int, str] = {}
    boxes = [_box(call, frames[call.path][1], owners) for call in shown]
    count = next((i for i, c in enumerate(shown) if _is_float(c.input)), len(shown))
    column = shown[count:]
    for i, (call, box) in enumerate(zip(column, boxes[count:])):
        frame = frames[call.path][0]
        following = column[i + 1] if i + 1 < len(column) else None
        if following and frames[following.path][0] == frame:
            then = following.input
        elif frame:  # the last one of a block
            then = _first_tensor(by_path[frame].output)
        else:
            then = following.input if following else _first_tensor(calls[0].output)
        output = _first_tensor(call.output)
        if _same(then, output):
            continue
        for j in range(i, -1, -1):  # the latest input in this block that completes the sum
            if frames[column[j].path][0] != frame:
                break
            if _same(then, _add(output, column[j].input)):
                box.add_from = j
                break
    after = column[0].input if column else _first_tensor(calls[0].output)
    total = None
    for call in shown[:count]:
        output = _first_tensor(call.output)
        total = output if total is None else _add(total, output)
    return boxes[:count], boxes[count:], count > 1 and _same(after, total)


def _box(call: Call, title: str, owners: dict[int, str]) -> Box:
    details, params = [], 0
    for name, p in call.module.named_parameters():
        path = f"{call.path}.{name}"
        owner = owners.setdefault(id(p), path)
        line = f"{name} {tuple(p.shape)}: "
        if owner == path:
            params += p.numel()
            details.append(line + f"{p.numel():,}")
        else:
            details.append(line + f"the same tensor as {owner}")
    kind = type(call.module).__name__
    takes, gives = _shape(call.input), _shape(call.output)
    return Box(call.path, kind, params, details, takes, gives, _mixes_positions(call), title)


def _mixes_positions(call: Call) -> bool:
    """Whether position 0 of a module's input (B, T, C) affects other positions of its output."""
    import torch

    x, y = call.input, _first_tensor(call.output)
    if not _is_float(x) or not _is_float(y) or x.dim() != 3 or x.size(1) < 2 or y.dim() != 3:
        return False
    changed = x.clone()
    changed[:, 0] += torch.linspace(-1, 1, x.size(2), dtype=x.dtype, device=x.device)
    args = tuple(changed if value is x else value for value in call.args)
    try:
        again = _first_tensor(call.module(*args, **call.kwargs))
    except Exception:  # a module that cannot be called twice, such as one with a cache
        return False
    return not _same(again[:, 1:], y[:, 1:])


def _first_tensor(value: Any) -> Any:
    """The first tensor in an output or in arguments, or None."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return value if hasattr(value, "shape") else None


def _shape(value: Any) -> str:
    tensor = _first_tensor(value)
    return "" if tensor is None else str(tuple(tensor.shape))


def _is_float(t: Any) -> bool:
    return t is not None and t.is_floating_point()


def _add(a: Any, b: Any) -> Any:
    """a + b, or None if they cannot be added."""
    if not _is_float(a) or not _is_float(b):
        return None
    try:
        return a + b
    except RuntimeError:
        return None


def _same(a: Any, b: Any) -> bool:
    """Whether two tensors are equal up to rounding; None equals nothing."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())
