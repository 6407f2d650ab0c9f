"""Where the persistable variables of a replica live: the scope for replica 0 and shared ones, copies for the rest."""

from __future__ import annotations

import torch

from penstock.exec.persistables import tensor_of
from penstock.exec.scope import Scope
from penstock.graph.ssa import Physical
from penstock.program.program import Program


class ReplicaMemory:
    """Persistables by physical variable.

    Copies of replicas > 0 are made from the scope at their first use, and again when a tensor of the scope was
    replaced, or written by somebody else (an Executor, another ParallelExecutor, `find_var(...).set`): all
    replicas start each run from the same values.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

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
        source = tensor_of(self.scope, program, variable.name)
        if variable.replica <= 0:
            return source
        known = self._copies.get(variable.key)
        if known is None or known[0] is not source:
            known = self._copies[variable.key] = (source, source.clone())
        return known[1]
