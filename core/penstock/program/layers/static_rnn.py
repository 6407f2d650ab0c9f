"""StaticRNN: a block over the steps of sequences of one length.

Source: StaticRNN (Fluid 1.8), python/paddle/fluid/layers/control_flow.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.record.blocks import OpenBlock, Recorded, control, recorded_block, sub_block, symbols_of
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.rows_of_positions import fix_rows
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named, record_call, wrap
from penstock.program.record.versions import take_over


class Memory:
    """A value that a step hands to the next one. `first`: its value before the first step, from outside."""

    def __init__(self, handle: Variable, first: Variable) -> None:
        self.handle, self.first = handle, first
        self.updated: Variable | None = None


class Recurrence:
    """What both kinds of recurrent blocks have: steps, memories, outputs, and when each may be used."""

    what = "StaticRNN"
    kind = "recurrent"

    def __init__(self, name: str | None = None) -> None:
        self._name = name or default_main_program().unique(self.kind)
        self._block: OpenBlock | None = None
        self._steps: list[tuple[Variable, Variable]] = []  # within the block, outside
        self._memories: dict[str, Memory] = {}
        self._outputs: list[Variable] = []
        self._results: list[Any] | None = None

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the block; then the operator that runs it."""
        if self._results is not None:
            raise ProgramError(f"{user_line()}: this {self.what} has a block already; make another one")
        recording = recording_of(default_main_program())
        fix_rows(recording)  # a step has the rows of the batch, or of a part of it
        with name_scope(self._name):
            with recorded_block(recording) as block:
                self._block, block.is_step = block, True
                yield
                self._end_step()
                self._check()
                outputs = [recording.own(v).name for v in self._outputs]
                updates = [recording.own(m.updated).name for m in self._memories.values()]
                recorded = block.close([*outputs, *updates])
                self._check_constants(recording, block, recorded)
            self._block = None
            self._results = self._record(recording, recorded, outputs, updates)
            for inside in (*(v for v, _ in self._steps), *(m.handle for m in self._memories.values())):
                recording.take_out(inside.name)

    def _end_step(self) -> None:
        """Record what stands behind the script's lines in each step."""

    def _check(self) -> None:
        late = [m.handle.name for m in self._memories.values() if m.updated is None]
        if late:
            raise ProgramError(f"{user_line()}: {self.what}: memory {late[0]!r} is never updated (update_memory)")
        if not self._steps or not self._outputs:
            raise ProgramError(f"{user_line()}: a {self.what} needs a step_input and an output")

    def _check_constants(self, recording: Recording, block: OpenBlock, recorded: Recorded) -> None:
        for name in recorded.writes:
            if recording.program.variables[name].storage in block.constants:
                raise ProgramError(
                    f"{user_line()}: a block of a {self.what} writes {name!r}, whose value from before it is a size or "
                    "a bound in the block. Count in a memory (memory, update_memory)",
                    variable=name,
                )

    def _record(self, recording: Recording, recorded: Recorded, outputs: list[str], updates: list[str]) -> list[Any]:
        raise NotImplementedError

    def _open(self, what: str) -> OpenBlock:
        if self._block is None:
            raise ProgramError(f"{user_line()}: {self.what}.{what} stands outside of its block")
        return self._block

    def _memory(self, first: Variable, sizes: Sequence[Any]) -> Variable:
        block = self._open("memory")
        name = f"{self._name}.memory_{len(self._memories)}"
        handle: Variable = block.placeholder(name, sizes, first.dtype)
        self._memories[handle.name] = Memory(handle, first)
        return handle

    def step_input(self, x: Any) -> Any:
        """Return the step of a sequence."""
        raise NotImplementedError

    def _step(self, inside: Variable, whole: Variable) -> Variable:
        block = self._open("step_input")

        def stepped(function: Callable[[Any], Any]) -> Any:
            with block.outside():
                made = function(whole)
            return self.step_input(made)

        self._steps.append((inside, whole))
        block.steps[inside.name] = stepped
        return inside

    def update_memory(self, mem: Any, var: Any) -> None:
        """Set what the next step finds in a memory: a variable of its shape and dtype. Raises ProgramError.

        Where one has the batch as its rows and the other one a number of them, they are compared in each step.
        """
        self._open("update_memory")
        memory = self._memories.get(getattr(mem, "name", ""))
        if memory is None:
            raise ProgramError(f"{user_line()}: {self.what}.update_memory: {mem!r} is no memory of it")
        if _rows_differ(mem, var):
            var = record_call(torch.ops.penstock.expect_rows, (var, mem.shape[0]), {})
        if (mem.desc.shape, mem.desc.dtype) != (var.desc.shape, var.desc.dtype):
            raise ProgramError(f"{user_line()}: {self.what}: memory {mem!r} is updated by {var!r}; expected its shape")
        memory.updated = var

    def output(self, *outputs: Any) -> None:
        """Mark variables as outputs of each step."""
        self._open("output")
        self._outputs += outputs

    def __call__(self, *args: Any) -> Any:
        """Return the outputs of all steps: one variable, or a list of several. Raises ProgramError before the block."""
        if self._results is None:
            raise ProgramError(f"{user_line()}: a {self.what} is called before its block was recorded")
        return self._results[0] if len(self._results) == 1 else self._results


