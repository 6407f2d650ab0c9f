"""How many jobs there are, in the API's schemas."""

from __future__ import annotations

from penstock_server.schemas.api import Answer


class JobCounts(Answer):
    """How many jobs are in each state; states without jobs are left out. `total`: of all states."""

    states: dict[str, int]
    total: int
