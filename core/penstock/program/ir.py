"""The Program: variables and operators as plain data. Torch-free; prints, parses and travels.

Invariants (checked by `legality.check`): every name that an operator reads is written before, fed, or
persistable; a view names its root storage; an operator lists every storage that it writes.
A Program pickles nothing; values of captured tensors live beside it (`Program.captured`), not in it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import Any, Literal

from penstock.program.expr import Dim, Expr, evaluate

LENGTHS, STEPS, ROWS = "@LENGTHS", "@STEPS", "@ROWS"
"""How the names end of inputs that are declared beside a ragged one (program/sequences.py)."""
AGAIN = "@AGAIN"
"""How the names end of what the backward pass computes again (program/training/recomputation.py)."""


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


@dataclass(frozen=True)
class SubBlock:
    """A block that an operator runs, once or several times: plain data, closed over nothing but its inputs.

    `inputs`: names in it of the tensors that the operator gives it, in order; `outputs`: of what it returns, made in it
    or inputs. An input that its operators write is a copy. `symbols`: the sizes that it is given. `variables`: its
    inputs and what its operators make.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    symbols: tuple[str, ...]
    variables: tuple[VarDesc, ...]
    operators: tuple[Operator, ...]

    def __hash__(self) -> int:
        return self._hash  # found once: plans are looked up by the constants of their operators

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.outputs, self.symbols, self.variables, self.operators))


Arg = None | bool | int | float | str | Ref | TorchConst | Expr | SubBlock | tuple["Arg", ...]
Output = str | None | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VarDesc:
    """A variable. `storage`: name of the variable that owns its memory (its own name unless it is a view).

    `distributed`: a table whose rows are on parameter servers alone; no process that trains allocates it. Its servers
    make a row at the `admit_after`-th update that has its id, and drop one that was not used for `expire_after_s`.
    `kind == "selected_rows"`: sparse gradient; `rows` (int64[n]) and `values` ([n, d]) name its two dense
    parts, `shape` is the dense shape of the parameter.
    `kind == "array"`: a tensor array; `shape` and `dtype` are those of its elements, in a SubBlock; elsewhere a value
    of it is a tensor without elements (see `program/control/arrays.py`).
    `kind == "unsized"`: a value whose sizes follow from data, as an array of one element. Blocks read it, and a fetch
    gives the element; `<name>@LENGTHS` has the lengths of its sequences, if it is ragged.
    `loose`: an input of `layers.data`, whose feeds may have more or fewer dimensions of size 1 behind the first.
    `buffer`: persistable state that the forward pass writes (running statistics, counters): one per replica;
    or an input that it writes in place: executors feed a copy, never the user's own array.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    kind: Literal["dense", "selected_rows", "array", "unsized"] = "dense"
    persistable: bool = False
    parameter: bool = False
    trainable: bool = True
    buffer: bool = False
    distributed: bool = False
    admit_after: int = 0
    expire_after_s: float | None = None
    feed: bool = False
    loose: bool = False
    lod_level: int = 0
    storage: str = ""
    rows: str = ""
    values: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.storage:
            object.__setattr__(self, "storage", self.name)

    @property
    def type(self) -> str:
        """Fluid's name for `kind` (`fluid.core.VarDesc.VarType`)."""
        return self.kind

    @property
    def has_several_rows(self) -> bool:
        """Whether it is an input with several rows a sample (record/multiples.py)."""
        first = self.shape[0] if self.feed and self.shape else None
        return isinstance(first, Expr) and first.op != "sym"

    @property
    def is_data(self) -> bool:
        """Whether the script declared it as an input: not where it was declared beside one, as its lengths are."""
        return self.feed and not self.name.endswith((LENGTHS, STEPS, ROWS))


@dataclass(frozen=True, slots=True)
class Operator:
    """One recorded call. `name` is unique in the Program and stays with the operator through passes.

    `writes`: names of the variables among the operands that it writes in place.
    `role_vars`: (parameter, gradient) pairs whose final gradient it makes, or uses to update.
    `train_only`: dropped by `clone(for_test=True)`.
    `block`: 0 is what a run runs; the others are run by the operator of block 0 that names them.
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
    block: int = 0
    _inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _blocks: tuple[SubBlock, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = (*self.args, *(v for _, v in self.kwargs))
        object.__setattr__(self, "_inputs", tuple(itertools.chain.from_iterable(_refs(v) for v in values)))
        object.__setattr__(self, "_blocks", tuple(itertools.chain.from_iterable(_blocks(v) for v in values)))

    def input_names(self) -> tuple[str, ...]:
        """Names of all operands, in order, duplicates kept."""
        return self._inputs  # found once: a graph's passes ask a hundred times

    def output_names(self) -> tuple[str, ...]:
        """Names of all results that are retained."""
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


def sub_blocks(op: Operator) -> tuple[SubBlock, ...]:
    """Return the blocks that an operator names, in order."""
    return op._blocks


def _blocks(value: Arg) -> Iterator[SubBlock]:
    if isinstance(value, SubBlock):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _blocks(item)


_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guard:
    """A relation between sizes that held while recording; checked when a plan is lowered."""

    left: Dim
    relation: Literal["==", "!=", "<", "<=", ">", ">="]
    right: Dim
    source: str = ""

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"

    def symbols(self) -> frozenset[str]:
        """Return the size symbols on both sides."""
        return frozenset().union(*(side.symbols() for side in (self.left, self.right) if isinstance(side, Expr)))

    def holds(self, bindings: Mapping[str, int]) -> bool:
        """Whether the relation holds for these sizes. Raises KeyError for an unbound symbol."""
        return _RELATIONS[self.relation](evaluate(self.left, bindings), evaluate(self.right, bindings))


@dataclass
class Structure:
    """The plain data of a Program: what is printed, parsed, compared and sent.

    `seed`: of every random operator; 0 asks for a fresh one at the first run.
    `symbols`: names of size symbols; the first is the batch.
    """

    seed: int = 0
    symbols: list[str] = field(default_factory=list)
    variables: dict[str, VarDesc] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    is_test: bool = False


def structure_of(block: SubBlock) -> Structure:
    """Return a block as a program of its own, with its inputs as feeds."""
    given = set(block.inputs)
    variables = {v.name: replace(v, feed=True) if v.name in given else v for v in block.variables}
    return Structure(symbols=list(block.symbols), variables=variables, operators=list(block.operators))


def unknown_variable(name: str, names: Any) -> str:
    """Return the text of the error for a name that is not there, with close matches."""
    import difflib  # only for an error message

    close = difflib.get_close_matches(str(name), list(names), n=3)  # a user may pass any object
    hint = f" Did you mean {', '.join(repr(c) for c in close)}?" if close else ""
    return f"variable {name!r} is not in the program.{hint}"
