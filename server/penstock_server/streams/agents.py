"""The agents that are connected, by node. A node has one connection: a new one replaces the old."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.protocol.agent import DiskSpace, PilotTerms
from penstock.protocol.clocks import ClockOffset
from penstock_server.diskspace import is_full
from penstock_server.problems import Conflict
from penstock_server.streams.nodeload import NodeLoads
from penstock_server.streams.socket import Outbox

REPLACED = 4409
OUT_OF_DATE = 1013


@dataclass(slots=True, eq=False)
class AgentLink:
    """One agent's connection. `missing`: replicas that should run there and did not come back with it.

    `greeted`: it got its welcome, before which it takes no other message. `once`, `ends_at`, `leaving`: of a pilot,
    that it takes one job, when its time for jobs is over (on the monotonic clock), and why it drains.
    `instance`: of the agent's run; `heard_at`: when its last message came; `takes_stacks`: it answers a `stack`;
    `records`: it takes a `record`.
    """

    node_id: str
    connected_at: float
    outbox: Outbox = field(default_factory=Outbox)
    missing: set[str] = field(default_factory=set)
    greeted: bool = False
    once: bool = False
    ends_at: float | None = None
    leaving: str = ""
    instance: str = ""
    heard_at: float = 0.0
    takes_stacks: bool = False
    records: bool = False

    def stays_until(self, terms: PilotTerms | None) -> None:
        """Note the terms of an agent that has connected just now."""
        if terms is not None:
            self.once, self.leaving = terms.once, terms.leaving
            self.ends_at = None if terms.seconds_left is None else self.connected_at + terms.seconds_left


class Agents:
    """Connected agents. `loads`: what they reported of their nodes' processor and memory."""

    def __init__(self) -> None:
        self.loads = NodeLoads()
        self._links: dict[str, AgentLink] = {}
        self._clocks: dict[str, ClockOffset] = {}
        self._disks: dict[str, DiskSpace] = {}

    def connect(self, link: AgentLink, *, alive_s: float) -> None:
        """Take a new connection; the node's old one, if any, is closed.

        Unless that is another agent's that sent a message within `alive_s`: a node's identity was copied then,
        and the two would replace each other for ever. Raises Conflict.
        """
        old = self._links.get(link.node_id)
        if old is not None:
            is_other = bool(old.instance and link.instance) and old.instance != link.instance
            if is_other and link.heard_at - old.heard_at < alive_s:
                raise Conflict("node_in_use", "another agent is this node: its node.json was copied; join by a token")
            old.outbox.close(REPLACED, "another connection of this node replaced this one")
        self._links[link.node_id] = link

    def disconnect(self, link: AgentLink) -> None:
        """Forget a connection, unless another has replaced it."""
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]

    def note_clock(self, link: AgentLink, offset: ClockOffset) -> bool:
        """Note a node's clock as its agent found it; return whether that is news to readers."""
        if not offset.differs(self._clocks.get(link.node_id)):
            return False
        self._clocks[link.node_id] = offset
        return True

    def note_disk(self, link: AgentLink, disk: DiskSpace) -> bool:
        """Note the space that a node's agent has left; return whether its disk has become full, or has room again."""
        before = self._disks.get(link.node_id)
        self._disks[link.node_id] = disk
        return is_full(disk) != is_full(before)

    def disk_of(self, node_id: str) -> DiskSpace | None:
        """Return a node's disk space of its last heartbeat since this server started; of an older agent None."""
        return self._disks.get(node_id)

    def clock_of(self, node_id: str) -> ClockOffset | None:
        """Return how far a node's clock is ahead of this server's, as last found since this server started."""
        return self._clocks.get(node_id)

    def close(self, node_id: str, reason: str) -> None:
        """End a node's connection, if there is one: its agent connects again, and says what it has."""
        link = self._links.get(node_id)
        if link is not None:
            link.outbox.close(OUT_OF_DATE, reason)

    def get(self, node_id: str) -> AgentLink | None:
        """Return a node's connection, if there is one."""
        return self._links.get(node_id)

    def all(self) -> list[AgentLink]:
        """Return every connection."""
        return list(self._links.values())
