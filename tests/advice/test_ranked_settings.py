"""Ranked settings: what is predicted from one recording, and which reason is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.advice.ranked import LEAST_GAIN, advise
from penstock.advice.recorded import Event, Recorded, recorded
from penstock.advice.setting import Setting, candidates
from penstock.protocol.graphdoc import GraphDocument, Op, Value

MS = 1_000_000
ROWS, LAYERS = 256, 6


def op(name: str, role: str, replica: int, inputs: list[Value], outputs: list[Value]) -> Op:
    return Op.model_validate({
        "name": name, "type": "penstock.product.default", "kind": "computation", "role": role, "replica": replica,
        "module": "", "source": "", "inputs": inputs, "outputs": outputs, "bytes": 0, "flops": 0,
    })  # fmt: skip


def one_replica() -> GraphDocument:
    """Return a chain of products on one replica, each of them with a gradient and an update of its own."""
    ops: list[Op] = []
    edges: list[tuple[int, int]] = []
    for layer in range(LAYERS):
        x, y = (Value(name=f"x{layer + k}", dtype="float32", shape=[ROWS, 64]) for k in range(2))
        w = Value(name=f"w{layer}", dtype="float32", shape=[64, 64])
        ops.append(op(f"mm_{layer}", "forward", 0, [x, w], [y]))
        if layer:
            edges.append((layer - 1, layer))
    for layer in reversed(range(LAYERS)):
        x = Value(name=f"x{layer}", dtype="float32", shape=[ROWS, 64])
        g = Value(name=f"w{layer}@GRAD", dtype="float32", shape=[64, 64])
        edges.append((len(ops) - 1, len(ops)))
        ops.append(op(f"mm_grad_{layer}", "backward", 0, [x], [g]))
    for layer in range(LAYERS):
        w, g = (Value(name=f"w{layer}{end}", dtype="float32", shape=[64, 64]) for end in ("", "@GRAD"))
        edges.append((2 * LAYERS - 1 - layer, len(ops)))
        ops.append(op(f"sgd_{layer}", "optimize", 0, [w, g], [w]))
    return GraphDocument(
        program="train", mode="local", num_replicas=1, num_threads=1, batch=[ROWS], ops=ops, edges=edges, syncs=[]
    )


def steps(graph: GraphDocument, op_ns: int) -> list[list[Event]]:
    return [[(index, 0, index * op_ns, op_ns) for index in range(len(graph.ops))] for _ in range(3)]


def run(cores: int = 4, op_ns: int = MS) -> Recorded:
    graph = one_replica()
    made = recorded(graph, steps(graph, op_ns), step_ns=len(graph.ops) * op_ns + MS, cores=cores)
    assert made is not None
    return made


def test_a_recording_knows_its_setting_and_what_is_outside() -> None:
    made = run()
    assert made.setting == Setting(1, 1, "reduce")
    assert made.outside_ns == pytest.approx(MS)
    assert made.rows == ROWS and set(made.op_ns) == {float(MS)}
    assert recorded(made.graph, [[]], step_ns=1.0, cores=1) is None


def test_the_current_setting_is_predicted_as_it_was_measured() -> None:
    options = advise(run())
    current = next(option for option in options if option.is_current)
    assert current.step_ns == pytest.approx((3 * LAYERS + 1) * MS, rel=1e-6)
    assert current.reason.startswith("as recorded")


def test_replicas_use_the_cores_that_one_thread_leaves_idle() -> None:
    # intra-op threads are all cores' in the recording, so each operator counts as more on one of them
    options = {
        option.setting: option for option in advise(run(cores=4), [Setting(4, 4, "reduce"), Setting(4, 1, "reduce")])
    }
    replicas, alone = options[Setting(4, 4, "reduce")], options[Setting(4, 1, "reduce")]
    assert replicas.workers == 4 and replicas.intra_op == 1
    assert replicas.step_ns < alone.step_ns
    assert replicas.exchange_ns > 0 and alone.exchange_ns == 0
    assert "4 at once with 1 core each" in replicas.reason


def test_operators_too_short_to_split_make_replicas_slower() -> None:
    made = run(cores=2, op_ns=2000)
    options = {option.setting: option for option in advise(made, [Setting(1, 4, "reduce")])}
    assert options[Setting(1, 4, "reduce")].operators_ns > 2 * options[Setting(1, 1, "reduce")].operators_ns


def test_all_reduce_updates_on_every_replica() -> None:
    made = replace(run(cores=2), op_ns=tuple([1000.0] * 2 * LAYERS + [MS] * LAYERS))
    options = {o.setting: o for o in advise(made, [Setting(2, 2, "reduce"), Setting(2, 2, "all_reduce")])}
    reduce, all_reduce = options[Setting(2, 2, "reduce")], options[Setting(2, 2, "all_reduce")]
    assert all_reduce.operators_ns > 1.8 * reduce.operators_ns


def test_a_gain_too_small_to_know_is_no_reason_to_change() -> None:
    options = advise(run())
    current = next(option for option in options if option.is_current)
    before = options[: options.index(current)]
    assert all(option.step_ns < current.step_ns * (1 - LEAST_GAIN) for option in before)


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_no_two_candidates_run_alike(cores: int) -> None:
    found = candidates(Setting(0, 2, "all_reduce"), cores=cores, rows=1000)
    assert len({one.runs_like(cores) for one in found}) == len(found)
    assert found[0] == Setting(0, 2, "all_reduce")


def test_replicas_beyond_the_rows_are_no_candidates() -> None:
    assert max(one.cpu_num for one in candidates(Setting(0, 1, "reduce"), cores=8, rows=3)) <= 3
