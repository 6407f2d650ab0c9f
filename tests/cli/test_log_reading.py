"""How the logs of several replicas and attempts become lines, and how long an absent server is waited for."""

from __future__ import annotations

import json

import pytest

from penstock.command import jobs
from penstock.command.follow import AWAY_S, Away
from penstock.command.jobs import LOG_POLL_S, LOG_WAIT_S, LineCutter, LogReader, await_more
from penstock.errors import Unavailable
from penstock.protocol.rest import Job, LogChunk, Replica


class Logs:
    """Logs in memory. `limit`: bytes of one piece."""

    def __init__(self, *, limit: int = 100) -> None:
        self.texts: dict[str, str] = {}
        self.ended: set[str] = set()
        self.asked = 0
        self._limit = limit

    def logs(self, job_id: str, replica_id: str, *, offset: int = 0) -> LogChunk:
        self.asked += 1
        text = self.texts.get(replica_id, "")[offset : offset + self._limit]
        eof = replica_id in self.ended and offset + len(text) == len(self.texts[replica_id])
        return LogChunk(replica_id=replica_id, offset=offset, next_offset=offset + len(text), text=text, eof=eof)


def job(*replica_ids: str) -> Job:
    replicas = [
        Replica(
            id=replica_id, job_id="j", attempt=1, epoch=1, role="trainer", index=index, state="RUNNING", node_id=None,
            host="", pid=None, endpoint=None, exit_code=None, signal=None, reason="", stream=index, started_at=None,
            finished_at=None, graph_hash=None,
        )
        for index, replica_id in enumerate(replica_ids)
    ]  # fmt: skip
    found: Job = json.loads('{"id": "j"}')
    found["replicas"] = replicas
    return found


def test_a_line_waits_for_its_end() -> None:
    lines = LineCutter()
    assert lines.add("a", "one\ntw") == ["one"]
    assert lines.add("b", "other") == []
    assert lines.add("a", "o\n\n") == ["two", ""]
    assert lines.flush() == [("b", "other")]
    assert lines.flush() == []


def test_pieces_of_several_replicas_are_printed_as_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(limit=4)
    logs.texts = {"a": "first line\nsecond\n", "b": "other"}
    reader, found = LogReader(logs, json=False), job("a", "b")
    while reader.print_new(found, found["replicas"]):
        pass
    reader.close()
    assert capsys.readouterr().out.splitlines() == [
        "[trainer 0] first line", "[trainer 0] second", "[trainer 1] other",
    ]  # fmt: skip


def test_last_log_lines_of_an_attempt_are_shown_after_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs()
    logs.texts = {"a": "begin\n"}
    reader, first, second = LogReader(logs, json=False), job("a"), job("b")
    reader.print_new(first, first["replicas"])
    logs.texts = {"a": "begin\nlast words\n", "b": "again\n"}
    logs.ended = {"a"}
    assert reader.print_new(second, second["replicas"])
    assert capsys.readouterr().out == "begin\nlast words\nagain\n"
    assert not reader.print_new(second, second["replicas"])
    before = logs.asked
    reader.print_new(second, second["replicas"])
    assert logs.asked == before + 1, "a log that has ended is not asked for again"


def test_an_absent_server_is_waited_for_and_then_is_an_error() -> None:
    now = 0.0
    away, error = Away(clock=lambda: now), Unavailable("gone")
    now = AWAY_S
    away.silent(error)
    away.answered()
    now += AWAY_S
    away.silent(error)
    now += 0.1
    with pytest.raises(Unavailable, match="gone"):
        away.silent(error)


class PushingServer(Logs):
    """Holds each request back for `held_s` of a clock, and has more when it answers."""

    def __init__(self, held_s: float) -> None:
        super().__init__()
        self.held_s, self.now = held_s, 0.0
        self.waits: list[tuple[str, int | None, float]] = []
        self.slept: list[float] = []

    def logs(self, job_id: str, replica_id: str, *, offset: int = 0, wait_s: float = 0.0) -> LogChunk:
        if wait_s:
            self.waits.append((replica_id, offset, wait_s))
            self.now += self.held_s
        return super().logs(job_id, replica_id, offset=offset)

    def job(self, job_id: str, *, wait_s: float = 0.0, since: int | None = None) -> Job:
        self.waits.append((job_id, since, wait_s))
        self.now += self.held_s
        return job()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.mark.parametrize(("held_s", "slept_s"), [(7.0, 0.0), (0.1, LOG_POLL_S - 0.1)])
def test_growth_is_awaited_in_one_request(held_s: float, slept_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    server, found = PushingServer(held_s), job("a", "b")
    monkeypatch.setattr(jobs, "time", server)
    server.texts, server.ended = {"a": "all\n", "b": "one\n"}, {"a"}
    reader = LogReader(server, json=True)
    reader.print_new(found, found["replicas"])
    await_more(server, found, found["replicas"], reader)
    assert server.waits == [("b", 4, LOG_WAIT_S)], "the log of a has ended"
    assert server.slept == [pytest.approx(slept_s)], "what comes in quick succession is read at once"


def test_when_all_logs_have_ended_the_job_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    server, found = PushingServer(1.0), job("a")
    found["version"] = 3
    monkeypatch.setattr(jobs, "time", server)
    server.texts, server.ended = {"a": "all\n"}, {"a"}
    reader = LogReader(server, json=True)
    reader.print_new(found, found["replicas"])
    await_more(server, found, found["replicas"], reader)
    assert server.waits == [("j", 3, LOG_WAIT_S)]
