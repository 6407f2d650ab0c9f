"""`paddle.fluid.wrapped_decorator`: decorators that keep signatures. Source: wrapped_decorator.py (Fluid 1.8)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["signature_safe_contextmanager", "wrap_decorator"]


def wrap_decorator(decorator_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that applies `decorator_func` at each call, to a function that keeps its own signature."""

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            return decorator_func(func)(*args, **kwargs)

        return call

    return decorate


def signature_safe_contextmanager(func: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
    """Return `contextlib.contextmanager(func)`; the manager is made at each call and may decorate functions."""
    return contextmanager(func)
