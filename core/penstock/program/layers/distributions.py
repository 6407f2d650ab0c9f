"""Distributions: `fluid.layers.Normal`, `Uniform`, `Categorical`, `MultivariateNormalDiag`.

Parameters are variables, numbers, lists or arrays; what is no variable becomes a float32 one. Gradients go to them,
also through samples. Source: python/paddle/fluid/layers/distributions.py (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.layers.random import drawn
from penstock.program.layers.tensor import assign
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable


def _variables(kind: str, *given: Any) -> list[Any]:
    made = [x if isinstance(x, Variable) else assign(np.atleast_1d(np.asarray(x, "float32"))) for x in given]
    if len({x.dtype for x in made}) > 1 and not any(isinstance(x, Variable) for x in given):
        raise ProgramError(f"{user_line()}: {kind}: parameters of dtypes {[str(x.dtype) for x in made]}")
    dtype = next((x.dtype for x in given if isinstance(x, Variable)), torch.float32)
    return [x if x.dtype == dtype else x.to(dtype) for x in made]


class _LocationScale:
    """Two parameters that broadcast, and samples of a standard distribution moved by them."""

    _draws = "uniform"

    def __init__(self, first: Any, second: Any) -> None:
        self._numbers = all(isinstance(x, (int, float)) for x in (first, second))
        self._first, self._second = _variables(type(self).__name__, first, second)

    def _drawn(self, shape: Sequence[int], seed: int) -> tuple[Any, list[Any]]:
        """Standard numbers of the shape and behind it of the parameters', and the shape of the result."""
        sizes = [*shape, *(self._first + self._second).shape]
        layer = f"{type(self).__name__}.sample"
        found = drawn(layer, self._draws, sizes, (0.0, 1.0), seed, self._first.dtype)
        return found, list(shape) if self._numbers else sizes


class Uniform(_LocationScale):
    """Uniform between `low` and `high`."""

    def __init__(self, low: Any, high: Any) -> None:
        super().__init__(low, high)
        self.low, self.high = self._first, self._second

    def sample(self, shape: Sequence[int], seed: int = 0) -> Any:
        """Return samples: `shape`, and behind it the shape of the parameters unless both are numbers."""
        found, sizes = self._drawn(shape, seed)
        return (found * (self.high - self.low) + self.low).reshape(sizes)

    def log_prob(self, value: Any) -> Any:
        """Return the logarithm of the density; -inf outside and on the bounds."""
        inside = torch.logical_and(self.low < value, value < self.high).to(value.dtype)
        return torch.log(inside) - torch.log(self.high - self.low)

    def entropy(self) -> Any:
        """Return log(high - low)."""
        return torch.log(self.high - self.low)


class Normal(_LocationScale):
    """Normal with mean `loc` and standard deviation `scale`."""

    _draws = "normal"

    def __init__(self, loc: Any, scale: Any) -> None:
        super().__init__(loc, scale)
        self.loc, self.scale = self._first, self._second

    def sample(self, shape: Sequence[int], seed: int = 0) -> Any:
        """Return samples: `shape`, and behind it the shape of the parameters unless both are numbers."""
        found, sizes = self._drawn(shape, seed)
        return (found * self.scale + self.loc).reshape(sizes)

    def log_prob(self, value: Any) -> Any:
        """Return the logarithm of the density."""
        away = (value - self.loc) / self.scale
        return -0.5 * away * away - torch.log(self.scale) - 0.5 * math.log(2.0 * math.pi)

    def entropy(self) -> Any:
        """Return (1 + log(2 pi)) / 2 + log scale, in the shape of loc and scale together."""
        return 0.5 + 0.5 * math.log(2.0 * math.pi) + torch.log(self.scale + torch.zeros_like(self.loc + self.scale))

    def kl_divergence(self, other: Normal) -> Any:
        """Return the divergence from `other` to this one."""
        if not isinstance(other, Normal):
            raise ProgramError(f"{user_line()}: Normal.kl_divergence: other is {other!r}; expected a Normal")
        ratio, away = self.scale / other.scale, (self.loc - other.loc) / other.scale
        return 0.5 * (ratio * ratio + away * away - 1.0 - 2.0 * torch.log(ratio))


class Categorical:
    """Categories of probabilities softmax(logits), over the last dimension."""

    def __init__(self, logits: Any) -> None:
        [self.logits] = _variables("Categorical", logits)

    def entropy(self) -> Any:
        """Return the entropy, with size 1 for the last dimension."""
        logs = F.log_softmax(self.logits, -1)
        return -(logs.exp() * logs).sum(-1, keepdim=True)

    def kl_divergence(self, other: Categorical) -> Any:
        """Return the divergence from `other` to this one, with size 1 for the last dimension."""
        if not isinstance(other, Categorical):
            raise ProgramError(f"{user_line()}: Categorical.kl_divergence: other is {other!r}; expected a Categorical")
        logs, others = F.log_softmax(self.logits, -1), F.log_softmax(other.logits, -1)
        return (logs.exp() * (logs - others)).sum(-1, keepdim=True)


class MultivariateNormalDiag:
    """Normal in k dimensions, mean `loc` [k], covariance `scale` [k, k], a diagonal matrix."""

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = _variables("MultivariateNormalDiag", loc, scale)
        shape = self.scale.desc.shape
        if self.scale.ndim != 2 or shape[0] != shape[1] or not isinstance(shape[0], int):
            raise ProgramError(f"{user_line()}: MultivariateNormalDiag: scale is {self.scale!r}; expected [k, k]")
        self._size: int = shape[0]

    def _variances(self) -> Any:
        return torch.diagonal(self.scale, 0, 0, 1)

    def entropy(self) -> Any:
        """Return (k (1 + log(2 pi)) + log det scale) / 2."""
        return 0.5 * (self._size * (1.0 + math.log(2.0 * math.pi)) + torch.log(self._variances()).sum())

    def kl_divergence(self, other: MultivariateNormalDiag) -> Any:
        """Return the divergence from `other` to this one."""
        if not isinstance(other, MultivariateNormalDiag):
            raise ProgramError(
                f"{user_line()}: MultivariateNormalDiag.kl_divergence: other is {other!r}; expected one of its kind"
            )
        own, others, away = self._variances(), other._variances(), other.loc - self.loc
        return 0.5 * ((own / others + away * away / others + torch.log(others / own)).sum() - self._size)
