"""Program: the structure with what recording and running add, under Fluid's names. Torch-free.

In a copy for test, backward and optimizer operators, what was recorded for training alone, and the variables that are
not used any more are left out; dropout and batch-norm are put at rest by their own arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from penstock.errors import ProgramError
from penstock.program import unique_name
from penstock.program.ir import Arg, Operator, Role, Structure, SubBlock, VarDesc, sub_blocks, unknown_variable
from penstock.program.operator_types import BlockOperator, in_fluids_names
from penstock.program.text import block_text, parse_structure, to_text

# type -> (position of the training argument, names written in training)
_TRAINING = {
    "penstock.dropout.default": 3,
    "penstock.lstm.default": 8,
    "penstock.lstm_sequence.default": 6,
    "penstock.gru.default": 7,
    "penstock.gru_sequence.default": 5,
    "penstock.data_norm_update_.default": 8,
    "aten.native_batch_norm.default": 5,
    "aten._native_batch_norm_legit.default": 5,
    "aten.native_dropout.default": 2,
}


def copy_structure(program: Structure) -> Structure:
    """Return an equal structure that shares no list with the original."""
    return Structure(
        seed=program.seed,
        symbols=list(program.symbols),
        variables=dict(program.variables),
        operators=list(program.operators),
        guards=list(program.guards),
        is_test=program.is_test,
    )


def with_nan_as_text(program: Structure) -> Structure:
    """Return a copy for comparing, since a NaN among the operands differs from itself."""
    copy = copy_structure(program)
    copy.operators = [
        replace(op, args=_comparable(op.args), kwargs=tuple((k, _comparable(v)) for k, v in op.kwargs))
        for op in program.operators
    ]
    return copy


def _comparable(value: Any) -> Any:
    if isinstance(value, SubBlock):
        return block_text(value)
    if isinstance(value, tuple):
        return tuple(_comparable(v) for v in value)
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def for_test_structure(program: Structure) -> Structure:
    """Return the forward part, at rest; without what is computed of gradients."""
    copy = copy_structure(program)
    forward, gone = (Role.FORWARD, Role.FORWARD | Role.LOSS), set[str]()
    for op in program.operators:
        if op.role not in forward or not gone.isdisjoint(op.input_names()):
            gone.update(n for n in op.output_names() if not program.variables[n].persistable)
    kept = [op for op in program.operators if op.role in forward and not op.train_only]
    copy.operators = [_at_rest(op) for op in kept if gone.isdisjoint(op.input_names())]
    used = {n for op in copy.operators for n in (*op.input_names(), *op.output_names())}
    used |= {program.variables[n].storage for n in used}
    copy.variables = {
        n: v for n, v in program.variables.items() if n in used or v.feed or (v.persistable and v.parameter)
    }
    copy.is_test = True
    return copy


def _at_rest(op: Operator) -> Operator:
    if sub_blocks(op):
        return replace(
            op,
            args=tuple(_blocks_at_rest(arg) for arg in op.args),
            kwargs=tuple((k, _blocks_at_rest(v)) for k, v in op.kwargs),
        )
    position = _TRAINING.get(op.type)
    if position is None:
        return op
    args: tuple[Arg, ...] = (*op.args[:position], False, *op.args[position + 1 :])
    return replace(op, args=args, writes=())


def _blocks_at_rest(value: Any) -> Any:
    if isinstance(value, SubBlock):
        return replace(value, operators=tuple(_at_rest(op) for op in value.operators if not op.train_only))
    return tuple(_blocks_at_rest(v) for v in value) if isinstance(value, tuple) else value


def nested_blocks(program: Structure) -> list[tuple[int, SubBlock]]:
    """Return the blocks that operators name, as (number of the parent, block); the first has the number after all
    that operators are in, and a block stands before those in it."""
    first = 1 + max((op.block for op in program.operators), default=0)
    found: list[tuple[int, SubBlock]] = []

    def walk(operators: Iterable[Operator], parent: int | None) -> None:
        for op in operators:
            for block in sub_blocks(op):
                found.append((op.block if parent is None else parent, block))
                walk(block.operators, first + len(found) - 1)

    walk(program.operators, None)
    return found


@dataclass(frozen=True, slots=True)
class MemoryMark:
    """Temporaries are released at their last use, but those called `skip` and, with `skip_grads`, gradients."""

    skip: frozenset[str]
    skip_grads: bool


@dataclass(eq=False)
class Program(Structure):
    """A Program that is being recorded or run. Equality is that of its structure (captured values aside).

    `captured`: values of tensors that were taken from outside, by variable name.
    `num_scopes`: how often a name scope was opened, by what is around it and its name.
    `run_as`: for a copy that takes a Program's place in some runs: the Program whose steps and seed these have.
    `memory_mark`: the arguments of `memory_optimize`, if it was called; no part of the text.
    `reader`: the DataLoader that runs take their batches from, if there is one; no part of the text.
    `after_steps_without_rows`: by owner, called after a step that this process takes part in without data of its own.
    `_open_recording`: makes the `recording` of a Program that has none; set by the recorder, as this module is read
    without torch, too.
    `revision`: counts changes, so that what was derived from the Program knows when it is stale.
    """

    captured: dict[str, Any] = field(default_factory=dict, repr=False)
    num_scopes: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)
    revision: int = 0
    fresh_seed: int = 0
    run_as: Program | None = field(default=None, repr=False)
    memory_mark: MemoryMark | None = field(default=None, repr=False)
    reader: Any = field(default=None, repr=False)
    after_steps_without_rows: dict[object, Callable[[], None]] = field(default_factory=dict, repr=False, init=False)
    _names: dict[str, int] = field(default_factory=dict, repr=False)
    recording: Any = field(default=None, repr=False)
    _open_recording: ClassVar[Callable[[Program], Any] | None] = None

    # -- Fluid's names ---------------------------------------------------------------------------

    @property
    def random_seed(self) -> int:
        """Fluid's name for `seed`."""
        return self.seed

    @random_seed.setter
    def random_seed(self, value: int) -> None:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ProgramError(f"random_seed is {value!r}; expected a whole number")
        self.seed = int(value)
        self.revision += 1

    def global_block(self) -> Block:
        """Return block 0, which a run runs."""
        return Block(self)

    def current_block(self) -> Block:
        """Return the block that layers record into: block 0."""
        return Block(self)

    @property
    def _version(self) -> int:
        """Fluid's name for `revision`."""
        return self.revision

    def block(self, index: int) -> Block:
        """Return a block. Raises ProgramError for one that is not there."""
        if not 0 <= index < self.num_blocks:
            raise ProgramError(f"block {index} is asked for; the program has {self.num_blocks}")
        return Block(self, index)

    @property
    def num_blocks(self) -> int:
        """Number of blocks: 1, those that operators of control flow name, and those of a pserver's program."""
        return 1 + max((op.block for op in self.operators), default=0) + len(nested_blocks(self))

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks."""
        return [Block(self, index) for index in range(self.num_blocks)]

    def list_vars(self) -> list[Any]:
        """Return all variables, those last that were declared and have no operator yet."""
        return list(Block(self).vars.values())

    @property
    def declared(self) -> dict[str, Any]:
        """The variables by name that were declared (`Block.create_var`), but that nothing has made or read yet."""
        found = getattr(self.recording, "declared", {})
        return {name: variable for name, variable in found.items() if name not in self.variables}

    def all_parameters(self) -> list[Any]:
        """Return all parameters."""
        return [self.handle(v.name) for v in self.variables.values() if v.parameter]

    # -- structure -------------------------------------------------------------------------------

    def _optimized_guard(self, param_and_grads: Iterable[Any]) -> AbstractContextManager[None]:
        """Let the operators that a block of Python records be a part of an update of (parameter, gradient)."""
        return self.global_block()._writer().guard(Role.OPTIMIZE, param_and_grads)

    def _lr_schedule_guard(self, is_with_opt: bool = False) -> AbstractContextManager[None]:
        """Let the operators that a block of Python records be those of a learning-rate schedule."""
        return self.global_block()._writer().guard(Role.LR_SCHED | (Role.OPTIMIZE if is_with_opt else Role(0)), ())

    def handle(self, name: str) -> Any:
        """Return the recorder's handle of `name` if there is one, else its description."""
        handles = getattr(self.recording, "handles", {})
        if name not in self.variables and name in self.declared:
            return self.declared[name]
        return handles.get(name, self.variables[name])

    def unique(self, prefix: str) -> str:
        """Return `prefix_k` with the next k of that prefix; within `unique_name.guard`, of the guard's generator."""
        generator = unique_name.chosen()
        if generator is not None:
            while (name := generator(prefix)) in self.variables:
                pass
            return name
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

    def reserve(self, name: str, *, operator: bool = False) -> None:
        """Count `prefix_k`, the name of a layer or an operator, as taken, and every lower k with it."""
        prefix, _, number = name.rpartition("_")
        if number.isdigit():
            key = f"op {prefix}" if operator else prefix
            self._names[key] = max(self._names.get(key, 0), int(number) + 1)

    def add_variable(self, var: VarDesc) -> VarDesc:
        """Add a variable. Raises ProgramError if another one has its name."""
        old = self.variables.get(var.name)
        if old is not None and old != var:
            raise ProgramError(
                f"variable {var.name!r} exists already with shape {_shape(old)} "
                f"(created at {old.source or 'unknown'}); now asked for with shape {_shape(var)}. "
                "Give one of them another name.",
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

    def own_name(self, name: str) -> str:
        """Return the name that a variable has here, which may be another one than Fluid's; '' if there is none."""
        if name in self.variables or name in self.declared:
            return name
        return "" if self.recording is None else str(self.recording.named_by_fluid(name))

    def parameters(self) -> list[VarDesc]:
        """Return the parameters in order of creation."""
        return [v for v in self.variables.values() if v.parameter]

    def feeds(self) -> list[VarDesc]:
        """Return the variables that a run must feed, in order of creation."""
        return [v for v in self.variables.values() if v.feed]

    def clone(self, for_test: bool = False) -> Program:
        """Return a copy. `for_test`: without backward and optimizer, with dropout and batch-norm at rest.

        What is recorded under `program_guard(copy)` goes into the copy, operands of the original included.
        """
        structure = for_test_structure(self) if for_test else copy_structure(self)
        copy = Program(**vars(structure), captured=dict(self.captured), _names=dict(self._names))
        copy.num_scopes = dict(self.num_scopes)
        copy.memory_mark, copy.reader = self.memory_mark, self.reader
        if self.recording is not None:
            copy.recording = self.recording.for_clone(copy)
        return copy

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Program):
            return NotImplemented
        mine, others = copy_structure(self), copy_structure(other)
        return mine == others or with_nan_as_text(mine) == with_nan_as_text(others)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return to_text(self)

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        """Return the text form (Fluid's name and arguments; the text is always whole)."""
        return to_text(self)

    @staticmethod
    def parse(text: str) -> Program:
        """Read a Program back from its text. Raises ProgramError with line and column."""
        return Program(**vars(parse_structure(text)))

    @property
    def desc(self) -> Description:
        """What Fluid's scripts write to a file: `program.desc.serialize_to_string()`."""
        return Description(self)

    @staticmethod
    def parse_from_string(binary_str: bytes | str) -> Program:
        """Read a Program back from what `desc.serialize_to_string` gave. Raises ProgramError, for Fluid's own, too."""
        text = binary_str if isinstance(binary_str, str) else binary_str.decode("utf-8", "replace")
        if not text.startswith("program version="):
            raise ProgramError(
                f"parse_from_string is given {len(binary_str)} bytes that no desc.serialize_to_string() of Penstock "
                "has made. Read Fluid's __model__ by fluid.io.load_inference_model(folder, executor)"
            )
        return Program.parse(text)


