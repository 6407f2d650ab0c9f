"""A pipe command: bash, with all that it starts, between a file and whoever reads its output.

The processes are a group of their own, which is ended with the stream. Bash is reaped last: until then its number,
which is the group's, is nobody else's when the group is signalled. What has left the group (setsid) is not waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque

from penstock.dataset.faults import file_error

_TAIL_LINES = 8
_PATIENCE_S = 5.0  # what a command has started may write a little longer than it, as in `tee >(gzip > copy.gz)`


class PipeCommand:
    """A command that runs. `descriptor`: its output; whoever has this closes it. `kill` is any thread's."""

    def __init__(self, path: str, command: str, given: int) -> None:
        """Start it with descriptor `given`, which is closed here, as its standard input. Raises DataError."""
        self._text = command
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._lock = threading.Lock()
        self._reaped = False
        try:
            self._process = subprocess.Popen(
                ["bash", "-c", f"set -o pipefail; ( {command}\n)"],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise file_error(path, f"the pipe command needs bash, which cannot be started: {error}") from error
        finally:
            os.close(given)
        assert self._process.stdout is not None  # asked for
        self.descriptor = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        self._listener = threading.Thread(target=self._listen, name="penstock-pipe-errors", daemon=True)
        self._listener.start()

    def failure(self) -> str | None:
        """Wait for the end. Return how it has failed: status, signal, last output; None: it has not."""
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert seen is not None  # no WNOHANG
        self._listener.join(_PATIENCE_S)
        self.kill()
        self._listener.join(_PATIENCE_S)
        if seen.si_status == 0:
            return None
        status = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        said = b"".join(self._tail).decode("utf-8", "backslashreplace").strip()
        last = f"; its last output: {said}" if said else "; it wrote nothing to its standard error"
        return f"the pipe command {self._text!r} failed with {_shown(status)}{last}"

    def kill(self) -> None:
        """End all of it, if it still runs."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and forget it. Idempotent."""
        self.kill()
        with self._lock:
            self._process.wait()
            self._reaped = True
        self._listener.join(_PATIENCE_S)

    def _listen(self) -> None:
        assert self._process.stderr is not None  # started with a pipe
        with self._process.stderr as errors:
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
