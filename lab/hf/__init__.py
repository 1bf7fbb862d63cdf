"""Hugging Face formats: load.py reads weights and export.py writes them; gpt2.py and bert.py describe
the names, layout and config of each model."""
