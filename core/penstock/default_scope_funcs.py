"""Scopes within scopes, of which the innermost is the current one of a thread.

Source: python/paddle/fluid/default_scope_funcs.py (Fluid 1.8).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.errors import SpecError
from penstock.scope import Scope, ScopeVariable

__all__ = ["enter_local_scope", "find_var", "get_cur_scope", "leave_local_scope", "scoped_function", "var"]


class _Scopes(threading.local):
    """The scopes of a thread, outermost first."""

    def __init__(self) -> None:
        self.entered = [Scope()]


_SCOPES = _Scopes()


def get_cur_scope() -> Scope:
    """Return the current scope of this thread."""
    return _SCOPES.entered[-1]


def enter_local_scope() -> None:
    """Make a scope within the current one the current one."""
    _SCOPES.entered.append(get_cur_scope().new_scope())


def leave_local_scope() -> None:
    """Let go of the current scope and return to the one around it. Raises SpecError for the outermost."""
    if len(_SCOPES.entered) == 1:
        raise SpecError("leave_local_scope without enter_local_scope: the current scope is the outermost")
    _SCOPES.entered.pop()
    get_cur_scope().drop_kids()


def var(name: str) -> ScopeVariable:
    """Return a variable of the current scope, which has no value until `set` gives it one."""
    return get_cur_scope().var(name)


def find_var(name: str) -> ScopeVariable | None:
    """Return a variable of the current scope or one around it; None if there is none."""
    return get_cur_scope().find_var(name)


def scoped_function(func: Callable[[], object]) -> None:
    """Call a function within a scope of its own."""
    enter_local_scope()
    try:
        func()
    finally:
        leave_local_scope()
