"""Initialisers: each records one operator into the startup Program.

Seeds: `seed=0` derives one from the startup Program's seed and the operator's position, so that the same
Program gives the same values on every machine. Random numbers are Philox (see docs/operators.md).
Source: python/paddle/fluid/initializer.py (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from penstock.program.expr import Dim, Expr, sym
from penstock.program.ir import Arg, Operator, TorchConst, VarDesc
from penstock.program.kernels import CAPTURED
from penstock.program.program import Program

SEED = "seed"
"""Reserved symbol: the seed of the Program that runs."""


class Initializer(Protocol):
    """Gives the operator that makes a parameter's first value."""

    def operator(self, var: VarDesc, startup: Program) -> Operator: ...


def _operator(type_: str, args: tuple[Arg, ...], var: VarDesc, startup: Program) -> Operator:
    name = startup.unique_operator(type_.split(".")[1])
    return Operator(name, type_, args, (var.name,), source=var.source)


def _shape(var: VarDesc) -> tuple[Dim, ...]:
    if any(isinstance(d, Expr) for d in var.shape):
        raise ValueError(f"parameter {var.name!r} has a symbolic shape {var.shape}; its sizes must be numbers")
    return var.shape


def _seed(seed: int, startup: Program) -> Arg:
    if seed:
        return seed
    return Expr("+", (Expr("*", (sym(SEED), 1000003)), len(startup.operators) + 1))


def _fans(shape: tuple[Dim, ...]) -> tuple[int, int]:
    sizes = [int(d) for d in shape if isinstance(d, int)]
    if len(sizes) < 2:
        n = sizes[0] if sizes else 1
        return n, n
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    receptive = math.prod(sizes[2:])
    return sizes[1] * receptive, sizes[0] * receptive


class Constant:
    """Every element is `value`."""

    def __init__(self, value: float = 0.0, force_cpu: bool = False) -> None:
        self.value = value if type(value) is int else float(value)  # float64 has no integers between those above 2^53

    def operator(self, var: VarDesc, startup: Program) -> Operator:
        """Record `aten.full`."""
        value: Arg = float(self.value) if "float" in var.dtype else int(self.value)
        op = _operator("aten.full.default", (_shape(var), value), var, startup)
        return Operator(
            op.name, op.type, op.args, op.outputs, (("dtype", TorchConst("dtype", var.dtype)),), source=var.source
        )


class _Random:
    type: str

    def __init__(self, first: float, second: float, seed: int) -> None:
        self.first, self.second, self.seed = float(first), float(second), int(seed)

    def operator(self, var: VarDesc, startup: Program) -> Operator:
        """Record the seeded random operator."""
        args = (_shape(var), self.first, self.second, _seed(self.seed, startup), TorchConst("dtype", var.dtype))
        return _operator(self.type, args, var, startup)


class Uniform(_Random):
    """Uniform in [low, high)."""

    type = "penstock.uniform.default"

    def __init__(self, low: float = -1.0, high: float = 1.0, seed: int = 0) -> None:
        super().__init__(low, high, seed)


class Normal(_Random):
    """Normal with mean `loc` and standard deviation `scale`."""

    type = "penstock.normal.default"

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__(loc, scale, seed)


class TruncatedNormal(_Random):
    """Normal, redrawn beyond two standard deviations."""

    type = "penstock.truncated_normal.default"

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__(loc, scale, seed)


class Xavier:
    """Glorot's initialiser; `fan_in`/`fan_out` default to the parameter's."""

    def __init__(
        self, uniform: bool = True, fan_in: float | None = None, fan_out: float | None = None, seed: int = 0
    ) -> None:
        self.uniform, self.fan_in, self.fan_out, self.seed = uniform, fan_in, fan_out, seed

    def operator(self, var: VarDesc, startup: Program) -> Operator:
        """Record a uniform in ±sqrt(6/(in+out)) or a normal of std sqrt(2/(in+out))."""
        fan_in, fan_out = _fans(var.shape)
        total = (fan_in if self.fan_in is None else self.fan_in) + (fan_out if self.fan_out is None else self.fan_out)
        if self.uniform:
            limit = math.sqrt(6.0 / total)
            return Uniform(-limit, limit, self.seed).operator(var, startup)
        return Normal(0.0, math.sqrt(2.0 / total), self.seed).operator(var, startup)


