"""Optimizers beside torch's own."""

from lab.optim.muon import Muon, MuonAdamW, orthogonalize
from lab.optim.state import load_optimizer

__all__ = ["Muon", "MuonAdamW", "load_optimizer", "orthogonalize"]
