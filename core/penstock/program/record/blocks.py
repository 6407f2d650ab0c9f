"""Blocks while they are recorded: what layers record within one is taken out of the Program and becomes a SubBlock.

Operators of a block read variables from outside by their own names; these become inputs of the operator that runs the
block. What a block writes of them is a result of that operator, and the variable stands for it from then on: as a new
version of the name, or, where a name's memory has to stay (state, inputs, views, variables of an enclosing block), by a
copy into it. Nothing within a block has a tape: its gradient is made from its operators when it runs. Where a gradient
ends within a block is therefore an operator, too (`aten.detach`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from penstock.compat.torch import set_versions
from penstock.errors import ProgramError
from penstock.program.control.interpreter import UNKNOWN
from penstock.program.expr import Dim, Expr, sym
from penstock.program.ir import Operator, SubBlock, VarDesc
from penstock.program.record.declared_sizes import fix_all
from penstock.program.record.fakes import empty_fake
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.source import user_line
from penstock.program.record.variable import recording_modes
from penstock.program.record.versions import take_over
from penstock.program.text import block_text


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded within a block. `reads`: names from outside, in order; `writes`: those that it changes."""

    operators: tuple[Operator, ...]
    made: dict[str, VarDesc]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Stepped = Callable[[Callable[[Any], Any]], Any]
"""Records a function of what a step is taken from, before the block, and returns the step of its result."""


class OpenBlock:
    """A block that is recorded now: the operators of the Program from `start` on."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.start = len(recording.program.operators)
        self.repeats = False  # a loop's, in which an array's elements may turn out to differ; see layers/arrays.py
        self.is_step = False  # a recurrence's, in which the next step reads what one writes
        self.constants: set[str] = set()  # storages from before it that were taken for numbers; see elements.py
        self.late_reads: list[tuple[Any, str, str]] = []  # array, symbol of the element's rows, that of the first one's
        self.late_writes: list[tuple[Any, str]] = []  # array, name of what was written
        self.steps: dict[str, Stepped] = {}  # by the name of a step, in a recurrent block
        self._versions = recording.versions()

    def makes(self, name: str) -> bool:
        """Whether an operator of the block has made a variable."""
        return any(name in op.output_names() for op in self.recording.program.operators[self.start :])

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Record within the `with` statement before the block, as a part of what is around it."""
        recording, operators = self.recording, self.recording.program.operators
        inner = operators[self.start :]
        del operators[self.start :]
        recording.open_blocks.remove(self)
        try:
            with torch.set_grad_enabled(not recording.open_blocks):
                yield
        finally:
            self.start = len(operators)
            operators.extend(inner)
            recording.open_blocks.append(self)

    def placeholder(self, name: str, sizes: Sequence[Any], dtype: torch.dtype) -> Any:
        """Return a variable that the operator of the block gives a value in each step. It ends with the block."""
        recording = self.recording
        fake = empty_fake(sizes, None, dtype)
        recording.bind(fake, recording.describe(fake, name))
        return recording.handle(fake)

    def close(self, results: Iterable[str] = ()) -> Recorded:
        """Take the block out of the Program. `results`: names that it returns, which may be from outside.

        Raises ProgramError where it writes memory that it sees under two names.
        """
        program = self.recording.program
        operators = tuple(program.operators[self.start :])
        del program.operators[self.start :]
        names = [name for op in operators for name in op.output_names()]
        outside = [n for op in operators for n in op.input_names()]
        reads = tuple(dict.fromkeys(n for n in (*outside, *results) if n not in set(names)))
        storages = {n: program.variables[n].storage for n in (*names, *reads)}
        packed = (n for n in reads if program.variables[n].kind != "dense")  # each use makes its next version
        writes = tuple(dict.fromkeys((*_written(operators, storages, reads, set(names)), *packed)))
        root = {storages[n]: n for n in reversed(reads)}
        made = {}
        for name in names:
            var = self.recording.take_out(name)
            made[name] = replace(var, storage=root.get(var.storage, var.storage))
        program.revision += 1
        # What it wrote in place is a result of its operator, not a change of what autograd has saved before it.
        set_versions(*self._versions)
        return Recorded(operators, made, reads, writes)


def _written(
    operators: Sequence[Operator], storages: dict[str, str], reads: Sequence[str], made: set[str]
) -> tuple[str, ...]:
    """Names from outside that operators write."""
    found: dict[str, None] = {}
    for op in operators:
        for storage in (storages[name] for name in op.writes):
            if storage in made:
                continue
            same = [name for name in reads if storages[name] == storage]
            if len(same) > 1:
                raise ProgramError(
                    f"{op.source}: a block writes the memory of {same[0]!r}, which it reads as {same[1]!r}, too. Copy "
                    "one of them before the block (layers.assign)",
                    operator=op.name,
                )
            found.setdefault(same[0])
    return tuple(found)


