"""The Program: variables and operators as plain data. Torch-free; prints, parses and travels.

Invariants (checked by `legality.check`): every name that an operator reads is written before, fed, or
persistable; a view names its root storage; an operator lists every storage that it writes.
A Program pickles nothing; values of captured tensors live beside it (`Program.captured`), not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import Any, Literal

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr


class Role(Flag):
    """What an operator is for; drives cloning for test, the transpiler and the views."""

    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZE = auto()
    RPC = auto()
    DIST = auto()
    LR_SCHED = auto()
    LOSS = auto()


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand that is a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConst:
    """A torch constant by name: dtype 'float32', device 'cpu', layout 'strided', memory_format 'preserve_format'."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    value: str


Arg = None | bool | int | float | str | Ref | TorchConst | Expr | tuple["Arg", ...]
Output = str | None | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VarDesc:
    """A variable. `storage`: name of the variable that owns its memory (its own name unless it is a view).

    `kind == "selected_rows"`: sparse gradient; `rows` (int64[n]) and `values` ([n, d]) name its two dense
    parts, `shape` is the dense shape of the parameter.
    `buffer`: persistable state that the forward pass writes (running statistics, counters): one per replica.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    kind: Literal["dense", "selected_rows"] = "dense"
    persistable: bool = False
    parameter: bool = False
    trainable: bool = True
    buffer: bool = False
    feed: bool = False
    lod_level: int = 0
    storage: str = ""
    rows: str = ""
    values: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.storage:
            object.__setattr__(self, "storage", self.name)


@dataclass(frozen=True, slots=True)
class Operator:
    """One recorded call. `name` is unique in the Program and stays with the operator through passes.

    `writes`: names of the variables among the operands that it writes in place.
    `role_vars`: (parameter, gradient) pairs whose final gradient it makes, or uses to update.
    `train_only`: dropped by `clone(for_test=True)`.
    """

    name: str
    type: str
    args: tuple[Arg, ...]
    outputs: tuple[Output, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    writes: tuple[str, ...] = ()
    role: Role = Role.FORWARD
    role_vars: tuple[tuple[str, str], ...] = ()
    module: str = ""
    source: str = ""
    train_only: bool = False

    def input_names(self) -> tuple[str, ...]:
        """Names of all operands, in order, duplicates kept."""
        values = (*self.args, *(v for _, v in self.kwargs))
        return tuple(itertools.chain.from_iterable(_refs(v) for v in values))

    def output_names(self) -> tuple[str, ...]:
        """Names of all results that are kept."""
        names: list[str] = []
        for out in self.outputs:
            if isinstance(out, tuple):
                names.extend(out)
            elif out is not None:
                names.append(out)
        return tuple(names)

    @property
    def input_arg_names(self) -> list[str]:
        """Fluid's name for `input_names()`."""
        return list(self.input_names())

    @property
    def output_arg_names(self) -> list[str]:
        """Fluid's name for `output_names()` plus what is written in place."""
        return list(dict.fromkeys((*self.output_names(), *self.writes)))


