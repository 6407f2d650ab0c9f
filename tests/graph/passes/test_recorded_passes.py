"""What a graph document tells of its passes: each stage derived from it is the graph that the pass was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from tests.property.networks import NETWORKS

from penstock.graph.build import build_graph
from penstock.graph.document import document
from penstock.graph.operands import Shares
from penstock.graph.passes import MatrixKernels, PassChoice, run_graph_passes, run_sized_passes
from penstock.graph.passes.recording import Run, form_of
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, Mode
from penstock.program.program import Program
from penstock.protocol.graphdoc import GraphDocument, canonical, graph_hash
from penstock.protocol.graphstages import Stage, stages
from penstock.protocol.runs import unpacked

ALL = PassChoice(
    fuse_optimizer=True,
    fuse_add_act=True,
    sequential=True,
    matrix=MatrixKernels(forced="onednn", at_once=2, intra_op=1),
)
OPS = Counter[tuple[object, ...]]


def shares_of(program: Program, replicas: int) -> Shares:
    sizes = {s: 4 for v in program.variables.values() for d in v.shape if not isinstance(d, int) for s in d.symbols()}
    return Shares([dict(sizes)] * replicas, [1.0 / replicas] * replicas)


def passed(name: str, mode: Mode, *, replicas: int = 2) -> tuple[Graph, Graph, GraphDocument]:
    """A network's graph as built, after all passes, and its document."""
    program = NETWORKS[name]().main
    built = build_graph(program, mode=mode, num_replicas=replicas, active=replicas)
    shares = shares_of(program, replicas)
    graph = run_graph_passes(built, program, ALL, recorded=True)
    graph = run_sized_passes(graph, program, ALL, shares, recorded=True)
    return built, graph, document(graph, program, shares, name="train", num_threads=2, rows=[4] * replicas)


def as_sets(graph: Graph) -> tuple[OPS, Counter[tuple[object, ...]]]:
    """Operators and edges of a graph, by what they are called."""
    ops = [(h.op.name, h.replica, form_of(h)) for h in graph.handles]
    return Counter(ops), Counter((*ops[a], *ops[b]) for a, b in graph.edges())


def of_stage(stage: Stage) -> tuple[OPS, Counter[tuple[object, ...]]]:
    ops = {i: (op.name, op.replica, (op.type, op.kind, op.role, op.module, op.source)) for i, op in stage.ops.items()}
    return Counter(ops.values()), Counter((*ops[a], *ops[b]) for a, b in stage.edges)


@pytest.mark.parametrize(("name", "mode"), [(n, "all_reduce") for n in NETWORKS] + [("ctr_dnn", "reduce")])
def test_every_stage_is_the_graph_between_two_passes(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Graph] = []
    apply = Run.apply

    def applied(run: Run, title: str, rewrite: Callable[..., Graph], *args: object) -> None:
        before = run.graph
        apply(run, title, rewrite, *args)
        if run.graph.handles is not before.handles:
            graphs.append(before)

    monkeypatch.setattr(Run, "apply", applied)
    built, graph, made = passed(name, mode, replicas=3)
    assert made.passes is not None
    assert made.passes.ran
    found = stages(made)
    assert of_stage(found[0]) == as_sets(built)
    assert of_stage(found[-1]) == as_sets(graph)
    between = [one for one, at in pairwise(graphs) if as_sets(one) != as_sets(at)]
    assert [of_stage(one) for one in found[:-1]][: len(between)] == [as_sets(one) for one in between]


def test_counts_of_a_pass_lead_from_stage_to_stage() -> None:
    _, _, made = passed("ctr_dnn", "all_reduce")
    assert made.passes is not None
    found = stages(made)
    for before, after, one in zip(found[:-1], found[1:], made.passes.ran, strict=True):
        assert len(after.ops) == len(before.ops) - one.removed + len(unpacked(one.added))
        assert set(unpacked(one.added)) == after.ops.keys() - before.ops.keys()
        assert set(unpacked(one.changed)) <= after.ops.keys() & before.ops.keys()
    names = [one.name for one in made.passes.ran]
    assert names.index("fuse_exchanges") < names.index("fuse_sparse_updates") < names.index("fuse_lookups")


def test_a_name_that_went_may_come_again() -> None:
    built, _, _ = passed("fit_a_line", "all_reduce")
    program = NETWORKS["fit_a_line"]().main
    last = built.handles[-1]

    def without(graph: Graph) -> Graph:
        rewriter = Rewriter(graph)
        for handle in graph.handles[:-1]:
            rewriter.keep(handle)
        return rewriter.finish()

    def again(graph: Graph) -> Graph:
        rewriter = Rewriter(graph)
        for handle in graph.handles:
            rewriter.keep(handle)
        rewriter.put(last.kind, last.op, last.replica, last.rows_of)
        return rewriter.finish()

    run = Run(built, recorded=True)
    run.apply("goes", without)
    run.apply("comes", again)
    made = document(run.graph, program, shares_of(program, 2), name="t", num_threads=1, rows=[4, 4])
    first, between, now = stages(made)
    assert of_stage(first) == of_stage(now) == as_sets(built)
    assert len(between.ops) == len(built.handles) - 1


def test_unrecorded_passes_leave_the_document_and_its_hash() -> None:
    program = NETWORKS["ctr_dnn"]().main
    built = build_graph(program, mode="reduce", num_replicas=2, active=2)
    graph = run_graph_passes(built, program, ALL)
    made = document(graph, program, shares_of(program, 2), name="t", num_threads=1, rows=[4, 4])
    assert made.passes is None
    assert b'"passes"' not in canonical(made)
    assert GraphDocument.model_validate_json(canonical(made)) == made
    _, _, told = passed("ctr_dnn", "reduce")
    assert GraphDocument.model_validate_json(canonical(told)) == told
    assert graph_hash(told) != graph_hash(told.model_copy(update={"passes": None}))


def test_what_passes_removed_is_a_small_part_of_a_document() -> None:
    for name in ("ctr_dnn", "transformer"):
        _, _, made = passed(name, "all_reduce")
        whole, without = len(canonical(made)), len(canonical(made.model_copy(update={"passes": None})))
        assert 0 < whole - without < 0.1 * without, (name, whole, without)
