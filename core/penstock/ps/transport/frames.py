"""Frames on a Unix socket: a fixed prefix, the head of a message, and its body in shared memory or behind it.

prefix   magic, flags, length of the head, length of the body
SHARED   the body lies at the start of the sender's region; else it follows on the socket
REGION   a descriptor comes with the prefix: from now on the sender's region
A frame is received whole or the connection is broken: there is no resynchronisation within a stream. A region is a
memfd, which vanishes with the last process that maps it. Its maker seals it against shrinking, and the receiver insists
on the seal: memory that shrinks under a reader kills it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import functools
import logging
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from penstock.errors import PeerError, Unavailable
from penstock.logger import warn_once
from penstock.machine.capability import capability
from penstock.native.openssl import SecureSocket
from penstock.ps.wire import MAX_HEAD_BYTES, Message, decode, encode

_log = logging.getLogger(__name__)
_LARGE = 256 << 10  # bytes
_STEP = 1 << 20  # bytes; regions grow in whole ones
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Region:
    """A mapped memfd. `view`: all of it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._map = mmap.mmap(descriptor, size)
        self.descriptor = descriptor
        self.view = memoryview(self._map)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.view)

    def write(self, parts: Sequence[memoryview | bytes]) -> int:
        """Put parts one after another at the start; return where they end."""
        end = 0
        for part in parts:
            if len(part) < _LARGE:
                self.view[end : end + len(part)] = part
            else:  # numpy lets other threads run while it copies
                room = np.frombuffer(self.view, np.uint8, len(part), end)
                np.copyto(room, np.frombuffer(part, np.uint8))
            end += len(part)
        return end

    def close(self) -> None:
        """Unmap and close. Views that are still held keep the mapping (not the descriptor) alive."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a message's tensors still look at it; it goes with them


def make_region(at_least: int) -> Region:
    """Make a region whose pages exist, so that writing to it cannot fail later.

    Raises OSError when memory is short, or cannot be sealed: then the body of a message goes through the socket.
    """
    if not capability("memfd").present:
        raise OSError(errno.ENOSYS, f"no memory that can be sealed: {capability('memfd').detail}")
    size = -(-at_least // _STEP) * _STEP
    descriptor = os.memfd_create("penstock-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return Region(descriptor, size)
    except (OSError, ValueError):
        os.close(descriptor)
        raise


def receive_region(descriptor: int) -> Region:
    """Map a region that another process made. Takes the descriptor over. Raises PeerError if it could shrink."""
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PeerError("the memory that came over the socket is not sealed against shrinking")
        return Region(descriptor, os.fstat(descriptor).st_size)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise PeerError(f"the descriptor that came over the socket cannot be mapped: {error}") from error
    except PeerError:
        os.close(descriptor)
        raise


_PREFIX = struct.Struct("<4sIIQ")
_MAGIC = b"PSL1"
_TLS = (b"\x15\x03", b"\x16\x03")  # an alert or a handshake
_SHARED, _REGION = 1, 2
_INLINE_BELOW = 16 << 10  # bytes: a copy through the socket costs less than looking at another page
MAX_BODY_BYTES = 1 << 36
_CHUNK = 2 << 20
_AT_ONCE = 16 << 20
_MOST = 32 << 10  # bytes of a frame that are received at once: a head and a body that follows it
_T = TypeVar("_T")
_LONGEST_MS = (1 << 31) - 1  # that poll takes


Connection = int | SecureSocket
"""A connection that has left its line: a descriptor, or one with TLS."""


def close_connection(connection: Connection) -> None:
    """Close a connection that nothing uses."""
    if isinstance(connection, int):
        os.close(connection)
    else:
        connection.shut_down()  # its descriptor is closed with the object


class Closed(Unavailable):
    """The other side has closed the connection."""


class Line:
    """One connection: frames out through an own region, frames in through the other side's. One user at a time.

    Received tensors look at shared memory: they are valid until the next frame is received. `shares`: over a Unix
    socket; else bodies go through the socket.
    """

    def __init__(self, connection: socket.socket, *, shares: bool = True) -> None:
        self._shares = shares
        connection.setblocking(True)  # for who takes it over: calls here do not block
        self._socket = connection
        self._ready = {event: select.poll() for event in (select.POLLIN, select.POLLOUT)}
        for event, poll in self._ready.items():
            poll.register(connection, event)
        self._mine: Region | None = None
        self._theirs: Region | None = None

    def send(
        self, message: Message, deadline: float, *, reading: contextlib.AbstractContextManager[None] | None = None
    ) -> None:
        """Send one frame. `deadline`: of `time.monotonic()`. Raises Unavailable.

        `reading` is held while the tensors are read, which is over before anything waits for the other side.
        """
        head, parts = encode(message)
        length = sum(len(p) for p in parts)
        with contextlib.nullcontext() if reading is None else reading:
            flags, descriptors = self._place(parts, length)
            if reading is not None and not flags & _SHARED:
                parts = [bytes(p) for p in parts]
        # All at once: the other side would wake up for a prefix, and have to wait again.
        start = _PREFIX.pack(_MAGIC, flags, len(head), length) + head
        if length < _INLINE_BELOW:
            start, parts = b"".join([start, *parts]), []
        try:
            self._write(start, [] if flags & _SHARED else parts, descriptors, deadline)
        except TimeoutError as error:
            raise Unavailable("the other side did not take the message within the deadline") from error
        except OSError as error:
            raise Closed(f"the connection broke while sending: {error}") from error

    def _write(
        self, start: bytes, parts: Sequence[memoryview | bytes], descriptors: Sequence[int], deadline: float
    ) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        sent = self._when_ready(
            select.POLLOUT, deadline, lambda: self._socket.sendmsg([start], ancillary, socket.MSG_DONTWAIT)
        )
        for part in (start[sent:], *parts):
            left = memoryview(part)
            while left:
                count = self._when_ready(
                    select.POLLOUT, deadline, functools.partial(self._socket.send, left, socket.MSG_DONTWAIT)
                )
                left = left[count:]

    def _place(self, parts: Sequence[memoryview | bytes], length: int) -> tuple[int, list[int]]:
        """Put the body into shared memory if that pays and is possible; return (flags, descriptors to pass)."""
        if length < _INLINE_BELOW or not self._shares:
            return 0, []
        fresh = self._mine is None or self._mine.size < length
        if fresh:
            try:
                larger = make_region(length)
            except OSError as error:
                why = error.strerror or str(error)
                warn_once(_log, f"bodies of messages go through the socket, since shared memory cannot be had: {why}")
                return 0, []
            if self._mine is not None:
                self._mine.close()
            self._mine = larger
        assert self._mine is not None
        self._mine.write(parts)
        return (_SHARED | _REGION, [self._mine.descriptor]) if fresh else (_SHARED, [])

    def receive(self, deadline: float, *, max_body: int = MAX_BODY_BYTES) -> Message:
        """Receive one frame. `max_body`: 0 takes no region either.

        Raises Unavailable (no frame in time), Closed, PeerError (not a frame, or too large).
        """
        try:
            head, behind, flags, length = self._head(deadline, max_body)
            if not flags & _SHARED:
                return decode(head, memoryview(self._exactly(length, deadline, behind)))
        except TimeoutError as error:
            raise Unavailable("no answer within the deadline") from error
        except OSError as error:
            raise Closed(f"the connection broke while receiving: {error}") from error
        if self._theirs is None or length > self._theirs.size:
            raise PeerError(f"a frame names {length} bytes of shared memory that it has not passed")
        return decode(head, self._theirs.view[:length])

    def _head(self, deadline: float, max_body: int) -> tuple[bytes, bytes, int, int]:
        """Receive all but the body, and the region that comes with it.

        Return (head, what has come of the body, flags, length of the body).
        """
        start, descriptors = self._start(deadline)
        with contextlib.ExitStack() as received:
            for descriptor in descriptors:
                received.callback(os.close, descriptor)
            if not start:
                raise Closed("the other side has closed the connection")
            if start[:2] in _TLS:
                raise PeerError("the other side speaks TLS, and this side does not")
            start = bytes(self._exactly(max(_PREFIX.size, len(start)), deadline, start))
            magic, flags, head_length, length = _PREFIX.unpack_from(start)
            if magic != _MAGIC or head_length > MAX_HEAD_BYTES + 8:
                raise PeerError("what came over the socket is no frame")
            if length > max_body or (flags & _REGION and not max_body):
                raise PeerError(f"a frame has a body of {length} bytes; at most {max_body} are taken here")
            if bool(flags & _REGION) != (len(descriptors) == 1):
                raise PeerError("a frame's descriptors are not those that it announces")
            end = _PREFIX.size + head_length
            start = bytes(self._exactly(max(end, len(start)), deadline, start))
            if len(start) - end > (0 if flags & _SHARED else length):
                raise PeerError("more came over the socket than one frame")
            received.pop_all()
        if descriptors:
            region = receive_region(descriptors[0])
            if self._theirs is not None:
                self._theirs.close()
            self._theirs = region
        return start[_PREFIX.size : end], start[end:], flags, length

    def _start(self, deadline: float) -> tuple[bytes, list[int]]:
        """Return what has come of a frame, most often all of it, and the descriptors that came with it."""
        descriptors = array.array("i")
        room = socket.CMSG_LEN(descriptors.itemsize)
        data, ancillary, _, _ = self._when_ready(
            select.POLLIN, deadline, lambda: self._socket.recvmsg(_MOST, room, socket.MSG_DONTWAIT)
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
        return data, list(descriptors)

    def _exactly(self, length: int, deadline: float, start: bytes) -> bytes | bytearray:
        """Return `length` bytes, of which `start` came already."""
        if len(start) == length:
            return start
        # A length is only a claim: memory is taken as bytes come.
        data, got = bytearray(min(length, max(_AT_ONCE, len(start)))), len(start)
        data[:got] = start
        while got < length:
            if got == len(data):
                data.extend(bytes(min(got, length - got)))
            with memoryview(data) as view:
                count = self._read_into(view[got : got + _CHUNK], deadline)
            if not count:
                raise Closed("the other side has closed the connection within a frame")
            got += count
        return data

    def _read_into(self, to: memoryview, deadline: float) -> int:
        return self._when_ready(select.POLLIN, deadline, lambda: self._socket.recv_into(to, flags=socket.MSG_DONTWAIT))

    def _when_ready(self, event: int, deadline: float, call: Callable[[], _T]) -> _T:
        """Return what the call returns once the socket is ready for it. Raises TimeoutError at the deadline.

        Signals do not put it off: a wait that is interrupted begins again with the time that is left, while a limit
        of the socket's own, SO_RCVTIMEO, would begin anew.
        """
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable("the deadline has passed")
            if not self._ready[event].poll(min(left * 1000, _LONGEST_MS)):
                raise TimeoutError
            with contextlib.suppress(BlockingIOError):  # another was quicker, or the kernel thought better of it
                return call()

    def stop_receiving(self) -> None:
        """End receiving, from another thread: a wait for a frame ends with Closed. Frames may still be sent."""
        with contextlib.suppress(OSError):  # broken already
            self._socket.shutdown(socket.SHUT_RD)

    def shut_down(self) -> None:
        """Break the connection from another thread: its user's call ends with Closed."""
        with contextlib.suppress(OSError):  # broken already
            self._socket.shutdown(socket.SHUT_RDWR)

    def open(self, deadline: float) -> None:
        """Do what precedes the first frame: here nothing. Raises Unavailable, PeerError."""

    def detach(self) -> Connection:
        """Return the connection's descriptor, which is the caller's now, and give the memory back."""
        descriptor = self._socket.detach()
        self.close()
        return descriptor

    def close(self) -> None:
        """Close the connection and give the memory back."""
        self._socket.close()
        for region in (self._mine, self._theirs):
            if region is not None:
                region.close()
        self._mine = self._theirs = None
