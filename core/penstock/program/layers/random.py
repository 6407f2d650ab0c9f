"""Random numbers as layers: other ones in each run, which follow from `Program.random_seed`.

Replicas draw what one batch would: an element's number follows from its position in the whole batch. A `seed` other
than 0 makes every run draw the same numbers, as in Fluid. They are drawn in `clone(for_test=True)`, too, and
have no gradient.
Source: python/paddle/fluid/layers/nn.py, tensor.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.layers.sizes import sizes_in
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named, recording_modes, wrap


def drawn(layer: str, kind: str, sizes: Sequence[Any], bounds: tuple[float, float], seed: int, dtype: Any) -> Any:
    """Return a variable of random numbers. `bounds`: low and high, or mean and standard deviation."""
    wanted = dtype_named(dtype)
    if not wanted.is_floating_point:
        raise ProgramError(f"{user_line()}: {layer} draws floating numbers; got dtype={dtype!r}. Cast what it returns")
    recording = recording_of(default_main_program())
    with name_scope(default_main_program().unique(layer)), torch.no_grad(), recording_modes(recording):
        return wrap(recording, _call(recording, kind, sizes, bounds, seed, wanted))


def _call(
    recording: Recording, kind: str, sizes: Sequence[Any], bounds: tuple[float, float], seed: int, dtype: torch.dtype
) -> torch.Tensor:
    shape = recording.shape_of(recording.rng().new_empty(sizes)) if _is_symbolic(sizes) else tuple(sizes)
    batch_dim, rows = recording.batch_of(shape)
    recording.num_seeds += 1
    operands = (kind, *map(float, bounds), seed or recording.num_seeds, not seed, batch_dim, rows, dtype)
    made: torch.Tensor = torch.ops.penstock.random(recording.rng(), list(sizes), *operands)
    return made


def _is_symbolic(sizes: Sequence[Any]) -> bool:
    return any(not isinstance(size, int) for size in sizes)


def _like(input: Any, shape: Sequence[int], input_dim: int, output_dim: int) -> list[Any]:
    sizes: list[Any] = list(shape)
    sizes[output_dim] = input.shape[input_dim]
    return sizes


def uniform_random(
    shape: Any, dtype: Any = "float32", min: float = -1.0, max: float = 1.0, seed: int = 0, name: str | None = None
) -> Any:
    """Return numbers that are uniform in [min, max). `shape`: ints and elements of `layers.shape(x)`."""
    return drawn("uniform_random", "uniform", sizes_in(shape), (min, max), seed, dtype)


def gaussian_random(shape: Any, mean: float = 0.0, std: float = 1.0, seed: int = 0, dtype: Any = "float32") -> Any:
    """Return normal numbers with a mean and a standard deviation. `shape`: as of `uniform_random`."""
    return drawn("gaussian_random", "normal", sizes_in(shape), (mean, std), seed, dtype)


def uniform_random_batch_size_like(
    input: Any,
    shape: Sequence[int],
    dtype: Any = "float32",
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    min: float = -1.0,
    max: float = 1.0,
    seed: int = 0,
) -> Any:
    """As `uniform_random`, but the result's `output_dim_idx` has the size of the input's `input_dim_idx`."""
    sizes = _like(input, shape, input_dim_idx, output_dim_idx)
    return drawn("uniform_random_batch_size_like", "uniform", sizes, (min, max), seed, dtype)


def gaussian_random_batch_size_like(
    input: Any,
    shape: Sequence[int],
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    seed: int = 0,
    dtype: Any = "float32",
) -> Any:
    """As `gaussian_random`, but the result's `output_dim_idx` has the size of the input's `input_dim_idx`."""
    sizes = _like(input, shape, input_dim_idx, output_dim_idx)
    return drawn("gaussian_random_batch_size_like", "normal", sizes, (mean, std), seed, dtype)


def _written(out: Any, value: Any) -> Any:
    return value if out is None else out.copy_(value)


def randint(
    low: int,
    high: int | None = None,
    shape: Any = None,
    out: Any = None,
    dtype: Any = None,
    device: str | None = None,
    stop_gradient: bool = False,
    seed: int = 0,
    name: str | None = None,
) -> Any:
    """Return whole numbers from low to high - 1, each as likely; with one argument, from 0 to low - 1."""
    start, end = (0, low) if high is None else (low, high)
    if end <= start:
        raise ProgramError(f"{user_line()}: randint draws from {start} to {end} exclusive, which is nothing")
    numbers = drawn("randint", "uniform", sizes_in([1] if shape is None else shape), (start, end), seed, "float64")
    return _written(out, torch.floor(numbers).clamp(max=end - 1).to(dtype_named(dtype or "int64")))


def randn(
    shape: Any,
    out: Any = None,
    dtype: Any = None,
    device: str | None = None,
    stop_gradient: bool = True,
    name: str | None = None,
) -> Any:
    """Return normal numbers with mean 0 and standard deviation 1."""
    return _written(out, drawn("randn", "normal", sizes_in(shape), (0.0, 1.0), 0, dtype or "float32"))


def sampling_id(x: Any, min: float = 0.0, max: float = 1.0, seed: int = 0, dtype: Any = "float32") -> Any:
    """Return for each row of probabilities a column, drawn as often as they say. Shapes: x [n, k]; result int64 [n].

    A number from [min, max) decides: the first column up to which the probabilities sum to more than it, else the last.
    """
    if not isinstance(x, Variable) or x.ndim != 2:
        raise ProgramError(f"{user_line()}: sampling_id needs probabilities [n, k]; got {x!r}")
    number = drawn("sampling_id", "uniform", [x.shape[0], 1], (min, max), seed, x.dtype)
    with torch.no_grad():
        past = (x.cumsum(1) <= number).to(torch.int64).sum(1)
        return past.clamp(max=x.shape[1] - 1)


def distinct_ids(below: int, num: int, seed: int) -> tuple[Any, Any]:
    """Return different log-uniform ids below `below`, int64 [num], and how many draws they took, int64 []."""
    recording = recording_of(default_main_program())
    with torch.no_grad(), recording_modes(recording):
        recording.num_seeds += 1
        call = torch.ops.penstock.distinct_ids
        ids, tries = call(recording.rng(), below, num, seed or recording.num_seeds, not seed)
        return wrap(recording, ids), wrap(recording, tries)


def randperm(
    n: int,
    out: Any = None,
    dtype: Any = "int64",
    device: str | None = None,
    stop_gradient: bool = True,
    seed: int = 0,
) -> Any:
    """Return the numbers below n in a random order, int64 or int32 [n]."""
    if n < 1:
        raise ProgramError(f"{user_line()}: randperm: n is {n}; expected a number above 0")
    numbers = drawn("randperm", "uniform", [n], (0.0, 1.0), seed, "float64")
    return _written(out, torch.argsort(numbers).to(dtype_named(dtype)))


def random_crop(x: Any, shape: Sequence[int], seed: int | None = None) -> Any:
    """Return of each row a part of sizes `shape`, the last dimensions, at a place of its own. No place is preferred."""
    sizes, batch = list(shape), x.ndim - len(shape)
    known: list[Any] = [x.desc.shape[batch + i] if batch > 0 else None for i in range(len(sizes))]
    if batch < 1 or any(not isinstance(have, int) or have < size for have, size in zip(known, sizes, strict=True)):
        raise ProgramError(f"{user_line()}: random_crop: shape is {sizes}; expected sizes of parts of {x!r}")
    for i, (have, size) in enumerate(zip(known, sizes, strict=True)):
        outer = list(x.shape[:batch])
        number = drawn("random_crop", "uniform", outer, (0.0, 1.0), seed or 0, "float64")
        first = torch.floor(number * (have - size + 1)).clamp(max=have - size).to(torch.int64)
        at = first.unsqueeze(-1) + (first.new_ones([size]).cumsum(0) - 1)
        at = at.reshape([*outer, *[1] * i, size, *[1] * (len(sizes) - i - 1)])
        x = torch.gather(x, batch + i, at.expand([*x.shape[: batch + i], size, *x.shape[batch + i + 1 :]]))
    return x


__all__ = [
    "gaussian_random", "gaussian_random_batch_size_like", "randint", "randn", "random_crop", "randperm",
    "sampling_id", "uniform_random",
    "uniform_random_batch_size_like",
]  # fmt: skip
