"""A block of a program, prepared once and run often: overloads resolved, constants made, persistable tensors bound.

For blocks that are run by who names them, not by a step: those of a parameter server. Operators run in order under
no-grad; nothing is checked at a run. Invariant: persistable variables are written in place, in the tensors that were
bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.expr import Expr
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.kernels import concrete, operator_error, resolve, shape_text
from penstock.program.program import Program

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


class PreparedBlock:
    """Operators over `bound` tensors. `run` may be called by one thread at a time."""

    def __init__(self, program: Program, operators: Sequence[Operator], bound: Mapping[str, torch.Tensor]) -> None:
        self.bound = dict(bound)
        for op in operators:
            _refuse(program, op)
        self._calls = [_call(op) for op in operators]

    def run(self, fed: Mapping[str, torch.Tensor], symbols: Mapping[str, int] | None = None) -> Env:
        """Run all operators; return every tensor by name. Raises OperatorError; writes before it remain."""
        env: Env = {**self.bound, **fed}
        with torch.no_grad():
            for call in self._calls:
                call.run(env, symbols or {})
        return env


def _refuse(program: Program, op: Operator) -> None:
    replaced = [n for n in op.output_names() if program.variables[n].persistable]
    if replaced or any(isinstance(o, tuple) for o in op.outputs):
        raise ProgramError(
            f"operator {op.name!r} ({op.source}) of block {op.block} makes {list(op.output_names())} anew; a server "
            "updates what it keeps in place, by operators with single results",
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
