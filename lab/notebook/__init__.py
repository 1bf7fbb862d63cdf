"""Helpers for play.ipynb: interactive views, checks of exercises, the style of figures.

Importing is silent and fast: torch and matplotlib are imported by the functions that need them. The
interpretability tools, which import torch, are in lab.notebook.interp.
"""

from lab.notebook.diagram import model_diagram
from lab.notebook.exercise import check
from lab.notebook.views import attention_view, mask_view, next_token_bars
from lab.notebook.widget import plot_setup

__all__ = ["attention_view", "check", "mask_view", "model_diagram", "next_token_bars", "plot_setup"]
