"""Callbacks, which a trainer runs between updates: validation, checkpoints, samples."""

from collections.abc import Callable
from typing import Any


class PeriodicCallback:
    """A callback that is due every `interval` steps (0: never) and after the last step.

    name: the kind of the log record. __call__(trainer) returns the record's values, or None.
    """

    def __init__(
        self, name: str, interval: int, function: Callable[[Any], dict | None] | None = None
    ):
        self.name, self.interval, self.function = name, interval, function

    def should_run(self, step: int, last: bool) -> bool:
        return self.interval > 0 and (step % self.interval == 0 or last)

    def __call__(self, trainer) -> dict | None:
        assert self.function
        return self.function(trainer)
