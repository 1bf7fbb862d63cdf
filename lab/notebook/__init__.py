"""Helpers for play.ipynb."""
