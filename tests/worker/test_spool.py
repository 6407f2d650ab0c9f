"""Frames that outlive their agent: on its disk, and with their process until they are there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.support.waiting import until_answer

from penstock.protocol.contract import Managed, left_path
from penstock.protocol.frames import Frame, Kind, decode, encode
from penstock.telemetry.link import UnixLink
from penstock.telemetry.outbox import Outbox, message
from penstock.telemetry.sessions import Watched
from penstock_worker.buffer import FrameBuffer
from penstock_worker.relay import Relay
from penstock_worker.spool import RECORD, Spool


def scalars(seq: int) -> bytes:
    return encode(Frame(Kind.SCALARS, 7, 1, seq, body={"step": seq}))


def test_frames_are_read_back_up_to_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    assert spool.load() == []
    frames = [scalars(seq) for seq in range(3)]
    assert all(spool.append(frame) for frame in frames)
    spool.close()
    path.write_bytes(path.read_bytes()[:-1])
    again = Spool(path)
    assert again.load() == frames[:2]
    assert again.append(frames[2])
    assert Spool(path).load() == frames


def test_what_is_stored_leaves_the_disk(tmp_path: Path) -> None:
    spool, frames = Spool(tmp_path / "spool"), [scalars(seq) for seq in range(10)]
    for frame in frames:
        spool.append(frame)
    whole = spool.size_bytes
    spool.trim(frames[4:])
    assert spool.size_bytes == whole  # not worth it yet
    spool.trim(frames[8:])
    assert spool.append(scalars(10))
    assert Spool(tmp_path / "spool").load() == [*frames[8:], scalars(10)]
    spool.trim([])
    assert (tmp_path / "spool").stat().st_size == spool.size_bytes == 0


def test_a_spool_is_bounded_and_a_full_disk_no_end(tmp_path: Path) -> None:
    frame = scalars(0)
    spool = Spool(tmp_path / "spool", limit_bytes=RECORD.size + len(frame))
    assert [spool.append(frame), spool.append(frame)] == [True, False]
    assert not Spool(Path("/proc/none/spool")).append(frame)


def relay(folder: Path, frames: FrameBuffer) -> Relay:
    return Relay(folder / "t.sock", frames, Spool(folder / "spool"), stream=7, epoch=1, wake=lambda: None)


def linked(to: Relay) -> UnixLink:
    return UnixLink(Managed("job", "name", "replica", "trainer", 0, 1, 7, str(to.path)))


def send(link: UnixLink, outbox: Outbox, steps: range) -> None:
    for step in steps:
        outbox.put(message(Kind.SCALARS, {"step": step}))
    while (item := outbox.take()) is not None:
        link.send(item)


@pytest.mark.asyncio
async def test_a_killed_agent_loses_no_metrics(tmp_path: Path) -> None:
    """One agent has read a part and is killed; the next has everything, in order, each once."""
    first, second, outbox = FrameBuffer(stream=7, epoch=1), FrameBuffer(stream=7, epoch=1), Outbox()
    outbox.introduce({})
    killed, after = relay(tmp_path, first), relay(tmp_path, second)
    await killed.open()
    link = linked(killed)
    outbox.connected(stream=7, epoch=1, keeps=link.confirms)
    send(link, outbox, range(5))

    async def spooled() -> int:
        link.idle()
        return link.stored_seq

    await until_answer(spooled, lambda seq: seq == 5)  # HELLO is 0
    outbox.stored(link.stored_seq)
    killed.abandon()
    await killed.close()
    await asyncio.to_thread(link.close)
    after.recall()
    await after.open()
    again = linked(after)
    outbox.connected(stream=7, epoch=1, keeps=again.confirms)
    send(again, outbox, range(5, 8))

    async def arrived() -> int:
        return len(second.unconfirmed())

    await until_answer(arrived, lambda count: count == 10)
    texts = b"".join(second.unconfirmed())
    assert [texts.count(b'"step":%d' % step) for step in range(8)] == [1] * 8
    await asyncio.to_thread(again.close)
    await after.close()


@pytest.mark.asyncio
async def test_what_no_agent_has_read_is_sent_again(tmp_path: Path) -> None:
    outbox = Outbox()
    outbox.introduce({})
    listening = relay(tmp_path, FrameBuffer(stream=7, epoch=1))
    await listening.open()
    link = linked(listening)
    outbox.connected(stream=7, epoch=1, keeps=link.confirms)
    send(link, outbox, range(1))  # into the kernel; the relay has had no turn to read it
    outbox.stored(link.stored_seq)
    outbox.connected(stream=7, epoch=1, keeps=link.confirms)
    kinds = []
    while (item := outbox.take()) is not None:
        kinds.append(item.kind)
    assert kinds == [Kind.HELLO, Kind.SCALARS]
    await asyncio.to_thread(link.close)
    await listening.close()


@pytest.mark.asyncio
async def test_a_process_that_ends_waits_for_its_agent_briefly(tmp_path: Path) -> None:
    listening = relay(tmp_path, FrameBuffer(stream=7, epoch=1, limit_bytes=1))  # full at once: it reads no more
    await listening.open()
    link, outbox = linked(listening), Outbox()
    outbox.introduce({})
    outbox.connected(stream=7, epoch=1)
    send(link, outbox, range(3))
    begin = time.monotonic()
    await asyncio.to_thread(link.close)
    assert time.monotonic() - begin < 10
    listening.abandon()
    await listening.close()


def logging(folder: Path) -> Watched:
    """A process whose agent listens in a folder."""
    return Watched(Managed("job", "name", "replica", "trainer", 0, 1, 7, str(folder / "t.sock")))


@pytest.mark.asyncio
async def test_figures_are_left_where_no_agent_takes_them(tmp_path: Path) -> None:
    killed, frames = relay(tmp_path, FrameBuffer(stream=7, epoch=1)), FrameBuffer(stream=7, epoch=1)
    await killed.open()
    killed.abandon()
    (tmp_path / "t.sock").unlink()  # as nothing listens there
    session = logging(tmp_path)
    for step in range(3):
        session.log(step=step, auc=0.5)
    await asyncio.to_thread(session.close)
    after = relay(tmp_path, frames)
    await after.open()
    await after.close()
    left = [decode(frame) for frame in frames.unconfirmed()]
    assert [frame.body["step"] for frame in left if frame.kind is Kind.SCALARS] == [0, 1, 2]
    assert left[0].kind is Kind.HELLO and left[-1].kind is Kind.GOODBYE
    assert not left_path(tmp_path / "t.sock").exists()
    assert len(Spool(tmp_path / "spool").load()) == len(left), "a killed agent has them, too"
    await killed.close()


def test_without_a_file_to_leave_figures_in_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = logging(tmp_path)
    session.log(step=1, auc=0.5)
    session.close()
    assert caplog.text.count("the last telemetry of this process is lost") == 1
    assert not left_path(tmp_path / "t.sock").exists()
