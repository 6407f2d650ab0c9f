"""The audit log: pages of it, and the requests with a wrong secret that were refused beyond the limit.

Rows of changes are written where the change is committed (`acting`, `Database.write`). A refused request changes
nothing, and a peer without a token must not write to the database at will: those of one peer between two steps are one
row with their number, and beyond `MAX_PEERS` peers the rest is one row without an address.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Select, and_, or_, select

from penstock_server.acting import Request
from penstock_server.db import Database
from penstock_server.schemas import api
from penstock_server.services.pages import from_token, to_token
from penstock_server.services.views import columns
from penstock_server.tables import AuditRow, JobRow

MAX_PEERS = 50


@dataclass(frozen=True, slots=True)
class Visible:
    """Of which subjects an administrator of projects sees entries: these projects, their jobs, and tokens for them."""

    projects: frozenset[str]
    token_ids: Collection[str]


class Audit:
    """The audit log of one server."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._refused: dict[str, tuple[Request, int]] = {}
        self.on_refused: Callable[[], None] = lambda: None

    def refuse(self, request: Request) -> None:
        """Count a refused request. The first of a peer since the last step is the one that the row describes."""
        peer = request.peer
        if peer not in self._refused and len(self._refused) >= MAX_PEERS:
            peer = request.peer = ""
        first, count = self._refused.get(peer, (request, 0))
        self._refused[peer] = first, count + 1
        self.on_refused()

    async def step(self) -> None:
        """Store what was refused since the last step. Raises DatabaseAway; then it is stored by a later one."""
        if not self._refused:
            return
        taken, self._refused = self._refused, {}
        try:
            async with self._db.write() as tx:
                tx.session.add_all([request.row("", count=count) for request, count in taken.values()])
        except BaseException:
            self._put_back(taken)
            raise

    def _put_back(self, taken: dict[str, tuple[Request, int]]) -> None:
        for peer, (request, count) in taken.items():
            self._refused[peer] = request, count + self._refused.get(peer, (request, 0))[1]

    async def page(
        self,
        *,
        by: str | None,
        subject: str | None,
        since_s: float | None,
        until_s: float | None,
        size: int,
        token: str | None,
        only: Visible | None = None,
    ) -> api.Page[api.AuditEntry]:
        """List entries, newest first. `by`: id or name of the token; `since_s`, `until_s`: seconds since 1970."""
        statement = select(AuditRow).order_by(AuditRow.at.desc(), AuditRow.id.desc()).limit(size + 1)
        if by is not None:
            statement = statement.where(or_(AuditRow.token_id == by, AuditRow.token_name == by))
        if subject is not None:
            statement = statement.where(AuditRow.subject == subject)
        if only is not None:
            jobs = select(JobRow.id).where(JobRow.project.in_(only.projects))
            names = [*only.projects, *only.token_ids]
            statement = statement.where(or_(AuditRow.subject.in_(names), AuditRow.subject.in_(jobs)))
        if since_s is not None:
            statement = statement.where(AuditRow.at >= datetime.fromtimestamp(since_s, UTC))
        if until_s is not None:
            statement = statement.where(AuditRow.at < datetime.fromtimestamp(until_s, UTC))
        after = from_token(token)
        async with self._db.read() as session:
            if after is not None:
                last = await session.get(AuditRow, after)
                if last is None:  # its retention is over, and so is that of all before it
                    return api.Page(items=[])
                statement = _before(statement, last)
            rows = (await session.execute(statement)).scalars().all()
        items = [api.AuditEntry(**columns(api.AuditEntry, row)) for row in rows[:size]]
        return api.Page(items=items, next_page_token=to_token(rows[size - 1].id) if len(rows) > size else None)


def _before(statement: Select[AuditRow], last: AuditRow) -> Select[AuditRow]:
    # The first condition alone is what the index can start from.
    older = or_(AuditRow.at < last.at, and_(AuditRow.at == last.at, AuditRow.id < last.id))
    return statement.where(AuditRow.at <= last.at, older)
