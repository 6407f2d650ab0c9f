"""Gradients that are sent ahead of a step: as soon as they are ready, and still pushed by the step."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from tests.graph.passes.test_fuse_remote import cut, graph_of, with_one_more
from tests.support.remotes import remotes_of_a_test
from tests.transpile.fake_servers import trained
from tests.transpile.recorded import batch

import penstock as fluid
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.choice import PassChoice
from penstock.graph.passes.fuse_remote import fuse_remote
from penstock.graph.passes.send_ahead import send_ahead
from penstock.graph.ssa import Graph, OpHandle
from penstock.ps.remote import SEND, SEND_AHEAD, SEND_STEP

module = sys.modules[send_ahead.__module__]  # its package has the function under its name


def rewritten(graph: Graph, program: fluid.Program) -> tuple[Graph, OpHandle, list[OpHandle]]:
    """The graph with what is sent ahead, its step, and what is sent."""
    made = send_ahead(fuse_remote(graph), program)
    check(made)
    (step,) = (h for h in made.handles if h.op.type == SEND_STEP)
    return made, step, [h for h in made.handles if h.op.type == SEND_AHEAD]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_gradients_are_sent_while_others_are_computed(
    num_replicas: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    recorded, *_ = cut(sync_mode=mode == "sync")
    made, step, ahead = rewritten(graph_of(recorded, num_replicas), recorded.main)
    assert len(ahead) >= 4
    pushed: Any = step.op.args[0]
    dense = {ref.name: place for ref, place in zip(pushed, _places(step), strict=True)}
    for one in ahead:
        operands: Any = one.op.args
        values, _, blocks, at = operands
        assert [dense[ref.name] for ref in values] == list(zip(blocks, at, strict=True))
        after = [h for h in made.handles[one.index + 1 : step.index] if h.kind == "computation"]
        assert after, "nothing is left to compute"
        assert one.op.outputs[0] in step.op.input_names()
        written = {made.variables[ref.name].storage for ref in values}
        assert not any(made.variables[n].storage in written for h in after for n in h.op.writes)


def _places(step: OpHandle) -> list[tuple[Any, Any]]:
    spec: Any = json.loads(str(step.op.args[-1]))
    return [(b, s) for _, blocks, at, _ in spec["dense"] for b, s in zip(blocks, at, strict=True)]


def test_a_gradient_leaves_after_its_last_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    recorded, *_ = cut()
    graph = graph_of(recorded)
    sent = next(h for h in graph.handles if h.op.type == SEND)
    before = next(h for h in graph.handles if h.index == sent.index - 1)
    name = sent.op.input_names()[0]
    again = with_one_more(graph, before.op.type, name)  # in place, just before its push
    made, _, ahead = rewritten(again, recorded.main)
    (one,) = (h for h in ahead if name in h.op.input_names())
    (writer,) = (h for h in made.handles if h.op.name == "again")
    assert writer.index < one.index
    assert writer.index in one.before


def test_groups_are_of_as_many_bytes_as_pay_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, *_ = cut()
    graph = graph_of(recorded)
    assert not rewritten(graph, recorded.main)[2], "all gradients are small"
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    each = rewritten(graph, recorded.main)[2]
    monkeypatch.setattr(module, "GROUP_BYTES", 40)
    groups = rewritten(graph, recorded.main)[2]
    assert 0 < len(groups) < len(each)
    assert any(len(h.op.input_names()) > 1 for h in groups)


def test_the_last_gradient_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        out = fluid.layers.fc(fluid.data("x", [-1, 3], "float32"), 1, bias_attr=False)
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(out))
    made = fluid.DistributeTranspiler()
    made.transpile(0, main, "127.0.0.1:6170", 1, startup_program=startup)
    assert not rewritten(build_graph(main, mode="reduce", num_replicas=1, active=1), main)[2]


def test_training_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    with remotes_of_a_test():
        for num_bytes in (1, 1 << 40):
            monkeypatch.setattr(module, "GROUP_BYTES", num_bytes)
            fakes, scope, _ = trained(*cut(), [batch(seed=i) for i in range(3)], PassChoice())
            learned.append({**{n: scope.find(n) for n in ("w", "out")}, **fakes.values})
    for name, value in learned[0].items():
        assert torch.equal(value, learned[1][name]), name
