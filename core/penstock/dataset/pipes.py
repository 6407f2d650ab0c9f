"""A pipe command: bash, with all that it starts, between a file and the reader of its output.

The processes are a group of their own, which is ended with the stream. What has left the group (setsid) is not waited
for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque

from penstock.dataset.faults import file_error
from penstock.process.group import ProcessGroup

_TAIL_LINES = 8
_PATIENCE_S = 5.0  # what a command has started may write a little longer than it, as in `tee >(gzip > copy.gz)`


class PipeCommand:
    """A command that runs. `descriptor`: its output; whoever has this closes it. `kill` is any thread's."""

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
        self._listener.join(_PATIENCE_S)
        self.kill()
        self._listener.join(_PATIENCE_S)
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
        self._listener.join(_PATIENCE_S)

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
