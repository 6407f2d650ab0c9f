"""Running a pserver program: its storage, handed to the server, which answers trainers until all have left.

Imported when an Executor meets such a program, so that others load no server.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from penstock.program.program import Program
from penstock.ps.durability.server_snapshots import snapshots
from penstock.ps.server import serve
from penstock.ps.settings import ServerRuntimeConfig, ServerSettings, handover_dir, handover_path
from penstock.scope import Scope
from penstock.serving.storage import ProgramStorage, storage_to_serve

_log = logging.getLogger(__name__)
_TERMINATED = 128 + signal.SIGTERM  # as a shell reports it


def serve_program(program: Program, scope: Scope) -> None:
    """Serve until every trainer has left, with FLAGS_rpc_send_thread_num threads; see `serve_storage`."""
    most = ServerRuntimeConfig().num_updates_at_once()
    serve_storage(storage_to_serve(program, scope), scope, num_threads=most)


def serve_storage(storage: ProgramStorage, scope: Scope, *, num_threads: int | None = None) -> None:
    """Serve until every trainer has left. `num_threads`: that update, if not as many as by default.

    Ctrl-C and SIGTERM end it too, after the server has closed: KeyboardInterrupt, SystemExit(143). It leaves its state
    for the next start then, see `ps.handover`. Raises SpecError for a setting in the environment, Unavailable where it
    cannot listen or trainers do not come.
    """
    settings = settings_of(storage)
    settings = replace(settings, handover_dir=handover_dir(settings.endpoint))
    warn_of_unread(settings)
    if num_threads is not None:
        settings = replace(settings, num_threads=num_threads)
        storage.limit_threads(num_threads)
    try:
        with _terminated_as_interrupted():
            serve(settings, storage)
    finally:
        scope.written_by(storage)


def warn_of_unread(settings: ServerSettings) -> None:
    """Warn of what a server without a configured folder has left at this endpoint, if one is configured now."""
    left = handover_path(settings.endpoint)
    if settings.folder is not None and snapshots(left):
        _log.warning(
            "%s is not read, because PENSTOCK_PS_STATE_DIR=%s is set. A server that was stopped without that variable "
            "has left it: to go on from it, unset the variable; else remove the folder", left, settings.state_dir,
        )  # fmt: skip


def settings_of(storage: ProgramStorage) -> ServerSettings:
    """Return the settings of a server of this storage: of its program and the environment. Raises SpecError."""
    own = storage.description
    return ServerSettings.from_environ(
        endpoint=own.endpoint, index=own.index, fanin=own.fanin, mode=own.mode,
        num_servers=len(own.endpoints), restored=storage.restored,
    )  # fmt: skip


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the stack, as Ctrl-C does; Python's default ends the process in the middle of a write."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's business, and it is not waiting here
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield  # the script has its own way to end
        return

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(_TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
