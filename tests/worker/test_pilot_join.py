"""A pilot retries its first join while the server is unreachable."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from penstock.errors import SpecError, Unavailable
from penstock_worker.identity import Identity, Offer, join, join_within

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


class OlderServer(BaseHTTPRequestHandler):
    """A server that does not know the field `pilot` of a join, and refuses it as it refuses every such field."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        faults = [{"pointer": "/pilot", "message": "Extra inputs are not permitted"}] if "pilot" in body else []
        answer = (
            {"title": "invalid", "status": 422, "errors": faults} if faults else {"node_id": "n1", "node_token": "t"}
        )
        self.send_response(422 if faults else 201)
        self.send_header("Content-Type", "application/problem+json" if faults else "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        return


def test_server_without_pilots_is_to_be_upgraded_first(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), OlderServer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(SpecError, match="Upgrade the server, or join without --once and --ttl"):
                join(url, "token", name="n", state_dir=tmp_path, offer=Offer(1, 0, 1), is_pilot=True)
            assert join(url, "token", name="n", state_dir=tmp_path, offer=Offer(1, 0, 1)).node_id == "n1"
        finally:
            server.shutdown()
