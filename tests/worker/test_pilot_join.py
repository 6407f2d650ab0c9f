"""A pilot retries its first join while the server is unreachable."""

from __future__ import annotations

import pytest

from penstock.errors import SpecError, Unavailable
from penstock_worker.identity import Identity, join_within

MINE = Identity("http://127.0.0.1:9", "n1", "token")


class Server:
    """Is unreachable until a time; the clock is the time that was slept."""

    def __init__(self, back_at: float) -> None:
        self.back_at, self.now, self.asked = back_at, 0.0, 0

    def join(self) -> Identity:
        self.asked += 1
        if self.now < self.back_at:
            raise Unavailable("no server answers")
        return MINE

    def sleep(self, wait_s: float) -> None:
        self.now += wait_s


def test_pilot_joins_when_the_server_is_back() -> None:
    server = Server(back_at=60.0)
    assert join_within(server.join, 300.0, clock=lambda: server.now, sleep=server.sleep) == MINE
    assert server.now < 60.0 + 10.0 and server.asked < 30


def test_pilot_gives_up_when_its_limit_is_over() -> None:
    server = Server(back_at=1e9)
    with pytest.raises(Unavailable):
        join_within(server.join, 300.0, clock=lambda: server.now, sleep=server.sleep)
    assert server.now == pytest.approx(300.0)


def test_refusal_is_not_retried() -> None:
    def join() -> Identity:
        raise SpecError("refused")

    with pytest.raises(SpecError):
        join_within(join, 300.0, sleep=lambda wait_s: pytest.fail("it has slept"))
