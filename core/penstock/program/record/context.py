"""The current main and startup Program, the current role and name scope.

The default Programs are those of the process, as Fluid's are; guards, roles and scopes are of the thread that opens
them. Recording itself is one thread at a time: `recording_lock`, since it changes torch.nn.functional for a moment.
A recording lasts as long as its guard; that of the default Programs from an input on until one of the two runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.patches import patches

recording_lock = threading.RLock()


class _Default:
    """The process's Programs, and their recording while it is open."""

    main = Program()
    startup = Program()
    recording: ExitStack | None = None


class _State(threading.local):
    """`main`, `startup`: those of the innermost guard of this thread, if any. `calls`: see `open_calls`."""

    def __init__(self) -> None:
        self.main: Program | None = None
        self.startup: Program | None = None
        self.role = Role.FORWARD
        self.role_vars: tuple[tuple[str, str], ...] = ()
        self.scopes: list[str] = []
        self.calls: list[tuple[Any, dict[int, str]]] = []


_state = _State()


def default_main_program() -> Program:
    """Return the Program that layers record into."""
    return _Default.main if _state.main is None else _state.main


def default_startup_program() -> Program:
    """Return the Program that initialisers record into."""
    return _Default.startup if _state.startup is None else _state.startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record into `main_program` (and `startup_program`) within the block, in this thread."""
    old = _state.main, _state.startup
    _state.main = main_program
    if startup_program is not None:
        _state.startup = startup_program
    try:
        with patches.opened():
            yield
    finally:
        _state.main, _state.startup = old


def input_declared() -> None:
    """Begin to record the default Programs, unless this thread has opened a guard."""
    with recording_lock:
        if _state.main is None and _Default.recording is None:
            _Default.recording = ExitStack()
            _Default.recording.enter_context(patches.opened())


def program_runs(program: Program) -> None:
    """End the recording of the default Programs if it is one of them; another input begins it again."""
    if program is _Default.main or program is _Default.startup:
        with recording_lock:
            if _Default.recording is not None:
                _Default.recording.close()
                _Default.recording = None


def open_calls() -> list[tuple[Any, dict[int, str]]]:
    """Return the module calls that this thread records now: Recording and paths of modules, the innermost last."""
    return _state.calls


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
