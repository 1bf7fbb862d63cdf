"""Optimizers beside torch's own."""

from lab.optim.muon import POLAR_EXPRESS, Muon, MuonAdamW, Together, orthogonalize
from lab.optim.norm import exact_norm
from lab.optim.state import load_optimizer

__all__ = [
    "POLAR_EXPRESS",
    "Muon",
    "MuonAdamW",
    "Together",
    "exact_norm",
    "load_optimizer",
    "orthogonalize",
]
