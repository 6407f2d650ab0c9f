"""Channels last, for layers whose channels come first: the input is laid out anew, and so is the result.

Parameters have the same shapes in both layouts, as in Fluid. Cost: two views; kernels that need another order copy.
Source: data_format of conv2d and pool2d, data_layout of batch_norm (Fluid 1.8).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from penstock.errors import ProgramError
from penstock.program.layers.activations import activate
from penstock.program.layers.results import result
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line

_LAST = {"NHWC": 4, "NDHWC": 5}
_OVER_CHANNELS = frozenset({"softmax"})
"""Activations over the last dimension, which are applied once the channels are that again."""


def takes_channels_last(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer whose first argument is `input` take NHWC or NDHWC as `data_format`, or as `data_layout`.

    Results before `act` cannot be fetched by Fluid's names then: they have their channels first.
    """
    signature = inspect.signature(layer)
    keyword = "data_format" if "data_format" in signature.parameters else "data_layout"
    first = signature.parameters[keyword].default

    @functools.wraps(layer)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        layout, x = given.arguments.get(keyword), given.arguments["input"]
        if layout not in _LAST:
            return layer(*args, **kwargs)
        if x.ndim != _LAST[layout] and keyword == "data_format":
            raise ProgramError(
                f"{user_line()}: {layer.__name__}: data_format is {layout!r}, and {x!r} has {x.ndim} dimensions",
                variable=x.name,
            )
        act = given.arguments.get("act")
        over_channels = act if act in _OVER_CHANNELS else None
        given.arguments |= {keyword: first, "input": x.movedim(-1, 1)}
        if over_channels:
            given.arguments["act"] = None
        results = recording_of(x.program).results
        before = set(results)
        made = layer(*given.args, **given.kwargs)
        moved, named = made.movedim(1, -1), ""
        for name in set(results) - before:
            named = name if results[name] is made.fake else named
            results[name] = moved.fake if results[name] is made.fake else None
        if not over_channels:
            return moved
        prefix, _, number = named.rpartition(".tmp_")
        found = activate(moved, over_channels)
        return result(found, prefix, int(number) + 1) if prefix else found

    return call
