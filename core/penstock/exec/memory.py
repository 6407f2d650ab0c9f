"""Persistable variables as tensors: in the scope for their home and shared ones, copies for other replicas.

`tensor_of` is the one way from a Program's persistable variable to its tensor in a scope.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import ProgramError
from penstock.exec.scope import Scope
from penstock.graph.ssa import SHARED, Physical
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


class ReplicaMemory:
    """Persistables by physical variable. `devices`: one for each replica; empty, all are in this process's memory.

    The scope's tensor is that of the variable's home: replica 0, or the owner that alone has it (`Graph.homes`). With
    devices it lies on its home's device, and is moved there if somebody has used it elsewhere.
    Copies of other replicas are made from the scope at their first use, and again when a tensor of the scope was
    replaced, or written by somebody else (an Executor, another ParallelExecutor, `find_var(...).set`): all
    replicas start each run from the same values.
    """

    def __init__(self, scope: Scope, devices: tuple[torch.device, ...] = ()) -> None:
        self.scope, self.devices = scope, devices
        self._homes: dict[str, int] = {}
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def settle(self, homes: Mapping[str, int]) -> None:
        """Take over where a graph has the persistables that not every replica has. Before binding its plan."""
        self._homes.update(homes)

    def home(self, name: str) -> int:
        """Return the replica whose copy the scope keeps."""
        return self._homes.get(name, 0)

    def device(self, replica: int) -> torch.device | None:
        """Return the device of a replica; what belongs to all is the first one's. None: the processor."""
        return self.devices[max(replica, 0)] if self.devices else None

    def refresh(self) -> None:
        """Forget the copies if somebody else has written the scope since this memory did. Before binding."""
        if self.scope.writer is not self:
            self._copies.clear()
            self.scope.writer = self

    def written(self) -> None:
        """Note that a run on this memory has written the scope's tensors and, equally, the copies."""
        self.scope.written_by(self)

    def tensor(self, program: Program, variable: Physical) -> torch.Tensor:
        """Return the tensor of a persistable physical variable. Raises ProgramError, see `tensor_of`."""
        home = self.home(variable.name)
        source = tensor_of(self.scope, program, variable.name, self.device(home))
        if variable.replica in (SHARED, home):
            return source
        known = self._copies.get(variable.key)
        if known is None or known[0] is not source:
            copy = source.to(self.device(variable.replica) or source.device, copy=True)
            known = self._copies[variable.key] = (source, copy)
        return known[1]
