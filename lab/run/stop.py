"""Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) end a run in good order."""

import contextlib
import os
import signal


class Stopped(Exception):
    """A signal, whose name it holds, asks for an end. Raised on all processes at the same place."""


class StopSignal:
    """Within `with`, the first signal asks for an end, and only a second Ctrl-C ends at once:
    terminals send SIGHUP twice, and torchrun passes on a SIGTERM that its processes have had."""

    def __init__(self, world):
        self.world, self.name = world, ""

    def __enter__(self):
        wanted = ("SIGINT", "SIGTERM", "SIGHUP")
        numbers = [getattr(signal, name) for name in wanted if hasattr(signal, name)]  # Windows
        heard = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]  # as under nohup
        self.before = {number: signal.signal(number, self.receive) for number in heard}
        self.terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number, frame):
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        if signal.Signals(number).name == "SIGHUP":  # nobody is there to read what we print
            for fd in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        elif not self.name and self.world.is_main:
            with contextlib.suppress(OSError):
                os.write(2, b"\nends after what is in hand; Ctrl-C stops at once\n")
        self.name = signal.Signals(number).name

    def check(self):
        """Raise Stopped on all processes if one of them was asked to stop. All call it together."""
        if not self.world.all(not self.name):
            raise Stopped(self.name or "signal on another rank")
