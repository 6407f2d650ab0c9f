"""Tokens as the REST API takes and gives them: scopes, or roles, in all projects or in some."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from penstock.protocol.jobspec import NAME, Text
from penstock_server.auth.principal import Role, scopes_of_roles
from penstock_server.schemas.api import Answer, Request, Timestamp

MAX_EXPIRY_S = 10 * 365 * 86400.0
Scope = Literal["read", "submit", "admin", "attach"]
ProjectName = Annotated[str, StringConstraints(pattern=NAME)]
MAX_PROJECTS = 100
_GRANTS = (("scopes", "role", "projects"), ("role", "scopes", "projects"), ("projects", "scopes", "role"))


class TokenRequest(Request):
    """A token to make."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": [name],
                    "properties": {name: {"not": {"type": "null"}}, **{other: {"type": "null"} for other in others}},
                }
                for name, *others in _GRANTS
            ],
            "examples": [
                {"name": "dashboard", "scopes": ["read"]},
                {"name": "ci", "role": "runner", "expires_in_s": 86_400},
                {"name": "ana", "projects": {"vision": "admin", "ctr": "viewer"}},
            ],
        }
    )

    name: Annotated[Text, Field(min_length=1, max_length=255)]
    scopes: Annotated[list[Scope] | None, Field(min_length=1, description="in all projects")] = None
    role: Annotated[Role | None, Field(description="in all projects: viewer reads, runner submits, too")] = None
    projects: Annotated[
        dict[ProjectName, Role] | None,
        Field(min_length=1, max_length=MAX_PROJECTS, description="the role in each project that the token is for"),
    ] = None
    expires_in_s: Annotated[float | None, Field(gt=0, le=MAX_EXPIRY_S)] = None

    @model_validator(mode="after")
    def _one_grant(self) -> TokenRequest:
        given = [name for name in ("scopes", "role", "projects") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"one of scopes, role and projects is needed; found {found}")
        return self

    def granted(self) -> list[str]:
        """Return the scopes of the token."""
        if self.scopes is not None:
            return list(self.scopes)
        return scopes_of_roles([self.role] if self.role is not None else list((self.projects or {}).values()))


class Token(Answer):
    """A token, without its secret. `projects`: the role in each project that it is for; null: its scopes, in all."""

    id: str
    kind: str
    name: str
    scopes: list[str]
    projects: dict[str, Role] | None
    created_at: Timestamp
    expires_at: Timestamp | None
    revoked_at: Timestamp | None
    last_used_at: Timestamp | None
    etag: str = Field(description="for If-Match of a change: a change in between is then refused with 412")


class TokenMade(Token):
    """A new token with its secret, which is shown once."""

    token: str


class Me(Answer):
    """The principal of a request. `projects`: its role in each project that it is for; null: its scopes, in all."""

    name: str
    scopes: list[str]
    projects: dict[str, Role] | None
