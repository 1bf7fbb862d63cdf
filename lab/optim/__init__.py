"""Optimizers beyond torch.optim, and sharded data parallelism (ZeRO-1 and FSDP2)."""
