"""Signals: Ctrl-C, SIGTERM and SIGHUP (terminal closed) save the run and stop it."""

import contextlib
import os
import signal


class GracefulStop(Exception):
    """The run should stop because of a signal, named in the message. Raised on all ranks together."""


class SignalHandler:
    """Context manager: the first signal requests a graceful stop, a second Ctrl-C quits.

    Other signals may repeat: terminals send SIGHUP twice, and torchrun forwards a SIGTERM that its
    processes have already received.
    """

    def __init__(self, world):
        self.world, self.name = world, ""  # name of the signal received, if any

    def __enter__(self) -> "SignalHandler":
        wanted = ("SIGINT", "SIGTERM", "SIGHUP")
        numbers = [getattr(signal, name) for name in wanted if hasattr(signal, name)]  # Windows
        # leave out ignored signals: under nohup, SIGHUP must stay ignored
        active = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
        self.previous = {number: signal.signal(number, self.receive) for number in active}
        self.terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        return self

    def ignore(self) -> None:
        """Ignore further signals: the run is saved, and torchrun may repeat a signal."""
        for number in self.previous:
            signal.signal(number, signal.SIG_IGN)

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        # set before the message, after which a user may press Ctrl-C again
        first, self.name = not self.name, signal.Signals(number).name
        if self.name == "SIGHUP":  # the terminal is gone: discard our output
            for fd in self.terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        elif first and self.world.is_main:
            # torchrun sends SIGTERM instead of a second SIGINT
            again = "" if self.world.distributed else "; press Ctrl-C again to quit without saving"
            with contextlib.suppress(OSError):
                os.write(2, f"\nfinishing the current step{again}\n".encode())

    def check(self) -> None:
        """Raise GracefulStop on all ranks if one of them received a signal. All call it together."""
        if not self.world.all_true(not self.name):
            raise GracefulStop(self.name or "signal on another rank")
