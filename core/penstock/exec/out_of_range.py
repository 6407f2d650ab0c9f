"""Which id was out of range when a lookup fails, since torch says only that one was. Pure functions over tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.exec.lowering import Lowered
from penstock.graph.operands import operands
from penstock.graph.ssa import OpHandle
from penstock.program.ir import Operator, Ref
from penstock.program.kernels import concrete, resolve

# Type -> (position of the table, of the ids, of the dimension that the ids index; None: dimension 0).
_LOOKUPS: Mapping[str, tuple[int, int, int | None]] = {
    "aten.embedding.default": (0, 1, None),
    "aten.index_select.default": (0, 2, 1),
    "aten.gather.default": (0, 2, 1),
}


def explained(op: Operator, message: str, lookup: Callable[[str], torch.Tensor | None]) -> str:
    """Return the first line of torch's message, with the id that left its table if there is one."""
    return (message.strip().splitlines() or ["no message"])[0] + _out_of_range(op, lookup)


def _out_of_range(op: Operator, lookup: Callable[[str], torch.Tensor | None]) -> str:
    if op.type not in _LOOKUPS:
        return ""
    table_at, ids_at, dim_at = _LOOKUPS[op.type]
    names = [op.args[i].name for i in (table_at, ids_at) if isinstance(op.args[i], Ref)]  # type: ignore[union-attr]  # Ref
    if len(names) != 2:
        return ""
    table, ids = (lookup(n) for n in names)
    if table is None or ids is None:
        return ""
    dim = 0 if dim_at is None else int(op.args[dim_at])  # type: ignore[arg-type]  # the schema's dim
    rows = table.shape[dim]
    wrong = ((ids < 0) | (ids >= rows)).nonzero()
    if not len(wrong):
        return ""
    place = wrong[0].tolist()
    what = "rows" if dim_at is None else f"elements along dimension {dim % table.dim()}"
    table_name, ids_name = (n.partition("#")[0] for n in names)
    return f" (id {ids[tuple(place)].item()} at {place} of {ids_name!r}: {table_name!r} has {what} 0 to {rows - 1})"


def operand_of(lowered: Lowered, handle: OpHandle, key: str) -> torch.Tensor | None:
    """Return an operand of a handle that has failed, computed again from feeds and persistables; None if it cannot be.

    The engine has emptied the slots of temporaries. Only handles that write nothing are run again.
    """
    makers = {name: h for h in lowered.graph.handles[: handle.index] for name in h.makes()}
    values: dict[str, Any] = {}

    def value(name: str) -> Any:
        if name not in values:
            kept = lowered.plan.get(lowered.slots[name])
            values[name] = kept if kept is not None else made(name)
        return values[name]

    def made(name: str) -> Any:
        maker = makers[name]
        if maker.op.writes or maker.kind != "computation":
            raise LookupError(name)
        bindings = lowered.shares.bindings[maker.rows_of]
        args, kwargs = operands(maker, lowered.shares)
        given = [concrete(a, bindings, value) for a in args]
        result = resolve(maker.op)(*given, **{k: concrete(v, bindings, value) for k, v in kwargs})
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip(maker.op.outputs, results, strict=False))[name]

    try:
        with torch.no_grad():
            found = value(key)
    except (LookupError, RuntimeError, PenstockError):  # it explains an error that is raised in any case
        return None
    return found if isinstance(found, torch.Tensor) else None
