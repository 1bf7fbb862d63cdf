"""Ctrl-C, SIGTERM and SIGHUP (the terminal was closed). In training the first asks for an end after what is in hand, the second
Ctrl-C does not wait; other programs Ctrl-C ends with one line. Imports nothing slow, as it is needed before torch is."""

import contextlib
import os
import signal
import sys
import threading

STOPPED = "stopped at once; what checkpoints there are stay as they were"


def importing(name):
    """Until the signal gets another handler, as `running` gives it, Ctrl-C is one line and exit
    status 130: what is imported would show where within itself it was."""
    line = f"\n{name}: stopped before it began\n".encode()
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, line), os._exit(130)))


@contextlib.contextmanager
def running(name):
    """In the body Ctrl-C raises KeyboardInterrupt as usual; one that comes out of it is one line and exit status 130."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        sys.exit(130)


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP set a flag; the loop ends after the step in hand. A second Ctrl-C stops at once. `with` gives
    the signals back to whoever had them. SIGHUP that is ignored stays so, as nohup wants.

    Python calls receive() between two operations of its own, and one of them may take a minute. Two signals that come
    meanwhile are one to it. So a thread reads every one from a pipe as it comes, answers it, and ends the process if it has to.
    """

    def __enter__(self):
        self.name, self.over = "", threading.Event()
        self.terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        numbers = [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]  # Windows has no SIGHUP
        heard = [number for number in dict.fromkeys(numbers) if signal.getsignal(number) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.receive) for number in heard}
        reader, self.pipe = os.pipe()
        if os.name == "posix":
            os.set_blocking(self.pipe, False)  # set_wakeup_fd wants that
        self.pipe_before = signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        self.watcher = threading.Thread(target=self.watch, args=(reader,), daemon=True)
        self.watcher.start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.pipe_before)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.over.set()
        os.close(self.pipe)  # which ends the thread
        self.watcher.join(1)  # so that what it says comes before what is said next

    def receive(self, number, frame):
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        for fd in self.terminals:
            if not os.isatty(fd):  # it has gone, and whoever writes to it gets an error: to nowhere instead
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)

    def watch(self, reader):
        first = True
        while number := os.read(reader, 1):
            if number[0] not in self.before:
                continue
            if first and os.environ.get("RANK", "0") == "0":
                line = f"\n{signal.Signals(number[0]).name}: ends after what is in hand; Ctrl-C stops at once\n"
                with contextlib.suppress(OSError):  # the terminal has gone
                    os.write(2, line.encode())
            elif not first and number[0] == signal.SIGINT and not self.over.wait(5):  # seconds for receive() to do it
                os.write(2, f"\ntrain_gpt2.py: error: {STOPPED}\n".encode())
                os._exit(130)
            first = False
        os.close(reader)
