"""Lookups of one table that can be asked for together: a model has one for each slot, and a call costs more than rows.

Lookups are joined at the place of the first one when the ids of all are there by then (or are views of feeds, which are
taken earlier), and differ in their last dimension at most. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.program.ir import Arg, Operator, Ref, VarDesc
from penstock.transpile.partition import LOOKUP


def padding_of(lookup: Operator) -> Arg:
    """Return the padding_idx of a lookup; -1: it has none."""
    return lookup.args[2] if len(lookup.args) > 2 else dict(lookup.kwargs).get("padding_idx", -1)


@dataclass(frozen=True, slots=True)
class Joined:
    """What stands in the place of a lookup: `lookups` asked for together (none: elsewhere), after `views` of feeds."""

    lookups: list[Operator] = field(default_factory=list)
    views: list[Operator] = field(default_factory=list)


def joined_lookups(
    operators: Sequence[Operator], tables: Collection[str], variables: Mapping[str, VarDesc]
) -> dict[str, Joined]:
    """Return for the name of each lookup of `tables` what stands in its place."""
    made: dict[str, tuple[int, Operator]] = {}
    groups: dict[object, tuple[int, Joined]] = {}
    found: dict[str, Joined] = {}
    for index, op in enumerate(operators):
        if op.type == LOOKUP and op.input_names()[0] in tables:
            ids = variables[op.input_names()[1]]
            key = (op.input_names()[0], padding_of(op), op.role, op.train_only, ids.dtype, _lead(ids))
            first, group = groups.get(key, (index, Joined()))
            late = [made[n] for n in {ids.name, ids.storage} & made.keys() if made[n][0] > first]
            views = [view for _, view in late if _is_view_of_feed(view, variables)]
            if group.lookups and len(views) == len(late) and _is_joinable(op, variables):
                group.lookups.append(op)
                group.views.extend(views)
                found[op.name] = Joined()
            else:
                found[op.name] = Joined([op])
                if _is_joinable(op, variables):
                    groups[key] = (index, found[op.name])
        made |= dict.fromkeys((*op.output_names(), *op.writes), (index, op))
    return found


def _is_view_of_feed(op: Operator, variables: Mapping[str, VarDesc]) -> bool:
    """Whether an operator can as well run earlier."""
    names = op.output_names()
    return (
        not op.writes
        and len(names) == 1
        and all(variables[n].feed for n in (*op.input_names(), variables[names[0]].storage))
    )


def _is_joinable(lookup: Operator, variables: Mapping[str, VarDesc]) -> bool:
    """Whether its ids have a known last dimension, or one alone, and its rows memory of their own."""
    ids, (name,) = variables[lookup.input_names()[1]], lookup.output_names()
    rows = variables[name]
    return (
        isinstance(lookup.args[1], Ref) and (len(ids.shape) == 1 or isinstance(ids.shape[-1], int))
        and rows.storage == name and not rows.persistable and len(rows.shape) == len(ids.shape) + 1
    )  # fmt: skip


def _lead(ids: VarDesc) -> tuple[int, tuple[object, ...]]:
    return len(ids.shape), ids.shape[:-1] or ids.shape
