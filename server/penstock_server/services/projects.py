"""Projects: the share and the quotas that an administrator gives, and what their jobs hold."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select

from penstock.protocol.states import JobState
from penstock_server import tags
from penstock_server.db import Database
from penstock_server.schemas import api
from penstock_server.services.fairness import Terms, Use
from penstock_server.services.survey import terms, uses
from penstock_server.tables import JobRow, ProjectRow


class Projects:
    """The projects of this server."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def all(self, only: Collection[str] | None = None) -> list[api.Project]:
        """List the projects that have terms of their own, or jobs that run or wait; or, of these, those in `only`."""
        waiting = select(JobRow.project, func.count()).where(JobRow.state.in_([JobState.QUEUED, JobState.RECOVERING]))
        async with self._db.read() as session:
            given, used = await terms(session), await uses(session)
            counts = {row[0]: row[1] for row in await session.execute(waiting.group_by(JobRow.project))}
        return [
            _view(name, given.get(name, Terms()), used.get(name, Use()), counts.get(name, 0))
            for name in sorted({*given, *used, *counts})
            if only is None or name in only
        ]

    async def get(self, name: str) -> api.Project:
        """Return a project; one that no request has named yet has the terms that each begins with."""
        found = await self.all([name])
        return found[0] if found else _view(name, Terms(), Use(), 0)

    async def put(self, name: str, request: api.ProjectTerms, *, tag: str | None = None) -> api.Project:
        """Give a project these terms instead of those that it has. `tag`: of the present ones (If-Match)."""
        async with self._db.write() as tx:
            present = (await terms(tx.session)).get(name, Terms())
            tags.require(f"project {name!r}", _tag(present), tag)
            await tx.session.merge(ProjectRow(name=name, **request.model_dump()))
            tx.effects.schedule = True
        return await self.get(name)


def _tag(given: Terms) -> str:
    return tags.of_terms(given.share, given.max_cpus, given.max_gpus, given.max_jobs)


def _view(name: str, given: Terms, used: Use, waiting: int) -> api.Project:
    cpus, gpus, memory = used.amounts
    return api.Project(
        name=name,
        share=given.share,
        max_cpus=given.max_cpus,
        max_gpus=given.max_gpus,
        max_jobs=given.max_jobs,
        cpus_used=cpus,
        gpus_used=gpus,
        memory_used_bytes=memory,
        jobs=used.jobs,
        waiting=waiting,
        etag=_tag(given),
    )
