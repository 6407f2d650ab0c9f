"""The machine as a test wants it: capabilities declared absent, here and in processes that it starts; its cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock import settings
from penstock.machine import capability


@contextmanager
def absent(*names: str) -> Iterator[None]:
    """Declare capabilities absent, and forget what was found before and meanwhile."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(settings.ABSENT.name, ",".join(names))
        capability.forget()
        yield
    capability.forget()


def pretend_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this process use so many cores, whatever the machine or a container's quota allows."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr("penstock.machine.cores.core_quota", lambda *_: None)
