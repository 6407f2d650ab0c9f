"""DynamicRNN: a block over the steps of ragged sequences. IfElse: two blocks, each on a part of the rows.

Source: DynamicRNN and IfElse (Fluid 1.8), python/paddle/fluid/layers/control_flow.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import ProgramError
from penstock.program.expr import Expr
from penstock.program.layers.control_flow import expect_rows
from penstock.program.layers.functions import increment
from penstock.program.layers.sequences import one_length
from penstock.program.layers.static_rnn import Recurrence
from penstock.program.layers.tensor import fill_constant
from penstock.program.record.blocks import Recorded, control, recorded_block, sub_block, symbols_of
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.declared_sizes import fix_all
from penstock.program.record.opening import recording_of
from penstock.program.record.ragged import join_rows
from penstock.program.record.recording import Recording
from penstock.program.record.rows_of_positions import fix_rows
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named, wrap
from penstock.program.record.versions import take_over
from penstock.program.sequences import LENGTHS, lengths_of, ragged_with_rows


class DynamicRNN(Recurrence):
    """A block over the steps of ragged sequences; in each step it sees those that have not ended.

    `with rnn.block():` takes the steps (`step_input`) and what belongs to whole sequences (`static_input`), carries
    memories (`memory`, `update_memory`) and marks outputs (`output`). `rnn()` then returns them as ragged rows, of
    the same sequences as the first step input.
    """

    what = "DynamicRNN"
    kind = "dynamic_recurrent"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._lengths: Any = None
        self._statics: list[tuple[Variable, Variable]] = []
        self._step_idx: Any = None

    @property
    def step_idx(self) -> Any:
        """The number of the step, int64 [1], counted from 0; behind the block that of all steps. None before it."""
        if self._block is not None and self._step_idx is None:
            with self._block.outside():
                self._step_idx = fill_constant([1], "int64", 0)
        if self._results is not None and self._step_idx is None:
            self._step_idx = self._lengths.max().reshape([1])
        return self._step_idx

    def _end_step(self) -> None:
        if self._step_idx is not None:
            increment(self._step_idx)

    def block(self) -> Any:
        """Return the context in which the block is recorded."""
        return self._recorded()

    def update_memory(self, ex_mem: Any, new_mem: Any) -> None:
        """Set what the next step finds in the memory `ex_mem`; see `Recurrence.update_memory`."""
        super().update_memory(ex_mem, new_mem)

    def step_input(self, x: Any, level: int = 0) -> Any:
        """Return the rows of a step. Shapes: x ragged [rows, …]; result [n, …] for the n sequences that have the step.

        Raises ProgramError for an x that is not ragged, of two levels, or of other sequences than the first.
        """
        block = self._open("step_input")
        recording = block.recording
        if self._steps:
            join_rows(recording, (self._steps[0][1], x))
        names = lengths_of(recording.program, recording.own(x).desc.shape[0]) if x.ndim else []
        if len(names) != 1 or level:
            raise ProgramError(
                f"{user_line()}: DynamicRNN.step_input needs rows of sequences of one level (lod_level=1), "
                f"got {x!r} with {len(names)}",
                variable=x.name,
            )
        lengths = recording.handles[names[0]]
        if self._lengths is not None and lengths.name != self._lengths.name:
            raise ProgramError(f"{user_line()}: {x!r} has other sequences than the first step input of the DynamicRNN")
        self._lengths = lengths
        sizes = [lengths.fake.shape[0], *recording.own(x).fake.shape[1:]]
        inside = block.placeholder(f"{self._name}.step_{len(self._steps)}", sizes, x.dtype)
        return self._step(inside, x)

    def static_input(self, x: Any) -> Any:
        """Return what belongs to the sequences that have the step: rows of x [n, …], or of a ragged x all their rows.

        Variables from outside with one row a sequence are taken so without it.
        """
        block = self._open("static_input")
        self._expect_step("static_input")
        own = block.recording.own(x)
        rows = own.desc.shape[0]
        owner = ragged_with_rows(block.recording.program, rows)
        if (
            owner is not None
            and not _is_symbol(rows)
            and one_length(block.recording.program, owner.name + LENGTHS) is None
        ):
            raise ProgramError(
                f"{user_line()}: DynamicRNN.static_input: {x!r} has {rows} rows, of which a step has another number. "
                "Give it what that was made of, and make it (layers.sequence_reshape) within the block",
                variable=own.name,
            )
        inside = block.placeholder(f"{self._name}.static_{len(self._statics)}", list(own.fake.shape), own.dtype)
        self._statics.append((inside, own))
        return inside

    def memory(
        self,
        init: Any = None,
        shape: Sequence[int] | None = None,
        value: float = 0.0,
        need_reorder: bool = False,
        dtype: Any = "float32",
    ) -> Any:
        """Return a memory that starts as `init` [n, …], in the order of the sequences, or as `value` in [n, *shape].

        `need_reorder` makes no difference: rows always follow their sequences.
        """
        block = self._open("memory")
        self._expect_step("memory")
        if init is None:
            if shape is None:
                raise ProgramError(f"{user_line()}: DynamicRNN.memory needs init or shape")
            with block.outside():
                kind = dtype_named(dtype)
                init = self._lengths.new_full([self._lengths.shape[0], *shape], value, dtype=kind)
        return self._memory(init, list(block.recording.own(init).fake.shape))

    def _expect_step(self, what: str) -> None:
        if self._lengths is None:
            raise ProgramError(f"{user_line()}: DynamicRNN.{what} stands before the first step_input")

    def _record(self, recording: Recording, recorded: Recorded, outputs: list[str], updates: list[str]) -> list[Any]:
        program, lengths = recording.program, recording.own(self._lengths).name
        batch = program.variables[lengths].shape[0]
        for name in recorded.writes:
            if program.variables[name].shape[:1] == (batch,):
                raise ProgramError(
                    f"{user_line()}: a block of a DynamicRNN writes {name!r}, which has a row for each sequence, from "
                    "outside; in a step there are rows of those sequences alone that have it. Carry it as a memory "
                    "(memory, update_memory), and use the last row of an output (sequence_last_step)",
                    variable=name,
                )
        steps = [(inside.name, recording.own(x).name) for inside, x in self._steps]
        memories = [(m.handle.name, recording.own(m.first).name) for m in self._memories.values()]
        states = [(name, name) for name in recorded.writes]
        fixed = [(inside.name, x.name) for inside, x in self._statics]
        known = {formal for formal, _ in (*steps, *memories, *states, *fixed)}
        rest = [n for n in recorded.reads if n not in known]
        by_sequence = [n for n in rest if program.variables[n].shape[:1] == (batch,)]
        ragged = [(formal, owner.name + LENGTHS) for formal, actual in fixed
                  if (owner := ragged_with_rows(program, program.variables[actual].shape[0])) is not None]  # fmt: skip
        by_sequence += [n for n in dict.fromkeys(level for _, level in ragged) if n not in by_sequence]
        statics = [*fixed, *((n, n) for n in by_sequence)]
        pairs = [("", lengths), *steps, *memories, *statics, *states,
                 *((n, n) for n in rest if n not in by_sequence)]  # fmt: skip
        formal = [pair[0] for pair in pairs]
        actual = [pair[1] for pair in pairs]
        paired = [at for name, level in ragged for at in (formal.index(name), formal.index(level))]
        first = _unused(recording, lengths, f"{self._name}.lengths")
        formal[0] = first.name
        symbols = symbols_of(recording, [recorded], [*formal, *actual])
        block = sub_block(recording, recorded, formal, [*outputs, *updates, *recorded.writes], symbols)
        recording.take_out(first.name)
        sizes = [len(steps), len(memories), len(statics), len(states), len(outputs)]
        counts = [*sizes, symbols.index(_symbol(batch)), len(ragged), *paired]
        made = control(recording, self.kind, actual, [block], counts)
        for name, tensor in zip(recorded.writes, made[len(outputs) :], strict=True):
            take_over(recording, name, tensor)
        for inside, _ in self._statics:
            recording.take_out(inside.name)
        return list(wrap(recording, made[: len(outputs)]))


def _unused(recording: Recording, like: str, name: str) -> Any:
    """A name within a block for an input that its operators do not read."""
    var = recording.program.variables[like]
    fake = recording.fake_like(recording.tensor_of(like))
    recording.bind(fake, recording.describe(fake, name))
    assert var.shape == recording.program.variables[name].shape
    return recording.handle(fake)


def _symbol(size: Any) -> str:
    if not _is_symbol(size):
        raise ProgramError(f"{user_line()}: rows of {size} cannot be divided; expected those of an input")
    return str(size.args[0])


def _is_symbol(size: Any) -> bool:
    return isinstance(size, Expr) and size.op == "sym"


class IfElse:
    """Two blocks: `true_block` on the rows of which `cond` is true, `false_block` on the others.

    `with ie.true_block():` takes its rows of variables (`ie.input(x)`) and marks outputs (`ie.output(…)`). `ie()`
    returns the outputs of both, row by row in the order of `cond`. Where `cond` has a batch, a block sees its rows of
    whatever has that batch; where it has a number of rows, of what it takes by `input`.
    """

    def __init__(self, cond: Any, name: str | None = None) -> None:
        """`cond`: bool [n, 1]. Raises ProgramError for another variable."""
        expect_rows(cond)
        self._cond = cond
        self._name = name or default_main_program().unique("ifelse")
        self._taken: dict[str, tuple[Variable, Variable]] = {}  # by the name outside: within the blocks, outside
        self._outputs: list[Any] = []
        self._recorded: dict[bool, tuple[Recorded, list[str], list[Any]]] = {}
        self._open: Any = None
        self._rows: Any = None  # the number of rows of a block, where cond's is no symbol: one that a run knows

    def true_block(self) -> Any:
        """Return the context in which the block of true rows is recorded."""
        return self._block(which=True)

    def false_block(self) -> Any:
        """Return the context in which the block of the other rows is recorded."""
        return self._block(which=False)

    @contextmanager
    def _block(self, *, which: bool) -> Iterator[None]:
        if which in self._recorded or self._open is not None:
            raise ProgramError(f"{user_line()}: this IfElse has a {str(which).lower()}_block already, or is in a block")
        recording = recording_of(default_main_program())
        self._outputs = []
        fix_all(recording)
        fix_rows(recording)
        if self._rows is None and not _is_symbol(recording.own(self._cond).desc.shape[0]):
            self._rows = recording.symbols.new_of_data()
        with name_scope(self._name), recorded_block(recording) as block:
            self._open = block
            try:
                yield
                own = [recording.own(v) for v in self._outputs]
                shapes = [(v.desc.shape, v.desc.dtype) for v in own]
                names = [v.name for v in own]
                self._recorded[which] = block.close(names), names, shapes
            finally:
                self._open = None

    def input(self, x: Any) -> Any:
        """Return the rows of x [n, …] that the block is for. Raises ProgramError for an x of other rows than `cond`."""
        if self._open is None:
            raise ProgramError(f"{user_line()}: IfElse.input stands outside of its blocks")
        own, cond = self._open.recording.own(x), self._open.recording.own(self._cond)
        if self._rows is not None and own.desc.shape[:1] != cond.desc.shape[:1]:
            raise ProgramError(
                f"{user_line()}: IfElse.input: {own!r} has other rows than the condition {cond!r}", variable=own.name
            )
        if own.name not in self._taken:
            name = f"{self._name}.input_{len(self._taken)}"
            sizes = list(own.fake.shape) if self._rows is None else [self._rows, *own.fake.shape[1:]]
            inside = self._open.placeholder(name, sizes, own.dtype)
            self._taken[own.name] = (inside, own)
        return self._taken[own.name][0]

    def output(self, *outs: Any) -> None:
        """Mark outputs of the block; both blocks have as many, of the same shapes and dtypes."""
        if self._open is None:
            raise ProgramError(f"{user_line()}: IfElse.output stands outside of its blocks")
        self._outputs += outs

    def __call__(self) -> list[Any]:
        """Return the merged outputs. Raises ProgramError if a block lacks, or has other outputs."""
        if set(self._recorded) != {True, False}:
            raise ProgramError(f"{user_line()}: an IfElse needs a true_block and a false_block")
        recording = recording_of(default_main_program())
        (then, left, shapes), (otherwise, right, others) = self._recorded[True], self._recorded[False]
        if shapes != others or not shapes:
            raise ProgramError(f"{user_line()}: the blocks of an IfElse have the outputs {shapes} and {others}")
        if then.writes or otherwise.writes:
            named = (*then.writes, *otherwise.writes)[0]
            raise ProgramError(f"{user_line()}: a block of an IfElse writes {named!r} from outside; use layers.cond")
        program, mask = recording.program, recording.own(self._cond).name
        batch = program.variables[mask].shape[0]
        rows = batch if self._rows is None else recording.symbols.dim(self._rows)
        taken = [(inside.name, outside.name) for inside, outside in self._taken.values()]
        known = {formal for formal, _ in taken} | {mask}
        rest = [n for n in dict.fromkeys((*then.reads, *otherwise.reads)) if n not in known]
        split = [n for n in rest if self._rows is None and program.variables[n].shape[:1] == (batch,)]
        pairs = [(mask, mask), *taken, *((n, n) for n in split), *((n, n) for n in rest if n not in split)]
        formal, actual = ([pair[i] for pair in pairs] for i in (0, 1))
        symbols = list(dict.fromkeys([*symbols_of(recording, (then, otherwise), [*formal, *actual]), _symbol(rows)]))
        blocks = [sub_block(recording, one, formal, names, symbols)
                  for one, names in ((then, left), (otherwise, right))]  # fmt: skip
        counts = [len(taken) + len(split), symbols.index(_symbol(rows))]
        with name_scope(self._name):
            made = control(recording, "if_else", actual, blocks, counts, {_symbol(rows): batch})
        for inside, _ in self._taken.values():
            recording.take_out(inside.name)
        self._recorded.clear()
        return list(wrap(recording, made))
