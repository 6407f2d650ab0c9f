"""Exit codes of the `penstock` command, documented in docs/cli.md."""

from __future__ import annotations

from enum import IntEnum

from penstock.errors import PenstockError, Unavailable


class Exit(IntEnum):
    """Meaning of the exit code."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    AUTH = 4
    CONFLICT = 5
    UNAVAILABLE = 6
    TIMEOUT = 7


class TimedOut(Unavailable):
    """What was waited for did not come in the time given."""

    code = "timeout"


_BY_CODE = {
    "not_found": Exit.NOT_FOUND,
    "auth_error": Exit.AUTH,
    "conflict": Exit.CONFLICT,
    "timeout": Exit.TIMEOUT,
    "unavailable": Exit.UNAVAILABLE,
    "peer_error": Exit.UNAVAILABLE,
}


def exit_of(error: PenstockError) -> Exit:
    """Return the exit code for an error. Errors differ by their machine code, so that no client is loaded."""
    return _BY_CODE.get(error.code, Exit.USAGE)
