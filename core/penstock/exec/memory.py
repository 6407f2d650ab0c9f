"""Persistable tensors of replicas: the scope's for their home and shared ones, copies for the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.graph.ssa import SHARED, Physical
from penstock.program.program import Program
from penstock.scope import Scope, tensor_of


class ReplicaMemory:
    """Persistables by physical variable. `devices`: one for each replica; empty, all are in this process's memory.

    The scope's tensor is that of the variable's home: replica 0, or the owner that alone has it (`Graph.homes`). With
    devices it lies on its home's device, and is moved there if it was used elsewhere.
    Copies of other replicas are made from the scope at their first use, and again when a tensor of the scope was
    replaced, or written from outside (an Executor, another ParallelExecutor, `find_var(...).set`): all
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
        """Drop the copies if the scope was written from outside since this memory wrote it. Before binding."""
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
