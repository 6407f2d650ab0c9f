"""Write what `BuildStrategy.debug_graphviz_path` asks for: three files in dot form, once for each executor."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import SpecError
from penstock.graph.build import build_graph
from penstock.graph.graphviz import dot
from penstock.graph.operands import Shares
from penstock.graph.passes import PassChoice, run_graph_passes, run_sized_passes
from penstock.graph.ssa import Graph
from penstock.program.program import Program


def write_drawings(program: Program, graph: Graph, choice: PassChoice, shares: Shares) -> None:
    """Write `<path>_original_graph`, `<path>_fused_graph` (one replica, before and after the passes) and
    `<path>_multi_devices_graph` (`graph`, as it runs). Existing files are replaced.

    Raises SpecError if they cannot be written; then nothing has run.
    """
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
