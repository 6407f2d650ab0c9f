"""Run a built graph, one handle after another, with the same kernels as the engine: its oracle, to the bit.

Not fast, and not meant to be. The caller sets the number of intra-op threads that the engine uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from penstock.graph.operands import Shares, operands
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.kernels import concrete, resolve

Hook = Callable[[OpHandle, list[Any], Callable[[], Any]], Any]
"""Called for each handle with its operands and a function that runs it; returns the result."""

Placed = Callable[[OpHandle, Any, list[Any], dict[str, Any]], Any]
"""Puts the call of a kernel on its replica's device, in place; returns the kernel of that device."""


def interpret(
    graph: Graph,
    shares: Shares,
    tensors: Mapping[str, torch.Tensor],
    hook: Hook | None = None,
    placed: Placed | None = None,
) -> dict[str, Any]:
    """Return the value of every physical variable after one run.

    `tensors`: feeds, random state and persistables by physical name; persistables are updated in place.
    `placed`: of replicas on devices; on CPU nothing has to be placed.
    """
    values: dict[str, Any] = dict(tensors)
    with torch.no_grad():
        for handle in graph.handles:
            given, named = operands(handle, shares)
            bindings = shares.bindings[handle.rows_of]
            args = [concrete(a, bindings, values.__getitem__) for a in given]
            kwargs = {k: concrete(v, bindings, values.__getitem__) for k, v in named}
            kernel = resolve(handle.op) if placed is None else placed(handle, resolve(handle.op), args, kwargs)
            call = partial(kernel, *args, **kwargs)
            result = call() if hook is None else hook(handle, [*args, *kwargs.values()], call)
            for name, value in zip(handle.op.outputs, result if isinstance(result, tuple) else (result,), strict=False):
                if isinstance(name, tuple):
                    values.update(zip(name, value, strict=True))
                elif name is not None:
                    values[name] = value
    return values
