"""Graphs of an executor for people: documents for telemetry, and the drawings of `BuildStrategy.debug_graphviz_path`.

An event names its operator by its position in the graph, so a document belongs to one graph, not to sizes alone: what
is fetched decides which operators the passes fuse. Graphs that read the same share a document.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SpecError
from penstock.exec.lowering import Lowered
from penstock.graph.build import build_graph
from penstock.graph.operands import Shares
from penstock.graph.passes import PassChoice, run_graph_passes, run_sized_passes
from penstock.graph.ssa import Graph
from penstock.program.program import Program
from penstock.telemetry import Watch

if TYPE_CHECKING:
    from penstock.protocol.graphdoc import GraphDocument

_MAX_DOCUMENTS = 32


class ShownGraphs:
    """The documents of the most recent graphs, and which of them `watch` knows as the current one."""

    def __init__(self, watch: Watch, *, name: str, num_threads: int) -> None:
        self._watch, self._name, self._num_threads = watch, name, num_threads
        # The graph is kept with its document, so that its id stays its own.
        self._documents: OrderedDict[tuple[object, ...], tuple[Graph, GraphDocument]] = OrderedDict()
        self._current: GraphDocument | None = None

    def show(self, lowered: Lowered, program: Program, rows: list[int], step: int) -> None:
        """Report that `step` is the first to run the graph of `lowered`, unless the step before did too."""
        if not self._watch.is_watched:
            return
        key = (id(lowered.graph), tuple(tuple(b.items()) for b in lowered.shares.bindings))
        found = self._documents.get(key)
        if found is None:
            found = self._documents[key] = (lowered.graph, self._document(lowered, program, rows))
            if len(self._documents) > _MAX_DOCUMENTS:
                self._documents.popitem(last=False)
        if found[1] is not self._current:
            self._current = found[1]
            self._watch.graph(found[1], from_step=step)

    def _document(self, lowered: Lowered, program: Program, rows: list[int]) -> GraphDocument:
        from penstock.graph.document import document  # of a watched process: it loads pydantic

        made = document(
            lowered.graph, program, lowered.shares, name=self._name, num_threads=self._num_threads, rows=rows
        )
        return next((known for _, known in self._documents.values() if known == made), made)

    def forget(self) -> None:
        """Drop the documents: the Program has changed."""
        self._documents.clear()


def write_drawings(program: Program, graph: Graph, choice: PassChoice, shares: Shares) -> None:
    """Write `<path>_original_graph`, `<path>_fused_graph` (one replica, before and after the passes) and
    `<path>_multi_devices_graph` (`graph`, as it runs). Existing files are replaced.

    Raises SpecError if they cannot be written; then nothing has run.
    """
    from penstock.graph.graphviz import dot  # as above

    path = choice.graphviz_path
    alone = Shares(shares.bindings[:1], shares.scales[:1])
    original = build_graph(program, mode="local", num_replicas=1, active=1)
    fused = run_sized_passes(run_graph_passes(original, program, choice), program, choice, alone)
    drawings = {
        "original": dot(original, program, alone, title="the program on one replica"),
        "fused": dot(fused, program, alone, title="the program on one replica after the passes"),
        "multi_devices": dot(graph, program, shares, title=f"the graph of {graph.num_replicas} replicas, {graph.mode}"),
    }
    try:
        for name, text in drawings.items():
            Path(f"{path}_{name}_graph").write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"BuildStrategy.debug_graphviz_path is {path!r}, where no file can be written: {error}", got=path
        ) from error
