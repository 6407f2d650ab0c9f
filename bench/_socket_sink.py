"""The other end of a telemetry session: a process that accepts at a Unix socket, reads and forgets, as a fast agent."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 60
CHUNK_BYTES = 1 << 18


def serve(path: str, parent: Connection) -> None:
    """Accept until the parent closes its end of the pipe, be it because it died."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    parent.send("ready")
    parent.poll(None)


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_read, args=(connection,), daemon=True).start()


def _read(connection: socket.socket) -> None:
    with connection:
        while connection.recv(CHUNK_BYTES):
            pass


class SocketSink:
    """The process and its socket's `path`. Enter to start it; it ends on any way out, and with its parent."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name) / "telemetry")

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(self.path, theirs), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_TIMEOUT_S):
            self._stop()
            raise RuntimeError(f"the socket's process is not ready after {START_TIMEOUT_S} s")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()
        self._folder.cleanup()
