"""Command-line helpers: user-facing errors, the top-level exception handler, flag parsing.

Imports nothing slow, so that a mistyped command fails immediately.
"""

from __future__ import annotations  # so that an old Python gets as far as check_python()

import contextlib
import errno
import importlib.util
import inspect
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent


class UserError(Exception):
    """An error that the user can fix. Its message is one sentence: the value, the rule, the fix."""

    status = 2


class RunError(UserError):
    """The run itself failed, for example because the loss is not finite. Exits with status 1.

    step: the update that failed, if it was one; the run's log records it.
    """

    status = 1

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


def require(condition: Any, message: str) -> None:
    """Raise UserError(message) unless condition is true."""
    if not condition:
        raise UserError(message)


def run_main(main: Callable, name: str | None = None) -> None:
    """Run main(argv) as a program and exit with its status (None: 0).

    A UserError is printed as one sentence. Any other exception is a bug and keeps its traceback.
    Exit statuses: 0 done, 1 failed, 2 bad input, 3 does not fit (lab plan), 75 stopped by a signal and
    saved if there was an update, 130 Ctrl-C before that.
    """
    name = name or Path(sys.argv[0]).name
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # undo pre_import_setup
    for stream in ("stdin", "stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the parent process, as with >&-
            setattr(sys, stream, open(os.devnull, "r" if stream == "stdin" else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for characters that the terminal cannot show
    rank = os.environ.get("RANK") or "0"
    try:
        status = main(sys.argv[1:]) or 0
    except KeyboardInterrupt:
        status = 130
        eprint(f"{name}: stopped")
    except BrokenPipeError:  # the reader of our output has exited, as in --help | head
        status = 1
    except Exception as error:
        status, sentence = format_error(error)
        if not status:
            raise
        if isinstance(error, UserError) and rank != "0":
            time.sleep(2)  # every rank fails on the same input; let rank 0 print first
        where = f"[rank {rank}] " if rank != "0" or is_peer_failure(error) else ""
        eprint(f"{name}: error: {where}{sentence}")
    if status == 75:  # saved: a further signal during Python's shutdown must not change the status
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):  # not on Windows
                signal.signal(getattr(signal, name), signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader is gone; otherwise Python would print an error at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if (os.environ.get("WORLD_SIZE") or "1") != "1":
        os._exit(status)  # gloo's threads may outlive the interpreter (pytorch/pytorch#179291)
    sys.exit(status)


def format_error(error: BaseException) -> tuple[int, str]:
    """(exit status, sentence) for an error that the user can fix; (0, "") for a bug."""
    if isinstance(error, UserError):
        return error.status, str(error)
    if is_peer_failure(error):
        text = str(error)
        detail = (text.partition("] ")[2] or text).partition(". ")[0]
        return 1, (
            f"lost the connection to another rank ({detail}); see that rank's output, then start all "
            "ranks again, with --resume if there is a checkpoint"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)[:40]
        return 2, f"{path}... is too long for a file name; choose a shorter one"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 2, "the disk that the output is written to is full; free some space"
    if isinstance(error, PermissionError) and error.filename:
        return 2, f"no permission to use {error.filename}; change that, or choose another path"
    return 0, ""


def is_oom(error: BaseException) -> bool:
    """Whether this is an out-of-memory error of CUDA, Python, the system or torch's CPU allocator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # by name, because torch is not imported here
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError)


def is_peer_failure(error: BaseException) -> bool:
    """Whether gloo or torch raised this because another process exited or stopped responding."""
    at_start = type(error).__name__ in ("DistNetworkError", "DistStoreError")
    return at_start or "gloo/transport" in str(error)


def torchrun_env() -> tuple[int, int, int]:
    """(rank, local rank, world size) from torchrun's environment variables; (0, 0, 1) without them.

    An empty variable counts as absent. Raises UserError unless they are complete and consistent.
    """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    numbers = [found.get(name, default) for name, default in zip(names, ("0", "0", "1"))]
    port = found.get("MASTER_PORT", "0")
    if all(re.fullmatch(r"[0-9]{1,9}", number) for number in [*numbers, port]):
        rank, local_rank, world_size = map(int, numbers)
        complete = world_size == 1 or (len(found) == len(names) and int(port) < 2**16)
        if rank < world_size and local_rank < world_size and complete:
            return rank, local_rank, world_size
    values = ", ".join(f"{name}={found.get(name, '')}" for name in names)
    raise UserError(
        f"{values} in the environment must all be set, with RANK and LOCAL_RANK less than WORLD_SIZE "
        "and a port below 65536; start several processes with torchrun, or a single one after "
        f"`unset {' '.join(names)}`"
    )


def eprint(text: str, file: TextIO | None = None) -> None:
    """Print a line to `file` or, wrapped, to stderr. Ignores a closed pipe or terminal."""
    with contextlib.suppress(OSError):
        print(text if file else wrap(text, file=sys.stderr), file=file or sys.stderr, flush=True)


def terminal_width(file: TextIO) -> int:
    """Width in columns of the terminal `file`; 0 if it is not a terminal."""
    return shutil.get_terminal_size().columns if file.isatty() else 0


def wrap(text: str, indent: str = "", file: TextIO | None = None) -> str:
    """Wrap lines to the terminal's width; return them unchanged if `file` (stdout) is not a terminal.

    indent: prefix of continuation lines. Commands in backticks are not broken, so that they can be
    copied.
    """
    if not (width := terminal_width(file or sys.stdout)):
        return text
    hidden = "\N{NO-BREAK SPACE}"  # textwrap does not break lines at these
    text = re.sub("`.*?`", lambda command: command[0].replace(" ", hidden), text)
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.split("\n"))).replace(hidden, " ")


def has_colors(file: TextIO | None = None) -> bool:
    """Whether `file` (stdout) is a terminal that shows styles. See https://no-color.org."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return (file or sys.stdout).isatty() and not plain


def bold(text: str, file: TextIO | None = None) -> str:
    """The text in bold type, if `file` (stdout) is a terminal that shows styles."""
    return f"\033[1m{text}\033[0m" if text and has_colors(file) else text


def dim(text: str) -> str:
    """The text in faint type, if stdout is a terminal that shows styles."""
    return f"\033[2m{text}\033[0m" if text and has_colors() else text


def fill_paragraphs(text: str) -> str:
    """Wrap the paragraphs of a help text to the terminal's width, except indented ones (examples)."""
    width = shutil.get_terminal_size().columns
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in paragraphs)


def help_text(config: Any) -> str:
    """The docstring of a program's config. The examples in its module's docstring, which are the indented
    paragraphs, are inserted after the first paragraph."""
    first, *rest = (inspect.getdoc(config) or "").split("\n\n")
    paragraphs = (sys.modules[config.__module__].__doc__ or "").split("\n\n")
    examples = [text.rstrip() for text in paragraphs if text.startswith("    ")]
    rest = [text for text in rest if not text.startswith("Args:")]  # tyro reads those
    return "\n\n".join([first, *examples, *rest])


def parse_args(config: Any, argv: list[str], description: str | None = None) -> Any:
    """Parse flags with tyro: names with underscores and without prefixes, and --no_x for each flag --x.

    config: a dataclass, whose fields are the flags, or a function, which is called. description: the
    text above the flags in --help; default: help_text(config).
    """
    import tyro

    prog = Path(sys.argv[0]).name
    if prog in ("lab", "__main__.py"):  # a tool
        prog = " ".join(["python -m lab", *sys.argv[1:2]])
    tyro._experimental_options["ansi_codes"] &= has_colors()  # tyro does not read NO_COLOR
    if {"-h", "--help"} & {*argv}:  # tyro would not wrap it, and would join the lines of examples
        print(fill_paragraphs(description or help_text(config)) + "\n")
    return tyro.cli(
        config, args=argv, prog=prog, description=" ", use_underscores=True,
        config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip


def progress(
    items: Iterable | None, description: str, unit: str = "shard", delay: float = 2, **kwargs: Any
) -> Any:
    """Iterate over items, with a progress bar on rank 0's terminal if it takes over `delay` seconds.

    kwargs: passed to tqdm. With items=None, pass total=..., and call update() on the result for each item.
    """
    from tqdm import tqdm

    off = (os.environ.get("RANK") or "0") != "0" or None  # None: off unless stderr is a terminal
    width = max(0, terminal_width(sys.stderr) - 3) or None  # room for the "^C" of a terminal
    how = dict(unit=unit, delay=delay, leave=False, disable=off, ncols=width)
    return tqdm(items, desc=description, **how, **kwargs)


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 layer, 2 layers."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names and how many more there are: a, b, c and 4 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shell_quote(text: str | Path) -> str:
    """Quote one word of a printed command for this system's shell."""
    return subprocess.list2cmdline([str(text)]) if os.name == "nt" else shlex.quote(str(text))


def command_for(name: str) -> str:
    """The command to type for a program of this project ("sample.py") or a tool ("lab report")."""
    file, _, tool = name.partition(" ")
    path = "-m lab" if file == "lab" else shell_quote(file)
    if Path.cwd() != ROOT:
        path = shell_quote(ROOT / file)
    # "python" if that is the running interpreter, otherwise the interpreter's path
    found, python = shutil.which("python"), sys.executable
    if found and os.path.dirname(os.path.abspath(found)) == os.path.dirname(python):
        python = "python"
    elif Path.cwd() in Path(python).parents:
        python = os.path.relpath(python)
    return f"{python} {path} {tool}".rstrip()


def check_python() -> None:
    """Exit with status 2 if this Python is too old."""
    if sys.version_info < (3, 11):  # noqa: UP036
        version = sys.version.split()[0]
        print(f"error: this is Python {version}, but 3.11 or newer is needed", file=sys.stderr)
        sys.exit(2)


def pre_import_setup() -> None:
    """Set up SIGINT handling and the OpenMP wait policy; call it before importing torch.

    Importing torch takes a second or more. Ctrl-C during the import then ends the process immediately; a
    KeyboardInterrupt would print a traceback through numpy and torch, or be ignored there.
    """
    check_python()
    if importlib.util.find_spec("torch") is None:
        print(
            "error: PyTorch is not installed for this Python; either run `make train` once and "
            "use .venv/bin/python, or run `pip install -r requirements.txt`", file=sys.stderr,
        )  # fmt: skip
        sys.exit(2)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_omp_wait_policy()


def set_omp_wait_policy() -> None:
    """Choose whether idle OpenMP threads spin or sleep, before torch starts them.

    Spinning is up to twice as fast on an idle machine, but on a busy one it takes CPU time from threads
    that have work. So threads spin only if the CPUs were idle during a tenth of a second.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE" if idle_cpu_fraction() > 0.9 else "PASSIVE"


def idle_cpu_fraction() -> float:
    """Fraction of CPU time that was idle during a tenth of a second; 0 if unknown."""

    def times():
        return [int(t) for t in Path("/proc/stat").read_text().split()[1:9]]

    try:
        before = times()
        time.sleep(0.1)
        spent = [b - a for a, b in zip(before, times())]
        return sum(spent[3:5]) / max(1, sum(spent))  # idle and iowait
    except (OSError, ValueError, IndexError):
        return 0.0
