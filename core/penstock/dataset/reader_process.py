"""A generator of batches in a process of its own, whose end is never waited for without sight.

The process is forked, so that the generator may be a closure; it must not use torch, whose threads a fork does not
have. What it raises is raised here; if it ends without a last word (killed, or out of memory), that is raised, too.
It ends with this process: a write into the closed pipe fails.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from penstock.errors import Unavailable

_BATCH, _ERROR, _END = range(3)
_END_S = 5.0  # how long a killed process may take to be reaped


def from_process(reader: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Return what `reader()` gives in a forked process. Raises what it raises, and Unavailable if the process dies."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_give, args=(reader, receiving, sending), daemon=True, name="penstock-reader")
    process.start()
    sending.close()
    try:
        while True:
            kind, value = _taken(receiving, process)
            if kind == _END:
                return
            if kind == _ERROR:
                raise value
            yield value
    finally:
        receiving.close()
        process.kill()
        process.join(_END_S)


def _taken(receiving: Connection, process: Any) -> tuple[int, Any]:
    try:
        kind, value = receiving.recv()
    except (EOFError, OSError):
        process.join(_END_S)
        raise Unavailable(
            f"the process of a DataLoader's generator (pid {process.pid}) ended with status {process.exitcode} before "
            "its last batch; a negative status is the signal that ended it (-9: often memory). See its output above"
        ) from None
    return kind, value


def _give(reader: Callable[[], Iterable[Any]], receiving: Connection, sending: Connection) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # handlers of the process that was forked are not for this one
    receiving.close()
    try:
        for batch in reader():
            sending.send((_BATCH, batch))
        sending.send((_END, None))
    except BrokenPipeError:
        return  # the rest is not wanted
    except BaseException as error:  # noqa: BLE001 - the process's boundary: the other side raises it
        sending.send((_ERROR, _travelling(error)))


def _travelling(error: BaseException) -> BaseException:
    """Return the error, or one with its text if it does not pickle."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was pickled one call before
    except Exception:  # noqa: BLE001 - whatever keeps it from travelling
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
