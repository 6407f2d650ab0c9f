"""Managed and unwatched sessions: what arrives at an agent over a real socket, and what an absent one costs."""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import until
from tests.support.yardstick import slowdown

from penstock.protocol.completeness import report_of
from penstock.protocol.contract import Managed
from penstock.protocol.frames import COLUMNS, FIRST_READER, Column, Frame, Kind, Work, decode
from penstock.protocol.graphdoc import Forms, GraphDocument, Passes, Removed
from penstock.telemetry.process import decide
from penstock.telemetry.sampling import BUDGET_BYTES_PER_S
from penstock.telemetry.sessions import Watched

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "frames" / "graph.json").read_text())["body"]


def document(num_copies: int = 1) -> GraphDocument:
    """The golden document, its three operators `num_copies` times over."""
    ops, edges, syncs = [], [], []
    for i in range(num_copies):
        ops += [{**op, "name": f"{op['name']}_{i}"} for op in GOLDEN["ops"]]
        edges += [[3 * i, 3 * i + 2], [3 * i + 1, 3 * i + 2]]
        syncs += [{**GOLDEN["syncs"][0], "parameter": f"w_{i}", "ops": [3 * i + 2]}]
    return GraphDocument.model_validate({**GOLDEN, "ops": ops, "edges": edges, "syncs": syncs})


class Source:
    """Trace rings of a pretended engine; `run` is one step of `num_ops` operators on two threads."""

    def __init__(self, num_ops: int) -> None:
        self.num_ops = num_ops
        self.produced = 0
        self._steps: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(self, step: int) -> None:
        self._steps.put((step, time.time_ns()))
        self.produced += self.num_ops

    def drain(self) -> Mapping[str, Any]:
        steps = [self._steps.get() for _ in range(self._steps.qsize())]
        op = np.tile(np.arange(self.num_ops, dtype=np.uint32), len(steps))
        start = np.repeat([at for _, at in steps], self.num_ops).astype(np.int64) + op // 2 * 1000
        step = np.repeat([number for number, _ in steps], self.num_ops).astype(np.uint64)
        took = np.full(len(op), 900, np.uint32)
        return {
            "start_ns": start,
            "duration_ns": took,
            "op": op,
            "step": step,
            "thread": op.astype(np.uint16) % 2,
            "lost": 0,
        }


class Agent:
    """What an agent does with a telemetry socket: it listens and reads frames. `pause`: it accepts and never reads."""

    def __init__(self, path: str, *, pause: bool = False) -> None:
        self.frames: list[Frame] = []
        self._pause = pause
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            if not self._pause:
                self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while len(prefix := stream.read(4)) == 4:
                data = stream.read(struct.unpack("<I", prefix)[0])
                self.frames.append(decode(data))

    def die(self) -> None:
        """End as a killed process does: everything closes at once."""
        for own in (self._listener, *self._connections):
            with own:
                try:
                    own.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the trainer has closed already
        self._thread.join()

    def of(self, kind: Kind) -> list[Frame]:
        return [frame for frame in list(self.frames) if frame.kind is kind]

    def counted(self) -> int:
        return sum(int(frame.columns[Column.COUNT].sum()) for frame in self.of(Kind.OP_SUMS))


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("s") / "t.sock")


@pytest.fixture
def agent(path: str) -> Iterator[Agent]:
    listening = Agent(path)
    yield listening
    listening.die()


def managed(path: str) -> Managed:
    return Managed("job", "name", "replica", "trainer", 1, 2, 7, path)


def mark(step: int) -> dict[str, Any]:
    now = time.time_ns()
    return {"step": step, "start_ns": now - 1000, "end_ns": now, "samples": 10, "loss": 0.5}


