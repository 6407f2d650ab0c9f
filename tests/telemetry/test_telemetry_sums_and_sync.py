"""Per-operator sums against a slow reference, and gradient exchange on hand-made schedules."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.frames import Column
from penstock.protocol.graphdoc import GraphDocument, Op, RoleName, Sync, Value
from penstock.telemetry.events import Events, op_sums
from penstock.telemetry.sync import GraphExchanges

MS = 1_000_000
DRAWN = st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 2**32 - 1)), min_size=1, max_size=200)


def op(name: str, role: RoleName, replica: int, *, writes: str) -> Op:
    value = Value(name=writes, dtype="float32", shape=[2])
    return Op(
        name=name, type="aten.mm.default", kind="computation", role=role, replica=replica, module="", source="",
        inputs=[], outputs=[value], bytes=8, flops=0,
    )  # fmt: skip


def document(*, sparse: bool = False, writer: str = "w@GRAD", backward: RoleName = "backward") -> GraphDocument:
    """Two replicas; operators 0, 1 make the gradient of w, 2 reads an old w, 3 and 4 exchange it, 5 updates."""
    return GraphDocument(
        program="p", mode="reduce", num_replicas=2, num_threads=2, batch=[4, 4],
        ops=[
            op("mm_0", backward, 0, writes=writer), op("mm_1", backward, 1, writes=writer),
            op("read_0", "forward", 0, writes="y"),
            op("reduce_0", "communication", -1, writes="w@GRAD"), op("reduce_1", "communication", -1, writes="w@GRAD"),
            op("sgd_0", "optimize", 0, writes="w"),
        ],
        edges=[(0, 3), (1, 3), (2, 3), (3, 4), (4, 5)],
        syncs=[Sync(parameter="w", gradient="w@GRAD", mode="reduce", owner=0, bytes=40, sparse=sparse, ops=[3, 4])],
    )  # fmt: skip


def schedule(*steps: dict[int, tuple[int, int]]) -> tuple[Events, np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """Return events and rows of hand-made steps: {operator: (start ms, duration ms)}."""
    rows = [(row, o, start, took) for row, step in enumerate(steps) for o, (start, took) in step.items()]
    row, ops, start, took = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Events(start * MS, took * MS, ops, row, np.zeros(len(ops), np.int64)), row


@given(DRAWN)
def test_sums_equal_a_loop_over_the_events(drawn: list[tuple[int, int]]) -> None:
    want: dict[int, list[int]] = defaultdict(list)
    for which, took in drawn:
        want[which].append(took)
    ops, durations = (np.array(column, np.int64) for column in zip(*drawn, strict=True))
    got = op_sums(ops, durations.astype(np.uint32))
    assert got[Column.OP].tolist() == sorted(want)
    assert got[Column.COUNT].tolist() == [len(want[o]) for o in sorted(want)]
    assert got[Column.TOTAL_NS].astype(np.uint64).tolist() == [sum(want[o]) for o in sorted(want)]
    assert got[Column.MAX_NS].tolist() == [max(want[o]) for o in sorted(want)]


def test_wait_is_from_the_earliest_gradient_to_the_exchange() -> None:
    step = {0: (0, 10), 1: (0, 25), 2: (0, 2), 3: (26, 3), 4: (30, 4), 5: (40, 1)}
    got = GraphExchanges(document()).exchanged(*schedule(step), num_rows=1)
    assert got.wait_ns.tolist() == [[16 * MS]]  # replica 0 was ready at 10, the exchange began at 26; 2 is no producer
    assert got.time_ns.tolist() == [[7 * MS]]


def test_an_exchange_of_several_parameters_counts_once() -> None:
    made = document()
    other = made.syncs[0].model_copy(update={"parameter": "v", "ops": [4]})
    made = made.model_copy(update={"syncs": [*made.syncs, other]})
    got = GraphExchanges(made).exchanged(*schedule({0: (0, 10), 1: (0, 25), 3: (26, 3), 4: (30, 4)}), num_rows=1)
    assert got.time_ns.tolist() == [[(3 + 2) * MS, 2 * MS]]


def test_backward_operators_produce_gradients_without_a_writer() -> None:
    step = {0: (0, 10), 1: (0, 25), 2: (0, 2), 3: (26, 3), 4: (30, 4)}
    got = GraphExchanges(document(writer="w@GRAD@scaled")).exchanged(*schedule(step), num_rows=1)
    assert got.wait_ns.tolist() == [[16 * MS]]


def test_without_backward_all_earlier_operators_are_producers() -> None:
    step = {0: (0, 10), 1: (0, 25), 2: (0, 2), 3: (26, 3), 4: (30, 4)}
    got = GraphExchanges(document(writer="other", backward="forward")).exchanged(*schedule(step), num_rows=1)
    assert got.wait_ns.tolist() == [[24 * MS]]


def test_wait_is_never_negative() -> None:
    step = {0: (0, 30), 1: (0, 40), 3: (26, 3), 4: (30, 4)}
    assert GraphExchanges(document()).exchanged(*schedule(step), num_rows=1).wait_ns.tolist() == [[0]]


def test_a_replica_without_rows_is_not_waited_for() -> None:
    step = {1: (0, 25), 3: (26, 3), 4: (30, 4)}
    assert GraphExchanges(document()).exchanged(*schedule(step), num_rows=1).wait_ns.tolist() == [[1 * MS]]


def test_sync_rows_are_sums_over_the_steps_with_the_exchange() -> None:
    ran = {0: (0, 10), 1: (0, 25), 3: (26, 3), 4: (30, 4)}
    idle = {0: (50, 10)}
    again = {0: (100, 20), 1: (100, 10), 3: (130, 1), 4: (131, 1)}
    plan = GraphExchanges(document())
    got = plan.columns(plan.exchanged(*schedule(ran, idle, again), num_rows=3))
    assert {c.name: v.tolist() for c, v in got.items()} == {
        "PARAM": [0], "COUNT": [2], "BYTES": [2 * 40 * 2], "TOTAL_NS": [9 * MS], "WAIT_NS": [36 * MS],
    }  # fmt: skip


def gather(name: str, *shapes: list[int], dtype: str) -> Op:
    """A gather of one value of each replica."""
    inputs = [Value(name=f"{name}@{i}", dtype=dtype, shape=shape) for i, shape in enumerate(shapes)]
    return op(name, "communication", -1, writes=name).model_copy(update={"kind": "gather", "inputs": inputs})


def test_sparse_rows_count_ids_and_values_of_every_replica() -> None:
    made = document(sparse=True)
    ops = [*made.ops]
    ops[3] = gather("gather.rows", [5], [3], dtype="int64")
    ops[4] = gather("gather.values", [5, 16], [3, 16], dtype="bfloat16")
    plan = GraphExchanges(made.model_copy(update={"ops": ops}))
    got = plan.columns(plan.exchanged(*schedule({0: (0, 1), 3: (2, 1), 4: (3, 1)}), num_rows=1))
    assert got[Column.BYTES].tolist() == [(5 + 3) * (8 + 16 * 2)]


def test_rows_that_an_update_reads_in_place_count_for_a_table() -> None:
    made = document(sparse=True)
    gradient = made.syncs[0].gradient
    names = [f"{gradient}@ROWS", f"{gradient}@VALUES", "other@GRAD@VALUES"]
    inputs = [
        Value(name=name, dtype=dtype, shape=[rows, *width])
        for name, dtype, width in zip(names, ("int64", "float32", "float32"), ([], [16], [4]), strict=True)
        for rows in (5, 3)
    ]
    ops = [*made.ops]
    ops[3] = ops[3].model_copy(update={"kind": "computation", "inputs": inputs})
    ops[4] = ops[4].model_copy(update={"kind": "computation", "inputs": []})
    plan = GraphExchanges(made.model_copy(update={"ops": ops}))
    assert plan.bytes.tolist() == [(5 + 3) * (8 + 16 * 4)]


def test_events_of_operators_that_the_document_lacks_are_ignored() -> None:
    step = {0: (0, 10), 1: (0, 25), 3: (26, 3), 4: (30, 4), 6: (1, 1), 9999: (0, 1)}
    assert GraphExchanges(document()).exchanged(*schedule(step), num_rows=1).wait_ns.tolist() == [[16 * MS]]
