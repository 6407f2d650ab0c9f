"""Attached sessions: a process that registers itself with a server over a real websocket."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import until
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from penstock.distributed.ports import free_ports
from penstock.protocol.contract import Attached
from penstock.protocol.frames import Frame, Kind, decode
from penstock.protocol.graphdoc import GraphDocument
from penstock.telemetry.sessions import Watched

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "frames" / "graph.json").read_text())["body"]


class Source:
    """Trace rings of a pretended engine in which one step of three operators ran."""

    def drain(self) -> Mapping[str, Any]:
        op = np.arange(3)
        start = time.time_ns() + op * 1000
        return {"start_ns": start, "duration_ns": op + 900, "op": op, "step": op * 0, "thread": op % 2, "lost": 0}


def mark(step: int) -> dict[str, Any]:
    now = time.time_ns()
    return {"step": step, "start_ns": now - 1000, "end_ns": now, "samples": 10, "loss": 0.5}


class ControlPlane:
    """The server's side of `/api/v1/attach`. Tokens other than "good" are refused with 401."""

    def __init__(self, port: int | None = None, *, lease_ttl_s: float = 15.0, stored_seq: int | None = None) -> None:
        self._stored_seq = stored_seq
        self.registered: list[dict[str, Any]] = []
        self.texts: list[dict[str, Any]] = []
        self.frames: list[Frame] = []
        self._lease_ttl_s = lease_ttl_s
        self.port = free_ports("127.0.0.1", 1)[0] if port is None else port
        self._server: Server = serve(
            self._handle, "127.0.0.1", self.port, process_request=_check_token, compression=None
        )  # fmt: skip
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _handle(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.path == "/api/v1/attach"
        register = json.loads(connection.recv())
        if register["index"] == 13:
            connection.close(4409, "trainer 13 is there already")
            return
        self.registered.append(register)
        answer = {
            "type": "registered",
            "job_id": "j",
            "replica_id": "r",
            "stream": 40 + len(self.registered),
            "epoch": 1,
        }
        connection.send(json.dumps({**answer, "lease_ttl_s": self._lease_ttl_s}))
        try:
            for message in connection:
                if isinstance(message, bytes):
                    self.frames.append(decode(message))
                else:
                    self.texts.append(json.loads(message))
                    if self._stored_seq is not None:
                        connection.send(json.dumps({"type": "beat", "stored_seq": self._stored_seq}))
        except ConnectionClosed:
            return

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def of(self, kind: Kind) -> list[Frame]:
        return [frame for frame in list(self.frames) if frame.kind is kind]


def _check_token(connection: ServerConnection, request: Request) -> Response | None:
    return None if request.headers["Authorization"] == "Bearer good" else connection.respond(401, "no\n")


@pytest.fixture
def server() -> Iterator[ControlPlane]:
    plane = ControlPlane(lease_ttl_s=0.3)
    yield plane
    plane.stop()


def attached(url: str, *, token: str = "good", index: int = 0) -> Attached:
    return Attached(url, token, "by-hand", "trainer", index)


def test_an_attached_process_streams_and_sends_heartbeats(server: ControlPlane) -> None:
    session = Watched(attached(server.url))
    watch = session.watch(Source(), name="train")
    watch.graph(GraphDocument.model_validate(GOLDEN), from_step=0)
    watch.step(**mark(0))
    until(lambda: server.of(Kind.OP_EVENTS) and server.texts)
    session.close()
    until(lambda: server.of(Kind.GOODBYE))
    (register,) = server.registered
    assert {key: register[key] for key in ("type", "job_name", "role", "index", "pid")} == {
        "type": "register", "job_name": "by-hand", "role": "trainer", "index": 0, "pid": os.getpid(),
    }  # fmt: skip
    assert "endpoint" not in register
    assert server.texts[0] == {"type": "beat"}
    assert {(frame.stream, frame.epoch) for frame in server.frames} == {(41, 1)}


def test_of_several_servers_the_first_that_answers_is_used(server: ControlPlane) -> None:
    (free,) = free_ports("127.0.0.1", 1)
    session = Watched(attached(f"http://127.0.0.1:{free},{server.url}"))
    session.progress(1, 2)
    until(lambda: server.of(Kind.HELLO))
    session.close()
    assert len(server.registered) == 1


def test_a_server_that_hangs_up_before_its_answer_is_passed_over(server: ControlPlane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            listening.accept()[0].close()

        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
        session = Watched(attached(f"http://127.0.0.1:{listening.getsockname()[1]},{server.url}"))
        session.progress(1, 2)
        until(lambda: server.of(Kind.HELLO))
        session.close()
        hanging_up.join()
    assert len(server.registered) == 1


def test_a_wrong_address_leaves_a_script_unwatched(caplog: pytest.LogCaptureFixture) -> None:
    session = Watched(attached("127.0.0.1:80"))
    session.progress(1, 2)
    until(lambda: "Training goes on unwatched" in caplog.text)
    session.close()
    assert "PENSTOCK_URL: server URL is '127.0.0.1:80'" in caplog.text


def test_an_attached_pserver_registers_its_endpoint(server: ControlPlane) -> None:
    session = Watched(attached(server.url))
    session.register(role="pserver", endpoint="127.0.0.1:6174")
    until(lambda: server.of(Kind.HELLO))
    session.close()
    assert (server.registered[-1]["role"], server.registered[-1]["endpoint"]) == ("pserver", "127.0.0.1:6174")


def test_a_role_that_is_told_late_registers_anew(server: ControlPlane) -> None:
    session = Watched(attached(server.url))
    session.progress(1, 2)
    until(lambda: server.of(Kind.PROGRESS))
    session.register(role="pserver", endpoint="127.0.0.1:6174")
    until(lambda: len(server.registered) == 2)
    session.close()
    assert [register["role"] for register in server.registered] == ["trainer", "pserver"]
    until(lambda: {frame.stream for frame in server.of(Kind.GOODBYE)} == {41, 42})


def test_a_restarted_server_gets_a_registration_and_the_backlog() -> None:
    first = ControlPlane()
    session = Watched(attached(first.url))
    session.log(1, auc=0.5)
    until(lambda: first.of(Kind.SCALARS))
    first.stop()
    second = ControlPlane(first.port)
    session.log(2, auc=0.6)
    until(lambda: len(second.of(Kind.SCALARS)) == 2)
    session.close()
    until(lambda: second.of(Kind.GOODBYE))
    second.stop()
    *first_ones, report, _ = second.frames
    assert [frame.kind for frame in first_ones] == [Kind.HELLO, Kind.SCALARS, Kind.SCALARS]
    assert (report.kind, report.body["counts"]["final"]) == (Kind.GAP, True)
    assert [frame.body["step"] for frame in second.of(Kind.SCALARS)] == [1, 2], "the first never said that it has 1"
    assert len(second.registered) == 1


def test_metrics_not_stored_by_a_killed_server_go_to_the_next() -> None:
    first = ControlPlane(lease_ttl_s=0.3, stored_seq=1)
    session = Watched(attached(first.url))
    session.log(1, auc=0.5)
    until(lambda: len(first.texts) >= 2)  # the answer to the first heartbeat is read before the second
    session.log(2, auc=0.6)
    until(lambda: len(first.of(Kind.SCALARS)) == 2)
    first.stop()
    second = ControlPlane(first.port)
    until(lambda: second.of(Kind.SCALARS))
    session.close()
    until(lambda: second.of(Kind.GOODBYE))
    second.stop()
    assert [frame.body["step"] for frame in second.of(Kind.SCALARS)] == [2], "1 was confirmed"


def test_closing_dials_once_more_during_a_long_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.telemetry.sender.FIRST_PAUSE_S", 60.0)
    port = free_ports("127.0.0.1", 1)[0]
    session = Watched(attached(f"http://127.0.0.1:{port}"))
    session.log(1, auc=0.5)
    until(lambda: "does not answer" in caplog.text)
    server = ControlPlane(port)
    session.close()
    until(lambda: server.of(Kind.GOODBYE))
    server.stop()
    assert [frame.body["step"] for frame in server.of(Kind.SCALARS)] == [1]


@pytest.mark.parametrize(
    ("token", "index", "message"),
    [("bad", 0, "refused PENSTOCK_TOKEN"), ("good", 13, "refused trainer 13 of job 'by-hand': trainer 13 is there")],
)
def test_a_refusal_is_told_once_and_ends_the_telemetry(
    server: ControlPlane, caplog: pytest.LogCaptureFixture, token: str, index: int, message: str
) -> None:
    session = Watched(attached(server.url, token=token, index=index))
    watch = session.watch(Source(), name="train")
    until(lambda: message in caplog.text)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-telemetry")])
    watch.step(**mark(0))
    session.log(1, auc=0.5)
    session.close()
    assert caplog.text.count(message) == 1
    assert server.frames == []
