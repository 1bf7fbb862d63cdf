"""Data: text to token shards, and token shards to micro-batches.

Only loader.py and document_mask.py import torch, so processes that only tokenize don't need it.
"""
