"""Data: text becomes token shards, and token shards become micro-batches.

Only loader.py and document_mask.py use torch: a process that only tokenizes does not import it.
"""
