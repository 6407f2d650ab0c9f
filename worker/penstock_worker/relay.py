"""The telemetry socket of one replica: length-prefixed frames in, nothing back.

Only the 48-byte header of a frame is read. A frame of another stream or epoch is refused and counted; bytes that are no
frame end that connection. The trainer is never made to wait: while the buffer is full nothing is read, the kernel's
socket buffer fills, and the trainer drops by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PeerError
from penstock.protocol.frames import MAX_FRAME_BYTES, decode_header
from penstock_worker.buffer import FrameBuffer

LENGTH = struct.Struct("<I")
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes, its end included
FULL_WAIT_S = 0.05
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


class Relay:
    """Listens on `path` and fills `frames`. `wake` is called when there is something to send."""

    def __init__(self, path: Path, frames: FrameBuffer, *, stream: int, epoch: int, wake: Callable[[], None]) -> None:
        self.path = path
        self.refused = 0
        self._frames = frames
        self._stream = stream
        self._epoch = epoch
        self._wake = wake
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen, in place of a former agent. Raises OSError, also if the folder is another user's."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.path.parent} belongs to another user")
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_FRAME_BYTES)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise PeerError(f"a telemetry frame of {size} bytes is larger than {MAX_FRAME_BYTES}")
                self._take(await reader.readexactly(size))
                while self._frames.full:  # noqa: ASYNC110 the buffer knows no event loop, and this is rare
                    await asyncio.sleep(FULL_WAIT_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the trainer has closed, or has ended
        except PeerError as error:
            _log.warning("telemetry connection on %s closed: %s", self.path, error)
        finally:
            writer.close()

    def _take(self, payload: bytes) -> None:
        header = decode_header(payload)
        if header.stream != self._stream or header.epoch != self._epoch:
            self.refused += 1
            return
        self._frames.push(header, payload)
        self._wake()
