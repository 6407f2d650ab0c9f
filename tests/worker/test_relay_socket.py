"""The telemetry socket: where it lies, what it takes, what ends a connection."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.process.private import read_private
from penstock.protocol import recording
from penstock.protocol.agent import Desired
from penstock.protocol.contract import left_path
from penstock.protocol.frames import Frame, Kind, encode
from penstock_worker.buffer import FrameBuffer
from penstock_worker.relay import MAX_SOCKET_PATH, Relay, socket_path
from penstock_worker.replica import Replica
from penstock_worker.spool import Spool


def prefixed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


class Listening:
    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self.woken = asyncio.Event()
        self.frames = FrameBuffer(stream=7, epoch=1, limit_bytes=limit_bytes)
        self.relay = Relay(path, self.frames, Spool(path.with_name("spool")), stream=7, epoch=1, wake=self.woken.set)


@pytest_asyncio.fixture
async def listening(tmp_path: Path) -> AsyncIterator[Listening]:
    made = Listening(socket_path(tmp_path), limit_bytes=4000)
    await made.relay.open()
    yield made
    await made.relay.close()


def test_a_socket_moves_elsewhere_if_its_folders_path_is_long(tmp_path: Path) -> None:
    assert socket_path(Path("/s/r1")) == Path("/s/r1/t.sock")
    long = tmp_path / ("x" * 120)
    assert len(str(socket_path(long))) <= MAX_SOCKET_PATH
    assert socket_path(long) == socket_path(long), "a restarted agent has to find it"
    assert socket_path(long) != socket_path(long / "other")


@pytest.mark.asyncio
async def test_a_request_to_record_lies_beside_the_socket(listening: Listening) -> None:
    path = recording.request_path(listening.relay.path)
    assert not recording.until(read_private(path), time.monotonic())
    before = time.monotonic()
    listening.relay.record_in_full(30)
    assert before + 30 <= recording.until(read_private(path), time.monotonic()) <= time.monotonic() + 30
    listening.relay.record_in_full(5)
    assert recording.until(read_private(path), time.monotonic()) >= before + 30, "a shorter request ends no longer one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await listening.relay.close()
    listening.relay.record_in_full(5)
    assert list(path.parent.glob("*record*")) == []


@pytest.mark.asyncio
async def test_the_socket_is_private_and_replaces_a_stale_one(listening: Listening) -> None:
    assert stat.S_IMODE(listening.relay.path.stat().st_mode) == 0o600
    spool = Spool(listening.relay.path.with_name("spool"))
    again = Relay(listening.relay.path, listening.frames, spool, stream=7, epoch=1, wake=lambda: None)
    await again.open()
    assert again.path.is_socket()
    await again.close()
    assert not again.path.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("junk", [struct.pack("<I", 1 << 30), prefixed(b"no frame at all"), prefixed(b"PS" * 40)])
async def test_bytes_that_are_no_frame_end_that_connection_only(listening: Listening, junk: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(listening.relay.path)
    writer.write(junk)
    assert await reader.read() == b"", "closed by the agent"
    writer.close()
    await writer.wait_closed()
    _, writer = await asyncio.open_unix_connection(listening.relay.path)
    writer.write(prefixed(encode(Frame(Kind.HELLO, 7, 1, 0, body={}))))
    await asyncio.wait_for(listening.woken.wait(), 60)
    assert not listening.frames.empty
    writer.close()
    await writer.wait_closed()


@pytest.mark.asyncio
async def test_another_epoch_is_refused_and_counted(listening: Listening) -> None:
    _, writer = await asyncio.open_unix_connection(listening.relay.path)
    writer.write(prefixed(encode(Frame(Kind.HELLO, 7, 2, 0, body={}))))
    writer.write(prefixed(encode(Frame(Kind.HELLO, 7, 1, 1, body={}))))
    await asyncio.wait_for(listening.woken.wait(), 60)
    assert listening.relay.refused == 1
    writer.close()
    await writer.wait_closed()


def sent_and_closed(listening: Listening, frames: int) -> None:
    """Send as a process that ends at once: the event loop runs nothing meanwhile."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(listening.relay.path))
        for seq in range(frames):
            peer.sendall(prefixed(encode(Frame(Kind.PROGRESS, 7, 1, seq, body={}))))


