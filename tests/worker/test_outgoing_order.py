"""What one connection carries, in which order, and what confirms it."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.agent import ReplicaReport
from penstock.protocol.frames import Frame, Kind, decode_header, encode
from penstock_worker.buffer import FrameBuffer
from penstock_worker.logtail import CHUNK_BYTES, WINDOW_BYTES, LogTail
from penstock_worker.outgoing import BEFORE_END_S, FRAMES_A_TURN, Outgoing


@dataclass
class Source:
    log: LogTail
    report: ReplicaReport = field(default_factory=lambda: ReplicaReport(replica_id="r1", epoch=1, state="RUNNING"))
    draining: bool = False
    end_due_at: float | None = None
    confirmed: bool = False
    frames: FrameBuffer = field(default_factory=lambda: FrameBuffer(stream=7, epoch=1))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "log").write_bytes(b"")
    return Source(LogTail(tmp_path / "log"))


def turn(outgoing: Outgoing, now: float = 0.0) -> list[dict[str, Any]]:
    return [json.loads(message) for message in outgoing.turn(now) if isinstance(message, str)]


def test_a_report_goes_once_a_connection(source: Source) -> None:
    first = Outgoing({"r1": source}, {})
    assert [message["state"] for message in turn(first)] == ["RUNNING"]
    assert turn(first) == []
    assert len(turn(Outgoing({"r1": source}, {}))) == 1


def ended(source: Source) -> None:
    source.report = source.report.model_copy(update={"state": "EXITED", "exit_code": 0})


def test_an_end_goes_out_after_its_log(source: Source, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"last words")
    ended(source)
    outgoing = Outgoing({"r1": source}, {})
    assert [message["type"] for message in turn(outgoing, 1e9)] == ["log"], "however long ago it ended"
    assert [message["type"] for message in turn(outgoing, 1e9)] == ["replica"]


def push(source: Source, turns: int) -> None:
    for seq in range(turns * FRAMES_A_TURN):
        frame = Frame(Kind.SCALARS, 7, 1, seq, body={})
        source.frames.push(decode_header(encode(frame)), encode(frame))


def test_an_end_goes_out_after_all_its_frames(source: Source) -> None:
    push(source, turns=2)
    ended(source)
    outgoing = Outgoing({"r1": source}, {})
    sent = [message for number in range(3) for message in outgoing.turn(1e9 + 0.4 * number * BEFORE_END_S)]
    assert [isinstance(message, bytes) for message in sent] == [True] * 2 * FRAMES_A_TURN + [False]


def test_an_end_waits_a_bounded_time_for_its_frames(source: Source) -> None:
    push(source, turns=100)
    ended(source)
    outgoing = Outgoing({"r1": source}, {})
    assert turn(outgoing, 5.0) == []
    assert [message["type"] for message in turn(outgoing, 5.0 + BEFORE_END_S)] == ["replica"]


def test_a_reconnect_does_not_delay_an_end_further(source: Source) -> None:
    push(source, turns=100)
    ended(source)
    connections = [Outgoing({"r1": source}, {}) for _ in range(3)]
    sent = [len(turn(connection, 5.0 + 0.5 * number * BEFORE_END_S)) for number, connection in enumerate(connections)]
    assert sent == [0, 0, 1]


def test_an_end_waits_a_bounded_time_for_its_log(source: Source, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (3 * WINDOW_BYTES))
    ended(source)
    outgoing = Outgoing({"r1": source}, {})
    for _ in range(100):  # the server acknowledges nothing
        assert "replica" not in [message["type"] for message in turn(outgoing, 5.0)]
    assert [message["type"] for message in turn(outgoing, 5.0 + BEFORE_END_S)] == ["replica"]


def test_an_end_waits_for_the_reading_of_its_socket(source: Source) -> None:
    ended(source)
    source.draining = True
    outgoing = Outgoing({"r1": source}, {})
    assert turn(outgoing) == []
    source.draining = False
    assert [message["type"] for message in turn(outgoing)] == ["replica"]


def test_an_end_waits_for_nothing_while_the_agent_stops(source: Source) -> None:
    push(source, turns=2)
    ended(source)
    outgoing = Outgoing({"r1": source}, {})
    outgoing.ends_first = True
    assert [message["type"] for message in turn(outgoing)] == ["replica"]


def test_a_log_goes_on_from_what_the_server_holds(source: Source, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    outgoing = Outgoing({"r1": source}, {"r1": 4})
    piece = next(message for message in turn(outgoing) if message["type"] == "log")
    assert (piece["offset"], base64.b64decode(piece["text_b64"])) == (4, b"456789")


def test_a_server_without_acknowledgements_gets_one_log_window(source: Source, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (3 * WINDOW_BYTES))
    outgoing = Outgoing({"r1": source}, {})
    for _ in range(100):
        turn(outgoing)
    assert WINDOW_BYTES <= source.log.sent < WINDOW_BYTES + CHUNK_BYTES
    outgoing.log_acked("r1", source.log.sent)
    assert [message["type"] for message in turn(outgoing)] == ["log"]


def test_only_an_answer_to_a_later_heartbeat_confirms_an_end(source: Source) -> None:
    source.report = source.report.model_copy(update={"state": "EXITED"})
    outgoing = Outgoing({"r1": source}, {})
    outgoing.heartbeat_sent(1.0)
    turn(outgoing, 10.0)
    outgoing.heartbeat_sent(2.0)
    assert outgoing.heartbeat_answered() == 1.0
    assert not source.confirmed
    assert outgoing.heartbeat_answered() == 2.0
    assert source.confirmed
    assert outgoing.heartbeat_answered() is None
