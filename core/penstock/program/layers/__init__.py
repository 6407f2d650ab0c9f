"""Fluid's layers: names and arguments as in Fluid 1.8, each a few lines of torch on Variables."""

from penstock.program.layers.inputs import data, fluid_data
from penstock.program.layers.losses import (
    cross_entropy,
    mean,
    reduce_mean,
    reduce_sum,
    softmax_with_cross_entropy,
    square_error_cost,
)
from penstock.program.layers.metrics import accuracy, auc
from penstock.program.layers.network import concat, embedding, fc, relu, sigmoid, softmax, tanh

__all__ = [
    "accuracy", "auc", "concat", "cross_entropy", "data", "embedding", "fc", "fluid_data", "mean", "reduce_mean",
    "reduce_sum", "relu", "sigmoid", "softmax", "softmax_with_cross_entropy", "square_error_cost", "tanh",
]  # fmt: skip
