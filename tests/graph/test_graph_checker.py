"""The checker accepts what is built, and sees every edge that is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.property.networks import NETWORKS, conv_net, ctr_dnn, fit_a_line

from penstock.errors import Bug
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.ssa import Graph, Mode
from penstock.program.ir import Ref


def graph_of(
    make: Callable[[], object] = conv_net, mode: Mode = "reduce", num_replicas: int = 2, active: int = 2
) -> Graph:
    """Build one."""
    return build_graph(make().main, mode=mode, num_replicas=num_replicas, active=active)  # type: ignore[attr-defined]  # a Network


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_built_graph_is_correct(name: str, mode: Mode) -> None:
    main = NETWORKS[name]().main
    for program in (main, main.clone(for_test=True)):
        for num_replicas in (1, 2, 3):
            for active in range(1, num_replicas + 1):
                check(build_graph(program, mode=mode, num_replicas=num_replicas, active=active))


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("make", [fit_a_line, conv_net, ctr_dnn])
def test_each_missing_edge_is_seen(make: Callable[[], object], mode: Mode) -> None:
    graph = graph_of(make, mode)
    unseen = []
    for before, after in graph.edges():
        graph.handles[after].before.remove(before)
        try:
            check(graph)
        except Bug:
            pass
        else:
            unseen.append((graph.handles[before].op.name, graph.handles[after].op.name))
        graph.handles[after].before.add(before)
    check(graph)
    assert unseen == []


def test_an_edge_backwards_is_seen() -> None:
    graph = graph_of()
    graph.handles[3].before.add(9)
    with pytest.raises(Bug, match=r"rule 1: #3 .* waits for #9 .* which comes later"):
        check(graph)


def test_an_unordered_second_writer_is_seen() -> None:
    graph = graph_of(fit_a_line)
    update = next(h for h in graph.handles if h.op.type == "penstock.sgd_.default")
    twin = replace(update, index=len(graph.handles), before=set(update.before))
    graph.handles.append(twin)
    with pytest.raises(Bug, match=r"rule 2: .*'sgd_0'"):
        check(graph)


def test_a_read_that_nothing_reaches_is_seen_with_the_users_line() -> None:
    graph = graph_of(fit_a_line)
    graph.variables["ghost#0"] = replace(graph.variables["x#0"], key="ghost#0", storage="ghost#0", feed=False)
    handle = graph.handles[0]
    handle.op = replace(handle.op, args=(Ref("ghost#0"), *handle.op.args[1:]))
    with pytest.raises(Bug, match=r"rule 4: .*networks\.py:\d+.* reads 'ghost#0', which no handle makes"):
        check(graph)


def test_a_second_writer_of_a_variable_is_found_though_ordered() -> None:
    graph = graph_of(fit_a_line)
    first = next(h for h in graph.handles if any(not graph.variables[n].persistable for n in h.makes()))
    graph.handles.append(replace(first, index=len(graph.handles), before=set(range(len(graph.handles)))))
    with pytest.raises(Bug, match=rf"rule 5: #{first.index} .* both make"):
        check(graph)
