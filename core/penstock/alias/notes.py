"""A note under errors of newer libraries that scripts of Fluid's time run into."""

from __future__ import annotations

import sys

_OF_NUMPY = "only 0-dimensional arrays can be converted to Python scalars"
NOTE = (
    "numpy 2.4 refuses an array of one element where a number is expected, earlier releases convert it. What "
    'Executor.run returns is converted; for arrays of the script\'s own install "numpy<2.4", or write value.item()'
)


def note(error: BaseException) -> None:
    """Add what to do to an error that has a known cause outside the script."""
    if isinstance(error, TypeError) and str(error) == _OF_NUMPY:
        error.add_note(NOTE)


def under_tracebacks() -> None:
    """Let the tracebacks that end this process have the notes."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        note(error)
        before(kind, error, trace)  # type: ignore[arg-type]  # a traceback

    sys.excepthook = hook
