"""Where the persistable variables of a replica live: the scope for replica 0 and shared ones, copies for the rest."""

from __future__ import annotations

import torch

from penstock.errors import ProgramError
from penstock.exec.scope import Scope
from penstock.graph.ssa import Physical
from penstock.program.program import Program


class ReplicaMemory:
    """Persistables by physical variable. Copies of replicas > 0 are made from the scope at their first use,
    and again when a tensor of the scope was replaced (after a load or a second startup run)."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._copies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, program: Program, variable: Physical) -> torch.Tensor:
        """Return the tensor of a persistable physical variable. Raises ProgramError if it has no value yet."""
        source = self.scope.find(variable.name)
        if source is None and variable.name in program.captured:
            source = program.captured[variable.name].clone()
            self.scope.set(variable.name, source)
        if source is None:
            created = program.variables[variable.name].source
            raise ProgramError(
                f"variable {variable.name!r} (created at {created}) has no value yet. "
                "Run the startup program first: exe.run(fluid.default_startup_program())",
                variable=variable.name,
            )
        if variable.replica <= 0:
            return source
        known = self._copies.get(variable.key)
        if known is None or known[0] is not source:
            known = self._copies[variable.key] = (source, source.clone())
        return known[1]
