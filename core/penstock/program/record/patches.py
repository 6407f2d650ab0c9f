"""Patches of torch: names that are replaced while a program is recorded, and put back when the last recording ends.

Outside of recordings torch is as it was; within them every patch passes on what has no Variable among its operands, so
that eager calls, of other threads too, give what they always gave. A name that was replaced by other code meanwhile
is left as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock.compat.torch import without_dynamo

Patch = tuple[Any, str, Callable[[Any], Any]]
"""Owner, name, and a function from what stands there to what replaces it."""


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace the names within the block."""
    made: list[tuple[Any, str, Any, Any]] = []
    try:
        for owner, name, replacement_of in patches:
            original = getattr(owner, name)
            made.append((owner, name, original, replacement_of(original)))
            setattr(owner, name, made[-1][3])
        yield
    finally:
        for owner, name, original, replacement in reversed(made):
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)


class Patches:
    """The patches of all recordings of the process: made by the first that is open, undone by the last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage within may end the recording of a Program
        self._patches: list[Patch] = []
        self._undo = ExitStack()
        self.num_open = 0
        self._are_made = False

    def add(self, *patches: Patch) -> None:
        """Make these in every recording, in one that is open already as well."""
        with self._lock:
            self._patches.extend(patches)
            if self.num_open:
                self._undo.enter_context(patched(patches))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Record within the block."""
        with self._lock:
            self.num_open += 1  # first: what is freed meanwhile may be the last other recording
            if not self._are_made:
                self._are_made = True
                self._undo.enter_context(without_dynamo())
                self._undo.enter_context(patched(self._patches))
        try:
            yield
        finally:
            with self._lock:
                self.num_open -= 1
                if not self.num_open:
                    self._are_made = False
                    self._undo.close()


class PatchCatcher(TorchFunctionMode):
    """Calls the patch of a function of torch that was looked up before the patch was made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = getattr(torch, getattr(func, "__name__", ""), None)
        chosen = now if now is not None and getattr(now, "__wrapped__", None) == func else func
        return chosen(*args, **(kwargs or {}))


patches = Patches()
