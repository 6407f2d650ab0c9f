"""The current main and startup Program, the current role and name scope.

The default Programs are those of the process, as Fluid's are; guards, roles and scopes are of the thread that opens
them. Recording itself is one thread at a time: `recording_lock`, since it changes torch.nn.functional for a moment.
A recording lasts as long as its guard; that of the default Programs from an input on until the main Program runs. What
uses a Variable after that opens the recording of its Program again, until the Program runs or a guard of it ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.compat.torch import enter_bottom, leave_bottom
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.patches import PatchCatcher, patches
from penstock.program.record.source import user_line

recording_lock = threading.RLock()


class _Default:
    """The process's Programs; `recordings`: id of a Program that is recorded outside a guard -> what ends that."""

    main = Program()
    startup = Program()
    recordings: dict[int, weakref.finalize[..., Program]] = {}  # noqa: RUF012 - of the class, as the rest


class _State(threading.local):
    """`main`, `startup`: those of the innermost guard of this thread, if any. `calls`: see `open_calls`.

    `layers`: kind of a layer that is called, the number of scopes around it, and those that it has opened itself.
    `catcher`: what `variable_used` has entered, until a Program runs in this thread or a guard ends.
    """

    def __init__(self) -> None:
        self.main: Program | None = None
        self.startup: Program | None = None
        self.role = Role.FORWARD
        self.role_vars: tuple[tuple[str, str], ...] = ()
        self.scopes: list[str] = []
        self.layers: list[tuple[str, int, list[str]]] = []
        self.calls: list[tuple[Any, dict[int, str]]] = []
        self.catcher: PatchCatcher | None = None


_state = _State()


def default_main_program() -> Program:
    """Return the Program that layers record into."""
    return _Default.main if _state.main is None else _state.main


def default_startup_program() -> Program:
    """Return the Program that initialisers record into."""
    return _Default.startup if _state.startup is None else _state.startup


def switch_main_program(program: Program) -> Program:
    """Make `program` the one that layers record into outside guards; return the one before."""
    old, _Default.main = _Default.main, program
    program_runs(old)
    return old


def switch_startup_program(program: Program) -> Program:
    """Make `program` the one that initialisers record into outside guards; return the one before."""
    old, _Default.startup = _Default.startup, program
    return old


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
        _take_over_guards(main_program)
    finally:
        _state.main, _state.startup = old
        if main_program is not _Default.main:
            _end_recording(main_program)


def record_on(program: Program) -> None:
    """Record a Program until it runs, is freed, or a guard of it ends; nothing to do if it is recorded already.

    The default main Program is recorded until it runs: a guard of it, such as an optimizer's, ends nothing.
    """
    if program is _state.main:
        return
    with recording_lock:
        if id(program) not in _Default.recordings:
            recording = ExitStack()
            recording.enter_context(patches.opened())
            end = weakref.finalize(program, _end, id(program), recording)
            end.atexit = False
            _Default.recordings[id(program)] = end


def variable_used(program: Program) -> None:
    """Record the Program of a Variable; in `torch.zeros(x.shape[0])` torch's function is looked up before the size."""
    if not patches.num_open and _state.catcher is None:
        _state.catcher = PatchCatcher()
        enter_bottom(_state.catcher)
    record_on(program)


def program_runs(program: Program) -> None:
    """End the recording of a Program outside guards; its next use begins it again. Raises ProgramError."""
    _end_recording(program)
    _take_over_guards(program)


def _end_recording(program: Program) -> None:
    if _state.catcher is not None and leave_bottom(_state.catcher):
        _state.catcher = None
    end = _Default.recordings.get(id(program))
    if end is not None:
        end()


def _take_over_guards(program: Program) -> None:
    """Keep the relations of sizes that lines behind the last operator have asked for. Raises ProgramError."""
    recording = program.recording
    if recording is not None and recording.symbols.sizes.asked:
        recording.add_guards(recording.symbols.new_guards(user_line()))


def _end(key: int, recording: ExitStack) -> None:
    with recording_lock:
        _Default.recordings.pop(key, None)
        recording.close()


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
    if _state.layers and len(_state.scopes) == _state.layers[-1][1]:
        _state.layers[-1][2].append(prefix or "scope")
    _state.scopes.append(prefix or "scope")
    try:
        yield
    finally:
        _state.scopes.pop()


@contextmanager
def layer_called(kind: str) -> Iterator[list[str]]:
    """Name what is recorded within the block as parts of a layer of that kind. Yields the scopes that it opens."""
    opened: list[str] = []
    _state.layers.append((kind, len(_state.scopes), opened))
    try:
        yield opened
    finally:
        _state.layers.pop()


def current_layer() -> str:
    """Return the kind of the layer that is called now, the innermost; "" outside of layers."""
    return _state.layers[-1][0] if _state.layers else ""


def current_scope() -> str:
    """Return the dotted path of name scopes and modules."""
    return ".".join(s for s in _state.scopes if s)
