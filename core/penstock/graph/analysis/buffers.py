"""The buffer plan: where in one arena each temporary lies, so that steps need not ask the allocator for memory.

Two temporaries may overlap only if every handle that touches one, by any view, runs before the maker of the other, by
a path of edges (`liveness.py`); then no schedule can see a difference. Temporaries that take over an operand's memory
(`takeovers`) form a *block* with it. Blocks are placed largest first, each into the smallest gap that fits among
those that may live at the same time. `check` proves a plan without looking at how it was made.

A pointwise operator's result may take over the memory of an operand that dies at it. Decided here; done by the engine,
which checks at each call that the operator alone has the operand. Rules:

1 the operator is torch's own and pointwise: element i of the result depends on element i of the operands
2 it makes one result and allocates nothing else, so that it cannot read an operand after a first pass has written
3 operand and result have one type, sizes, strides and number of bytes, as the first run has shown
4 whatever else touches the operand's memory, by any view, runs before the operator, by a path of edges

Source: cross_op_memory_reuse_pass, memory_optimize and buffer_shared_inplace_pass.cc (Fluid 1.8); the order is that of
greedy-by-size planners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.compat.torch import OpOverload, has_kernel, schema_of
from penstock.errors import Bug, ProgramError
from penstock.graph.analysis.liveness import Allocation, Liveness
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
    """Whether rules 1 and 2 hold for a handle's operator, as far as its kind shows."""
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


ALIGNMENT = 64  # bytes, as torch's allocator: kernels that look at alignment choose as they do elsewhere
HEADER = 64  # bytes in front of each block, the engine's
_MAX_ENTRIES = 16  # of one handle, see placement.h

Matrix = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Buffers:
    """A plan. `block_of[i]`: block of allocation i; `operand_of[i]`: position of the operand it takes over, or -1.

    `offsets`, `sizes`: of blocks with their headers, in bytes. `checks[b]`: the last blocks before b that overlap it.
    `separate_bytes`: what the allocations need without sharing. `live_bytes`: the largest sum of what lives at once
    when handles run in order; no plan is smaller.
    """

    allocations: tuple[Allocation, ...]
    block_of: tuple[int, ...]
    operand_of: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    checks: tuple[tuple[int, ...], ...]
    separate_bytes: int
    live_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return max((o + s for o, s in zip(self.offsets, self.sizes, strict=True)), default=0)


def plan(
    graph: Graph,
    observed: Sequence[Allocation],
    *,
    pinned: Set[str] = frozenset(),
    lasting: Set[str] = frozenset(),
    reuse: bool = True,
    inplace: bool = True,
) -> Buffers:
    """Place what was observed, largest first. Deterministic.

    `pinned`: storages that are not placed (fetches, for they outlive the step in other hands). `lasting`: storages
    that are placed, but share no memory. Without `reuse` blocks do not overlap.
    Cost: O(handles x edges / 64 + blocks²), some milliseconds for a few hundred blocks.
    """
    allocations = _placeable(graph, observed, pinned)
    alive = Liveness(graph, allocations, lasting)
    taken = takeovers(graph, allocations, alive) if inplace else {}
    block_of, members = _blocks(allocations, {i: source for i, (source, _) in taken.items()})
    sizes = np.array([_aligned(allocations[block[0]].nbytes) for block in members], dtype=np.int64)
    follows = _follows(graph, allocations, alive, members)
    apart = ~(follows | follows.T) if reuse else np.ones_like(follows)
    offsets = _place(sizes, apart)
    return Buffers(
        tuple(allocations),
        tuple(block_of),
        tuple(taken[i][1] if i in taken else -1 for i in range(len(allocations))),
        tuple(offsets.tolist()),
        tuple(sizes.tolist()),
        _checks(offsets, sizes, follows),
        int(sum(_aligned(a.nbytes) for a in allocations)),
        _live_bytes(len(graph.handles), sizes, members, alive),
    )


def _placeable(graph: Graph, observed: Sequence[Allocation], pinned: Set[str]) -> list[Allocation]:
    variables = graph.variables
    count: dict[int, int] = {}
    found = []
    for allocation in observed:
        roots = {variables[n].storage for n in allocation.results}
        lent = any(variables[r].persistable or variables[r].feed or r in pinned for r in roots)
        if lent or any(variables[n].persistable for n in allocation.results) or allocation.nbytes == 0:
            continue
        count[allocation.handle] = count.get(allocation.handle, 0) + 1
        if count[allocation.handle] <= _MAX_ENTRIES:
            found.append(allocation)
    return found