@pytest.mark.speed
def test_hundred_thousand_events_a_second_arrive_without_loss(
    agent: Agent, path: str, record_property: Callable[[str, object], None]
) -> None:
    num_ops, rate, seconds = 300, 100_000, 3.0
    session, source = Watched(managed(path)), Source(num_ops)
    watch = session.watch(source, name="train")
    watch.graph(document(num_ops // 3), from_step=0)
    began, step = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        while step * num_ops < now * rate:
            source.run(step)
            watch.step(**mark(step))
            step += 1
        time.sleep(0.002)
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    assert source.produced > 0.9 * rate * seconds
    assert agent.counted() == source.produced
    reports = [report_of(frame.body) for frame in agent.of(Kind.GAP)]
    assert None not in reports, "nothing was dropped"
    last = reports[-1]
    assert last is not None and last.final and last.held == {}
    assert last.produced["OP_EVENTS"] == source.produced
    assert last.sent["OP_EVENTS"] == sum(frame.count for frame in agent.of(Kind.OP_EVENTS))
    assert last.sampled_out["OP_EVENTS"] == source.produced - last.sent["OP_EVENTS"]
    assert [frame.seq for frame in agent.frames] == list(range(len(agent.frames)))
    events = agent.of(Kind.OP_EVENTS)
    assert all(frame.count == num_ops for frame in events)
    assert 12 * sum(frame.count for frame in events) <= BUDGET_BYTES_PER_S * (seconds + 2)
    assert sum(int(frame.columns[Column.COUNT].sum()) for frame in agent.of(Kind.SYNC)) == step * num_ops // 3
    assert int(agent.of(Kind.METRICS)[-1].columns[Column.STEP][-1]) == step - 1
    share = session.drain_cpu_s / seconds / slowdown()
    record_property("drain_cpu_share", share)
    assert share < 0.1  # about 0.013 on an idle machine; the bench gives the figure, this catches a loop over events


def test_first_come_hello_graph_and_its_use_and_last_goodbye(agent: Agent, path: str) -> None:
    session, source = Watched(managed(path)), Source(3)
    watch = session.watch(source, name="train")
    watch.graph(document(), from_step=0)
    source.run(0)
    watch.step(**mark(0))
    session.log(auc=0.75, broken=float("nan"))
    session.progress(1, 10)
    session.progress(2, 10, "passes")
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    assert [frame.kind for frame in agent.frames[:3]] == [Kind.HELLO, Kind.GRAPH, Kind.GRAPH_USED]
    assert agent.frames[-1].kind is Kind.GOODBYE
    hello = agent.frames[0].body
    assert (hello["role"], hello["index"], hello["pid"]) == ("trainer", 1, os.getpid())
    assert {(frame.stream, frame.epoch) for frame in agent.frames} == {(7, 2)}
    (scalars,), (progress,) = agent.of(Kind.SCALARS), agent.of(Kind.PROGRESS)
    assert (scalars.body["step"], scalars.body["values"]) == (0, {"auc": 0.75, "broken": None})
    assert progress.body == {"done": 2, "total": 10, "unit": "passes"}


def test_numpy_steps_are_taken_and_unsendable_values_skipped(
    agent: Agent, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = Watched(managed(path))
    session.progress(1, 10, {1})  # type: ignore[arg-type]  # what JSON cannot say
    until(lambda: "a PROGRESS message is not sent" in caplog.text)
    session.log(np.int64(2), auc=0.5)  # type: ignore[arg-type]  # as scripts do
    session.progress(2, 10)
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    assert [frame.body["step"] for frame in agent.of(Kind.SCALARS)] == [2]
    assert [frame.body["done"] for frame in agent.of(Kind.PROGRESS)] == [2]


def test_a_reconnecting_agent_gets_hello_graph_and_the_backlog(path: str) -> None:
    first = Agent(path)
    session, source = Watched(managed(path)), Source(3)
    watch = session.watch(source, name="train")
    watch.graph(document(), from_step=0)
    source.run(0)
    watch.step(**mark(0))
    until(lambda: first.of(Kind.METRICS))
    first.die()
    Path(path).unlink()
    for step in range(1, 6):  # while nobody listens
        source.run(step)
        watch.step(**mark(step))
    session.log(5, auc=0.5)
    second = Agent(path)
    until(lambda: second.of(Kind.SCALARS) and first.counted() + second.counted() == source.produced)
    session.close()
    until(lambda: second.of(Kind.GOODBYE))
    second.die()
    assert [frame.kind for frame in second.frames[:3]] == [Kind.HELLO, Kind.GRAPH, Kind.GRAPH_USED]
    assert [frame.seq for frame in first.frames + second.frames] == list(range(len(first.frames) + len(second.frames)))


def test_a_graph_too_large_with_its_passes_is_sent_without(agent: Agent, path: str) -> None:
    none: dict[str, list[int]] = {name: [] for name in Forms.model_fields}
    removed = Removed(**none, name=[], name_number=[], first=[], count=[])
    texts = [os.urandom(5 << 20).hex()]  # deflated still more than a frame holds
    passes = Passes(ran=[], unchanged=[], texts=texts, removed=removed, was=Forms(**none))
    session, source = Watched(managed(path)), Source(3)
    watch = session.watch(source, name="train")
    watch.graph(document().model_copy(update={"passes": passes}), from_step=0)
    source.run(0)
    watch.step(**mark(0))
    until(lambda: agent.of(Kind.GRAPH))
    assert GraphDocument.model_validate(agent.of(Kind.GRAPH)[0].body) == document()
    session.close()


@pytest.mark.speed
def test_an_agent_that_never_reads_delays_neither_step_nor_exit(path: str) -> None:
    stalled = Agent(path, pause=True)
    session, source = Watched(managed(path)), Source(3000)
    watch = session.watch(source, name="train")
    watch.graph(document(1000), from_step=0)
    longest_s, deadline, step = 0.0, time.monotonic() + 1.0, 0
    while time.monotonic() < deadline:
        source.run(step)
        began_s = time.thread_time()  # its own processor time: what the session costs, not what else runs here
        watch.step(**mark(step))
        longest_s = max(longest_s, time.thread_time() - began_s)
        step += 1
        time.sleep(0.005)
    began_s = time.monotonic()
    session.close()
    assert time.monotonic() - began_s < 10.0  # a hang; it gives up after 2 s
    assert longest_s < 0.005
    stalled.die()


def test_without_an_agent_nothing_waits(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.telemetry.sessions.CLOSE_S", 120.0)
    monkeypatch.setattr("penstock.telemetry.sender.FIRST_PAUSE_S", 120.0)
    session = Watched(managed(path))
    watch = session.watch(Source(3), name="train")
    watch.step(**mark(0))
    until(lambda: "does not answer" in caplog.text)
    began_s = time.monotonic()
    session.close()
    assert time.monotonic() - began_s < 50.0


def test_a_failing_source_is_disabled_with_one_warning(
    agent: Agent, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def drain(self) -> Mapping[str, Any]:
            raise RuntimeError("engine is gone")

    session, source = Watched(managed(path)), Source(3)
    session.watch(Broken(), name="broken one")
    watch = session.watch(source, name="train")
    watch.graph(document(), from_step=0)
    source.run(0)
    watch.step(**mark(0))
    until(lambda: agent.counted() == 3)
    source.run(1)
    watch.step(**mark(1))
    until(lambda: agent.counted() == 6)
    session.close()
    assert caplog.text.count("the telemetry of broken one failed") == 1


def test_a_closed_watch_has_flushed_and_reads_its_source_no_more(agent: Agent, path: str) -> None:
    session, source = Watched(managed(path)), Source(3)
    watch = session.watch(source, name="train")
    watch.graph(document(), from_step=0)
    source.run(0)
    watch.step(**mark(0))
    watch.close()
    source.run(1)
    until(lambda: agent.counted() == 3)
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    assert agent.counted() == 3


@pytest.mark.parametrize("end", ["goes on", "is closed"])
def test_work_of_the_feed_arrives_with_its_step(agent: Agent, path: str, end: str) -> None:
    session, source = Watched(managed(path)), Source(3)
    watch = session.watch(source, name="train")
    watch.graph(document(), from_step=0)
    trace, step = session.input(), mark(0)
    assert trace is not None
    begin_ns = step["start_ns"]
    trace.add(Work.READ, FIRST_READER, begin_ns - 9000, begin_ns - 6000)  # before the step: it is not sent
    trace.add(Work.WAIT, 0, begin_ns - 4000, begin_ns + 300)
    source.run(0)
    watch.step(**step)
    if end == "is closed":
        watch.close()
    else:
        until(lambda: agent.of(Kind.INPUT_EVENTS))
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    [frame] = agent.of(Kind.INPUT_EVENTS)
    found = {column: frame.columns[column].tolist() for column in (Column.DURATION_NS, Column.WORK, Column.THREAD)}
    assert found == {Column.DURATION_NS: [4300], Column.WORK: [Work.WAIT], Column.THREAD: [0]}
    assert frame.t0_ns == begin_ns - 4000


def test_evaluation_gives_no_rows_beside_training(agent: Agent, path: str) -> None:
    session, train, test = Watched(managed(path)), Source(3), Source(3)
    forward = [{**op, "role": "forward"} for op in GOLDEN["ops"]]
    watches = [session.watch(train, name="train"), session.watch(test, name="test")]
    watches[0].graph(document(), from_step=0)
    watches[1].graph(GraphDocument.model_validate({**GOLDEN, "ops": forward, "syncs": []}), from_step=0)
    for step, (watch, source) in enumerate(zip(watches, (train, test), strict=True)):
        source.run(step)
        watch.step(**mark(step))
        until(lambda step=step: agent.counted() == 3 * step + 3)  # type: ignore[misc]  # the training is known of
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    assert [frame.columns[Column.STEP].tolist() for frame in agent.of(Kind.METRICS)] == [[0]]
    assert len({frame.body["hash"] for frame in agent.of(Kind.GRAPH_USED)}) == 2


def test_loss_of_evaluation_before_training_has_its_own_name(agent: Agent, path: str) -> None:
    session, train, test = Watched(managed(path)), Source(3), Source(3)
    forward = [{**op, "role": "forward"} for op in GOLDEN["ops"]]
    evaluation = session.watch(test, name="test")
    evaluation.graph(GraphDocument.model_validate({**GOLDEN, "ops": forward, "syncs": []}), from_step=0)
    test.run(0)
    evaluation.step(**mark(0) | {"loss": 0.75})
    until(lambda: agent.of(Kind.METRICS))
    session.log(step=0, eval_loss=0.25)
    training = session.watch(train, name="train")
    training.graph(document(), from_step=0)
    train.run(1)
    training.step(**mark(1) | {"loss": 0.5})
    until(lambda: len(agent.of(Kind.METRICS)) == 2)
    session.close()
    until(lambda: agent.of(Kind.GOODBYE))
    assert str([frame.columns[Column.LOSS].tolist() for frame in agent.of(Kind.METRICS)]) == "[[nan], [0.5]]"
    assert [one.body["values"] for one in agent.of(Kind.SCALARS)] == [{"penstock/eval_loss": 0.75}, {"eval_loss": 0.25}]


def test_a_pserver_says_what_it_is(agent: Agent, path: str) -> None:
    session = Watched(managed(path))
    session.register(role="pserver", endpoint="10.0.0.1:6174", index=3)
    until(lambda: agent.of(Kind.HELLO))
    session.close()
    hello = agent.of(Kind.HELLO)[-1].body
    assert (hello["role"], hello["index"], hello["endpoint"]) == ("pserver", 3, "10.0.0.1:6174")


# ---- unwatched, exit and fork: a process of its own each


def run_script(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_unwatched_costs_no_thread_no_torch_and_no_websockets() -> None:
    done = run_script(
        "import sys, threading, penstock.telemetry as t\n"
        "watch = t.session().watch(None, name='x')\n"
        "watch.graph(None, 0); watch.step(step=1, start_ns=0, end_ns=1, samples=1, loss=None); watch.close()\n"
        "t.log(auc=1.0); t.progress(1, 2); t.session().register(role='pserver', endpoint='a:1'); t.close()\n"
        "print(threading.active_count(), watch.is_watched, {'torch', 'websockets'} & set(sys.modules))\n"
    )
    assert (done.stdout, done.stderr) == ("1 False set()\n", "")


def test_an_unreadable_environment_disables_telemetry(caplog: pytest.LogCaptureFixture) -> None:
    environ = {**managed("s").environ(), "PENSTOCK_INDEX": "first"}
    assert not isinstance(decide(environ), Watched)
    assert "PENSTOCK_INDEX is 'first'; expected this trainer's number" in caplog.text
    assert not isinstance(decide({}), Watched)
    assert isinstance(decide(managed("s").environ()), Watched)


SCRIPT = """
import os, sys, time, numpy as np, penstock.telemetry as t
from penstock.protocol.graphdoc import Forms, GraphDocument, Passes, Removed
class Source:
    rows = []
    def drain(self):
        rows, self.rows = self.rows, []
        column = lambda i: np.array([row[i] for row in rows], np.int64)
        return {"start_ns": column(2), "duration_ns": column(3), "op": column(1), "step": column(0),
                "thread": column(4), "lost": 0}
source = Source()
watch = t.session().watch(source, name="train")
watch.graph(GraphDocument.model_validate_json(os.environ["DOCUMENT"]), from_step=0)
now = time.time_ns()
source.rows += [(0, op, now, 10, 0) for op in range(3)]
watch.step(step=0, start_ns=now, end_ns=time.time_ns(), samples=8, loss=None)
source.rows += [(1, 0, now, 10, 0)]
"""


def script_environ(path: str) -> dict[str, str]:
    return {**managed(path).environ(), "DOCUMENT": json.dumps(GOLDEN)}


def test_a_script_that_ends_has_said_everything_and_goodbye(agent: Agent, path: str) -> None:
    done = run_script(SCRIPT, **script_environ(path))
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: agent.of(Kind.GOODBYE))
    assert agent.counted() == 4
    assert [(f.step, f.flags, f.count) for f in agent.of(Kind.OP_EVENTS)] == [(0, 1, 3), (1, 0, 1)]


def test_a_crashing_script_has_sent_the_unfinished_step(agent: Agent, path: str) -> None:
    done = run_script(SCRIPT + "raise RuntimeError('operator failed')\n", **script_environ(path))
    assert done.returncode == 1
    until(lambda: agent.of(Kind.GOODBYE))
    assert [(f.step, f.flags, f.count) for f in agent.of(Kind.OP_EVENTS)] == [(0, 1, 3), (1, 0, 1)]


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("sys.exit(3)", 3, "exit code 3"),
        ("sys.exit('no luck')", 1, "exit: no luck"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, ""),
        ("def end(): sys.exit(3)\ntry: end()\nfinally: t.close", 3, "exit code 3"),
    ],
)
def test_goodbye_says_how_the_script_ended(agent: Agent, path: str, ending: str, code: int, error: str) -> None:
    done = run_script("import sys, penstock.telemetry as t\nt.progress(1, 2)\n" + ending, **managed(path).environ())
    assert done.returncode == code, done.stderr
    until(lambda: agent.of(Kind.GOODBYE))
    (goodbye,) = agent.of(Kind.GOODBYE)
    assert goodbye.body == {"failed": bool(error), "error": error}


def test_a_forked_child_is_unwatched_and_its_parent_is_not(agent: Agent, path: str) -> None:
    forks = (
        "import threading\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    watch.step(step=9, start_ns=0, end_ns=1, samples=1, loss=None); t.log(step=9, child=1.0)\n"
        "    assert threading.active_count() == 1\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "t.log(step=1, parent=1.0)\n"
    )
    done = run_script(SCRIPT + forks, **script_environ(path))
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: agent.of(Kind.GOODBYE))
    assert [frame.body["values"] for frame in agent.of(Kind.SCALARS)] == [{"parent": 1.0}]
    assert len(agent.of(Kind.HELLO)) == len(agent.of(Kind.GOODBYE)) == 1
    assert {frame.kind for frame in agent.frames} >= set(COLUMNS) - {Kind.LOG, Kind.INPUT_EVENTS}
