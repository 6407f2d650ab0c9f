"""Optimizers under Fluid 1.8's names: `minimize` records backward pass, clipping, regularisation and updates.

`docs/optimizers.md` states each formula and its source.
"""

from penstock.program.optimizers.adam import AdamaxOptimizer, AdamOptimizer, AdamWOptimizer, LambOptimizer
from penstock.program.optimizers.adaptive import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    DecayedAdagradOptimizer,
    FtrlOptimizer,
    RMSPropOptimizer,
)
from penstock.program.optimizers.averages import ExponentialMovingAverage, LookaheadOptimizer, ModelAverage
from penstock.program.optimizers.base import Optimizer
from penstock.program.optimizers.compressed import DGCMomentumOptimizer
from penstock.program.optimizers.merging import GradientMergeOptimizer
from penstock.program.optimizers.momentum import (
    DpsgdOptimizer,
    LarsMomentumOptimizer,
    MomentumOptimizer,
    SGDOptimizer,
)
from penstock.program.optimizers.recomputing import RecomputeOptimizer

SGD, Momentum, LarsMomentum = SGDOptimizer, MomentumOptimizer, LarsMomentumOptimizer
Adagrad, DecayedAdagrad, Ftrl, RMSProp = AdagradOptimizer, DecayedAdagradOptimizer, FtrlOptimizer, RMSPropOptimizer
Adam, AdamW, Adamax, Lamb = AdamOptimizer, AdamWOptimizer, AdamaxOptimizer, LambOptimizer
Adadelta, Dpsgd = AdadeltaOptimizer, DpsgdOptimizer

__all__ = [
    "SGD", "Adadelta", "AdadeltaOptimizer", "Adagrad", "AdagradOptimizer", "Adam", "AdamOptimizer", "AdamW",
    "AdamWOptimizer", "Adamax", "AdamaxOptimizer", "DGCMomentumOptimizer", "DecayedAdagrad",
    "DecayedAdagradOptimizer", "Dpsgd", "DpsgdOptimizer",
    "ExponentialMovingAverage", "Ftrl", "FtrlOptimizer", "GradientMergeOptimizer", "Lamb", "LambOptimizer",
    "LarsMomentum", "LarsMomentumOptimizer", "LookaheadOptimizer", "ModelAverage", "Momentum", "MomentumOptimizer",
    "Optimizer", "RMSProp", "RMSPropOptimizer", "RecomputeOptimizer", "SGDOptimizer",
]  # fmt: skip