@contextmanager
def recorded_block(recording: Recording) -> Iterator[OpenBlock]:
    """Record into a block within the `with` statement. The caller closes it, before or after the statement ends.

    What the block writes of variables from outside was not written to torch, which has saved some for their gradients.
    """
    fix_all(recording)
    with undone_on_failure(recording, renames=True), torch.no_grad():
        block, before = OpenBlock(recording), recording.versions()
        recording.open_blocks.append(block)
        try:
            yield block
        finally:
            recording.open_blocks.pop()
            set_versions(*before)


def sub_block(
    recording: Recording, recorded: Recorded, inputs: Sequence[str], outputs: Sequence[str], symbols: Sequence[str]
) -> SubBlock:
    """Return the plain form of a block. `inputs`: of its operator, all of them; `symbols`: see `symbols_of`."""
    given = [_input(recording.program.variables[name]) for name in inputs]
    return SubBlock(
        tuple(inputs), tuple(outputs), tuple(symbols), (*given, *recorded.made.values()), recorded.operators
    )


def _input(var: VarDesc) -> VarDesc:
    kind: Literal["array", "dense"] = "array" if var.kind in ("array", "unsized") else "dense"
    return VarDesc(var.name, var.shape, var.dtype, kind, source=var.source)


def symbols_of(recording: Recording, blocks: Iterable[Recorded], inputs: Iterable[str]) -> list[str]:
    """Return the size symbols that occur in blocks or in the shapes of their inputs, in the Program's order."""
    found: set[str] = set()
    for name in inputs:
        found |= _symbols(recording.program.variables[name].shape)
    for block in blocks:
        for op in block.operators:
            found |= _symbols((*op.args, *(v for _, v in op.kwargs)))
        for var in block.made.values():
            found |= _symbols(var.shape)
    return [name for name in (*recording.program.symbols, *recording.symbols.of_data) if name in found]


def _symbols(value: Any) -> frozenset[str]:
    if isinstance(value, Expr):
        return value.symbols()
    return frozenset().union(*map(_symbols, value)) if isinstance(value, tuple) else frozenset()


def control(
    recording: Recording,
    kind: str,
    inputs: Sequence[str],
    blocks: Sequence[SubBlock],
    counts: Sequence[int] = (),
    sizes_outside: Mapping[str, Dim] | None = None,
) -> list[torch.Tensor]:
    """Record the operator that runs blocks, and return its results on fakes.

    `sizes_outside`: what symbols of a block's own stand for in what the operator returns. Raises ProgramError for a
    result whose size only the block knows.
    """
    tensors = [_kept(recording, name) for name in inputs]
    outside = sizes_outside or {}
    inner = _known_inside(recording, blocks[0].symbols) - outside.keys()
    for block in blocks:
        _expect_known(block, inner)
    whole = [UNKNOWN if name in inner else outside.get(name, sym(name)) for name in blocks[0].symbols]
    sizes = [recording.symbols.size(size) if isinstance(size, Expr) else size for size in whole]
    texts = [block_text(block) for block in blocks]
    with recording_modes(recording):
        made = torch.ops.penstock.control(kind, tensors, sizes, texts, list(counts))
    return list(made)


def _known_inside(recording: Recording, symbols: Sequence[str]) -> set[str]:
    """The symbols of sizes that follow from data and that nothing around a block has."""
    late = set(symbols) & recording.symbols.of_data.keys()
    if not late:
        return late
    return late.difference(*(_symbols(var.shape) for var in recording.program.variables.values()))


def _expect_known(block: SubBlock, inner: set[str]) -> None:
    for var in block.variables if inner else ():
        if var.name in block.outputs and var.kind == "dense" and _symbols(var.shape) & inner:
            raise ProgramError(
                f"{var.source or user_line()}: a block returns {var.name!r}, whose size follows from data. Write it to "
                "an array from outside (layers.array_write), or return what is made of all of it (layers.reduce_sum)",
                variable=var.name,
            )


def _kept(recording: Recording, name: str) -> torch.Tensor:
    """An input of an operator of control flow; of state and written inputs a copy, as they change before the gradient
    is made."""
    tensor, var = recording.tensor_of(name), recording.program.variables[name]
    if not var.buffer and (not var.persistable or var.parameter):
        return tensor
    with recording_modes(recording):
        return tensor.clone()


def run_once(recording: Recording, recorded: Recorded, results: Sequence[str]) -> list[torch.Tensor]:
    """Record the operator that runs a block once; return its `results`. What it writes is taken over."""
    symbols = symbols_of(recording, [recorded], recorded.reads)
    block = sub_block(recording, recorded, recorded.reads, [*results, *recorded.writes], symbols)
    made = control(recording, "block", recorded.reads, [block])
    for name, tensor in zip(recorded.writes, made[len(results) :], strict=True):
        take_over(recording, name, tensor)
    return made[: len(results)]
