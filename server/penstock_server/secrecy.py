"""Which jobs a reader sees, and what of them not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.protocol.masking import MASK
from penstock_server.auth.principal import READ, Principal

SEES_ENV = frozenset({"submit"})
"""Scopes whose holders see the values of a job's variables; what looks like a secret is never shown."""


def without_env(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a job for those who may only read: the names of its variables, without their values."""
    spec = view["spec"]
    return {**view, "spec": {**spec, "env": dict.fromkeys(spec["env"], MASK)}}


@dataclass(frozen=True, slots=True)
class Sight:
    """What one principal sees of jobs. `projects`: those whose jobs it sees; None: of all."""

    projects: frozenset[str] | None
    env_in: frozenset[str] | None
    """Projects in which it sees the values of `env`; None: as `env` says, in all."""
    env: bool = False

    @classmethod
    def of(cls, principal: Principal) -> Sight:
        """Return what a principal sees."""
        seen, with_env = principal.projects_with(READ), principal.projects_with(SEES_ENV)
        return cls(seen, with_env, env=principal.may(SEES_ENV))

    def sees(self, project: str) -> bool:
        """Whether the jobs of a project are shown."""
        return self.projects is None or project in self.projects

    def sees_env(self, project: str) -> bool:
        """Whether the values of `env` are shown in the jobs of a project."""
        return self.env if self.env_in is None else project in self.env_in

    def of_view(self, view: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON of a job that is shown, as this principal sees it."""
        return view if self.sees_env(view["spec"]["project"]) else without_env(view)


ALL = Sight(None, None, env=True)
"""Everything but what is never shown."""
