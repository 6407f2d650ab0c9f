"""Blocks of a server's program: prepared once and run often, over the scope's tensors or the rows of a table.

`PreparedBlock`: overloads resolved, constants made, persistable tensors bound. Operators run in order under no-grad;
nothing is checked at a run. Persistable variables are written in place, in the tensors that were bound. `TableBlock`:
the C++ table, with the program's own operators as its update. Where the update is one of Penstock's sparse kernels the
table applies it itself, row by row where the rows are. Any other update runs as operators over copies of the rows,
which then go back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.machine.cores import usable_cores
from penstock.program.expr import Expr
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.kernels import concrete, operator_error, resolve, shape_text
from penstock.program.program import Program
from penstock.ps.remote import SPARSE_TABLE
from penstock.ps.table import FirstValues, Floats, Ids, SparseTable, TableSettings

Env = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator. `args`: constants, with holes; `refs`: (hole, variable); `late`: (hole, operand with symbols)."""

    operator: Operator
    kernel: Any
    args: list[Any]
    refs: tuple[tuple[int, str], ...]
    late: tuple[tuple[int, Arg], ...]
    kwargs: dict[str, Any]

    def run(self, env: Env, symbols: Mapping[str, int]) -> None:
        args = self.args.copy()
        for hole, name in self.refs:
            args[hole] = env[name]
        for hole, operand in self.late:
            args[hole] = concrete(operand, symbols, env.__getitem__)
        try:
            result = self.kernel(*args, **self.kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            shapes = {n: shape_text(env.get(n)) for n in self.operator.input_names()}
            raise operator_error(self.operator, str(error), shapes) from error
        results = result if isinstance(result, tuple) else (result,)
        for output, value in zip(self.operator.outputs, results, strict=False):
            if isinstance(output, str):
                env[output] = value
            elif output is not None:  # a block of control flow has a list of results
                env.update(zip(output, value, strict=True))


class PreparedBlock:
    """Operators over `bound` tensors. `run` may be called by one thread at a time."""

    def __init__(self, program: Program, operators: Sequence[Operator], bound: Mapping[str, torch.Tensor]) -> None:
        self.bound = dict(bound)
        for op in operators:
            _refuse(program, op)
        self._calls = [_call(op) for op in operators]

    @property
    def needs_sizes(self) -> bool:
        """Whether an operator takes a size that is known at a run only."""
        return any(_sized(a) for call in self._calls for _, a in call.late)

    @property
    def needs_python(self) -> bool:
        """Whether native code cannot run it: it needs sizes, or has control flow, whose kernel is Python."""
        return self.needs_sizes or any(call.operator.type.startswith("penstock.control") for call in self._calls)

    def run(self, fed: Mapping[str, torch.Tensor], symbols: Mapping[str, int] | None = None) -> Env:
        """Run all operators; return every tensor by name. Raises OperatorError; writes before it remain."""
        env: Env = {**self.bound, **fed}
        with torch.no_grad():
            for call in self._calls:
                call.run(env, symbols or {})
        return env


def _refuse(program: Program, op: Operator) -> None:
    replaced = [n for n in op.output_names() if program.variables[n].persistable]
    if replaced:
        raise ProgramError(
            f"operator {op.name!r} ({op.source}) of block {op.block} makes {replaced} anew; a server updates what it "
            "keeps in place",
            operator=op.name,
        )


def _call(op: Operator) -> _Call:
    refs = tuple((i, a.name) for i, a in enumerate(op.args) if isinstance(a, Ref))
    late = tuple((i, a) for i, a in enumerate(op.args) if not isinstance(a, Ref) and _waits(a))
    waiting = {i for i, _ in (*refs, *late)}
    args = [None if i in waiting else concrete(a, {}, str) for i, a in enumerate(op.args)]
    if any(_waits(v) for _, v in op.kwargs):
        raise ProgramError(f"operator {op.name!r} ({op.source}) takes a variable by name", operator=op.name)
    return _Call(op, resolve(op), args, refs, late, {k: concrete(v, {}, str) for k, v in op.kwargs})


def _waits(value: Arg) -> bool:
    """Whether an operand is known at a run only."""
    if isinstance(value, tuple):
        return any(_waits(v) for v in value)
    return isinstance(value, (Ref, Expr))


def _sized(value: Arg) -> bool:
    """Whether an operand has a size that is known at a run only."""
    return any(_sized(v) for v in value) if isinstance(value, tuple) else isinstance(value, Expr)


Push = Callable[[SparseTable, Ids, Floats, Any, Env, int, int], None]


def _sgd(table: SparseTable, ids: Ids, gradients: Floats, args: Any, env: Env, now: int, threads: int) -> None:
    table.push_sgd(ids, gradients, lr=_number(env, args[3]), now=now, threads=threads)


def _adagrad(table: SparseTable, ids: Ids, gradients: Floats, args: Any, env: Env, now: int, threads: int) -> None:
    lr = _number(env, args[4])
    table.push_adagrad(ids, gradients, lr=lr, epsilon=args[5], now=now, threads=threads)


def _adam(table: SparseTable, ids: Ids, gradients: Floats, args: Any, env: Env, now: int, threads: int) -> None:
    lr, step, (beta1, beta2, epsilon) = _number(env, args[6]), round(_number(env, args[3])), args[7:10]
    table.push_adam(
        ids, gradients, lr=lr, step=step, beta1=beta1, beta2=beta2, epsilon=epsilon, now=now, threads=threads
    )


def _number(env: Env, operand: Any) -> float:
    return float(env[operand.name])


# Kernel -> (how the table does it, how many of its first operands are rows of the table: the parameter and states).
_KERNELS: dict[str, tuple[Push, int]] = {
    "penstock.sparse_sgd_.default": (_sgd, 1),
    "penstock.sparse_adagrad_.default": (_adagrad, 2),
    "penstock.sparse_adam_.default": (_adam, 3),
}


class TableBlock:
    """One table with its update. Updates come one at a time; `table` may be read meanwhile.

    Rows age by `clock` (seconds) from here on: a table that comes back is as if it had all been used just now.
    """

    def __init__(
        self, program: Program, operators: Sequence[Operator], bound: Mapping[str, torch.Tensor], *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        described = next(op for op in operators if op.type == SPARSE_TABLE)
        made: Any = described.outputs
        self.columns: tuple[str, ...] = made[0]
        self._positions: str = made[1]
        self._merged: str = made[2]
        self.table = SparseTable(_settings(described))
        self._expire_after_s: Any = dict(described.kwargs)["expire_after_s"]
        self._clock, self._began = clock, clock()
        self._width = self.table.settings.width
        self._num_threads = usable_cores()
        own = [op for op in operators if op is not described]
        self._kernel = self._kernel_of(own)
        self._block = PreparedBlock(program, [op for op in own if op is not self._kernel], bound)

    def _kernel_of(self, operators: Sequence[Operator]) -> Operator | None:
        """Return the operator that the table does itself, if it is all that touches the rows."""
        names = {*self.columns, self._positions, self._merged}
        touching = [op for op in operators if names & set(op.input_names())]
        if len(touching) != 1 or touching[0].type not in _KERNELS or touching[0] is not operators[-1]:
            return None
        _, number = _KERNELS[touching[0].type]
        order = tuple(Ref(name) for name in self.columns)
        return touching[0] if touching[0].args[:number] == order else None

    def limit_threads(self, most: int) -> None:
        """Update with at most so many threads."""
        self._num_threads = min(self._num_threads, most)

    def now(self) -> int:
        """Return the time that a use of a row is noted with: whole seconds since the beginning."""
        return int(self._clock() - self._began)

    def expire(self) -> int:
        """Drop the rows that were not used for as long as the program sets; return how many. No updates meanwhile."""
        if self._expire_after_s is None:
            return 0
        oldest = math.floor(self._clock() - self._began - self._expire_after_s)
        return self.table.expire(oldest) if oldest > 0 else 0

    def check_room(self, ids: torch.Tensor) -> None:
        """Raise TableFull if an update of these ids, the next one, would make more rows than there is room for."""
        # Sightings are counted in the order in which the update goes through the ids.
        self.table.check_room(ids.numpy() if self._kernel is not None else np.unique(ids.numpy()))

    def update(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Apply gradients [n, width] of `ids` int64[n], which may repeat. Raises TableFull."""
        pushed, values = ids.numpy(), gradients.numpy()
        if self._kernel is None:
            self.table.update(pushed, values, self._rule, now=self.now())
            return
        push, _ = _KERNELS[self._kernel.type]
        push(self.table, pushed, values, self._kernel.args, self._block.run({}), self.now(), self._num_threads)

    def _rule(self, rows: Floats, merged: Floats) -> None:
        whole, width = torch.from_numpy(rows), self._width
        parts = [whole[:, i * width : (i + 1) * width] for i in range(len(self.columns))]
        fed = {name: part.contiguous() for name, part in zip(self.columns, parts, strict=True)}
        run = {self._positions: torch.arange(len(rows)), self._merged: torch.from_numpy(merged)}
        env = self._block.run({**fed, **run})
        for name, part in zip(self.columns, parts, strict=True):
            part.copy_(env[name])


def _settings(described: Operator) -> TableSettings:
    """Return the settings that a `sparse_table` operator holds."""
    given: dict[str, Any] = dict(described.kwargs)
    rows: Any = described.outputs[0]
    return TableSettings(
        name=rows[0],
        width=given["width"],
        capacity=given["capacity"],
        first_values=FirstValues(given["first"], given["a"], given["b"]),
        states=dict(zip(rows[1:], given["first_states"], strict=True)),
        seed=given["seed"],
        padding_idx=given["padding_idx"],
        keeps_last_use=given["expire_after_s"] is not None,
        admit_after=given["admit_after"],
    )
