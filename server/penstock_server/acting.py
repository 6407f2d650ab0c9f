"""The request that is being served, as its row in the audit log describes it.

The guard begins it once a request may pass; the first write transaction that the request commits adds the row, so that
a change and its row are stored together or not at all. Loops and websockets have no request: what they write leaves no
row here. It holds no secret: neither headers, query nor body, and of the path only the identifier of what it names.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime

from penstock_server.tables import AuditRow
from penstock_server.uuid7 import uuid7


@dataclass(slots=True)
class Request:
    """A request that may change something. `status`: of its answer if it succeeds; `subject`: named by its path."""

    at: datetime
    peer: str
    method: str
    route: str
    status: int
    request_id: str
    subject: str = ""
    token_id: str | None = None
    token_name: str = ""
    is_recorded: bool = False

    def row(self, subject: str, *, count: int = 1) -> AuditRow:
        """Return the row that says so. `count`: of the requests that it stands for."""
        return AuditRow(
            id=uuid7(), at=self.at, token_id=self.token_id, token_name=self.token_name, peer=self.peer,
            method=self.method, route=self.route, subject=subject, status=self.status, request_id=self.request_id,
            count=count,
        )  # fmt: skip


_CURRENT: ContextVar[Request | None] = ContextVar("penstock_request", default=None)


def begin(request: Request | None) -> None:
    """Have what this task commits from now on recorded as the change of `request`; of none if it is None."""
    _CURRENT.set(request)


def identify(token_id: str, token_name: str) -> None:
    """Name the one-time token with which this request came: its principal, where the guard knew none."""
    request = _CURRENT.get()
    if request is not None:
        request.token_id, request.token_name = token_id, token_name


def unrecorded() -> Request | None:
    """Return the request that is being served if it has no row yet."""
    request = _CURRENT.get()
    return None if request is None or request.is_recorded else request
