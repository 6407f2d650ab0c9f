"""Gradients that a script clips or decays itself, between `backward` and `apply_gradients`.

What it gets back stands for the changed gradient, and knows the one that the backward pass made: an update of it comes
after that one's exchange, as everything between them does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from penstock.program.ir import Role
from penstock.program.record.context import program_guard, role
from penstock.program.record.opening import recording_of
from penstock.program.record.variable import Variable, recording_modes
from penstock.program.training.backward import Gradient, SelectedRows
from penstock.program.training.gradients import PendingGradient, prefix_of_state

Pair = tuple[Variable, Gradient]
Prepare = Callable[[Sequence[PendingGradient], str], Callable[[], None]]
"""Creates the state that a change needs, under a prefix; returns what records the change."""


def changed(pairs: Iterable[tuple[Any, Any]], kind: str, prepare: Prepare) -> list[Pair]:
    """Record a change of gradients; return the pairs with what it made. Parameters without a gradient are left out."""
    given = [(param, gradient) for param, gradient in pairs if gradient is not None]
    if not given:
        return []
    program = given[0][0].program
    with program_guard(program):
        prefix = prefix_of_state(program, kind)
        pending = [PendingGradient(param, gradient, prefix) for param, gradient in given]
        record = prepare(pending, prefix)
        with torch.no_grad(), recording_modes(recording_of(program)), role(Role.OPTIMIZE):
            record()
    return [_pair(*pair, one) for pair, one in zip(given, pending, strict=True)]


def _pair(param: Variable, gradient: Gradient, one: PendingGradient) -> Pair:
    if one.is_raw:
        return param, gradient
    recording = recording_of(param.program)
    value = recording.handle(one.value)
    recording.changed_gradients[value.name] = one
    if isinstance(gradient, SelectedRows):
        return param, SelectedRows(f"{value.name}@SELECTED_ROWS", gradient.rows, value, gradient.height)
    return param, value
