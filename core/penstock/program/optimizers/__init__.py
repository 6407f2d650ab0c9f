"""Optimizers under Fluid 1.8's names: `minimize` records backward pass, clipping, regularisation and updates.

`docs/optimizers.md` states each formula and its source.
"""

from penstock.program.optimizers.adam import AdamaxOptimizer, AdamOptimizer, AdamWOptimizer
from penstock.program.optimizers.adaptive import (
    AdagradOptimizer,
    DecayedAdagradOptimizer,
    FtrlOptimizer,
    RMSPropOptimizer,
)
from penstock.program.optimizers.base import Optimizer
from penstock.program.optimizers.momentum import LarsMomentumOptimizer, MomentumOptimizer, SGDOptimizer

SGD, Momentum, LarsMomentum = SGDOptimizer, MomentumOptimizer, LarsMomentumOptimizer
Adagrad, DecayedAdagrad, Ftrl, RMSProp = AdagradOptimizer, DecayedAdagradOptimizer, FtrlOptimizer, RMSPropOptimizer
Adam, AdamW, Adamax = AdamOptimizer, AdamWOptimizer, AdamaxOptimizer

__all__ = [
    "SGD", "Adagrad", "AdagradOptimizer", "Adam", "AdamOptimizer", "AdamW", "AdamWOptimizer", "Adamax",
    "AdamaxOptimizer", "DecayedAdagrad", "DecayedAdagradOptimizer", "Ftrl", "FtrlOptimizer", "LarsMomentum",
    "LarsMomentumOptimizer", "Momentum", "MomentumOptimizer", "Optimizer", "RMSProp", "RMSPropOptimizer",
    "SGDOptimizer",
]  # fmt: skip
