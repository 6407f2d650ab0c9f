"""Copies of a Program: whole, or for test.

For test: backward and optimizer operators, what was recorded for training alone, and the variables that
nobody mentions any more are left out; dropout and batch-norm are put at rest by their own arguments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from penstock.program.ir import Arg, Operator, Role, Structure

# type -> (position of the training argument, names written in training)
_TRAINING = {
    "penstock.dropout.default": 3,
    "penstock.lstm.default": 8,
    "penstock.lstm_sequence.default": 6,
    "penstock.gru.default": 7,
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
    if isinstance(value, tuple):
        return tuple(_comparable(v) for v in value)
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def for_test_structure(program: Structure) -> Structure:
    """Return the forward part, at rest."""
    copy = copy_structure(program)
    kept = [op for op in program.operators if op.role in (Role.FORWARD, Role.FORWARD | Role.LOSS) and not op.train_only]
    copy.operators = [_at_rest(op) for op in kept]
    used = {n for op in copy.operators for n in (*op.input_names(), *op.output_names())}
    used |= {program.variables[n].storage for n in used}
    copy.variables = {
        n: v for n, v in program.variables.items() if n in used or v.feed or (v.persistable and v.parameter)
    }
    copy.is_test = True
    return copy


def _at_rest(op: Operator) -> Operator:
    position = _TRAINING.get(op.type)
    if position is None:
        return op
    args: tuple[Arg, ...] = (*op.args[:position], False, *op.args[position + 1 :])
    return replace(op, args=args, writes=())
