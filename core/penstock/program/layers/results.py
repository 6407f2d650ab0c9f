"""Fluid's names of layers' results, `fc_0.tmp_1`, by which scripts fetch them.

The k-th temporary of Fluid's layer is `<layer>_<n>.tmp_<k>`. Variables here have names of their operators; a name of
Fluid's that no variable has stands for the result that a layer has registered.
Source: LayerHelper.create_variable_for_type_inference (Fluid 1.8).
"""

from __future__ import annotations

from typing import Any

from penstock.program.layers.activations import activate
from penstock.program.record.opening import recording_of
from penstock.program.record.variable import Variable


def result(value: Any, layer: str, number: int) -> Any:
    """Return a layer's value, which can be fetched as `<layer>.tmp_<number>` from now on.

    Not where another layer of that name has one: Fluid counts on, by numbers that depend on what the layers do inside.
    """
    if isinstance(value, Variable):
        made, name = recording_of(value.program).results, f"{layer}.tmp_{number}"
        made[name] = None if name in made else value.fake
    return value


def activated(value: Any, act: str | None, layer: str, number: int) -> Any:
    """Return `act` of a layer's temporary `number`, which is the next one, or the temporary itself without `act`."""
    before = result(value, layer, number)
    return result(activate(before, act), layer, number + 1) if act else before
