"""The graph that a step of a given feed runs, seen from outside of the executor: what trace events point into."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from penstock.exec.data_parallel import DataParallel
from penstock.exec.feeding import as_tensors, split
from penstock.graph.document import document
from penstock.graph.ssa import Graph
from penstock.program.kernels import bind_symbols
from penstock.protocol.graphdoc import GraphDocument


def sized_graph(core: DataParallel, feed: Mapping[str, Tensor]) -> tuple[Graph, GraphDocument]:
    """Return the graph of a step that is fed `feed`, and its document. Every feed has a batch dimension."""
    parts = split(core.program, as_tensors(core.program, feed), core.num_replicas)
    rows = [len(next(iter(part.values()))) for part in parts]
    shares = core.shares([bind_symbols(core.program, part) for part in parts], rows)
    graph = core.sized_graph(shares)
    return graph, document(graph, core.program, shares, name="bench", num_threads=core.num_threads, rows=rows)
