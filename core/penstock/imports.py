"""Imports at the start of a process: what they make is neither looked at for garbage nor taken apart at the end.

Modules, classes and functions live as long as their process, and there are many: 500,000 objects with torch. Each full
collection of garbage visits all of them, several times while they are being imported, and twice more as the interpreter
ends. A block of `importing` collects none and then freezes what is there, which saves a third of the processor time of
a process that starts, and ends soon (`bench startup`, docs/performance.md).

Frozen objects are freed as ever when nothing refers to them. A cycle among those that were there before is no longer
found; `gc.unfreeze()` undoes that. Source: the manual of Python's `gc`, `freeze`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in the block, and freeze what there is after it, unless it raises.

    Within another such block, and where a caller has switched collections off, nothing is done.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def importing_torch() -> AbstractContextManager[None]:
    """As `importing`, in a process that has not imported torch yet: what a script has made later is not frozen."""
    return nullcontext() if "torch" in sys.modules else importing()
