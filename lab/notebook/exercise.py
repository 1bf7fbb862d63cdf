"""check: tells the reader of play.ipynb whether the answer to an exercise is right."""

import math
import sys
from typing import Any

GREEN, RED, BLUE, RESET = "\033[32m", "\033[31m", "\033[34m", "\033[0m"


def check(name: str, got: Any, want: Any, hint: str = "", tol: float = 1e-6) -> None:
    """Print whether the answer `got` is right, without printing the answer.

    want: the value (a number, string, list or tensor), or a function that gets `got` and returns
    True or a sentence about what is wrong. tol: allowed difference of numbers; a millionth of the wanted
    value is always allowed. If `got` is ..., the placeholder in an empty exercise, print "your turn".
    Never raises, so that a notebook runs to its end whatever the answers are.
    """
    try:
        if _is_placeholder(got):
            return _print(BLUE, f"○ your turn: {name}")
        wrong = _ask(got, want) if _is_function(want) else _difference(got, want, tol)
        if not wrong:
            return _print(GREEN, f"✓ right: {name}")
        note = f"✗ not yet: {name}: got {_describe(got)}; {wrong}"
    except Exception as error:
        note = f"✗ not yet: {name}: the check raised {type(error).__name__}: {error}"
    _print(RED, f"{note}; {hint}" if hint else note)


def _print(color: str, text: str) -> None:
    colored = sys.stdout.isatty() or "ipykernel" in sys.modules  # not in a file or a pipe
    print(f"{color}{text}{RESET}" if colored else text)


def _is_placeholder(got: Any) -> bool:
    return got is ... or (isinstance(got, tuple | list) and any(one is ... for one in got))


def _is_function(want: Any) -> bool:
    return callable(want) and not hasattr(want, "shape")


def _ask(got: Any, want: Any) -> str:
    """The sentence that the function `want` returns; "" if it accepts the answer."""
    said = want(got)
    return said if isinstance(said, str) else "" if said else "that is not it"


def _difference(got: Any, want: Any, tol: float) -> str:
    """A sentence about what is wrong with `got`, or "". It may tell the shape of `want`, never its value."""
    if hasattr(want, "shape") or hasattr(got, "shape"):
        return _array_difference(got, want, tol)
    if isinstance(want, bool | int | float):
        if not isinstance(got, bool | int | float):
            return "expected a number"
        close = math.isclose(got, want, rel_tol=1e-6, abs_tol=tol)
        return "" if close or (math.isnan(got) and math.isnan(want)) else "that is not the number"
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"expected a {type(want).__name__} of length {len(want)}"
        if len(got) != len(want):
            return f"expected {len(want)} elements"
        for i, (a, b) in enumerate(zip(got, want)):
            if wrong := _difference(a, b, tol):
                return f"at index {i}: {wrong}"
        return ""
    if type(got) is not type(want):
        return f"expected a {type(want).__name__}"
    return "" if got == want else f"that is not the {type(want).__name__}"


def _array_difference(got: Any, want: Any, tol: float) -> str:
    """_difference for tensors and arrays, compared in float64; dtypes may differ."""
    import torch  # only here, so that importing lab.notebook is fast

    want = torch.as_tensor(want).detach().cpu()
    expected = (
        f"expected a tensor of shape {tuple(want.shape)}" if want.dim() else "expected a number"
    )
    try:
        got = torch.as_tensor(got).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        return expected
    if got.shape != want.shape:
        return expected
    a, b = got.double(), want.double()
    off = ~torch.isclose(a, b, rtol=1e-6, atol=tol, equal_nan=True)
    if not off.any():
        return ""
    if not want.dim():
        return "that is not the number"
    worst = (a - b).abs().max().item()
    return f"the shape is right, but {int(off.sum())} of {off.numel()} values are off, by up to {worst:.2g}"


def _describe(got: Any) -> str:
    """`got` in a few words: the shape of a tensor, the start of a long value."""
    if hasattr(got, "shape") and len(got.shape):
        return f"a tensor of shape {tuple(got.shape)}"
    text = repr(got.item() if hasattr(got, "item") else got)
    return text if len(text) <= 80 else text[:77] + "..."
