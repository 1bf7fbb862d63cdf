"""A run: its folder, settings, checkpoints, log, speed and health."""

from lab.run.checkpoints import save_checkpoint
from lab.run.folder import farewell, run_folder
from lab.run.log import Log
from lab.run.meter import Meter
from lab.run.settings import resolve, settings
from lab.run.stop import Stopped, StopSignal
from lab.run.vitals import Vitals

__all__ = [
    "Log",
    "Meter",
    "StopSignal",
    "Stopped",
    "Vitals",
    "farewell",
    "resolve",
    "run_folder",
    "save_checkpoint",
    "settings",
]
