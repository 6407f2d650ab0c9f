"""In-place: a pointwise operator's result may take over the memory of an operand that dies at it.

Decided here as plain data for the buffer plan; done by the engine, which looks once more, at each call, whether the
operator alone has the operand. The operator itself is the ordinary one: it only gets that memory for its result.

1 the operator is torch's own and pointwise: element i of the result depends on element i of the operands
2 it makes one result and allocates nothing else, so that it cannot read an operand after a first pass has written
3 operand and result have one type, sizes, strides and number of bytes, as the first run has shown
4 whoever else touches the operand's memory, by any view, runs before the operator, by a path of edges

Source: buffer_shared_inplace_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.compat.torch import OpOverload, has_kernel, schema_of
from penstock.errors import ProgramError
from penstock.graph.passes.liveness import Allocation, Liveness
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.kernels import resolve

_READS_AGAIN = frozenset[str]()
"""Pointwise operators of torch that are no single pass (rule 2); tests/graph/passes runs every one of them."""


def takeovers(graph: Graph, allocations: Sequence[Allocation], alive: Liveness) -> dict[int, tuple[int, int]]:
    """Return {allocation: (the allocation that it takes over, position of the operand)}, by index."""
    by_handle: dict[int, list[int]] = {}
    by_storage: dict[str, int] = {}
    for index, allocation in enumerate(allocations):
        by_handle.setdefault(allocation.handle, []).append(index)
        by_storage.update(dict.fromkeys(alive.storages[index], index))
    found: dict[int, tuple[int, int]] = {}
    for handle_index, made in by_handle.items():
        handle = graph.handles[handle_index]
        allocation = allocations[made[0]]
        if len(made) != 1 or not allocation.alone or len(allocation.results) != 1 or not is_single_pass(handle):
            continue
        source = _dying_operand(graph, handle, allocation, by_storage, alive)
        if source is not None:
            found[made[0]] = source
    return found


def is_single_pass(handle: OpHandle) -> bool:
    """Whether rules 1 and 2 hold for a handle's operator, as far as its kind tells."""
    if not handle.op.type.startswith("aten.") or handle.op.writes:
        return False
    try:
        overload = resolve(handle.op)
    except ProgramError:
        return False
    return is_single_pass_overload(overload)


def is_single_pass_overload(overload: OpOverload) -> bool:
    """Whether torch's kernel of a pointwise operator is its own, on CPU, and reads each element once."""
    return (
        torch.Tag.pointwise in overload.tags
        and schema_of(overload).name not in _READS_AGAIN
        and len(schema_of(overload).returns) == 1
        and has_kernel(_full_name(overload), "CPU")
    )


def _full_name(overload: OpOverload) -> str:
    schema = schema_of(overload)
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _dying_operand(
    graph: Graph,
    handle: OpHandle,
    allocation: Allocation,
    by_storage: Mapping[str, int],
    alive: Liveness,
) -> tuple[int, int] | None:
    read = [graph.variables[n].storage for n in handle.reads()]
    for position, name in allocation.twins:
        storage = graph.variables[name].storage
        source = by_storage.get(storage)
        if source is not None and read.count(storage) == 1 and alive.dies_at(source, handle.index):
            return source, position
    return None
