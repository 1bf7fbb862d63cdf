"""One process at a time in a folder, and whether a file can be written there."""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def only_writer(folder, refusal, wait=False):
    """While this lasts, no other process of this machine is an only_writer of `folder`, which is made where there is none.

    Raises ValueError(refusal) where there is one already, or with `wait` waits for its end. The lock lies on the folder
    itself: it leaves no file behind, and the system drops it with the process that holds it, however that ends.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows: a folder cannot be locked, and nothing keeps two processes apart
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # processes started from here do not inherit it
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError:  # a network file system without locks
            pass
        yield
    finally:
        os.close(handle)


def check_writable(path, flag):
    """Raise ValueError where the file that --flag names cannot be written: to be known before the work that it is to hold. Its
    folder is made; a file that was not there is not left."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink(missing_ok=True)  # of several processes another may have been first
    except OSError as error:
        raise ValueError(
            f"{flag}={path} cannot be written ({error.strerror}); name another place with --{flag}"
        ) from error
