"""`follow.wait`: the server holds the request back until there is something new; nothing is asked twice a second."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.client import Client
from penstock.command import follow
from penstock.command.exits import TimedOut
from penstock.errors import Unavailable
from penstock.protocol.rest import Job


class Clock:
    """Time that passes in sleeps and in requests that the server holds back."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Pushing:
    """A client whose server answers (after seconds, state, version); None: it is unreachable."""

    def __init__(self, clock: Clock, answers: list[tuple[float, str, int] | None]) -> None:
        self.clock, self.answers, self.asked = clock, iter(answers), list[tuple[float, int | None]]()

    def job(self, job_id: str, *, wait_s: float = 0.0, since: int | None = None) -> Job:
        self.asked.append((wait_s, since))
        answer = next(self.answers)
        if answer is None:
            raise Unavailable("no server")
        after_s, state, version = answer
        self.clock.now += after_s
        fields: dict[str, Any] = {"id": job_id, "name": "j", "state": state, "version": version, "progress": None}
        return cast(Job, {**fields, "eta_s": None, "latest": {}, "why": "w"})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(follow, "time", made)
    return made


def wait(client: Pushing, timeout_s: float | None = None) -> Job:
    return follow.wait(cast(Client, client), "j", follow.display_for(quiet=True), timeout_s=timeout_s)


def test_changes_are_awaited_without_a_pause(clock: Clock) -> None:
    client = Pushing(clock, [(0, "QUEUED", 1), (0.9, "RUNNING", 2), (1.0, "RUNNING", 2), (0.2, "SUCCEEDED", 3)])
    assert wait(client)["state"] == "SUCCEEDED"
    assert client.asked == [(0.0, None), (1.0, 1), (1.0, 2), (1.0, 2)]
    assert set(clock.slept) == {0.0}


def test_server_that_answers_at_once_is_asked_twice_a_second(clock: Clock) -> None:
    client = Pushing(clock, [(0, "RUNNING", 1), (0, "RUNNING", 1), (0, "RUNNING", 1), (0, "FAILED", 2)])
    assert wait(client)["state"] == "FAILED"
    assert clock.slept == [0.0, follow.POLL_S, follow.POLL_S]


def test_unreachable_server_is_asked_again(clock: Clock) -> None:
    client = Pushing(clock, [(0, "RUNNING", 1), None, None, (0.5, "SUCCEEDED", 2)])
    assert wait(client)["state"] == "SUCCEEDED"
    assert clock.slept == [0.0, follow.POLL_S, follow.POLL_S]


def test_deadline_bounds_the_request(clock: Clock) -> None:
    client = Pushing(clock, [(0, "RUNNING", 1), (0.3, "RUNNING", 1), (0.0, "RUNNING", 1)])
    with pytest.raises(TimedOut, match=r"within 0\.3 s"):
        wait(client, timeout_s=0.3)
    assert client.asked[1] == (0.3, 1)