def taken(listening: Listening) -> int:
    count = 0
    while listening.frames.pop() is not None:
        count += 1
    return count


@pytest.mark.asyncio
async def test_close_reads_a_connection_that_was_never_accepted(listening: Listening) -> None:
    sent_and_closed(listening, 3)
    await listening.relay.close()
    assert taken(listening) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(1, 8))
async def test_close_reads_what_ended_connections_sent(listening: Listening, turns: int) -> None:
    sent_and_closed(listening, 20)
    for _ in range(turns):  # of the event loop, between the connection and the end of what was sent over it
        await asyncio.sleep(0)
    await listening.relay.close()
    assert taken(listening) == 20


@pytest.mark.asyncio
async def test_close_reads_what_ended_processes_left(listening: Listening) -> None:
    path = left_path(listening.relay.path)
    assert path.stat().st_mode & 0o777 == 0o600
    frames = b"".join(prefixed(encode(Frame(Kind.PROGRESS, 7, 1, seq, body={}))) for seq in range(3))
    path.write_bytes(frames + frames[:20])  # the last one is torn
    sent_and_closed(listening, 2)
    await listening.relay.close()
    assert taken(listening) == 5
    assert not path.exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["link", "pipe", "junk"])
async def test_close_neither_follows_nor_waits_for_what_is_left(
    listening: Listening, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = left_path(listening.relay.path)
    path.unlink()
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(prefixed(b"x" * 60))
    sent_and_closed(listening, 2)
    await asyncio.wait_for(listening.relay.close(), 60)
    assert taken(listening) == 2
    assert "was not read to its end" in caplog.text


@pytest.mark.asyncio
async def test_close_waits_a_bounded_time_for_an_open_peer(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_worker.relay.DRAIN_S", 0.05)
    _, writer = await asyncio.open_unix_connection(listening.relay.path)
    await asyncio.wait_for(listening.relay.close(), 60)
    writer.close()
    await writer.wait_closed()


@pytest.mark.asyncio
async def test_close_does_not_wait_for_a_full_buffer(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_worker.relay.DRAIN_S", 600.0)
    sent_and_closed(listening, 200)
    await asyncio.wait_for(listening.relay.close(), 60)
    assert listening.frames.full


@pytest.mark.asyncio
async def test_an_end_is_known_though_its_task_is_cancelled(tmp_path: Path) -> None:
    order = Desired(
        replica_id="r1", job_id="j", job_name="j", role="trainer", index=0, epoch=1, stream=7, entrypoint=["x"]
    )
    replica = Replica(order, tmp_path, changed=lambda: None, wake=lambda: None)
    await replica.relay.open()
    _, writer = await asyncio.open_unix_connection(replica.relay.path)
    ending = asyncio.create_task(replica.refuse("no"))
    await asyncio.sleep(0)
    assert (replica.report.state, replica.draining) == ("EXITED", True)
    ending.cancel()
    await asyncio.wait([ending])
    assert (replica.report.state, replica.draining, replica.relay.path.exists()) == ("EXITED", False, False)
    replica.relay.abandon()
    writer.close()
    await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_full_buffer_stops_the_reading_until_there_is_room(listening: Listening) -> None:
    _, writer = await asyncio.open_unix_connection(listening.relay.path)
    for seq in range(200):
        writer.write(prefixed(encode(Frame(Kind.PROGRESS, 7, 1, seq, body={"pad": "x" * 1000}))))
    await asyncio.wait_for(listening.woken.wait(), 60)
    seen: list[bytes] = []
    async with asyncio.timeout(60):
        while len(seen) < 200:
            assert listening.frames.size_bytes < 4000 + 1200, "one frame beyond the limit at most"
            while (payload := listening.frames.pop()) is not None:
                seen.append(payload)
            listening.frames.confirm(listening.frames.sends)
            await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
