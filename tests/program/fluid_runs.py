"""What comparisons with Fluid's numbers share: a started executor, parameters that are set, arrays as lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from bench.peers.fluid_cases import Array

import penstock as fluid
from penstock.scope import Scope

Numbers = dict[str, list[float]]


def listed(array: Any) -> list[float]:
    return [float(v) for v in np.asarray(array, dtype=np.float64).reshape(-1)]


def data(name: str, array: Array) -> Any:
    return fluid.data(name, list(array.shape), str(array.dtype))


def started() -> tuple[Any, Scope]:
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program(), scope=scope)
    return exe, scope


def value(scope: Scope, name: str) -> torch.Tensor:
    found = scope.find(name)
    assert isinstance(found, torch.Tensor), name
    return found


def given(
    arrays: Mapping[str, Array],
    lengths: Mapping[str, Sequence[int]],
    trained: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> Any:
    """Return variables that are fed, with gradients for `trained`; rows of sequences where there are lengths, and a
    batch of any size for `rows`."""
    return {
        name: fluid.layers.data(
            name,
            list(v.shape[1:] if name in lengths or name in rows else v.shape),
            append_batch_size=name in lengths or name in rows,
            dtype=str(v.dtype),
            lod_level=int(name in lengths),
            stop_gradient=name not in trained,
        )
        for name, v in arrays.items()
    }


def fed(arrays: Mapping[str, Array], lengths: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return what is fed for `given`."""
    return {n: fluid.create_lod_tensor(v, [list(lengths[n])]) if n in lengths else v for n, v in arrays.items()}
