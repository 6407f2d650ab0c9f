"""The current main and startup Program, the current role and name scope. One per thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.program.ir import Role
from penstock.program.program import Program


class _State(threading.local):
    def __init__(self) -> None:
        self.main = Program()
        self.startup = Program()
        self.role = Role.FORWARD
        self.role_vars: tuple[tuple[str, str], ...] = ()
        self.scopes: list[str] = []


_state = _State()


def default_main_program() -> Program:
    """Return the Program that layers record into."""
    return _state.main


def default_startup_program() -> Program:
    """Return the Program that initialisers record into."""
    return _state.startup


def switch_main_program(program: Program) -> Program:
    """Make `program` the main Program; return the previous one."""
    old, _state.main = _state.main, program
    return old


def switch_startup_program(program: Program) -> Program:
    """Make `program` the startup Program; return the previous one."""
    old, _state.startup = _state.startup, program
    return old


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record into `main_program` (and `startup_program`) within the block."""
    old_main = switch_main_program(main_program)
    old_startup = switch_startup_program(startup_program) if startup_program is not None else None
    try:
        yield
    finally:
        switch_main_program(old_main)
        if old_startup is not None:
            switch_startup_program(old_startup)


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
