"""The one way from a Program's persistable variable to its tensor in a scope."""

from __future__ import annotations

import torch

from penstock.errors import ProgramError
from penstock.exec.scope import Scope
from penstock.program.expr import Expr
from penstock.program.ir import VarDesc
from penstock.program.program import Program

_LOOKUP = "penstock.lookup_table.default"
_CPU = torch.device("cpu")


def tensor_of(scope: Scope, program: Program, name: str, device: torch.device | None = None) -> torch.Tensor:
    """Return the tensor; a captured value is put into the scope at its first use.

    `device`: where it is needed; the scope's tensor moves there. None: the processor's memory.

    Raises ProgramError if it has no value yet, or if the scope's tensor is not what the Program describes
    (another Program's variable of the same name).
    """
    var = program.variables[name]
    tensor = scope.find(name)
    if tensor is None and name in program.captured:
        tensor = program.captured[name].clone()
        scope.set(name, tensor)
    if tensor is None:
        raise ProgramError(
            f"variable {name!r} (created at {var.source}) has no value {_missing(program, var)}", variable=name
        )
    if not _fits(var, tensor):
        described = f"{var.dtype}[{', '.join(str(d) for d in var.shape)}]"
        raise ProgramError(
            f"variable {name!r} (created at {var.source}) is {described}, but the scope "
            f"holds {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} under that name: another program's "
            "startup has run in this scope. Give each model its own fluid.Scope(), or name their parameters",
            variable=name,
        )
    wanted = device or _CPU
    if tensor.device != wanted:
        tensor = tensor.to(wanted)
        scope.set(name, tensor)
    return tensor


def _missing(program: Program, var: VarDesc) -> str:
    """Say why a variable may have no value, and what to do."""
    if var.distributed:
        return "here: its rows are on parameter servers alone. They can be looked up, but not fetched or fed"
    said = "yet. Run the startup program first: exe.run(fluid.default_startup_program())"
    if any(op.type == _LOOKUP and var.name == op.input_names()[0] for op in program.operators):
        said += (
            ". If it is a table that parameter servers have, use the transpiled program, or its clone(for_test=True)"
        )
    return said


def _fits(var: VarDesc, tensor: torch.Tensor) -> bool:
    if str(tensor.dtype) != f"torch.{var.dtype}" or tensor.dim() != len(var.shape):
        return False
    return all(isinstance(d, Expr) or d == s for d, s in zip(var.shape, tensor.shape, strict=True))
