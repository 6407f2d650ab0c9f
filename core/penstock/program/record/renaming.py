"""Lasting names for variables that were just recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.program.ir import Operator, Output, Ref
from penstock.program.record.recording import Recording


def rename_recorded(recording: Recording, tensor: torch.Tensor, new: str) -> None:
    """Give a variable that was just recorded its lasting name. Cost: one look at each operator and variable."""
    program, old = recording.program, recording.name_of(tensor)
    var = program.variables.pop(old)
    program.add_variable(replace(var, name=new, storage=new if var.storage == old else var.storage))
    for name, other in program.variables.items():
        if other.storage == old:
            program.variables[name] = replace(other, storage=new)
    program.operators[:] = [_renamed(op, old, new) if _mentions(op, old) else op for op in program.operators]
    recording.rename(old, new)


def _mentions(op: Operator, name: str) -> bool:
    return name in op.output_names() or name in op.input_names() or name in op.writes


def _renamed(op: Operator, old: str, new: str) -> Operator:
    def arg(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(new) if value.name == old else value
        return tuple(arg(v) for v in value) if isinstance(value, tuple) else value

    def out(value: Output) -> Output:
        if isinstance(value, tuple):
            return tuple(new if v == old else v for v in value)
        return new if value == old else value

    return replace(
        op,
        args=tuple(arg(a) for a in op.args),
        kwargs=tuple((k, arg(v)) for k, v in op.kwargs),
        outputs=tuple(out(o) for o in op.outputs),
        writes=tuple(new if w == old else w for w in op.writes),
    )
