"""Everything around the training loop: run directory, checkpoints, logs, health checks, timing."""
