"""Scope: named tensors that outlive a run (parameters, optimizer state, counters).

`tensor_of` is the one way from a Program's persistable variable to its tensor in a scope.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.errors import FeedError, ProgramError
from penstock.program.expr import Expr
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.pruning import counted_as

_LOOKUP = "penstock.lookup_table.default"
_CPU = torch.device("cpu")


class Scope:
    """Names to tensors. `revision` counts replaced tensors, so that a lowered plan knows when to bind again.

    A name that a scope does not have is looked up in the scope that it was made from (`new_scope`).
    """

    def __init__(self, parent: Scope | None = None) -> None:
        self._parent = parent
        self._kids: list[Scope] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._declared: set[str] = set()  # by `var`, before their first value
        self._counting = threading.Lock()  # Hogwild threads count steps of one program
        self._steps: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()
        self._makers: dict[str, weakref.ref[Program]] = {}
        self.prepared: weakref.WeakKeyDictionary[Program, Any] = weakref.WeakKeyDictionary()
        """What a pserver program will serve from here, until it serves (`serving.storage`)."""
        self.revision = 0
        self.writer: object = None
        """What last changed tensors in place: copies of them elsewhere are stale."""

    def find(self, name: str) -> torch.Tensor | None:
        """Return the tensor called `name`, or None."""
        found = self._tensors.get(name)
        return self._parent.find(name) if found is None and self._parent is not None else found

    def set(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor under a name."""
        if self._tensors.get(name) is not tensor:
            self.revision += 1
        self._tensors[name] = tensor

    def written_by(self, writer: object) -> None:
        """Note that `writer` has changed tensors in place; copies of another one are made again."""
        if self.writer is not writer:
            self.writer = writer
            self.revision += 1

    def initialised_by(self, program: Program, name: str) -> Program | None:
        """Note that a startup Program has made `name`; return another living one that made it before."""
        before = self._makers.get(name)
        self._makers[name] = weakref.ref(program)
        other = before() if before is not None else None
        return other if other is not program else None

    def erase(self, names: list[str]) -> None:
        """Remove names."""
        for name in names:
            self._tensors.pop(name, None)
            self._declared.discard(name)
        self.revision += 1

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._tensors)

    def find_var(self, name: str) -> ScopeVariable | None:
        """Return Fluid's view of a variable, or None for one that neither has a value nor was asked for by `var`."""
        return ScopeVariable(self, name) if self.find(name) is not None or self._has_declared(name) else None

    def _has_declared(self, name: str) -> bool:
        return name in self._declared or (self._parent is not None and self._parent._has_declared(name))

    def var(self, name: str) -> ScopeVariable:
        """Return Fluid's view of a variable, which has no value until `set` gives it one if it was not there."""
        self._declared.add(name)
        return ScopeVariable(self, name)

    def new_scope(self) -> Scope:
        """Return a scope within this one: it finds what is here, and what it sets is its own."""
        kid = Scope(self)
        self._kids.append(kid)
        return kid

    def drop_kids(self) -> None:
        """Let go of the scopes that `new_scope` has made."""
        self._kids.clear()

    def next_step(self, program: Program) -> int:
        """Return the number of this run of `program` (from 0) and count it. Any thread: each number is given once.

        A copy that takes a Program's place in some runs counts on with its steps (`Program.run_as`).
        """
        with self._counting:
            step = self.steps(program)
            self.set_steps(program, step + 1)
        return step

    def steps(self, program: Program) -> int:
        """Return how often `program` has run here."""
        return self._steps.get(counted_as(program), 0)

    def set_steps(self, program: Program, steps: int) -> None:
        """Let the next run of `program` be number `steps` (after a load)."""
        self._steps[counted_as(program)] = steps


class ScopeVariable:
    """Fluid's `scope.find_var(name).get_tensor()`: read as an array, `set` in place."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope, self.name = scope, name

    def get_tensor(self) -> ScopeVariable:
        """Return itself: Penstock keeps tensors, not wrappers."""
        return self

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor. Raises ProgramError if there is none yet."""
        found = self._scope.find(self.name)
        if found is None:
            raise ProgramError(f"variable {self.name!r} has no value in this scope yet; set one", variable=self.name)
        return found

    def set(self, value: np.ndarray | torch.Tensor, place: object = None) -> None:
        """Copy `value` into the tensor, or make it. Raises FeedError for another shape."""
        given = torch.as_tensor(value)
        if self._scope.find(self.name) is None:
            self._scope.set(self.name, given.clone())
            return
        if given.shape != self.tensor.shape:
            raise FeedError(
                f"variable {self.name!r} has shape {list(self.tensor.shape)}; a value of shape {list(given.shape)} "
                "does not fit",
                variable=self.name,
            )
        self.tensor.copy_(given)
        self._scope.written_by(self)

    def _is_initialized(self) -> bool:
        """Whether it has a value."""
        return self._scope.find(self.name) is not None

    def shape(self) -> list[int]:
        """Return the sizes."""
        return list(self.tensor.shape)

    _get_dims = shape  # Fluid's name, which scripts that reset counters of metrics use

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        array: np.ndarray = self.tensor.detach().cpu().numpy()
        return array.astype(dtype) if dtype is not None else array.copy()  # type: ignore[call-overload]  # numpy's protocol


_current = [Scope()]  # of the process, as in Fluid: guards of every thread change it for all


def global_scope() -> Scope:
    """Return the scope that runs use unless they are given one."""
    return _current[-1]


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Make `scope` the global one within the block."""
    _current.append(scope)
    try:
        yield
    finally:
        _current.pop()


def tensor_of(scope: Scope, program: Program, name: str, device: torch.device | None = None) -> torch.Tensor:
    """Return the tensor; a captured value is put into the scope at its first use.

    `device`: where it is needed; the scope's tensor moves there. None: the processor's memory.

    Raises ProgramError if it has no value yet, or if the scope's tensor is not what the Program describes
    (another Program's variable of the same name).
    """
    var = program.variables[name]
    tensor = scope.find(name)
    if tensor is None and name in program.captured:
        tensor = program.captured[name].clone()
        scope.set(name, tensor)
    if tensor is None:
        raise ProgramError(
            f"variable {name!r} (created at {var.source}) has no value {_missing(program, var)}", variable=name
        )
    if not _fits(var, tensor):
        described = f"{var.dtype}[{', '.join(str(d) for d in var.shape)}]"
        raise ProgramError(
            f"variable {name!r} (created at {var.source}) is {described}, but the scope "
            f"holds {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} under that name: another program's "
            "startup has run in this scope. Give each model its own fluid.Scope(), or name their parameters",
            variable=name,
        )
    wanted = device or _CPU
    if tensor.device != wanted:
        tensor = tensor.to(wanted)
        scope.set(name, tensor)
    return tensor


def _missing(program: Program, var: VarDesc) -> str:
    """Explain why a variable may have no value, and what to do."""
    if var.distributed:
        return "here: its rows are on parameter servers alone. They can be looked up, but not fetched or fed"
    reason = "yet. Run the startup program first: exe.run(fluid.default_startup_program())"
    if any(op.type == _LOOKUP and var.name == op.input_names()[0] for op in program.operators):
        reason += (
            ". If it is a table that parameter servers have, use the transpiled program, or its clone(for_test=True)"
        )
    return reason


def _fits(var: VarDesc, tensor: torch.Tensor) -> bool:
    if str(tensor.dtype) != f"torch.{var.dtype}" or tensor.dim() != len(var.shape):
        return False
    return all(isinstance(d, Expr) or d == s for d, s in zip(var.shape, tensor.shape, strict=True))
