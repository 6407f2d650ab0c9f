"""A file as a stream of text: plain, compressed (`.gz`), through a command, which reads it decompressed.

Invariant: a stream that ends has ended well. A command's exit status and a compressed file's checksum are looked at
before the last line counts as read, and failing is an error whatever the policy for bad lines: what is missing is
unknown.
Linux; a command needs bash.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import select
import signal
import subprocess
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from penstock.dataset.faults import file_error

CAT = "cat"
"""The command that changes nothing; it is not started."""
_PIECE = 1 << 18
_TAIL_LINES = 8
_PATIENCE_S = 5.0


class Source:
    """An open stream: `descriptor`, and how it went. One thread's."""

    def __init__(self, path: str, command: str) -> None:
        """Open a file. Raises DataError if it cannot be opened."""
        self.path, self._command = path, command
        self._process: subprocess.Popen[bytes] | None = None
        self._inflating: _Inflating | None = None
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._listener: threading.Thread | None = None
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise file_error(path, f"cannot be opened: {error.strerror}") from error
        self._size = os.fstat(self.descriptor).st_size
        if path.endswith(".gz"):
            self._inflating = _Inflating(self.descriptor)
            self.descriptor = self._inflating.descriptor
        if command != CAT:
            self._start()

    @property
    def is_plain(self) -> bool:
        """Whether it is the file itself, any part of which can be read."""
        return self._process is None and self._inflating is None

    def skip(self, num_bytes: int) -> None:
        """Go on behind the first bytes. Raises DataError if there are not that many.

        One less is enough: a last line without a line end counts one.
        """
        if self.is_plain:
            if os.fstat(self.descriptor).st_size + 1 < num_bytes:
                raise file_error(self.path, f"is shorter than the {num_bytes} bytes that were read of it before")
            os.lseek(self.descriptor, num_bytes, os.SEEK_SET)
            return
        while num_bytes:
            got = len(os.read(self.descriptor, min(num_bytes, _PIECE)))
            if not got:
                self.check()
                if num_bytes == 1:
                    return
                raise file_error(self.path, f"gives {num_bytes} bytes less than were read of it before")
            num_bytes -= got

    def check(self) -> None:
        """After the end of the stream: raise DataError if what makes it has failed."""
        self._check_size()
        if self._process is not None:
            status = self._process.wait()
            if self._listener is not None:
                self._listener.join()
            if self._inflating is not None:
                self._inflating.check(self.path)
            if status:
                raise file_error(self.path, self._failure(status))
        elif self._inflating is not None:
            self._inflating.check(self.path)

    def check_after_fault(self) -> None:
        """After a line that could not be read: raise DataError if it was the last because what makes it has failed."""
        self._check_size()
        if self.is_plain or not select.select([self.descriptor], [], [], _PATIENCE_S)[0]:
            return
        if not os.read(self.descriptor, 1):
            self.check()

    def _check_size(self) -> None:
        if self.is_plain and os.fstat(self.descriptor).st_size < self._size:
            raise file_error(
                self.path, f"was cut short while it was read: it had {self._size} bytes when it was opened"
            )

    def interrupt(self) -> None:
        """End a command that still runs, so that whoever reads from it sees the end. Any thread."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # bash and what it started: a group of their own

    def close(self) -> None:
        """Close; end a command that still runs. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.interrupt()
        if self._process is not None:
            self._process.wait()
        if self._listener is not None:
            self._listener.join()
        if self._inflating is not None:
            self._inflating.close()

    def _start(self) -> None:
        given = self.descriptor
        script = f"set -o pipefail; ( {self._command} )"
        try:
            self._process = subprocess.Popen(
                ["bash", "-c", script],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise file_error(self.path, f"the pipe command needs bash, which cannot be started: {error}") from error
        finally:
            os.close(given)
        assert self._process.stdout is not None  # asked for
        self.descriptor = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        self._listener = threading.Thread(target=self._listen, name="penstock-pipe-errors", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process is not None and self._process.stderr is not None  # started with a pipe
        with self._process.stderr as errors:
            for line in errors:
                self._tail.append(line)

    def _failure(self, status: int) -> str:
        number = -status if status < 0 else status - 128
        how = f"exit status {status}"
        with contextlib.suppress(ValueError):
            how += f", signal {signal.Signals(number).name}" if number > 0 else ""
        said = b"".join(self._tail).decode("utf-8", "backslashreplace").strip()
        last = f"; its last output: {said}" if said else "; it wrote nothing to its standard error"
        return f"the pipe command {self._command!r} failed with {how}{last}"


class _Inflating:
    """A thread that decompresses a file into a pipe. zlib works without the interpreter lock."""

    def __init__(self, compressed: int) -> None:
        self.descriptor, self._to = os.pipe2(os.O_CLOEXEC)
        self._compressed = compressed
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-inflate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with os.fdopen(self._compressed, "rb") as file, gzip.GzipFile(fileobj=file) as plain:
                while piece := plain.read(_PIECE):
                    self._write(piece)
        except BrokenPipeError:
            pass  # nobody reads any more
        except (EOFError, OSError, zlib.error) as error:
            self._error = f"is no whole .gz file: {error}"
        finally:
            os.close(self._to)

    def _write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            view = view[os.write(self._to, view) :]

    def check(self, path: str) -> None:
        self._thread.join()
        if self._error is not None:
            raise file_error(path, self._error)

    def close(self) -> None:
        """Wait for the thread; its reader has closed."""
        self._thread.join()


@contextlib.contextmanager
def opened(path: str, command: str) -> Iterator[Source]:
    """Give a file's stream, and close it."""
    source = Source(path, command)
    try:
        yield source
    finally:
        source.close()


def size_of(path: str) -> int:
    """Return a file's bytes. Raises DataError if it is not there."""
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise file_error(path, f"cannot be opened: {error.strerror}") from error
