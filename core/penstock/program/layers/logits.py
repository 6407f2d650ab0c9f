"""The logits that probabilities were made of, found in the operators that were recorded before.

A loss of probabilities takes the logarithm of logits where a softmax made them, possibly reshaped since: neither its
value nor its gradient ends where a probability underflows. Logits that are written after the softmax are not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.program.ir import Operator, Ref
from penstock.program.record.context import default_main_program
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.variable import Variable

_SAME_ORDER = {f"aten.{name}" for name in ("view", "_unsafe_view", "squeeze", "unsqueeze", "clone", "detach")}


@dataclass(frozen=True, slots=True)
class Softmax:
    """What made probabilities: a softmax of `logits` along `axis`. `logits` is None where they have changed since.

    `is_reshaped`: the probabilities have other sizes than the logits, and the same order.
    """

    logits: Any
    axis: int
    is_reshaped: bool = False


def softmax_of(p: Any) -> Softmax | None:
    """Return the softmax that made `p`, or made what `p` is a reshaped copy of; None for other values.

    Where the gradient ends between logits and `p`, it ends at the logits.
    """
    if not isinstance(p, Variable):
        return None
    recording = recording_of(default_main_program())
    makers = {name: place for place, op in enumerate(recording.program.operators) for name in op.output_names()}
    path, ends = [p.name], p.stop_gradient and not _is_of_block(recording, makers.get(p.name, 0))
    while path[-1] in makers:
        op = recording.program.operators[makers[path[-1]]]
        kind = op.type.rpartition(".")[0]
        source = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        if op.type.startswith("aten._softmax.") and isinstance(op.args[1], int):
            logits = recording.handles.get(source)
            if logits is None or _changes(recording, {source, *path}, makers[path[-1]]):
                return Softmax(None, op.args[1])
            ends = ends and (not logits.stop_gradient or _is_of_block(recording, makers[path[-1]]))
            return Softmax(logits.detach() if ends else logits, op.args[1], is_reshaped=len(path) > 1)
        if kind not in _SAME_ORDER:
            return None
        ends = ends or kind == "aten.detach"
        path.append(source)
    return None


def _is_of_block(recording: Recording, place: int) -> bool:
    """Whether an operator is in a block that is recorded now, where a gradient ends by operators alone."""
    return bool(recording.open_blocks) and place >= recording.open_blocks[0].start


def _changes(recording: Recording, names: set[str], place: int) -> bool:
    """Whether a later operator, or a later round of a loop that is recorded now, may write one of `names`."""
    variables = recording.program.variables
    storages = {variables[name].storage for name in names}

    def writes(op: Operator) -> bool:
        return any(variables[name].storage in storages for name in op.writes)

    repeated = any(place < block.start for block in recording.open_blocks if block.repeats or block.is_step)
    return repeated or any(map(writes, recording.program.operators[place + 1 :]))
