"""Capabilities of the machine, declared absent for a test: in this process, and in those that it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.machine import capability


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Declare capabilities absent, and forget what was found before and meanwhile."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(capability.ABSENT, ",".join(names))
        capability.forget()
        yield
    capability.forget()
