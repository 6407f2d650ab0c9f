"""The recording of a job, read process by process from the server: frames in their order, with the graphs they index.

Frames come in pages, so that one page of one process is in memory at a time. What a running job records after a page
was read comes with the next one. Frames that the server has deleted (its quota, its retention) are not seen.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.errors import PeerError
from penstock.protocol.frames import Frame, Kind, decode
from penstock.protocol.graphdoc import GraphDocument

if TYPE_CHECKING:
    from penstock.client import Client, Event
    from penstock.protocol.rest import Job, Replica, Series

PAGE_BYTES = 8 << 20
MAX_POINTS = 100_000
"""Of each series; the server thins longer ones so that extremes stay."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one attempt of a job. `stream`: the number of its frames; `number`: from 1, unique in the job."""

    number: int
    stream: int
    replica_id: str
    role: str
    index: int
    attempt: int
    host: str
    pid: int | None
    endpoint: str | None
    started_ns: int | None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A frame. `graph`: hash of the graph whose operators it indexes, None if that is not known."""

    frame: Frame
    graph: str | None


@dataclass(slots=True)
class Progress:
    """How far reading has come. `process`: the one being read, `read_bytes`: of all."""

    processes: int
    process: Process | None = None
    read_bytes: int = 0


@dataclass(slots=True)
class Recording:
    """The recording of one job. `on_progress`: called after each page."""

    client: Client
    job: Job
    on_progress: Callable[[Progress], None] = lambda progress: None
    processes: tuple[Process, ...] = ()
    _documents: dict[str, GraphDocument] = field(default_factory=dict)
    _progress: Progress = field(default_factory=lambda: Progress(0))

    def __post_init__(self) -> None:
        replicas = sorted(self.client.replicas(self.job["id"]), key=lambda r: (r["attempt"], r["role"] != "trainer"))
        self.processes = tuple(process_of(number + 1, replica) for number, replica in enumerate(replicas))
        self._progress.processes = len(replicas)

    def frames(self, process: Process, kinds: Collection[Kind]) -> Iterator[Recorded]:
        """Yield the frames of a process, oldest first, each once. Raises PeerError, Unavailable."""
        graph = self._only_graph(process)
        after: int | None = None
        wanted = sorted({*kinds, Kind.GRAPH_USED})
        self._progress.process = process
        while content := self.client.frames(
            self.job["id"], stream=process.stream, kinds=wanted, after_seq=after, limit_bytes=PAGE_BYTES
        ):
            for frame in map(decode, cut(content)):
                if after is not None and frame.seq <= after:
                    continue  # sent twice, after a lost connection
                after = frame.seq
                if frame.kind is Kind.GRAPH_USED:
                    graph = str(frame.body.get("hash")) if isinstance(frame.body, dict) else None
                if frame.kind in kinds:
                    yield Recorded(frame, graph)
            self._progress.read_bytes += len(content)
            self.on_progress(self._progress)

    def document(self, graph: str) -> GraphDocument:
        """Return a graph document; the same object for the same hash."""
        if graph not in self._documents:
            self._documents[graph] = GraphDocument.model_validate(self.client.graph(graph))
        return self._documents[graph]

    def events(self) -> Iterator[Event]:
        """Yield the changes of state of the job and its processes."""
        return self.client.events(self.job["id"])

    def series(self) -> dict[str, Series]:
        """Return the metrics of the job."""
        return self.client.metrics(self.job["id"], max_points=MAX_POINTS)

    def _only_graph(self, process: Process) -> str | None:
        """Return the graph before the first GRAPH_USED frame, which the quota may have taken."""
        used = {use["hash"] for use in self.client.graphs(self.job["id"]) if use["replica_id"] == process.replica_id}
        return used.pop() if len(used) == 1 else None


def process_of(number: int, replica: Replica) -> Process:
    """Return a process as the server describes it."""
    started = replica["started_at"]
    return Process(
        number, replica["stream"], replica["id"], replica["role"], replica["index"], replica["attempt"],
        replica["host"], replica["pid"], replica["endpoint"], None if started is None else unix_ns(started),
    )  # fmt: skip


def cut(content: bytes) -> Iterator[bytes]:
    """Yield the frames of an answer, each of which follows its length. Raises PeerError if it ends within one."""
    at = 0
    while at < len(content):
        if at + _LENGTH.size > len(content):
            raise PeerError(f"the recorded frames end within a length, at byte {at} of {len(content)}")
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + size
        if at > len(content):
            raise PeerError(f"the recorded frames end at byte {len(content)}, within a frame of {size} bytes")
        yield content[at - size : at]


def unix_ns(text: str) -> int:
    """Return a time of the API (ISO 8601) as Unix time in nanoseconds."""
    found = datetime.fromisoformat(text)
    return int(found.replace(microsecond=0).timestamp()) * 1_000_000_000 + found.microsecond * 1000
