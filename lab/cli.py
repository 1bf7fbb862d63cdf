"""What all commands share: errors that a person can mend, one boundary that says them, flags.

Imports nothing slow: a command that is typed wrong should say so at once.
"""

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class UserError(Exception):
    """Something that a person can mend, in one sentence: the value, the rule and the way out."""

    status = 2


class RunError(UserError):
    """The run went wrong, as by a loss that is not finite: one sentence, with a status of its own."""

    status = 1


def command(main, name=None):
    """Run main(argv) as a program, and end the process with its exit status (None: 0).

    A UserError becomes one sentence. Whatever else is raised keeps its traceback, as it is not the
    user's to mend. Statuses: 0 done, 1 went wrong, 2 bad input, 75 stopped and saved, 130 Ctrl-C.
    """
    name = name or Path(sys.argv[0]).name
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as it was before_torch
    # who imports this file by its name gets the module that runs, not a second one
    sys.modules.setdefault(Path(sys.argv[0]).stem, sys.modules["__main__"])
    for stream in ("stdin", "stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by who started it, as by >&-
            setattr(sys, stream, open(os.devnull, "r" if stream == "stdin" else "w"))
    sys.stdout.reconfigure(errors="replace")  # ? where a terminal lacks a character
    rank = os.environ.get("RANK", "0")
    try:
        status = main(sys.argv[1:]) or 0
    except KeyboardInterrupt:
        status = 130
        say(f"{name}: stopped")
    except BrokenPipeError:  # the reader of our output has left, as in --help | head
        status = 1
    except Exception as error:
        status, sentence = in_words(error)
        if not status:
            raise
        if isinstance(error, UserError) and rank != "0":
            time.sleep(2)  # all processes meet the same bad input, which rank 0 says first
        where = f"[rank {rank}] " if rank != "0" or lost_another(error) else ""
        say(f"{name}: error: {where}{sentence}")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it; Python would complain at its end once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(status)  # gloo's threads may outlive the interpreter (pytorch/pytorch#179291)
    sys.exit(status)


def in_words(error):
    """(exit status, sentence) of what a person can mend; (0, "") of a bug."""
    if isinstance(error, UserError):
        return error.status, str(error)
    if out_of_memory(error):
        return 2, "the memory is full; ask for less at a time, such as a smaller --batch_size"
    if lost_another(error):
        said = str(error)
        found = (said.partition("] ")[2] or said).partition(". ")[0]
        return 1, (
            f"another process has ended, or its machine does not answer ({found}); it may say why "
            "itself; start all again, with --resume if there is a checkpoint"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)[:40]
        return 2, f"{path}... is too long for the name of a file; name another"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 2, "the disk is full under what is printed or written; make room"
    if isinstance(error, PermissionError) and error.filename:
        return 2, f"you have no permission to use {error.filename}; change that, or name another"
    return 0, ""


def out_of_memory(error):
    """Whether CUDA, Python, the system or torch's CPU allocator says that memory is full."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch's own class is not imported here
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError)


def lost_another(error):
    """Whether this is what gloo and torch raise where another process has gone, or does not answer."""
    at_start = type(error).__name__ in ("DistNetworkError", "DistStoreError")
    return at_start or "gloo/transport" in str(error)


def say(text, file=None):
    """Print a line (to stderr); that its reader or the terminal has gone ends nothing."""
    with contextlib.suppress(OSError):
        print(text, file=file or sys.stderr, flush=True)


def parse(settings, argv, description=None):
    """tyro.cli, with flags --like_this and without prefixes; --no_compile beside --compile."""
    import tyro

    file = Path(sys.argv[0]).name
    prog = " ".join(["python -m lab", *sys.argv[1:2]]) if file == "__main__.py" else file
    how = dict(use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
    return tyro.cli(settings, args=argv, prog=prog, description=description, **how)


def progress(items, what, unit="shard"):
    """`items`, with a bar on rank 0's terminal if going through them takes more than two seconds."""
    from tqdm import tqdm

    off = True if os.environ.get("RANK", "0") != "0" else None  # None: where stderr is no terminal
    return tqdm(items, desc=what, unit=unit, delay=2, leave=False, disable=off)


def quoted(text):
    """A word of a command that is printed for people to type, as this system's shell reads it."""
    return subprocess.list2cmdline([text]) if os.name == "nt" else shlex.quote(str(text))


def program(name):
    """What to type here for a file of this project, or for "lab" and a tool of it."""
    file, _, tool = name.partition(" ")
    path = "-m lab" if file == "lab" else file
    if Path.cwd() != ROOT:
        path = quoted(str(ROOT / file))
    # the interpreter that runs this: python, where that is the same one, else its path
    found, python = shutil.which("python"), sys.executable
    if found and os.path.dirname(os.path.abspath(found)) == os.path.dirname(python):
        python = "python"
    elif Path.cwd() in Path(python).parents:
        python = os.path.relpath(python)
    return f"{python} {path} {tool}".rstrip()


def before_torch():
    """What a program does before it imports torch, which takes a second or more.

    A Ctrl-C within the import ends the process at once: Python's exception would be a traceback of
    numpy's or torch's files, or be lost there.
    """
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_threads()


def set_threads():
    """Say how OpenMP's threads wait on a CPU, before torch starts them.

    Threads that spin while they wait are up to twice as fast where nothing else runs; where
    something does, they take the time of those that work. So the load of a tenth of a second
    decides, where the system tells it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE" if idle_share() > 0.9 else "PASSIVE"


def idle_share():
    """Share of the time for which the CPUs had nothing to do; 0 where the system does not tell."""

    def times():
        return [int(t) for t in Path("/proc/stat").read_text().split()[1:9]]

    try:
        before = times()
        time.sleep(0.1)
        spent = [b - a for a, b in zip(before, times())]
        return sum(spent[3:5]) / max(1, sum(spent))  # idle, and waiting for a disk
    except (OSError, ValueError, IndexError):
        return 0.0
