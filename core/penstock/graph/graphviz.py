"""A graph as text in the dot language of Graphviz, to look at: `dot -Tsvg <file>`. Pure; changes no graph.

One box an operator, in a frame for its replica: filled by role, bordered by replica, shaped by kind (a hexagon
exchanges between replicas), with module, operands and the user's line as tooltip. Feeds and persistable variables are
nodes of their own. A solid edge says which variables it carries; a dashed one only orders (a write after a read, an
operator before another because a pass wants it).
Source: debug_graphviz_path, graph_viz_pass.cc and multi_devices_graph_print_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.graph.document import document
from penstock.graph.operands import Shares
from penstock.graph.ssa import SHARED, Graph, OpHandle
from penstock.program.program import Program
from penstock.protocol.graphdoc import Op, RoleName, Value

_FILL: dict[RoleName, str] = {
    "forward": "#d6e6f5",
    "backward": "#fbe3cd",
    "optimize": "#d8ecd2",
    "lr_sched": "#ecf3c6",
    "loss": "#f7cfd4",
    "communication": "#e2d7f2",
}
_BORDER = ("#1f5a94", "#b4541a", "#2f7d32", "#7a3e9d", "#a8831a", "#1b8a8a", "#a3295f", "#5d6b1e")
_SHARED_BORDER = "#555555"
_EXCHANGES = ("all_reduce", "reduce", "gather", "broadcast")


def dot(graph: Graph, program: Program, shares: Shares, *, title: str) -> str:
    """Return `graph` for the sizes of `shares`. Names are escaped, so any name is a legal label."""
    operators = document(graph, program, shares, name=title, num_threads=0, rows=[]).ops
    lines = [
        f"digraph {_quoted(title)} {{",
        f'  graph [label={_quoted(title)}, labelloc="t", fontname="Helvetica", fontsize="18", rankdir="TB", '
        'nodesep="0.25", ranksep="0.35"];',
        '  node [fontname="Helvetica", fontsize="11", style="filled,rounded", shape="box", penwidth="1.4"];',
        '  edge [fontname="Helvetica", fontsize="9", color="#7f8c99", arrowsize="0.6"];',
        *_legend(),
    ]
    for replica in (*range(graph.num_replicas), SHARED):
        lines += _replica(graph, operators, replica)
    return "\n".join([*lines, *_edges(graph, operators), "}"]) + "\n"


def _legend() -> Iterator[str]:
    yield '  subgraph "cluster_legend" {'
    yield '    label="roles"; color="#cccccc"; fontsize="11";'
    for role, fill in _FILL.items():
        yield f'    "role {role}" [label="{role}", fillcolor="{fill}", color="{fill}", fontsize="9"];'
    yield "  }"


def _replica(graph: Graph, operators: list[Op], replica: int) -> Iterator[str]:
    """The nodes of one replica in a frame; those of all replicas without."""
    border = _border(replica)
    if replica != SHARED:
        yield f'  subgraph "cluster_replica_{replica}" {{'
        yield f'    label="replica {replica}"; color="{border}"; fontcolor="{border}"; style="rounded";'
    for handle in graph.handles:
        if handle.replica == replica:
            yield "    " + _operator(handle, operators[handle.index], border)
    for key, variable in graph.variables.items():
        if variable.replica == replica and variable.storage == key and (variable.feed or variable.persistable):
            shape, what = ("cylinder", "kept between steps") if variable.persistable else ("ellipse", "fed")
            yield (
                f"    {_variable(key)} [label={_quoted(variable.name)}, shape={_quoted(shape)}, "
                f'tooltip={_quoted(f"{variable.name}: {what}")}, fillcolor="#ffffff", color="{border}"];'
            )
    if replica != SHARED:
        yield "  }"


def _operator(handle: OpHandle, op: Op, border: str) -> str:
    shape = "hexagon" if handle.kind in _EXCHANGES else "invhouse" if handle.kind == "scale_loss_grad" else "box"
    label = op.name + "\n" + op.type.removeprefix("aten.").removesuffix(".default")
    tooltip = "\n".join(
        [
            f"{op.source or 'no line'}{f' in {op.module}' if op.module else ''}",
            *(f"reads {_described(v)}" for v in op.inputs),
            *(f"makes {_described(v)}" for v in op.outputs),
        ]
    )
    return (
        f"{_node(handle.index)} [label={_quoted(label)}, shape={_quoted(shape)}, "
        f'fillcolor="{_FILL.get(op.role, "#ffffff")}", color="{border}", tooltip={_quoted(tooltip)}];'
    )


def _edges(graph: Graph, operators: list[Op]) -> Iterator[str]:
    for before, after in graph.edges():
        made = {v.name: v for v in operators[before].outputs}
        carried = [made[v.name] for v in operators[after].inputs if v.name in made]
        if carried:
            text = "\n".join(dict.fromkeys(_described(v) for v in carried))
            yield f"  {_node(before)} -> {_node(after)} [edgetooltip={_quoted(text)}];"
        else:
            yield f'  {_node(before)} -> {_node(after)} [style="dashed", edgetooltip="order"];'
    for handle in graph.handles:
        for key in dict.fromkeys((*handle.reads(), *handle.makes())):
            variable = graph.variables[key]
            if variable.storage == key and (variable.feed or variable.persistable):
                ends = (_variable(key), _node(handle.index))
                source, target = ends if key in handle.reads() else ends[::-1]
                written = ', color="#b4541a", dir="both"' if key in handle.op.writes else ""
                yield f"  {source} -> {target} [edgetooltip={_quoted(variable.name)}{written}];"


def _described(value: Value) -> str:
    return f"{value.name} {value.dtype}{list(value.shape)}"


def _border(replica: int) -> str:
    return _SHARED_BORDER if replica == SHARED else _BORDER[replica % len(_BORDER)]


def _node(index: int) -> str:
    return f'"op {index}"'


def _variable(key: str) -> str:
    return _quoted(f"var {key}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
    return f'"{escaped}"'