def _refs(value: Arg) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for item in value:
            yield from _refs(item)


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes that held while recording; checked when a plan is lowered."""

    left: Dim
    relation: Literal["==", "!=", "<", "<=", ">", ">="]
    right: Dim
    source: str = ""

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"


@dataclass(eq=False)
class Program:
    """Variables, operators and guards, in recorded order. Equality is structural (captured values aside).

    `seed`: of every random operator; 0 asks for a fresh one at the first run.
    `symbols`: names of size symbols; the first is the batch.
    """

    seed: int = 0
    symbols: list[str] = field(default_factory=list)
    variables: dict[str, VarDesc] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    captured: dict[str, Any] = field(default_factory=dict, repr=False)
    revision: int = 0
    is_test: bool = False
    fresh_seed: int = 0
    _names: dict[str, int] = field(default_factory=dict, repr=False)
    recording: Any = field(default=None, repr=False)

    # -- Fluid's names ---------------------------------------------------------------------------

    @property
    def random_seed(self) -> int:
        """Fluid's name for `seed`."""
        return self.seed

    @random_seed.setter
    def random_seed(self, value: int) -> None:
        self.seed = int(value)
        self.revision += 1

    def global_block(self) -> Block:
        """Return the only block."""
        return Block(self)

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks; a Penstock Program has one."""
        return [Block(self)]

    def list_vars(self) -> list[Any]:
        """Return all variables."""
        return [self.handle(name) for name in self.variables]

    def all_parameters(self) -> list[Any]:
        """Return all parameters."""
        return [self.handle(v.name) for v in self.variables.values() if v.parameter]

    # -- structure -------------------------------------------------------------------------------

    def handle(self, name: str) -> Any:
        """Return the recorder's handle of `name` if there is one, else its description."""
        handles = getattr(self.recording, "handles", {})
        return handles.get(name, self.variables[name])

    def unique(self, prefix: str) -> str:
        """Return `prefix_k` with the next k of that prefix."""
        k = self._names.get(prefix, 0)
        while True:
            self._names[prefix] = k + 1
            name = f"{prefix}_{k}"
            if name not in self.variables:
                return name
            k += 1

    def unique_operator(self, base: str) -> str:
        """Return the next free operator name of the form `base_k`."""
        k = self._names.get(f"op {base}", 0)
        self._names[f"op {base}"] = k + 1
        return f"{base}_{k}"

    def add_variable(self, var: VarDesc) -> VarDesc:
        """Add a variable. Raises ProgramError if another one has its name."""
        old = self.variables.get(var.name)
        if old is not None and old != var:
            raise ProgramError(
                f"variable {var.name!r} exists already with shape {_shape(old)} (created at {old.source or 'unknown'}); "
                f"now asked for with shape {_shape(var)}. Give one of them another name.",
                variable=var.name,
            )
        self.variables[var.name] = var
        self.revision += 1
        return var

    def append(self, op: Operator) -> Operator:
        """Append an operator."""
        self.operators.append(op)
        self.revision += 1
        return op

    def var(self, name: str) -> VarDesc:
        """Return a variable. Raises ProgramError naming close matches."""
        try:
            return self.variables[name]
        except KeyError:
            raise ProgramError(unknown_variable(name, self.variables), variable=name) from None

    def parameters(self) -> list[VarDesc]:
        """Return the parameters in order of creation."""
        return [v for v in self.variables.values() if v.parameter]

    def feeds(self) -> list[VarDesc]:
        """Return the variables that a run must feed, in order of creation."""
        return [v for v in self.variables.values() if v.feed]

    def clone(self, for_test: bool = False) -> Program:
        """Return a copy. `for_test`: without backward and optimizer, with dropout and batch-norm at rest."""
        from penstock.program.clone import clone_for_test, copy_program  # clone.py imports this module

        return clone_for_test(self) if for_test else copy_program(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return _structure(self) == _structure(other)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        from penstock.program.text import to_text  # text.py imports this module

        return to_text(self)

    to_string = __str__

    @staticmethod
    def parse(text: str) -> Program:
        """Read a Program back from its text. Raises ProgramError with line and column."""
        from penstock.program.text import parse  # text.py imports this module

        return parse(text)


def _structure(p: Program) -> tuple[Any, ...]:
    return p.seed, p.symbols, p.variables, p.operators, p.guards, p.is_test


def _shape(var: VarDesc) -> str:
    return "[" + ", ".join(str(d) for d in var.shape) + "]"


def unknown_variable(name: str, names: Any) -> str:
    """Return the text of the error for a name that is not there, with close matches."""
    import difflib  # only for an error message

    close = difflib.get_close_matches(name, list(names), n=3)
    hint = f" Did you mean {', '.join(repr(c) for c in close)}?" if close else ""
    return f"variable {name!r} is not in the program.{hint}"


@dataclass(frozen=True, slots=True)
class Block:
    """Fluid's view of a Program's operators and variables."""

    program: Program

    @property
    def ops(self) -> list[Operator]:
        """The operators, in order."""
        return self.program.operators

    @property
    def vars(self) -> dict[str, VarDesc]:
        """The variables by name."""
        return self.program.variables

    def var(self, name: str) -> Any:
        """Return the variable called `name`."""
        self.program.var(name)
        return self.program.handle(name)

    def has_var(self, name: str) -> bool:
        """Whether there is a variable called `name`."""
        return name in self.program.variables

    def all_parameters(self) -> list[Any]:
        """Return all parameters."""
        return self.program.all_parameters()


def with_role(op: Operator, role: Role) -> Operator:
    """Return a copy of `op` in another role."""
    return replace(op, role=role)
