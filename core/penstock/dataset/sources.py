"""A file as a stream of text: plain, compressed (`.gz`), through a command, which reads it decompressed.

Invariant: a stream that ends has ended well. A command's exit status and a compressed file's checksum are looked at
before the last line counts as read, and failing is an error whatever the policy for bad lines: what is missing is
unknown.
Linux; a command needs bash. It and what it starts are a process group, which is ended with the stream; what has left
the group (setsid) is not waited for.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import select
import signal
import stat
import subprocess
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from penstock.dataset.faults import DataError, file_error
from penstock.process.group import ProcessGroup

CAT = "cat"
"""The command that changes nothing; it is not started."""
PARQUET = (".parquet", ".pq")
_ARROW = (".arrow", ".feather", ".ipc")
_PIECE = 1 << 18
_END_WAIT_S = 5.0


_TAIL_LINES = 8
_TRAILING_S = 5.0  # what a command has started may write a little longer than it, as in `tee >(gzip > copy.gz)`


class PipeCommand:
    """A command that runs. `descriptor`: its output, which its holder closes. `kill` is any thread's."""

    def __init__(self, path: str, command: str, given: int) -> None:
        """Start it with descriptor `given`, which is closed here, as its standard input. Raises DataError."""
        self._text = command
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        try:
            self._group = ProcessGroup(
                ["bash", "-c", f"set -o pipefail; ( {command}\n)"],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                with_parent=False,  # a trainer has threads
            )
        except OSError as error:
            raise file_error(path, f"the pipe command needs bash, which cannot be started: {error}") from error
        finally:
            os.close(given)
        assert self._group.stdout is not None  # asked for
        self.descriptor = os.dup(self._group.stdout.fileno())
        self._group.stdout.close()
        self._listener = threading.Thread(target=self._listen, name="penstock-pipe-errors", daemon=True)
        self._listener.start()

    def failure(self) -> str | None:
        """Wait for the end. Return how it has failed: status, signal, last output; None: it has not."""
        status = self._group.wait()
        self._listener.join(_TRAILING_S)
        self.kill()
        self._listener.join(_TRAILING_S)
        if status == 0:
            return None
        said = b"".join(self._tail).decode("utf-8", "backslashreplace").strip()
        last = f"; its last output: {said}" if said else "; it wrote nothing to its standard error"
        return f"the pipe command {self._text!r} failed with {_shown(status)}{last}"

    def kill(self) -> None:
        """End all of it, if it still runs."""
        self._group.signal_all(signal.SIGKILL)

    def close(self) -> None:
        """End it and forget it. Idempotent."""
        self.kill()
        self._group.reap()
        self._listener.join(_TRAILING_S)

    def _listen(self) -> None:
        assert self._group.stderr is not None  # started with a pipe
        with self._group.stderr as errors:
            for line in errors:
                self._tail.append(line)


def _shown(status: int) -> str:
    number = -status if status < 0 else status - 128
    how = f"exit status {status}"
    with contextlib.suppress(ValueError):
        how += f", signal {signal.Signals(number).name}" if number > 0 else ""
    if number == signal.SIGPIPE:
        how += " (a command like head that ends before it has read all ends the one before it)"
    return how


class Source:
    """An open stream: `descriptor`, and how it went. One thread's."""

    def __init__(self, path: str, command: str) -> None:
        """Open a file. Raises DataError if it cannot be opened, or is no file."""
        self.path = path
        self._command: PipeCommand | None = None
        self._inflating: _Inflating | None = None
        self.descriptor = _opened(os.devnull if is_remote(path) else path)
        self._size = os.fstat(self.descriptor).st_size
        if path.endswith(".gz") and not is_remote(path):
            self._inflating = _Inflating(self.descriptor)
            self.descriptor = self._inflating.descriptor
        if command != CAT:
            self._command = PipeCommand(path, command, self.descriptor)
            self.descriptor = self._command.descriptor

    @property
    def is_plain(self) -> bool:
        """Whether it is the file itself, any part of which can be read."""
        return self._command is None and self._inflating is None

    def expect(self, size: int) -> None:
        """Note how many bytes the file had before it was opened: one that has fewer by then was cut short, too."""
        self._size = max(self._size, size)

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
        failure = self._command.failure() if self._command is not None else None
        if self._inflating is not None:
            self._inflating.check(self.path)
        if failure is not None:
            raise file_error(self.path, failure)

    def check_after_fault(self) -> None:
        """After a line that could not be read: raise DataError if it was the last because what makes it has failed."""
        self._check_size()
        if self.is_plain:
            return
        readable = select.poll()  # unlike select, of any descriptor
        readable.register(self.descriptor, select.POLLIN)
        if readable.poll(_END_WAIT_S * 1000) and not os.read(self.descriptor, 1):
            self.check()

    def _check_size(self) -> None:
        if self.is_plain and os.fstat(self.descriptor).st_size < self._size:
            raise file_error(self.path, f"was cut short while it was read: it had {self._size} bytes before")

    def interrupt(self) -> None:
        """End a command that still runs, so that its reader sees the end. Any thread."""
        if self._command is not None:
            self._command.kill()

    def close(self) -> None:
        """Close; end a command that still runs. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._command is not None:
            self._command.close()
        if self._inflating is not None:
            self._inflating.close()


def _opened(path: str) -> int:
    """Open a regular file; anything else could block its reader for ever. Raises DataError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO waits for its writer without it
    except OSError as error:
        raise file_error(path, f"cannot be opened: {error.strerror}") from error
    try:
        if path != os.devnull:
            _check_regular(path, os.fstat(descriptor).st_mode)
    except DataError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise file_error(path, f"is {what}, not a file. What a command makes is read with dataset.set_pipe_command")


class _Inflating:
    """A thread that decompresses a file into a pipe. zlib works without the interpreter lock."""

    def __init__(self, compressed: int) -> None:
        self.descriptor, self._to = os.pipe2(os.O_CLOEXEC)
        self._compressed = compressed
        empty = os.fstat(compressed).st_size == 0  # which GzipFile takes for a whole file of nothing
        self._error: str | None = "is no whole .gz file: it is empty" if empty else None
        self._thread = threading.Thread(target=self._run, name="penstock-inflate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with os.fdopen(self._compressed, "rb") as file, gzip.GzipFile(fileobj=file) as plain:
                while piece := plain.read(_PIECE):
                    self._write(piece)
        except BrokenPipeError:
            pass  # the reader has ended
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


def is_remote(path: str) -> bool:
    """Whether a file is not in the file system, so that a command has to fetch it."""
    return path.startswith(("hdfs:", "afs:"))


def is_columnar(path: str) -> bool:
    """Whether a file is no text but columns (`arrow`), by its name."""
    return path.endswith(PARQUET + _ARROW)


def size_of(path: str) -> int:
    """Return a file's bytes; 0 of a remote one. Raises DataError if it is not there, or is no file."""
    if is_remote(path):
        return 0
    try:
        found = Path(path).stat()
    except OSError as error:
        raise file_error(path, f"cannot be opened: {error.strerror}") from error
    _check_regular(path, found.st_mode)
    return found.st_size