def _shape(var: VarDesc) -> str:
    return "[" + ", ".join(str(d) for d in var.shape) + "]"


@dataclass(frozen=True, slots=True)
class Description:
    """A Program as bytes: its text in UTF-8, without the values of captured tensors."""

    program: Program

    def serialize_to_string(self) -> bytes:
        """Return the bytes, for `Program.parse_from_string`."""
        return to_text(self.program).encode()


class Framework(Protocol):
    """What a Block needs of the recorder, which this module is read without."""

    def create_var(self, program: Program, **described: Any) -> Any: ...
    def create_parameter(self, program: Program, **described: Any) -> Any: ...
    def append_op(
        self,
        block: Block,
        type_: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
    ) -> Any: ...
    def guard(self, own: Role, pairs: Iterable[Any]) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Fluid's view of the operators of one block, and of the Program's variables, which all blocks share.

    `_framework`: what declares variables and appends operators by hand; set by `penstock.program.framework`.
    """

    _framework: ClassVar[Framework | None] = None

    program: Program
    index: int = 0

    @property
    def idx(self) -> int:
        """Fluid's name for `index`."""
        return self.index

    @property
    def ops(self) -> list[BlockOperator]:
        """The operators, in order, by Fluid's names of their types; `kernel` is what runs."""
        return in_fluids_names(self.operators)

    @property
    def parent_idx(self) -> int:
        """The number of the block whose operator runs this one; -1 for block 0, 0 for those of a pserver's program."""
        inside = self._nested()
        return inside[0] if inside is not None else 0 if self.index else -1

    @property
    def operators(self) -> list[Operator]:
        """The operators, in order: of a Program with one block the list itself."""
        inside = self._nested()
        if inside is not None:
            return list(inside[1].operators)
        if not any(op.block for op in self.program.operators):
            return self.program.operators
        return [op for op in self.program.operators if op.block == self.index]

    @property
    def vars(self) -> dict[str, Any]:
        """The variables by name: descriptions of a nested block's, else what `list_vars` of the Program returns."""
        inside = self._nested()
        if inside is not None:
            return {v.name: v for v in inside[1].variables}
        return {name: self.program.handle(name) for name in (*self.program.variables, *self.program.declared)}

    def _nested(self) -> tuple[int, SubBlock] | None:
        first = 1 + max((op.block for op in self.program.operators), default=0)
        return nested_blocks(self.program)[self.index - first] if self.index >= first else None

    def var(self, name: str) -> Any:
        """Return the variable called `name`: a Variable for recording, where the recorder is loaded."""
        name = self.program.own_name(name) or name
        if name in self.program.declared:
            return self.program.handle(name)
        self.program.var(name)
        if Program._open_recording is not None:
            Program._open_recording(self.program)
        return self.program.handle(name)

    def create_var(self, **described: Any) -> Any:
        """Declare a variable (`name`, `shape`, `dtype`, `persistable`, …) that an operator or the scope gives a value.

        Raises ProgramError for another one of that name.
        """
        return self._writer().create_var(self.program, **described)

    def create_parameter(self, **described: Any) -> Any:
        """Declare a parameter (`name`, `shape`, `dtype`, `initializer`, `attr`, …).

        An `initializer` is recorded into this Program, else a first value into the current startup Program.
        """
        return self._writer().create_parameter(self.program, **described)

    def append_op(
        self,
        type: str,
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        attrs: Mapping[str, Any] | None = None,
        stop_gradient: bool = False,
    ) -> Any:
        """Append an operator by Fluid's type, slots and attributes, and return it. Raises ProgramError."""
        return self._writer().append_op(self, type, inputs or {}, outputs or {}, attrs or {})

    def _writer(self) -> Framework:
        if self._framework is None:
            raise ProgramError("import penstock.program.framework before variables are declared in a block by hand")
        return self._framework

    def has_var(self, name: str) -> bool:
        """Whether there is a variable called `name`."""
        return bool(self.program.own_name(name))

    def all_parameters(self) -> list[Any]:
        """Return all parameters."""
        return self.program.all_parameters()

    def iter_parameters(self) -> Iterator[Any]:
        """Return the parameters one after another."""
        return iter(self.all_parameters())

    _var_recursive = var

    def _find_var_recursive(self, name: str) -> Any:
        """Return the variable called `name`, or None."""
        return self.var(name) if self.has_var(name) else None

    def _clone_variable(self, var: Any, force_persistable: bool = True) -> Any:
        """Declare a variable of another Program's here: its name, sizes and dtype."""
        sizes = [size if isinstance(size, int) else -1 for size in var.desc.shape]
        kept = force_persistable or var.persistable
        described = {"name": var.name, "shape": sizes, "dtype": var.desc.dtype, "lod_level": var.lod_level}
        return self.create_var(**described, persistable=kept)

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        """Return its variables and operators, one a line."""
        return "\n".join([f"block {self.index}", *map(str, self.vars.values()), *map(str, self.ops)]) + "\n"

    __str__ = to_string
