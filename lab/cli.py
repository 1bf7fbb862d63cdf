"""What all commands share: errors that a person can mend, one boundary that says them, flags from
dataclasses.

Imports nothing slow: a command that is typed wrong should say so at once.
"""

import errno
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class UserError(Exception):
    """Something that a person can mend, in one sentence: the value, the rule and the way out."""

    status = 2


class RunError(UserError):
    """The run went wrong, as by a loss that is not finite. One sentence too, with another exit
    status."""

    status = 1


def command(main, name=None):
    """Run main(argv) as a program, and end the process with its exit status (None: 0).

    A UserError becomes one sentence. Whatever else is raised keeps its traceback, as it is not the
    user's to mend. Statuses: 0 done, 1 went wrong, 2 bad input, 75 stopped by a signal and saved,
    130 Ctrl-C.
    """
    name = name or Path(sys.argv[0]).name
    # Who imports this file by its name gets the module that runs, not a second one with classes of
    # its own.
    sys.modules.setdefault(Path(sys.argv[0]).stem, sys.modules["__main__"])
    for stream in ("stdin", "stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by who started it, as by >&-
            setattr(sys, stream, open(os.devnull, "r" if stream == "stdin" else "w"))
    # a terminal that lacks a character shows a question mark
    sys.stdout.reconfigure(errors="replace")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        status = main(sys.argv[1:]) or 0
    except UserError as error:
        if rank:  # all processes meet the same bad input, which rank 0 says; it may be ours alone
            time.sleep(2)
        status = error.status
        say(f"{name}: error: {f'[rank {rank}] ' if rank else ''}{error}")
    except KeyboardInterrupt:
        status = 130
        say(f"{name}: stopped")
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            what = "the memory is full; ask for less at a time, such as a smaller --batch_size"
            status = 2
        elif lost_another(error):
            found = str(error).partition("] ")[2].partition(". ")[0]
            what = f"[rank {rank}] another process has ended, or its machine does not answer ({found}); "
            what += "it may say why itself; checkpoints stay: start all again, with --resume"
            status = 1
        else:
            raise
        say(f"{name}: error: {what}")
    except BrokenPipeError:  # the reader of our output has left, as in --help | head
        status = 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        status, path = 2, str(error.filename)[:40]
        say(f"{name}: error: {path}... is too long for the name of a file; name another")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it; Python would complain at its end once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if world_size > 1:  # gloo's threads may outlive the interpreter (pytorch/pytorch#179291)
        os._exit(status)
    sys.exit(status)


def out_of_memory(error):
    """Whether this is what CUDA, Python or torch's CPU allocator raises when memory is full."""
    names = ("MemoryError", "OutOfMemoryError")
    return type(error).__name__ in names or "allocate memory" in str(error).lower()


def lost_another(error):
    """Whether this is what gloo raises where another process has gone, or is silent for too
    long."""
    return "gloo/transport" in str(error)


def say(text, file=None):
    """Print a line (to stderr); that its reader or the terminal has gone ends nothing."""
    try:
        print(text, file=file or sys.stderr, flush=True)
    except OSError:
        pass


def parse(settings, argv, prog=None, description=None):
    """tyro.cli with this project's conventions: --like_this, no prefixes, --no_compile beside
    --compile."""
    import tyro

    prog = prog or Path(sys.argv[0]).name
    return tyro.cli(
        settings,
        args=argv,
        prog=prog,
        description=description,
        use_underscores=True,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def progress(items, what, unit="shard"):
    """`items`, with a bar on rank 0's terminal if going through them takes longer than two
    seconds."""
    from tqdm import tqdm

    off = True if os.environ.get("RANK", "0") != "0" else None  # None: where stderr is no terminal
    return tqdm(items, desc=what, unit=unit, delay=2, leave=False, disable=off)


def quoted(text):
    """A word of a command that is printed for people to type, as this system's shell reads it."""
    return subprocess.list2cmdline([text]) if os.name == "nt" else shlex.quote(str(text))


def program(name):
    """What to type, from the folder that we are in, for a file of this project, or for "lab" and a
    tool of it."""
    here = Path.cwd() == ROOT
    file, _, tool = name.partition(" ")
    path = ("-m lab" if file == "lab" else file) if here else quoted(str(ROOT / file))
    return f"{this_python()} {path} {tool}".rstrip()


def this_python():
    """What to type for the interpreter that runs this: python, where that is the same one, else its
    path."""
    found = shutil.which("python")
    here = Path(sys.executable)
    if found and Path(found).parent.absolute() == here.parent.absolute():
        return "python"
    return os.path.relpath(here) if Path.cwd() in here.parents else str(here)


def set_threads():
    """Say how OpenMP's threads wait on a CPU, before torch starts them.

    Threads that spin while they wait are up to twice as fast where nothing else runs; where
    something does, they take the time of those that work (docs/LOG.md). So the load of the last
    tenth of a second decides, where the system tells it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE" if idle_share() > 0.9 else "PASSIVE"


def idle_share(seconds=0.1):
    """Share of the time for which the CPUs had nothing to do; 0 where the system does not tell."""

    def idle_and_all():
        times = [int(t) for t in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return times[3] + times[4], sum(times)

    try:
        idle0, all0 = idle_and_all()
        time.sleep(seconds)
        idle1, all1 = idle_and_all()
        return (idle1 - idle0) / max(1, all1 - all0)
    except (OSError, ValueError, IndexError):
        return 0.0