class MSRA:
    """He's initialiser."""

    def __init__(self, uniform: bool = True, fan_in: float | None = None, seed: int = 0) -> None:
        self.uniform, self.fan_in, self.seed = uniform, fan_in, seed

    def operator(self, var: VarDesc, startup: Program) -> Operator:
        """Record a uniform in ±sqrt(6/in) or a normal of std sqrt(2/in)."""
        fan_in = _fans(var.shape)[0] if self.fan_in is None else self.fan_in
        if self.uniform:
            limit = math.sqrt(6.0 / fan_in)
            return Uniform(-limit, limit, self.seed).operator(var, startup)
        return Normal(0.0, math.sqrt(2.0 / fan_in), self.seed).operator(var, startup)


class NumpyArrayInitializer:
    """The elements of an array, which has the parameter's shape.

    The startup Program holds a copy of the array; its text does not.
    """

    def __init__(self, value: np.ndarray) -> None:
        self.value = np.asarray(value)

    def operator(self, var: VarDesc, startup: Program) -> Operator:
        """Record the copy. Raises ValueError for another shape than the parameter's."""
        if self.value.shape != tuple(_shape(var)):
            raise ValueError(
                f"NumpyArrayInitializer: the array has shape {list(self.value.shape)}, parameter {var.name!r} "
                f"{list(var.shape)}; expected one shape"
            )
        return _captured(self.value, var, startup)


class Bilinear:
    """Filters [n, c, k, k] of a transposed convolution that enlarges images by interpolation.

    A filter is w(column) w(row) with w(x) = 1 - |x / f - c|, f = ceil(k / 2), c = (2 f - 1 - f mod 2) / (2 f). As in
    Fluid under Python 3, the row of element i is i / k modulo k, which is no whole number.
    """

    def operator(self, var: VarDesc, startup: Program) -> Operator:
        """Record the filters. Raises ValueError for a shape that is not [n, c, k, k]."""
        shape = [int(size) for size in _shape(var) if isinstance(size, int)]
        if len(shape) != 4 or shape[2] != shape[3]:
            raise ValueError(f"Bilinear: parameter {var.name!r} has shape {shape}; expected [n, c, k, k]")
        size = shape[3]
        half = math.ceil(size / 2.0)
        center = (2 * half - 1 - half % 2) / (2.0 * half)
        place = np.arange(math.prod(shape), dtype=np.float64)
        column, row = place % size, (place / size) % size
        values = (1 - np.abs(column / half - center)) * (1 - np.abs(row / half - center))
        return _captured(values.reshape(shape), var, startup)


def _captured(value: np.ndarray, var: VarDesc, startup: Program) -> Operator:
    startup.captured[var.name] = torch.from_numpy(np.array(value)).to(getattr(torch, var.dtype))
    return Operator(startup.unique_operator("captured"), CAPTURED, (var.name,), (var.name,), source=var.source)


def force_init_on_cpu() -> bool:
    """Return whether parameters start on the CPU: False, as an executor starts them on its own device."""
    return False


@contextmanager
def init_on_cpu() -> Iterator[None]:
    """Do nothing: an executor starts parameters on its own device, with the numbers of any other."""
    yield


BilinearInitializer = Bilinear
ConstantInitializer, UniformInitializer, NormalInitializer = Constant, Uniform, Normal
TruncatedNormalInitializer, XavierInitializer, MSRAInitializer = TruncatedNormal, Xavier, MSRA
