"""Remotes of one test: opened by what it names, and closed when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.ps.communicator import Remotes, remotes
from penstock.ps.remote import Opener


@contextmanager
def remotes_of_a_test(opener: Opener | None = None) -> Iterator[Remotes]:
    """Open the process's remotes by `opener` (None: to real servers) within; what is left open is closed."""
    before = remotes.opener
    remotes.opener = opener or before
    try:
        yield remotes
    finally:
        remotes.opener = before
        remotes.configs.clear()
        for descriptor in remotes.opened():
            remotes.close(descriptor)
