"""A run: its folder, settings, checkpoints, log, speed and health."""

from lab.run.log import Log
from lab.run.meter import Meter
from lab.run.stop import Stopped, StopSignal
from lab.run.vitals import Vitals

__all__ = ["Log", "Meter", "StopSignal", "Stopped", "Vitals"]
