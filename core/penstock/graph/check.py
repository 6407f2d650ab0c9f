"""What makes a graph correct, proved for each graph that is built (tests) or asked for (`check`).

1 acyclic: every edge goes from a lower to a higher index
2 one writer a version: two writers of one storage are ordered by a path, or write disjoint parts of it
3 a reader and a writer of one storage are ordered by a path
4 every read is reached: an operand is persistable, fed, the random state, or made by a handle before
5 one maker a variable, views included: two handles never fill the same slot
"""

from __future__ import annotations

from penstock.errors import Bug
from penstock.graph.ssa import Graph, OpHandle, are_disjoint
from penstock.program.legality import RNG


def check(graph: Graph) -> None:
    """Raise Bug naming the first pair of handles that breaks a rule. O(handles² / 64) bits."""
    ancestors: list[int] = []
    for handle in graph.handles:
        reach = 0
        for before in handle.before:
            if before >= handle.index:
                raise Bug(f"rule 1: {_text(handle)} waits for {_text(graph.handles[before])}, which comes later")
            reach |= ancestors[before] | 1 << before
        ancestors.append(reach)
    _check_storages(graph, ancestors)
    _check_reads(graph, ancestors)


def _accesses(graph: Graph, handle: OpHandle) -> tuple[set[str], set[str]]:
    made = {n for n in handle.makes() if graph.variables[n].storage == n}
    writes = {graph.variables[n].storage for n in handle.op.writes} | made
    reads = {graph.variables[n].storage for n in handle.reads()}
    return reads, writes


def _check_storages(graph: Graph, ancestors: list[int]) -> None:
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    for handle in graph.handles:
        reads, writes = _accesses(graph, handle)
        for storage in writes:
            writers.setdefault(storage, []).append(handle.index)
        for storage in reads - writes:
            readers.setdefault(storage, []).append(handle.index)
    for storage, indices in writers.items():
        for writer in indices:
            for other in (*indices, *readers.get(storage, [])):
                low, high = sorted((writer, other))
                if low == high or are_disjoint(graph.handles[low].op, graph.handles[high].op):
                    continue
                if not ancestors[high] >> low & 1:
                    rule = 2 if other in indices else 3
                    raise Bug(
                        f"rule {rule}: {_text(graph.handles[low])} and {_text(graph.handles[high])} both touch "
                        f"{storage!r}, one of them writes it, and nothing orders them"
                    )


def _check_reads(graph: Graph, ancestors: list[int]) -> None:
    makers: dict[str, int] = {}
    for handle in graph.handles:
        for name in handle.makes():
            if name in makers and not graph.variables[name].persistable:
                first = graph.handles[makers[name]]
                raise Bug(f"rule 5: {_text(first)} and {_text(handle)} both make {name!r}")
            makers[name] = handle.index
    for handle in graph.handles:
        for name in handle.reads():
            variable = graph.variables[name]
            root = graph.variables[variable.storage]
            if name in makers and makers[name] != handle.index:
                if not ancestors[handle.index] >> makers[name] & 1:
                    raise Bug(
                        f"rule 4: {_text(handle)} reads {name!r} before {_text(graph.handles[makers[name]])} makes it"
                    )
            elif not (variable.persistable or variable.feed or root.persistable or variable.name == RNG):
                raise Bug(f"rule 4: {_text(handle)} reads {name!r}, which no handle makes")


def _text(handle: OpHandle) -> str:
    return f"#{handle.index} {handle.op.name!r} on replica {handle.replica} ({handle.op.source or 'no line'})"
