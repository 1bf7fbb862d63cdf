"""Text generation: sampling, the key-value cache, streaming and faster decoding."""
