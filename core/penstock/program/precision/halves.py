"""Rewriting a recorded Program so that chosen operators compute in half precision.

An operator of the white list reads half copies of its float32 operands, and its results are cast back to float32 under
their own names. So is the operator of its gradient, which computes what autograd would through those casts: in half
precision, and cast back. Parameters, their gradients and everything else stay float32. A half copy serves all readers
until its variable is written. Operators of Penstock's own, and those within blocks of control flow, stay as they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.logger import warn_once
from penstock.program.ir import AGAIN, Arg, Operator, Output, Ref, Role, TorchConst
from penstock.program.operator_types import fluid_type, layer_of
from penstock.program.precision.lists import AutoMixedPrecisionLists
from penstock.program.program import Program

_log = logging.getLogger(__name__)
_WHOLE = {"nce", "hsigmoid", "sampled_softmax_with_cross_entropy", "linear_chain_crf", "npair_loss", "lrn"}
"""Layers made of several calls, which Fluid computes in float32 as a whole."""
_TRANSPOSED = {"aten.convolution.default": 6, "aten.convolution_backward.default": 7}


def in_half(program: Program, lists: AutoMixedPrecisionLists, dtype: str) -> int:
    """Rewrite the operators of `program`; return how many compute in `dtype` now."""
    rewriting = _Rewriting(program, lists, dtype)
    operators, program.operators[:] = list(program.operators), []
    num = 0
    for op in operators:
        rewriting.forget_written(op)
        if rewriting.takes(op):
            rewriting.rewrite(op)
            num += 1
        else:
            program.operators.append(op)
    program.revision += 1
    return num


@dataclass
class _Rewriting:
    program: Program
    lists: AutoMixedPrecisionLists
    dtype: str
    copies: dict[str, str] = field(default_factory=dict)
    """Variable -> its half copy."""

    def takes(self, op: Operator) -> bool:
        """Whether an operator is to compute in half precision."""
        if not self._is_white(op):
            return False
        if not op.type.startswith("aten.") or op.writes:
            if not op.writes:
                warn_once(_log, f"mixed precision: {op.type} stays in float32, the only precision that it has")
            return False
        names = {name.partition(AGAIN)[0] for name in (*op.input_names(), *op.output_names())}
        floats = [name for name in op.output_names() if self._is_float32(name)]
        roots = all(self.program.variables[name].storage == name for name in floats)
        return bool(floats) and roots and not names & self.lists.black_varnames

    def _is_white(self, op: Operator) -> bool:
        # A forward operator that is computed again is one still: both have to be of one precision.
        is_again = any(AGAIN in name for name in op.output_names())
        kind = fluid_type(replace(op, role=Role.FORWARD) if is_again else op).removesuffix("_grad")
        at = _TRANSPOSED.get(op.type)
        if at is not None and op.args[at] is True:
            kind = "conv2d_transpose"
        layer = layer_of(op)
        return kind in self.lists.white_list and layer not in _WHOLE and layer not in self.lists.black_list

    def _is_float32(self, name: str) -> bool:
        var = self.program.variables.get(name)
        return var is not None and var.kind == "dense" and var.dtype == "float32"

    def forget_written(self, op: Operator) -> None:
        """Drop the copies of what an operator writes in place."""
        variables = self.program.variables
        written = {variables[name].storage for name in op.writes if name in variables}
        for name in [name for name in self.copies if variables[name].storage in written]:
            del self.copies[name]

    def rewrite(self, op: Operator) -> None:
        """Append casts of its operands, the operator in half precision, and casts of its results."""
        args = tuple(self._operand(arg, op) for arg in op.args)
        kwargs = tuple((key, self._operand(value, op)) for key, value in op.kwargs)
        made = {name: self._half(name) for name in op.output_names() if self._is_float32(name)}
        outputs = tuple(_renamed(out, made) for out in op.outputs)
        own = tuple(pair for pair in op.role_vars if pair[1] not in made)
        self.program.operators.append(replace(op, args=args, kwargs=kwargs, outputs=outputs, role_vars=own))
        for name, half in made.items():
            pairs = tuple(pair for pair in op.role_vars if pair[1] == name)
            self._cast(half, name, "float32", replace(op, role_vars=pairs))

    def _operand(self, value: Arg, op: Operator) -> Arg:
        if isinstance(value, tuple):
            return tuple(self._operand(one, op) for one in value)
        if not isinstance(value, Ref) or not self._is_float32(value.name):
            return value
        copy = self.copies.get(value.name)
        if copy is None:
            copy = self.copies[value.name] = self._half(value.name)
            self._cast(value.name, copy, self.dtype, replace(op, role_vars=()))
        return Ref(copy)

    def _half(self, name: str) -> str:
        """Describe a half copy of a variable, which nothing has made yet; return its name."""
        old = self.program.variables[name]
        base, number = f"{name}.cast_{self.dtype}", 0
        while (found := f"{base}_{number}") in self.program.variables:
            number += 1
        plain: dict[str, Any] = {"persistable": False, "parameter": False, "feed": False, "buffer": False}
        self.program.add_variable(
            replace(old, name=found, dtype=self.dtype, storage=found, lod_level=0, trainable=True, **plain)
        )
        return found

    def _cast(self, source: str, result: str, dtype: str, like: Operator) -> None:
        self.program.operators.append(
            replace(
                like,
                name=self.program.unique_operator("_to_copy"),
                type="aten._to_copy.default",
                args=(Ref(source),),
                kwargs=(("dtype", TorchConst("dtype", dtype)),),
                outputs=(result,),
                writes=(),
            )
        )


def _renamed(out: Output, names: dict[str, str]) -> Output:
    if isinstance(out, tuple):
        return tuple(names.get(name, name) for name in out)
    return names.get(out, out) if isinstance(out, str) else out


__all__ = ["in_half"]
