"""Log lines of the library: loggers named after modules, written to stderr where an application configures no logging.

A module logs to `logging.getLogger(__name__)`: INFO is progress, WARNING what a user should change, ERROR what failed.
A record that another handler takes is left to it, so that an application that configures logging finds none written
twice.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref

_NAME = "penstock.fallback"
_lock = threading.RLock()  # a collection of garbage within may end an owner that logs
_warned: dict[int, set[str]] = {}  # id of an owner, as long as it lives -> subjects


class FallbackHandler(logging.Handler):
    """Writes `penstock: <message>` to the current `sys.stderr`, as `logging.lastResort` does, but from INFO on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record that no other handler takes."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(other.name != _NAME and record.levelno >= other.level for other in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        try:
            sys.stderr.write(f"penstock: {self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as in every handler: a line that cannot be written ends no training
            self.handleError(record)


def set_up() -> None:
    """Give the logger `penstock` its one handler, and the level INFO unless the application has set one."""
    logger, handler = logging.getLogger("penstock"), FallbackHandler()
    handler.name = _NAME
    logger.handlers = [handler, *(other for other in logger.handlers if other.name != _NAME)]
    logger.setLevel(logger.level or logging.INFO)


def warn_once(logger: logging.Logger, text: str, owner: object = None, *, about: str = "") -> None:
    """Log a warning, unless one with this text was logged for `owner` before; None: in this process. Thread-safe.

    `owner`: a program, strategy, client, …; it is forgotten at its end. `about`: the subject, if its texts differ.
    """
    if is_first(logger if owner is None else owner, about or text):
        logger.warning(text, stacklevel=2)


def is_first(owner: object, about: str) -> bool:
    """Return whether this is the first call for `owner`, as long as it lives, with this subject. Thread-safe."""
    with _lock:
        if id(owner) not in _warned:
            _warned[id(owner)] = set()
            weakref.finalize(owner, _warned.pop, id(owner), None).atexit = False
        is_new = about not in _warned[id(owner)]
        _warned[id(owner)].add(about)
    return is_new