def _rows_differ(mem: Variable, var: Variable) -> bool:
    """Whether the first size alone differs: a number at one, known when fed at the other."""
    own, others = mem.desc.shape, var.desc.shape
    fits = mem.dtype == var.dtype and len(own) == len(others) > 0 and own[1:] == others[1:]
    return fits and own[0] != others[0] and sum(isinstance(size, int) for size in (own[0], others[0])) == 1


class StaticRNN(Recurrence):
    """A block over the steps of sequences [time, batch, …], which all have the same length.

    `with rnn.step():` takes the steps (`step_input`), carries memories (`memory`, `update_memory`) and marks outputs
    (`step_output`). `rnn()` then returns them, [time, …].
    """

    def step(self) -> Any:
        """Return the context in which the block is recorded."""
        return self._recorded()

    def step_input(self, x: Any) -> Any:
        """Return the step of a sequence. Shapes: x [time, …]; result […]."""
        block = self._open("step_input")
        name = f"{self._name}.step_{len(self._steps)}"
        inside = block.placeholder(name, list(block.recording.own(x).fake.shape[1:]), x.dtype)
        return self._step(inside, x)

    def memory(
        self,
        init: Any = None,
        shape: Sequence[int] | None = None,
        batch_ref: Any = None,
        init_value: float = 0.0,
        init_batch_dim_idx: int = 0,
        ref_batch_dim_idx: int = 1,
    ) -> Any:
        """Return a memory that starts as `init`, or filled with `init_value` in `shape`.

        The size `init_batch_dim_idx` of the shape is that of `batch_ref` (of the sequence, if it is a step of one) at
        `ref_batch_dim_idx`.
        """
        block = self._open("memory")
        if init is None:
            if shape is None or batch_ref is None:
                raise ProgramError(f"{user_line()}: StaticRNN.memory needs init, or shape and batch_ref")
            whole = next((x for inside, x in self._steps if inside is batch_ref), batch_ref)
            with block.outside():
                sizes: list[Any] = list(shape)
                sizes[init_batch_dim_idx] = whole.shape[ref_batch_dim_idx]
                kind = whole.dtype if whole.dtype.is_floating_point else dtype_named("float32")
                init = whole.new_full(sizes, init_value, dtype=kind)
        return self._memory(init, list(block.recording.own(init).fake.shape))

    def step_output(self, o: Any) -> None:
        """Mark a variable as an output of each step."""
        self.output(o)

    def _record(self, recording: Recording, recorded: Recorded, outputs: list[str], updates: list[str]) -> list[Any]:
        steps = [(inside.name, recording.own(x).name) for inside, x in self._steps]
        memories = [(m.handle.name, recording.own(m.first).name) for m in self._memories.values()]
        states = [(name, name) for name in recorded.writes]
        known = {formal for formal, _ in (*steps, *memories, *states)}
        pairs = [*steps, *memories, *states, *((n, n) for n in recorded.reads if n not in known)]
        formal, actual = ([pair[i] for pair in pairs] for i in (0, 1))
        symbols = symbols_of(recording, [recorded], [*formal, *actual])
        block = sub_block(recording, recorded, formal, [*outputs, *updates, *recorded.writes], symbols)
        counts = [len(steps), len(memories), len(states), len(outputs)]
        made = control(recording, self.kind, actual, [block], counts)
        for name, tensor in zip(recorded.writes, made[len(outputs) :], strict=True):
            take_over(recording, name, tensor)
        return list(wrap(recording, made[: len(outputs)]))
