"""Hugging Face formats: reading weights (load.py) and writing them (export.py); gpt2.py and bert.py
hold the names, layout and config of each model."""
