"""Outcome of this process, as far as it is known before the end, for GOODBYE.

CPython keeps an uncaught exception in `sys.last_value`, but nothing of a `SystemExit`. So `sys.exit` is
wrapped, and whether its exception was caught after all is read from the outermost frame: one that ended by itself has
stopped at its return. Not seen: a non-zero `raise SystemExit(3)` that does not go through `sys.exit`.
"""

from __future__ import annotations

import dis
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

MAX_ERROR = 500  # letters of an error's text
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ends. `error`: its exception or exit code in words; empty if it did not fail."""

    error: str = ""

    @property
    def failed(self) -> bool:
        """True if there is an error."""
        return bool(self.error)

    def body(self) -> dict[str, Any]:
        """Return the body of GOODBYE."""
        return {"failed": self.failed, "error": self.error}


def decide(*, uncaught: BaseException | None, exit_code: object, returned: bool) -> Outcome:
    """Return the outcome. `exit_code`: last argument of `sys.exit`; `returned`: the program ran to its end after it."""
    if uncaught is not None:
        return Outcome(_words(uncaught))
    if returned or exit_code is None or exit_code == 0:
        return Outcome()
    return Outcome(f"exit code {exit_code}" if isinstance(exit_code, int) else f"exit: {_text(exit_code)}")


class ExitWatch:
    """Knows how the program ends, once `install` was called. Everything else about ending stays as it was."""

    def __init__(self) -> None:
        self._outermost: FrameType | None = None
        self._exit_code: object = None

    def install(self) -> None:
        """Wrap `sys.exit`. The outermost frame is known only if the main thread calls this."""
        self._outermost = _outermost() if _in_main_thread() else None
        before = sys.exit

        def leave(status: Any = None, /) -> NoReturn:
            if _in_main_thread():  # elsewhere it ends that thread alone
                self._exit_code = status
            before(status)

        sys.exit = leave

    def outcome(self) -> Outcome:
        """Return how the program ends: exact at the interpreter's exit, and what is known so far before."""
        return decide(
            uncaught=getattr(sys, "last_value", None), exit_code=self._exit_code, returned=_returned(self._outermost)
        )


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _outermost() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _returned(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _RETURNS


def _words(error: BaseException) -> str:
    text = _text(error)
    return f"{type(error).__name__}: {text}"[:MAX_ERROR] if text else type(error).__name__


def _text(value: object) -> str:
    """Return `value` in words that a peer can read. A broken `__str__` must not keep the goodbye from being said."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - the author of an exception may do anything
        text = f"(its text raised {type(error).__name__})"
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")[:MAX_ERROR]
