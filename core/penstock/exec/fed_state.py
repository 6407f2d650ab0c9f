"""Persistable variables that are fed: set in the scope before a run, or on each replica of its own.

Nothing is set before the whole feed is known to fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.errors import FeedError
from penstock.exec.feeding import Share, converted, fitting
from penstock.exec.lowering import Lowered
from penstock.exec.memory import ReplicaMemory
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.scope import Scope


def state_in(program: Program, feed: Any, scope: Scope, num_replicas: int = 1) -> tuple[list[Share], Any]:
    """Return the persistable variables among a feed with their values, and the feed without them; nothing is set.

    The values are those of the scope, then what replicas from the second on have of their own: of inputs that were made
    persistable, which are fed in each dict of a list, or in one array with the entries of several replicas. Of other
    variables the first dict that has one counts. Raises FeedError for a dtype or a shape that does not fit the program
    or the scope.
    """
    items: list[Any] = list(feed) if isinstance(feed, (list, tuple)) else [feed]
    given = [{n: v for n, v in d.items() if _is_state(program, n)} if isinstance(d, Mapping) else {} for d in items]
    if not any(given):
        return [], feed
    states: list[Share] = [{} for _ in range(max(num_replicas, len(given)))]
    for replica, own in reversed(list(enumerate(given))):
        for name, value in own.items():
            var = program.variables[name]
            entries = _of_replicas(var, value, num_replicas if len(given) == 1 else 1)
            states[0][name] = entries[0]
            for place, entry in enumerate(entries if var.buffer else (), start=replica):
                states[place][name] = entry
    for name, value in states[0].items():
        known = scope.find(name)
        if known is not None and known.shape != value.shape:
            raise FeedError(
                f"feed {name!r} has shape {list(value.shape)}, but the variable in the scope has {list(known.shape)}",
                variable=name,
            )
    rest = [{n: v for n, v in d.items() if n not in states[0]} if isinstance(d, Mapping) else d for d in items]
    return states, rest if isinstance(feed, (list, tuple)) else rest[0]


def _of_replicas(var: VarDesc, value: Any, num_replicas: int) -> list[torch.Tensor]:
    """Return the one value that is fed to a persistable variable, or those of several replicas, one after another."""
    size = var.shape[0] if var.shape and var.buffer else 0
    if num_replicas > 1 and isinstance(size, int) and size:
        tensor = converted(var, value)
        parts, left = divmod(tensor.shape[0] if tensor.dim() else 0, size)
        if 1 < parts <= num_replicas and not left:
            return [fitting(var, part) for part in tensor.split_with_sizes([size] * parts)]
    return [fitting(var, value)]


def set_state(scope: Scope, state: Share) -> None:
    """Copy what `state_in` has found into the scope, once the rest of the feed is known to fit."""
    for name, value in state.items():
        scope.var(name).set(value)


def _is_state(program: Program, name: str) -> bool:
    var = program.variables.get(name)
    return var is not None and var.persistable and not var.feed and not var.distributed


def check_number(states: Sequence[Share], active: int) -> None:
    """Raise FeedError if an array has the entries of another number of replicas than have rows."""
    for name in states[0]:
        number = sum(name in own for own in states)
        if number not in (1, active):
            raise FeedError(
                f"feed {name!r} has {number} entries, but {active} replicas have rows; feed one for each of them, or "
                "one for all",
                variable=name, got=number, expected=active,
            )  # fmt: skip


def set_own(states: Sequence[Share], lowered: Lowered, program: Program, memory: ReplicaMemory) -> None:
    """Copy what replicas from the second on have of their own to where a plan reads it. After its binding."""
    if any(states[1:]):
        for variable in lowered.graph.variables.values():
            if variable.persistable and variable.replica > 0 and variable.name in states[variable.replica]:
                memory.tensor(program, variable).copy_(states[variable.replica][variable.name])
