"""What a peer's process says, line by line; never waited for without a limit."""

from __future__ import annotations

import os
import selectors
import time
from typing import IO


class LineReader:
    """Lines of a pipe with this reader alone."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._number, self._unread = pipe.fileno(), b""

    def line(self, limit_s: float) -> bytes:
        """Return the next line; b"" at the end. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._number, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"did not answer within {limit_s:.0f} s")
                got = os.read(self._number, 1 << 16)
                if not got:
                    return b""
                self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return line
