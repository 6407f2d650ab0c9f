"""Memory that two processes share: a memfd, passed over a Unix socket, which vanishes with the last of them.

The maker seals it against shrinking, and the receiver insists on the seal: memory that shrinks under a reader kills it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

from penstock.errors import PeerError
from penstock.machine.capability import capability

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
        """Unmap and close. Views that somebody still holds keep the mapping (not the descriptor) alive."""
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
