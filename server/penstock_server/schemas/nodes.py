"""What nodes report of themselves over time."""

from __future__ import annotations

from pydantic import Field

from penstock_server.schemas.api import Answer, Timestamp


class NodeLoad(Answer):
    """Processor and memory of a node over the last hour, means of a minute each, since this server started.

    The lists are of the same length, oldest first; a minute without a heartbeat is left out.
    """

    node_id: str
    at: list[Timestamp] = Field(description="begin of each minute")
    cpu_percent: list[float] = Field(description="of all cores together, 0 to 100")
    memory_used_bytes: list[int]
