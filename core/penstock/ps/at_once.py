"""Calls of several servers at the same time: all are made, all have ended when the first error is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from typing import TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")


def at_once(pool: Executor, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls, the last on this thread; return their results in order, when all have ended.

    If some fail: the first one's error; with several, one of its class that has the texts of all.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    # In copies of the caller's context: whether its waits count, for instance (ps.counters).
    others = [pool.submit(copy_context().run, call) for call in calls[:-1]]
    errors: list[BaseException] = []
    results: list[T] = []
    for result in (*(f.result for f in others), calls[-1])[::-1]:
        try:
            results.append(result())
        except BaseException as error:  # noqa: BLE001  # raised below, when nothing uses the caller's memory any more
            errors.append(error)
    if errors:
        raise _joined(errors[::-1])
    return results[::-1]


def _joined(errors: Sequence[BaseException]) -> BaseException:
    first = errors[0]
    grave = next((e for e in errors if not isinstance(e, PenstockError)), None)
    if grave is not None:
        return grave
    if len(errors) == 1 or not isinstance(first, PenstockError):
        return first
    return type(first)("; ".join(dict.fromkeys(str(e) for e in errors)), **first.fields)
