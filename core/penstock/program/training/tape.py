"""The tape behind a loss while it is recorded: its leaves, and what would make a gradient wrong without an error.

A tape is torch's own, of nodes that one call each has left. Two kinds of it cannot be walked: an operator without a
derivative, whose node drops the gradient (the backward operators of branches, loops, recurrent layers and sequences:
they are not differentiated a second time), and a value that was overwritten after a call has saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.compat.torch import WITHOUT_DERIVATIVE
from penstock.errors import ProgramError
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line

_OVERWRITTEN = "modified by an inplace operation"


def leaves_of(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a gradient of `result` ends at."""
    for node in _nodes([result.grad_fn], ends=lambda node: False):
        leaf = getattr(node, "variable", None)  # of the node that accumulates a leaf's gradient
        if leaf is not None:
            yield leaf


def _nodes(first: Sequence[Any], ends: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes from some on, none behind those at which it `ends`."""
    todo, seen = list(first), set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            todo += [parent for parent, _ in node.next_functions]


def refuse_lost_gradients(
    recording: Recording, targets: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> None:
    """Raise ProgramError if a gradient of `targets` for one of `wanted` goes through an operator without a derivative.

    Cost: one walk of the tape, and one for each such operator.
    """
    leaves, made = {id(t) for t in wanted if t.grad_fn is None}, {t.grad_fn for t in wanted if t.grad_fn is not None}

    def ends(node: Any) -> bool:
        return node in made or id(getattr(node, "variable", None)) in leaves

    for node in _nodes([t.grad_fn for t in targets], ends):
        if node.name() != WITHOUT_DERIVATIVE or not any(map(ends, _nodes([node], ends))):
            continue
        name = recording.name_of_result(node)
        op = next((op for op in recording.program.operators if name in op.output_names()), None)
        what, source = (op.type.removesuffix(".default"), op.source) if op else ("an operator", "")
        raise ProgramError(
            f"{source or user_line()}: {what} has no derivative, so a gradient through it would be lost. Gradients of "
            "branches, loops, recurrent layers and sequences are not differentiated again: make what is differentiated "
            "twice (a gradient penalty) of other layers, or stop the gradient there (stop_gradient = True)",
            operator=op.name if op else "",
        )


@contextmanager
def overwritten_values_named(what: str) -> Iterator[None]:
    """Turn what torch says of a value that was saved for the gradient, and overwritten since, into ProgramError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ProgramError) or _OVERWRITTEN not in str(error):
            raise
        found = str(error).partition("which is ")[2].partition(",")[0] or "a value"
        raise ProgramError(
            f"{user_line()}: the gradient of {what} needs the value of {found}, which was written in place afterwards. "
            "Write to a copy (layers.assign), or use the result of a call that is not in place"
        ) from error
