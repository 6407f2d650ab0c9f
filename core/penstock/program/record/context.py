"""The current main and startup Program, the current role and name scope.

The default Programs are those of the process, as Fluid's are; guards, roles and scopes are of the thread that opens
them. Recording itself is one thread at a time: `recording_lock`, since it changes torch.nn.functional for a moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.program.ir import Role
from penstock.program.program import Program

recording_lock = threading.RLock()


class _Default:
    """The process's Programs."""

    main = Program()
    startup = Program()


class _State(threading.local):
    """`main`, `startup`: those of the innermost guard of this thread, if any."""

    def __init__(self) -> None:
        self.main: Program | None = None
        self.startup: Program | None = None
        self.role = Role.FORWARD
        self.role_vars: tuple[tuple[str, str], ...] = ()
        self.scopes: list[str] = []


_state = _State()


def default_main_program() -> Program:
    """Return the Program that layers record into."""
    return _Default.main if _state.main is None else _state.main


def default_startup_program() -> Program:
    """Return the Program that initialisers record into."""
    return _Default.startup if _state.startup is None else _state.startup


def switch_main_program(program: Program) -> Program:
    """Make `program` the main Program of this guard, or of the process outside of guards; return the previous one."""
    old = default_main_program()
    if _state.main is None:
        _Default.main = program
    else:
        _state.main = program
    return old


def switch_startup_program(program: Program) -> Program:
    """Make `program` the startup Program, as `switch_main_program` does; return the previous one."""
    old = default_startup_program()
    if _state.startup is None:
        _Default.startup = program
    else:
        _state.startup = program
    return old


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record into `main_program` (and `startup_program`) within the block, in this thread."""
    old = _state.main, _state.startup
    _state.main = main_program
    if startup_program is not None:
        _state.startup = startup_program
    try:
        yield
    finally:
        _state.main, _state.startup = old


@contextmanager
def role(value: Role, role_vars: tuple[tuple[str, str], ...] = ()) -> Iterator[None]:
    """Give the operators recorded within the block a role and (parameter, gradient) pairs."""
    old, old_vars = _state.role, _state.role_vars
    _state.role, _state.role_vars = value, role_vars
    try:
        yield
    finally:
        _state.role, _state.role_vars = old, old_vars


def current_role() -> tuple[Role, tuple[tuple[str, str], ...]]:
    """Return the role and pairs of operators recorded now."""
    return _state.role, _state.role_vars


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Put the operators recorded within the block under the module path `prefix`."""
    _state.scopes.append(prefix or "scope")
    try:
        yield
    finally:
        _state.scopes.pop()


def current_scope() -> str:
    """Return the dotted path of name scopes and modules."""
    return ".".join(s for s in _state.scopes if s)
