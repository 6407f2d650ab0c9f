"""The list of jobs and nodes with which a subscription begins: read and encoded once for all browsers that ask for it
at the same time, a piece at a time, so that the event loop turns between pieces.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from penstock_server.secrecy import Sight, without_env
from penstock_server.services.jobs import Jobs
from penstock_server.services.nodes import Nodes
from penstock_server.streams.queue import Encoded, encode

LISTED_JOBS = 200


@dataclass(frozen=True, slots=True)
class Listed:
    """The list as of one moment. `jobs`: JSON of each for those who see `env`; `masked`: for others."""

    jobs: str
    masked: str
    rest: str

    def message(self, number: int, sight: Sight) -> Encoded:
        """Return the snapshot for one subscription of a principal that sees all projects."""
        jobs = self.jobs if sight.env else self.masked
        return Encoded(number, f'{{"type":"snapshot","id":{number},"jobs":[{jobs}],{self.rest}}}')


class Listing:
    """Makes the list. One event loop."""

    def __init__(self, jobs: Jobs, nodes: Nodes) -> None:
        self._jobs, self._nodes = jobs, nodes
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[Listed] | None = None  # waits for its turn: it will read what is there later than now

    async def read(self) -> Listed:
        """Return the list as it is now or later, with every change that a caller was not yet subscribed to."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_in_turn(), name="listing")
        return await asyncio.shield(self._next)  # a browser that leaves must not end it for the others

    async def read_of(self, number: int, sight: Sight) -> tuple[Encoded, set[str]]:
        """Return the snapshot for one subscription of a principal that sees some projects, and the ids of its jobs."""
        ids, total = await self._jobs.newest(LISTED_JOBS, sight.projects)
        jobs = [encode(sight.of_view(job.model_dump(mode="json"))) async for job in self._jobs.of(ids)]
        rest = await self._rest(total, len(jobs))
        return Encoded(number, f'{{"type":"snapshot","id":{number},"jobs":[{",".join(jobs)}],{rest}}}'), set(ids)

    async def _read_in_turn(self) -> Listed:
        async with self._lock:
            self._next = None
            return await self._read()

    async def _read(self) -> Listed:
        jobs: list[str] = []
        masked: list[str] = []
        ids, total = await self._jobs.newest(LISTED_JOBS)
        async for job in self._jobs.of(ids):
            view = job.model_dump(mode="json")
            jobs.append(encode(view))
            masked.append(encode(without_env(view)))
        return Listed(",".join(jobs), ",".join(masked), await self._rest(total, len(jobs)))

    async def _rest(self, total: int, num_listed: int) -> str:
        nodes = [node.model_dump(mode="json") for node in await self._nodes.page()]
        more = "true" if total > num_listed else "false"
        return f'"nodes":{encode(nodes)},"total":{total},"more":{more}'