def _aligned(nbytes: int) -> int:
    return HEADER + -(-nbytes // ALIGNMENT) * ALIGNMENT


def _blocks(allocations: Sequence[Allocation], source_of: dict[int, int]) -> tuple[list[int], list[list[int]]]:
    """Chains of takeovers, each a block; in the order of their first makers."""
    block_of: list[int] = []
    members: list[list[int]] = []
    for index in range(len(allocations)):
        source = source_of.get(index)
        if source is None:
            block_of.append(len(members))
            members.append([index])
        else:
            block_of.append(block_of[source])
            members[block_of[source]].append(index)
    return block_of, members


def _follows(
    graph: Graph, allocations: Sequence[Allocation], alive: Liveness, members: Sequence[Sequence[int]]
) -> Matrix:
    """[b, c]: whether all of block b is over before block c is made."""
    made = [0] * len(graph.handles)  # bit c: the handle makes block c
    for block, inside in enumerate(members):
        made[allocations[inside[0]].handle] |= 1 << block
    later = [0] * len(graph.handles)  # bit c: block c is made by a handle after this one
    for handle in reversed(graph.handles):
        mine = later[handle.index] | made[handle.index]
        for before in handle.before:
            later[before] |= mine
    rows = []
    for inside in members:
        free = (1 << len(members)) - 1
        for allocation in inside:
            for user in alive.users[allocation]:
                free &= later[user]
            free = 0 if alive.lasts[allocation] else free
        rows.append(free)
    return _matrix(rows)


def _matrix(rows: Sequence[int]) -> Matrix:
    size = len(rows)
    width = -(-size // 8)
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), dtype=np.uint8)
    return np.unpackbits(packed.reshape(size, width), axis=1, bitorder="little")[:, :size].astype(np.bool_)


def _place(sizes: npt.NDArray[np.int64], apart: Matrix) -> npt.NDArray[np.int64]:
    """Offsets, largest block first, each in the smallest gap between those that it must be apart from."""
    offsets = np.zeros_like(sizes)
    placed = np.zeros(len(sizes), dtype=np.bool_)
    for block in np.argsort(-sizes, kind="stable"):
        others = np.flatnonzero(placed & apart[block])
        others = others[np.argsort(offsets[others], kind="stable")]
        starts = offsets[others]
        ends = np.maximum.accumulate(starts + sizes[others]) if len(others) else starts
        gap_starts = np.concatenate(([0], ends))
        room = np.concatenate((starts, [np.iinfo(np.int64).max])) - gap_starts
        room[room < sizes[block]] = np.iinfo(np.int64).max  # the gap after the last one is the last resort
        offsets[block] = gap_starts[np.argmin(room)] if room.min() < np.iinfo(np.int64).max else gap_starts[-1]
        placed[block] = True
    return offsets


def _checks(
    offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], follows: Matrix
) -> tuple[tuple[int, ...], ...]:
    """For each block the overlapping ones before it, without those that another one of these checks for its part."""
    ends = offsets + sizes
    overlap = (offsets[:, None] < ends[None, :]) & (offsets[None, :] < ends[:, None])
    before = (overlap & follows).T
    packed = np.packbits(before, axis=1, bitorder="little")
    masks = [int.from_bytes(row.tobytes(), "little") for row in packed]
    found = []
    for mask in masks:
        left, nearest = mask, []
        while left:
            last = left.bit_length() - 1  # blocks are numbered by their makers, so nothing before it is after it
            nearest.append(last)
            left &= ~(masks[last] | 1 << last)
        found.append(tuple(nearest))
    return tuple(found)


def _live_bytes(
    num_handles: int, sizes: npt.NDArray[np.int64], members: Sequence[Sequence[int]], alive: Liveness
) -> int:
    change = np.zeros(num_handles + 1, dtype=np.int64)
    for size, inside in zip(sizes, members, strict=True):
        users = set().union(*(alive.users[a] for a in inside))
        change[min(users)] += size
        last = num_handles - 1 if any(alive.lasts[a] for a in inside) else max(users)
        change[last + 1] -= size
    return int(np.cumsum(change).max())


def check(graph: Graph, buffers: Buffers, *, lasting: Set[str] = frozenset()) -> None:
    """Raise Bug naming the first two allocations that overlap although nothing orders them. O(allocations²)."""
    alive = Liveness(graph, buffers.allocations, lasting)
    spans = [
        (buffers.offsets[b], buffers.offsets[b] + a.nbytes)
        for a, b in zip(buffers.allocations, buffers.block_of, strict=True)
    ]
    for i, (start, end) in enumerate(spans):
        if start % ALIGNMENT or end > buffers.arena_bytes:
            raise Bug(f"{_text(graph, buffers.allocations[i])} lies at {start} to {end} of {buffers.arena_bytes} bytes")
        for k in range(i):
            if start < spans[k][1] and spans[k][0] < end and not _ordered(buffers, alive, k, i):
                raise Bug(
                    f"{_text(graph, buffers.allocations[k])} and {_text(graph, buffers.allocations[i])} overlap at "
                    f"{max(start, spans[k][0])}, and nothing orders the end of one and the beginning of the other"
                )


def _ordered(buffers: Buffers, alive: Liveness, one: int, other: int) -> bool:
    for first, second in ((one, other), (other, one)):
        maker = buffers.allocations[second].handle
        if alive.is_over_before(first, maker):
            return True
        in_place = buffers.operand_of[second] >= 0 and buffers.block_of[first] == buffers.block_of[second]
        if in_place and alive.dies_at(first, maker):
            return True
    return False


def _text(graph: Graph, allocation: Allocation) -> str:
    what = repr(allocation.results[0]) if allocation.results else "scratch"
    return f"{what} ({allocation.nbytes} bytes of #{allocation.handle} {graph.handles[allocation.handle].op.name!r})"
