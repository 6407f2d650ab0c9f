"""The telemetry socket of one replica: length-prefixed frames in, the number of the newest frame on disk back.

Only the 48-byte header of a frame is read. A frame of another stream or epoch is refused and counted; bytes that are no
frame end that connection. The trainer is never made to wait: while the buffer is full nothing is read, the kernel's
socket buffer fills, and the trainer drops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PeerError
from penstock.process.private import read_private, read_regular, write_private
from penstock.protocol import preemption, recording
from penstock.protocol.contract import MAX_LEFT_BYTES, left_path
from penstock.protocol.frames import MAX_FRAME_BYTES, SPOOLED, decode_header
from penstock_worker.accounts import WAY, Account
from penstock_worker.buffer import AGAIN, FrameBuffer
from penstock_worker.spool import Spool

LENGTH = struct.Struct("<I")
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes, its end included
FULL_WAIT_S = 0.05
BACKLOG = 100
ACCEPT_AGAIN_S = 1.0
DRAIN_S = 2.0
_log = logging.getLogger(__name__)


def socket_path(folder: Path) -> Path:
    """Return where the telemetry socket of `folder` lies: in it, or below /tmp if that path is too long.

    The place depends on the folder alone, so that a restarted agent listens where the trainer calls.
    """
    path = folder / "t.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / f"{name}.sock"


def _answer(connection: socket.socket, seq: int) -> None:
    """Send the number of a frame that is on disk. A process that reads none, or has ended, gets none.

    Not by the stream: a write that fails would end it, with the frames that were not read yet.
    """
    with contextlib.suppress(OSError):
        connection.send(SPOOLED.pack(seq), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class Relay:
    """Listens on `path` and fills `frames`. `wake` is called when there is something to send.

    Accepts by itself: `asyncio.start_unix_server` drops what is in the backlog when it closes, and does not show which
    connections are still read.
    """

    def __init__(
        self, path: Path, frames: FrameBuffer, spool: Spool, *, stream: int, epoch: int, wake: Callable[[], None]
    ) -> None:
        self.path = path
        self.refused = 0
        self._complete = True
        self._frames = frames
        self._spool = spool
        self._stream = stream
        self._epoch = epoch
        self._wake = wake
        self.account: Account | None = None  # as whom the processes run that send here; None: as this one
        self._listener: socket.socket | None = None
        self._reading: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen, in place of a former agent. Raises OSError, also if the folder is another user's."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.path.parent} belongs to another user")
        if self.account is not None:
            self.path.parent.chmod(WAY)
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self.path))
            os.chmod(self.path, 0o600)
            self._give(self.path)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._resume(listener)
        try:
            os.close(os.open(left_path(self.path), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            self._give(left_path(self.path))
        except OSError as error:  # what a process could leave is lost if it ends while there is no agent
            _log.warning("%s could not be made: %s", left_path(self.path), error)

    async def close(self) -> None:
        """Read what was sent until now, then stop listening and remove the socket.

        Waits for the ends of all connections, at most `DRAIN_S`: those of processes that have ended are there already.
        Does not wait while the buffer is full; what is left is read when there is room.
        """
        if self._listener is not None:
            self._accept(self._listener)
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    while self._reading and not self._frames.full:
                        await asyncio.wait(self._reading, timeout=FULL_WAIT_S)
            self._take_left()
        finally:
            left_path(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            recording.request_path(self.path).unlink(missing_ok=True)

    def _take_left(self) -> None:
        """Take what processes have left that ended while there was no agent."""
        path, at = left_path(self.path), 0
        try:
            content = read_regular(path, MAX_LEFT_BYTES)
            while at + LENGTH.size <= len(content):
                (size,) = LENGTH.unpack_from(content, at)
                at += LENGTH.size + size
                if at > len(content):
                    break  # torn
                self._take(content[at - size : at])
        except (OSError, PeerError) as error:
            _log.warning("%s was not read to its end: %s", path, error)

    def record_in_full(self, seconds: int) -> None:
        """Have the processes that send here send every step whole for some seconds; a longer request stays."""
        if self._listener is None:
            return  # closed: nothing would remove the file
        path, now = recording.request_path(self.path), time.monotonic()
        try:
            write_private(path, recording.encode(max(now + seconds, recording.until(read_private(path), now))))
            self._give(path)
        except OSError as error:
            _log.warning("recording in full was not asked for on %s: %s", self.path, error)

    @property
    def notice_path(self) -> Path:
        """Where the notice of a preemption to the processes that send here lies, and their answer to it."""
        return preemption.notice_path(self.path)

    def give_notice(self, content: bytes) -> None:
        """Ask the processes that send here to save and to end. Raises OSError."""
        write_private(self.notice_path, content)
        self._give(self.notice_path)

    def _give(self, path: Path) -> None:
        """Let who runs as `account` use a file in a folder that only this process writes to. Raises OSError."""
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid, follow_symlinks=False)

    def abandon(self) -> None:
        """Close the connections that `close` has not seen the ends of, and remove what it leaves."""
        with contextlib.suppress(OSError):  # the job may have made something else of it
            self.notice_path.unlink()
        for task in self._reading:
            task.cancel()

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is free
                _log.warning("telemetry connection on %s not accepted: %s", self.path, error)
                loop.remove_reader(listener)
                loop.call_later(ACCEPT_AGAIN_S, self._resume, listener)
                return
            task = loop.create_task(self._serve(connection))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_FRAME_BYTES)
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise PeerError(f"a telemetry frame of {size} bytes is larger than {MAX_FRAME_BYTES}")
                seq = self._take(await reader.readexactly(size))
                if seq is not None:
                    _answer(connection, seq)
                while self._frames.full:  # noqa: ASYNC110 the buffer knows no event loop, and this is rare
                    await asyncio.sleep(FULL_WAIT_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the trainer has closed, or has ended
        except PeerError as error:
            _log.warning("telemetry connection on %s closed: %s", self.path, error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def recall(self) -> None:
        """Take what a former agent of this replica had not sent, or was not confirmed to have sent."""
        for payload in self._spool.load():
            header = decode_header(payload)
            self._frames.push(header, payload)

    def _take(self, payload: bytes) -> int | None:
        """Take a frame; return its number if its sender may forget it and all before it."""
        header = decode_header(payload)
        if header.stream != self._stream or header.epoch != self._epoch:
            self.refused += 1
            return None
        self._frames.push(header, payload)
        self._wake()
        if header.kind not in AGAIN:
            return None
        if not self._spool.append(payload):
            self._complete = False  # what its sender keeps begins with this one
        return header.seq if self._complete else None
