"""What a process has one of, for a block of a test: Fluid's flags, warnings, and the session of telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock import logger
from penstock.exec import flags
from penstock.telemetry import process
from penstock.telemetry.unwatched import Session


@contextmanager
def no_flags_set() -> Iterator[None]:
    """Begin without flags; those that are set within the block end with it."""
    held = (flags._set, flags._without_effect)
    before = [dict(one) for one in held]
    for one in held:
        one.clear()
    try:
        yield
    finally:
        for one, values in zip(held, before, strict=True):
            one.clear()
            one.update(values)


@contextmanager
def nothing_warned() -> Iterator[None]:
    """Begin without warnings that were logged; those of the block are forgotten with it."""
    former, logger._warned = logger._warned, {}
    try:
        yield
    finally:
        logger._warned = former


@contextmanager
def session_of(instead: Session) -> Iterator[None]:
    """Make `instead` the session of this process within the block."""
    former, process._process.session = process._process.session, instead
    try:
        yield
    finally:
        process._process.session = former
