"""Optimizers beside torch's own."""

from lab.optim.muon import Muon, MuonAdamW, orthogonalize
from lab.optim.norm import exact_norm
from lab.optim.state import load_optimizer

__all__ = ["Muon", "MuonAdamW", "exact_norm", "load_optimizer", "orthogonalize"]
