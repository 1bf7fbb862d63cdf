"""The tools behind `python -m lab TOOL`."""
