"""Streams and events of a plan on devices, seen on devices that only write down what is asked of them.

A real card runs what is on one stream in order, and whatever waits for an event after all that was put on the event's
stream before it was recorded. `Replay` knows these two rules and nothing of how the plan works; what the graph orders
must be ordered by them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tests.property.networks import ctr_dnn

from penstock.exec.devices import Capture, DeviceStreams, DeviceTrace, StepGraph
from penstock.graph.devices import build_device_graph
from penstock.graph.passes.exchanges import fuse_broadcasts
from penstock.graph.ssa import Graph, Mode
from penstock.native.engine import DevicePlan, Engine, EngineError, PretendedDevices, TorchPlan

_devices: list[PretendedDevices] = []
_library = torch.library.Library("penstock_pretended", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
_library.define("call(int instruction) -> Tensor")  # type: ignore[no-untyped-call]  # torch's


def _call(instruction: int) -> torch.Tensor:
    """Note which streams are current; a negative instruction fails."""
    _devices[-1].called(abs(instruction))
    if instruction < 0:
        raise ValueError("this instruction fails")
    return torch.zeros(1)


_library.impl("call", _call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's


@pytest.fixture
def pretended() -> Iterator[PretendedDevices]:
    devices = PretendedDevices()
    _devices.append(devices)
    yield devices
    _devices.pop()


@functools.cache
def graph_of(mode: Mode, num_replicas: int) -> Graph:
    """Built once: nothing here changes a graph."""
    return build_device_graph(ctr_dnn().main, mode=mode, num_replicas=num_replicas, active=num_replicas)


@dataclass
class Replay:
    """What the log of a run says of the order on the devices: for each instruction, those that have surely ended."""

    log: Sequence[tuple[str, int, int]]
    home: dict[int, list[int]]  # instruction -> its streams
    after: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        done: dict[int, set[int]] = {}  # stream -> instructions that end before what is put on it next
        behind: dict[int, set[int]] = {}  # version of an event -> the same
        for what, stream, number in self.log:
            here = done.setdefault(stream, set())
            if what in ("record", "time"):
                behind[number] = set(here)
            elif what == "wait":
                here |= behind[number]
            elif stream in self.home[number]:
                self.after.setdefault(number, set()).update(here)
                here.add(number)


def run(
    graph: Graph, pretended: PretendedDevices, num_replicas: int, *, workers: int = 3, seed: int = 0, failing: int = -1
) -> tuple[DeviceStreams, dict[int, list[int]]]:
    """Run the order of a graph with instructions that note their streams; return what ran, and where each belongs."""
    streams = DeviceStreams(graph, tuple(torch.device("cuda", r) for r in range(num_replicas)), pretended=pretended)
    plan = TorchPlan(0)
    for handle in graph.handles:
        number = -handle.index if handle.index == failing else handle.index
        plan.add("penstock_pretended::call", "", [("const", number)], [None], handle.index)
    for before, after in graph.edges():
        plan.edge(before, after)
    plan.seal()
    plan.use_devices(streams.plan)
    exchange = [2 * r + 1 for r in range(num_replicas)]
    home = {
        h.index: [2 * h.replica] if h.kind in ("computation", "scale_loss_grad") else exchange for h in graph.handles
    }
    engine = Engine(workers, max_running=workers, intra_op_threads=1)
    try:
        streams.run(7, lambda: engine.run(plan, 7, schedule_seed=seed))
    finally:
        engine.close()
    return streams, home


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_the_devices_keep_every_edge_of_the_graph(
    num_replicas: int, mode: Mode, seed: int, pretended: PretendedDevices
) -> None:
    graph = fuse_broadcasts(graph_of(mode, num_replicas))
    _, home = run(graph, pretended, num_replicas, seed=seed)
    replay = Replay(pretended.log(), home)
    unordered = [(b, a) for b, a in graph.edges() if b not in replay.after[a]]
    assert unordered == []
    assert len(replay.after) == len(graph.handles)


def test_the_replay_sees_a_wait_that_is_missing(pretended: PretendedDevices) -> None:
    graph = graph_of("reduce", 2)
    _, home = run(graph, pretended, 2, workers=1)
    replay = Replay([row for row in pretended.log() if row[0] != "wait"], home)
    assert [(b, a) for b, a in graph.edges() if b not in replay.after[a]] != []


def test_each_call_has_its_streams_and_only_its_own(pretended: PretendedDevices) -> None:
    graph = graph_of("reduce", 2)
    run(graph, pretended, 2)
    current: dict[int, set[int]] = {}
    for what, stream, number in pretended.log():
        if what == "call" and stream < 4:
            current.setdefault(number, set()).add(stream)
    for handle in graph.handles:
        exchanges = handle.kind in ("reduce", "gather", "broadcast")
        assert current[handle.index] == ({1, 3} if exchanges else {0, 2})


def test_edges_within_a_stream_cost_no_event(pretended: PretendedDevices) -> None:
    graph = graph_of("all_reduce", 1)
    run(graph, pretended, 1)
    entries = [what for what, _, _ in pretended.log()]
    assert entries.count("wait") == 2  # begin: the exchange stream for the compute stream; end: the other way round
    assert entries.count("record") == 4


def test_a_step_waits_for_prior_work_and_ends_with_all_exchanges(pretended: PretendedDevices) -> None:
    graph = graph_of("reduce", 2)
    streams, _ = run(graph, pretended, 2)
    log = pretended.log()
    behind = {number: stream for what, stream, number in log if what == "record"}
    first, last = (next(i for i, row in rows if row[0] == "call") for rows in (enumerate(log), _backwards(log)))
    at_begin = {(stream, behind[n]) for what, stream, n in log[:first] if what == "wait"}
    at_end = {(stream, behind[n]) for what, stream, n in log[last:] if what == "wait"}
    assert {(1, 0), (1, 2), (3, 0), (3, 2)} <= at_begin
    assert {(0, 1), (0, 3), (2, 1), (2, 3)} <= at_end
    assert streams.plan.times()


def _backwards(log: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, tuple[str, int, int]]]:
    return ((i, log[i]) for i in range(len(log) - 1, -1, -1))


def test_times_are_pairs_of_events_in_the_order_of_the_graph(pretended: PretendedDevices) -> None:
    graph = graph_of("reduce", 2)
    streams, _ = run(graph, pretended, 2, workers=1)
    times = streams.plan.times()
    assert len(times) == len(graph.handles)
    assert all(duration > 0 for _, duration in times)
    ends = [start + duration for start, duration in times]
    assert all(ends[before] <= times[after][0] for before, after in graph.edges())


def test_the_trace_gives_a_steps_events_once(pretended: PretendedDevices) -> None:
    graph = graph_of("all_reduce", 2)
    streams, _ = run(graph, pretended, 2)
    engine = Engine(1, max_running=1, intra_op_threads=1)
    try:
        trace = DeviceTrace(engine)
        trace.add(streams.events(), 7)
        trace.add(streams.events(), 7)
        drained = trace.drain()
        assert drained["op"].tolist() == [h.index for h in graph.handles]
        assert set(drained["step"].tolist()) == {7}
        assert set(drained["thread"].tolist()) == {0, 1}
        assert (drained["duration_ns"] > 0).all()
        assert drained["lost"] == 0
        assert len(trace.drain()["op"]) == 0
    finally:
        engine.close()


def test_a_step_is_reported_when_its_events_are_there(pretended: PretendedDevices) -> None:
    engine = Engine(1, max_running=1, intra_op_threads=1)
    try:
        trace, told = DeviceTrace(engine), []
        events = run(graph_of("all_reduce", 1), pretended, 1)[0].events()
        assert events is not None
        trace.expect(4)
        trace.report(4, lambda: told.append(4))
        trace.report(5, lambda: told.append(5))  # one without times: it comes after those before
        assert told == []
        trace.add({**events, "step": np.full(len(events["op"]), 4)}, 4)
        assert told == [4, 5]
        trace.report(6, lambda: told.append(6))
        assert told == [4, 5, 6]
    finally:
        engine.close()


def test_a_captured_plan_has_an_event_behind_each_instruction(pretended: PretendedDevices) -> None:
    graph = graph_of("all_reduce", 1)
    recorded: list[tuple[int, int, int]] = []

    def record(event: int, stream: int, flag: int) -> int:
        recorded.append((event, stream, flag))
        return 0

    note = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)(record)
    streams = DeviceStreams(graph, (torch.device("cuda", 0),), pretended=pretended)
    address = ctypes.cast(note, ctypes.c_void_p).value
    assert address is not None
    streams.plan.capture_on(1, 0, record=address, stream=99)
    plan = TorchPlan(0)
    for handle in graph.handles:
        plan.add("penstock_pretended::call", "", [("const", handle.index)], [None], handle.index)
    for before, after in graph.edges():
        plan.edge(before, after)
    plan.seal()
    plan.use_devices(streams.plan)
    engine = Engine(1, max_running=1, intra_op_threads=1)
    try:
        streams.plan.begin_capture()
        engine.run(plan, 0)
        streams.plan.end_capture()
        assert len(recorded) == len(graph.handles) + 1 == len({event for event, _, _ in recorded})
        assert {(stream, flag) for _, stream, flag in recorded} == {(99, 1)}
        assert {stream for what, stream, _ in pretended.log() if what == "call"} & {0, 1} == {1}, "streams of device 0"
        streams.run(8, lambda: None)  # a replay
        events = streams.events()
        assert events is not None
        assert sorted(events["op"]) == [handle.index for handle in graph.handles]
        assert set(events["step"]) == {8}
    finally:
        engine.close()


def test_a_plan_with_exchanges_is_not_captured(pretended: PretendedDevices) -> None:
    streams = DeviceStreams(
        graph_of("reduce", 2), tuple(torch.device("cuda", r) for r in range(2)), pretended=pretended
    )
    with pytest.raises(ValueError, match="one device without exchanges"):
        streams.plan.capture_on(1, 0, record=1, stream=0)


def test_what_changes_in_every_run_is_not_captured_for_ever() -> None:
    state, captured = StepGraph("", [Capture(None)]), []
    for run_, revision in enumerate([*range(10), *[9] * 4, *range(20, 24), 23]):
        addresses = (revision, 0)
        if state.is_worth_capturing(addresses) and not state.is_current(addresses):
            captured.append(run_)
            state.captures[0].graph = object()  # type: ignore[assignment]  # a CUDA graph needs a card
            state.addresses, state.num_captures = addresses, state.num_captures + 1
    assert captured == [0, 1, 2, 3, 10, 18]  # then once it stays


def test_a_failed_step_restores_streams_and_reports_no_times(pretended: PretendedDevices) -> None:
    graph = graph_of("reduce", 2)
    failing = next(h.index for h in graph.handles if h.kind == "reduce")
    with pytest.raises(EngineError, match="this instruction fails"):
        run(graph, pretended, 2, workers=1, failing=failing)
    before = len(pretended.log())
    pretended.called(0)
    assert {stream for _, stream, _ in pretended.log()[before:]} == {0, 2, 4, 6, 8, 10, 12, 14}, "compute streams"


def test_a_plan_gives_its_events_back(pretended: PretendedDevices) -> None:
    graph = graph_of("reduce", 2)
    streams, _ = run(graph, pretended, 2)
    assert pretended.events_alive > 0
    del streams
    assert pretended.events_alive == 0


def test_replicas_without_a_device_are_refused(pretended: PretendedDevices) -> None:
    plan = DevicePlan([0, 1], pretended=pretended)
    with pytest.raises(ValueError, match="replica 2 has no device; there are 2"):
        plan.place(2, exchange=False)


def test_two_replicas_may_share_a_card(pretended: PretendedDevices) -> None:
    plan = DevicePlan([3, 3], timed=False, pretended=pretended)
    plan.place(0, exchange=False)
    plan.place(1, exchange=False)
    plan.seal([(0, 1)])
    plan.begin()
    plan.end()
    assert {stream for _, stream, _ in pretended.log()} == {6, 7}
