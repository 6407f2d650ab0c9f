"""The counts of telemetry add up to what really happened, whatever is lost, repeated, killed or started again.

The processes are real outboxes and agents' buffers; the server is the sums alone, over a recording that outlives it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import PeerError
from penstock.protocol.completeness import (
    EARLIER,
    MAX_PROCESSES,
    Account,
    Report,
    StreamCounts,
    account,
    report_of,
    rows_of,
    sentence,
    stored,
    sum_of,
    unknown_since_ms,
)
from penstock.protocol.frames import COLUMNS, Frame, Kind, decode, decode_header
from penstock.telemetry.collector import Draft
from penstock.telemetry.outbox import Outbox, message, pack
from penstock.telemetry.tally import Tally
from penstock_worker.buffer import FrameBuffer

EVENTS, SUMS = Kind.OP_EVENTS.name, Kind.OP_SUMS.name
LIMIT = 3000  # bytes of an outbox and of an agent's buffer: a few frames


def restarted(counts: StreamCounts) -> StreamCounts:
    """Return what a server reads from its database."""
    return stored(json.loads(json.dumps(counts.fields())))


@dataclass
class Job:
    """One process, its agent and the server, and what really happened to the rows."""

    truth: Counter[str] = field(default_factory=Counter)  # operator events: produced, sampled_out; sums: produced
    recorded: Counter[str] = field(default_factory=Counter)
    counts: StreamCounts = field(default_factory=StreamCounts)
    on_disk: StreamCounts = field(default_factory=StreamCounts)
    outbox: Outbox = field(default_factory=lambda: Outbox(process="p", limit_bytes=LIMIT))
    tally: Tally = field(default_factory=Tally)
    num_agents: int = 0
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.outbox.introduce({"process": "p"})
        self.outbox.connected(stream=7, epoch=1, keeps=True)
        self.buffer = self._agent()
        self.marks: list[int] = []

    def _agent(self) -> FrameBuffer:
        self.num_agents += 1
        return FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT, name=f"a{self.num_agents}")

    def produce(self, rows: int) -> None:
        sent = rows // 3
        self.truth.update({"produced": rows, "sampled_out": rows - sent, "sums": 1})
        self.tally.produced += rows
        self.tally.sampled_out += rows - sent
        for kind, count in ((Kind.OP_EVENTS, sent), (Kind.OP_SUMS, 1)):
            self.outbox.put(pack(Draft(kind, {column: np.zeros(count) for column in COLUMNS[kind]}, 0)))
        self.outbox.counted(Kind.OP_EVENTS, self.tally.copy())

    def report(self, _: int) -> None:
        self.outbox.report()

    def to_agent(self, num: int, *, read: bool = True) -> None:
        for _ in range(num):
            item = self.outbox.take()
            if item is None:
                return
            if read:
                payload = bytes(item.frame)
                self.buffer.push(decode_header(payload), payload)

    def to_server(self, num: int, *, arrive: bool = True) -> None:
        for _ in range(num):
            payload = self.buffer.pop()
            if payload is None:
                return
            if arrive:
                self._arrived(decode(payload))

    def _arrived(self, frame: Frame) -> None:
        self.now_ms += 1
        if frame.kind is Kind.HELLO:
            self.counts.greet(frame.body["process"], self.now_ms)
        elif frame.kind is Kind.GAP:
            report = report_of(frame.body)
            if report is not None:
                self.counts.take(report, self.recorded, self.now_ms)
            elif "total" in frame.body:
                self.counts.take_agent(frame.body["agent"], rows_of(frame.body["total"]))
        elif frame.kind.name in (EVENTS, SUMS):
            self.recorded[frame.kind.name] += frame.count

    def process_reconnects(self, num: int) -> None:
        self.to_agent(num % 4, read=False)  # the kernel had taken them
        self.outbox.connected(stream=7, epoch=1, keeps=True)

    def agent_reconnects(self, num: int) -> None:
        self.to_server(num % 4, arrive=False)
        self.buffer.rewind()

    def agent_is_killed(self, _: int) -> None:
        spooled = self.buffer.unconfirmed()
        self.buffer = self._agent()
        for payload in spooled:
            self.buffer.push(decode_header(payload), payload)
        self.outbox.connected(stream=7, epoch=1, keeps=True)

    def server_is_killed(self, num: int) -> None:
        self.counts = restarted(self.on_disk)
        self.agent_reconnects(num)

    def heartbeat(self, _: int) -> None:
        self.on_disk = restarted(self.counts)
        self.buffer.confirm(self.buffer.sends)

    def end(self) -> None:
        self.outbox.put(message(Kind.GOODBYE, {}))
        self.flow()

    def flow(self) -> None:
        while not (self.outbox.empty and self.buffer.empty):
            self.to_agent(1)
            self.to_server(100)

    def account(self, kind: str, *, ended: bool) -> Account:
        return account(self.counts, kind, self.recorded, {}, ended=ended)


ACTIONS = [
    Job.produce, Job.produce, Job.report, Job.to_agent, Job.to_agent, Job.to_server, Job.to_server,
    Job.process_reconnects, Job.agent_reconnects, Job.agent_is_killed, Job.server_is_killed, Job.heartbeat,
]  # fmt: skip
courses = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 60)), max_size=60)


@settings(deadline=None, max_examples=100)
@given(courses)
def test_every_row_of_a_process_that_ends_is_accounted_for(course: list[tuple[object, int]]) -> None:
    job = Job()
    for action, number in course:
        action(job, number)  # type: ignore[operator]
        found = job.account(EVENTS, ended=False)
        assert found.unexplained == 0
        assert found.produced <= job.truth["produced"]
    job.end()
    events, sums = job.account(EVENTS, ended=True), job.account(SUMS, ended=True)
    assert (events.produced, sums.produced) == (job.truth["produced"], job.truth["sums"])
    assert (events.shown, sums.shown) == (job.recorded[EVENTS], job.recorded[SUMS])
    assert (events.sampled_out, sums.sampled_out) == (job.truth["sampled_out"], 0)
    assert (events.unexplained, sums.unexplained, events.pending, sums.pending) == (0, 0, 0, 0)
    assert "process_ended" not in events.dropped
    assert unknown_since_ms(job.counts, ended=True) is None


@settings(deadline=None, max_examples=60)
@example([(Job.produce, 3), (Job.report, 1), (Job.to_agent, 2), (Job.to_server, 2), (Job.server_is_killed, 1)])
@given(courses)
def test_counts_of_a_killed_process_are_lower_bounds_since_then(course: list[tuple[object, int]]) -> None:
    job = Job()
    job.to_agent(1)
    job.to_server(1)
    for action, number in course:
        action(job, number)  # type: ignore[operator]
    job.to_server(100)  # what the agent has still comes
    job.buffer.rewind()
    job.to_server(100)
    found = job.account(EVENTS, ended=True)
    assert (found.unexplained, found.pending, found.shown) == (0, 0, job.recorded[EVENTS])
    assert found.shown <= found.produced <= job.truth["produced"]
    since = unknown_since_ms(job.counts, ended=True)
    assert since is not None and since == max(one.at_ms for one in job.counts.reports.values())


REPORTS = [
    Report("p", number, final=number == 4, produced={EVENTS: 10 * number}, sent={EVENTS: 10 * number})
    for number in range(1, 5)
]


@given(st.lists(st.sampled_from(REPORTS), min_size=1), st.permutations(REPORTS))
def test_repeated_and_reordered_reports_change_nothing(repeated: list[Report], order: list[Report]) -> None:
    counts = StreamCounts()
    for report in [*order, *repeated]:
        counts.take(report, {EVENTS: 40}, 1)
    assert account(counts, EVENTS, {EVENTS: 40}, {}, ended=True) == Account(EVENTS, produced=40, shown=40)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_accounts_of_streams_add_up_in_any_order(parts: list[tuple[int, int, int]]) -> None:
    accounts = [Account(EVENTS, a + b + c, a, b, dropped={"refused": c} if c else {}) for a, b, c in parts]
    total = sum_of(EVENTS, accounts)
    assert total == sum_of(EVENTS, reversed(accounts))
    assert (total.produced, total.unexplained) == (sum(map(sum, parts)), 0)


def test_frames_that_arrived_twice_are_seen() -> None:
    counts = StreamCounts()
    counts.take(Report("p", 0, final=True, produced={EVENTS: 5}, sent={EVENTS: 5}), {EVENTS: 8}, 1)
    assert account(counts, EVENTS, {EVENTS: 8}, {}, ended=True).unexplained == -3


def test_recording_that_lost_a_file_is_seen() -> None:
    counts = StreamCounts()
    counts.take(Report("p", 0, final=True, produced={EVENTS: 5}, sent={EVENTS: 5}), {EVENTS: 5}, 1)
    found = account(counts, EVENTS, {EVENTS: 2}, {}, ended=True)
    assert found.unexplained == 3
    assert "≠" in sentence(found)


def test_rows_that_retention_removed_are_not_shown() -> None:
    counts = StreamCounts()
    counts.take(Report("p", 0, final=True, produced={EVENTS: 9}, sent={EVENTS: 9}), {EVENTS: 9}, 1)
    by_quota = account(counts, EVENTS, {EVENTS: 9}, {EVENTS: 4}, ended=True)
    assert (by_quota.shown, by_quota.expired, by_quota.unexplained) == (5, {"quota": 4}, 0)
    counts.removed = {"recorded": {EVENTS: 9}, "quota": {EVENTS: 4}}
    gone = account(restarted(counts), EVENTS, {}, {}, ended=True)
    assert (gone.shown, gone.expired, gone.unexplained) == (0, {"quota": 4, "retention": 5}, 0)


def test_processes_that_follow_one_another_in_a_stream_add_up() -> None:
    counts = StreamCounts()
    for number in range(MAX_PROCESSES + 20):
        report = Report(f"p{number}", 3, final=True, produced={EVENTS: 2}, sampled_out={EVENTS: 1}, sent={EVENTS: 1})
        counts.take(report, {EVENTS: number + 1}, number)
    assert len(counts.reports) == MAX_PROCESSES and EARLIER in counts.reports
    found = account(counts, EVENTS, {EVENTS: MAX_PROCESSES + 20}, {}, ended=True)
    assert found == Account(EVENTS, 2 * (MAX_PROCESSES + 20), MAX_PROCESSES + 20, MAX_PROCESSES + 20)


def test_process_that_goes_on_with_another_stream_counts_once() -> None:
    box, tally = Outbox(process="p"), Tally(produced=30, sampled_out=10, passed=20)
    box.introduce({})
    box.connected(stream=1, epoch=1)
    for rows in (15, 5):
        box.put(pack(Draft(Kind.OP_EVENTS, {column: np.zeros(rows) for column in COLUMNS[Kind.OP_EVENTS]}, 0)))
    box.counted(Kind.OP_EVENTS, tally)
    frames = [box.take(), box.take()]  # HELLO, and the first of the two
    old = report_of(decode(bytes(box.farewell()[0].frame)).body)
    box.connected(stream=2, epoch=1)
    box.put(message(Kind.GOODBYE, {}))
    while (item := box.take()) is not None:
        frames.append(item)
    [new] = [found for one in frames if one and (found := report_of(decode(bytes(one.frame)).body)) and found.final]
    assert old is not None
    assert (old.produced, old.sampled_out, old.sent, old.held) == ({EVENTS: 25}, {EVENTS: 10}, {EVENTS: 15}, {})
    assert (new.produced, new.sampled_out, new.sent, new.held) == ({EVENTS: 5}, {}, {EVENTS: 5}, {})


def test_processes_without_an_end_are_bounded() -> None:
    counts = StreamCounts()
    for number in range(1000):
        counts.greet(f"p{number}", number)
        counts.take(Report(f"q{number}", 1), {}, number)
    assert len(counts.reports) == 2 * MAX_PROCESSES


@pytest.mark.parametrize("counts", [
    3, {}, {"process": "p", "number": -1}, {"process": "P!", "number": 1}, {"process": "p", "number": True},
    {"process": "p", "number": 1, "produced": {EVENTS: -1}, "sampled_out": {}, "held": {}, "sent": {}, "dropped": {}},
    {"process": "p", "number": 1, "produced": {}, "sampled_out": {}, "held": {}, "sent": {}, "dropped": {"x": 1}},
])  # fmt: skip
def test_hostile_reports_are_refused(counts: object) -> None:
    with pytest.raises(PeerError):
        report_of({"counts": counts})
    assert report_of({EVENTS: 3}) is None


def test_sentence_has_every_part_with_its_reason() -> None:
    found = Account(EVENTS, 1200, 800, 380, 4, {"agent_buffer_full": 10, "new_reason": 1}, {"quota": 5})
    assert sentence(found) == (
        "produced 1,200 operator events = 800 shown + 380 sampled out + 11 dropped (10 beyond the agent's buffer, "
        "1 new_reason) + 5 removed by retention (5 beyond the recording's size) + 4 not sent yet"
    )
