"""The style of play.ipynb's figures from chapter 9 on. Importing this module in a kernel applies it.

One meaning per color in all figures, listed in a table of the notebook: OURS, OTHER, THIRD, LOSS,
RATE, KNOWN (predictions, drawn dashed) and BASE (baseline or earlier state). Heat maps are blue.
"""

import logging
import os
import sys
from typing import Any

# Idle OpenMP threads sleep instead of spinning, because several processes share the cores. Must be
# set before torch starts its threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lab.notebook.widget import plot_setup
from lab.tools.plot_style import SERIES

OURS, OTHER, LOSS, THIRD, RATE = SERIES[False]
KNOWN, BASE = "0.1", "0.65"


def set_style() -> None:
    """Call plot_setup, and make OURS the default color of lines and blue that of heat maps."""
    import matplotlib
    from cycler import cycler

    plot_setup()
    settings: dict[Any, Any] = {"axes.prop_cycle": cycler(color=[OURS]), "image.cmap": "Blues"}
    matplotlib.rcParams.update(settings)
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # missing fonts


if "ipykernel" in sys.modules:
    set_style()
