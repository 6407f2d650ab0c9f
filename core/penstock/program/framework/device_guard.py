"""`fluid.device_guard`: where Fluid's operators are asked to run on another device than their program's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from penstock.errors import ArgumentError
from penstock.logger import warn_once

_log = logging.getLogger(__name__)
_DEVICES = (None, "cpu", "gpu")


@contextlib.contextmanager
def device_guard(device: str | None = None) -> Iterator[None]:
    """Record what is in the block as anything else: every replica runs whole on its own device, as a warning says.

    Results are the same. Raises ArgumentError for a device that is neither 'cpu', 'gpu' nor None.
    """
    kind = device.partition(":")[0] if isinstance(device, str) else device
    if kind not in _DEVICES:
        raise ArgumentError(f"device_guard: device is {device!r}; expected 'cpu', 'gpu' or None")
    if device is not None:
        warn_once(_log, f"device_guard({device!r}) has no effect: every replica runs whole on the device of its place")
    yield
