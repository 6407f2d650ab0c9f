"""Followers of jobs, logs and frames. Publishing never waits: it only puts into the followers' queues."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.frames import Header, Kind
from penstock.protocol.stream import (
    ConditionsChanged,
    EventAdded,
    Figures,
    GraphUsed,
    MediaAdded,
    Points,
    ServerMessage,
    StreamGraph,
)
from penstock_server.secrecy import ALL, Sight, without_env
from penstock_server.streams.queue import BrowserQueue, Encoded, LogWish, append_points, encode

RING_BYTES = 3 << 18
"""Below what waits for a browser before events are dropped, with room for what comes while it opens."""
MAX_RINGS = 64
_PART: dict[Kind, str] = {
    Kind.OP_EVENTS: "ops", Kind.OP_SUMS: "ops", Kind.GAP: "ops", Kind.SYNC: "sync", Kind.EXCHANGE: "sync",
    Kind.INPUT_EVENTS: "ops",
}  # fmt: skip
SHOWN = frozenset(_PART)
SERVER = "server"
"""The part of a subscription to the conditions of the server; it has no other."""
LOST = "FRAMES"
"""Kind under which a gap counts whole frames that a broken connection took with it."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One browser's interest in one job (`job_id`), or in the list of jobs (None), or in the server (None, `SERVER`).

    `sight`: what its browser sees of jobs; `shown`: of the list of jobs, those that it sees, if that is not all.
    `ready`: frames are delivered; before it they wait in the job's ring, and `num_lost` counts those that never came.
    """

    id: int
    job_id: str | None
    parts: frozenset[str]
    queue: BrowserQueue
    log_offsets: dict[str, int] = field(default_factory=dict)
    ready: bool = False
    num_lost: int = 0
    sight: Sight = ALL
    shown: set[str] = field(default_factory=set)
    held: dict[str, Points] | None = field(default_factory=dict)
    """Points that wait until the snapshot is read."""
    early: dict[str, ServerMessage | Encoded] | None = field(default_factory=dict)
    early_figures: dict[str, str] = field(default_factory=dict)
    """State and figures that are newer than the snapshot that is being read, and follow it."""

    def put_state(self, key: str, message: ServerMessage | Encoded) -> None:
        """Queue a message, or hold it until the snapshot is read; it replaces the one of the same key that waits."""
        if self.early is None:
            self.queue.put_state(f"{key}:{self.id}", message)
        else:
            self.early.pop(key, None)
            self.early[key] = message

    def see(self, job_id: str) -> None:
        """Note a job of the list that is shown."""
        if self.job_id is None and self.sight.projects is not None:
            self.shown.add(job_id)

    def put_figures(self, figures: Mapping[str, str]) -> None:
        """Queue figures as JSON by job, or hold them; those of jobs that are not shown are left out."""
        if self.early is not None:
            self.early_figures.update(figures)
            return
        if self.job_id is None and self.sight.projects is not None:
            figures = {job_id: text for job_id, text in figures.items() if job_id in self.shown}
        if figures:
            self.queue.put_figures(self.id, figures)

    def begin(self, snapshot: ServerMessage | Encoded) -> None:
        """Queue the snapshot, and what came while it was read; a sender may take messages at any time before."""
        early, self.early = self.early or {}, None
        self.put_state("snapshot", snapshot)
        for key, message in early.items():
            self.put_state(key, message)
        if self.early_figures:
            self.put_figures(self.early_figures)
            self.early_figures = {}

    def put_metrics(self, points: Mapping[str, Points]) -> None:
        """Queue points that are stored by now, or hold them."""
        if self.held is None:
            self.queue.put_metrics(self.id, points)
        else:
            append_points(self.held, points)

    def begin_metrics(self, snapshot: Mapping[str, Points]) -> None:
        """Queue what came while the snapshot was read and is not in it, and from now on what comes."""
        held, self.held = self.held or {}, None
        fresh = {
            name: _without(points, snapshot[name]) if name in snapshot else points for name, points in held.items()
        }
        fresh = {name: points for name, points in fresh.items() if points["step"]}
        if fresh:
            self.queue.put_metrics(self.id, fresh)


@dataclass(slots=True)
class Recent:
    """The newest frames of a job, so that a page which opens now is not empty. Bounded by bytes;
    the newest frame stays whatever its size.

    `pinned`: of the EXCHANGE frames that went, the newest of each stream: it holds sums since the start, and may be the
    last for long.
    """

    items: deque[tuple[Header | None, bytes | StreamGraph]] = field(default_factory=deque)
    pinned: dict[int, tuple[Header, bytes]] = field(default_factory=dict)
    size: int = 0

    def add(self, header: Header | None, content: bytes | StreamGraph) -> None:
        """Add a frame, or a message among the frames; the oldest go."""
        self.items.append((header, content))
        self.size += len(content) if isinstance(content, bytes) else 0
        while self.size > RING_BYTES and len(self.items) > 1:
            what, old = self.items.popleft()
            self.size -= len(old) if isinstance(old, bytes) else 0
            if what is not None and what.kind is Kind.EXCHANGE and isinstance(old, bytes):
                self.pinned[what.stream] = (what, old)

    def all(self) -> list[tuple[Header | None, bytes | StreamGraph]]:
        """Return everything that is retained, oldest first."""
        return [*self.pinned.values(), *self.items]


class Hub:
    """Subscriptions and the fan-out to them. One event loop."""

    def __init__(self) -> None:
        self._of_job: dict[str, set[Subscription]] = defaultdict(set)
        self._of_list: set[Subscription] = set()
        self._of_server: set[Subscription] = set()
        self._recent: dict[str, Recent] = defaultdict(Recent)

    def add(self, subscription: Subscription) -> None:
        """Start delivering to a subscription."""
        if SERVER in subscription.parts:
            self._of_server.add(subscription)
        elif subscription.job_id is None:
            self._of_list.add(subscription)
        else:
            self._of_job[subscription.job_id].add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Stop delivering to a subscription."""
        subscription.queue.forget(subscription.id)
        self._of_list.discard(subscription)
        self._of_server.discard(subscription)
        if subscription.job_id is not None:
            self._of_job[subscription.job_id].discard(subscription)
            if not self._of_job[subscription.job_id]:
                del self._of_job[subscription.job_id]

    def follows(self, job_id: str) -> bool:
        """Whether this job has a follower of its own."""
        return job_id in self._of_job

    def publish_job(self, view: dict[str, Any]) -> None:
        """Send a job's newest state to its own followers."""
        _put_job(self._of_job.get(view["id"], ()), view)

    def publish_listed(self, view: dict[str, Any]) -> None:
        """Send a job's newest state to the followers of the list."""
        _put_job(self._of_list, view)

    def publish_figures(self, figures: Mapping[str, Figures]) -> None:
        """Send the newest figures of jobs."""
        if self._of_list:
            texts = {job_id: encode(found) for job_id, found in figures.items()}
            for sub in self._of_list:
                sub.put_figures(texts)
        for job_id, found in figures.items():
            subs = self._of_job.get(job_id)
            if subs:
                text = {job_id: encode(found)}
                for sub in subs:
                    if "state" in sub.parts:
                        sub.put_figures(text)

    def publish_clocks(self, nodes: list[dict[str, Any]]) -> None:
        """Send the nodes to those that follow a job, whose timeline is drawn by the nodes' clocks."""
        text = encode(nodes)
        for sub in itertools.chain.from_iterable(self._of_job.values()):
            if "state" in sub.parts:
                sub.put_state("nodes", Encoded.of("nodes", sub.id, "nodes", text))

    @property
    def lists_followed(self) -> bool:
        """Whether the list of jobs and nodes has a follower."""
        return bool(self._of_list)

    def publish_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """Send the nodes as they are now."""
        text = encode(nodes)
        for sub in self._of_list:
            sub.put_state("nodes", Encoded.of("nodes", sub.id, "nodes", text))

    def publish_conditions(self, conditions: list[dict[str, Any]]) -> None:
        """Send the conditions of the server as they are now."""
        for sub in self._of_server:
            message = ConditionsChanged(type="conditions", id=sub.id, conditions=conditions)
            sub.put_state("conditions", message)

    def publish_event(self, job_id: str | None, event: dict[str, Any]) -> None:
        """Send a change of state."""
        for sub in self._of_job.get(job_id, ()) if job_id is not None else self._of_list:
            if "state" in sub.parts:
                sub.put_state(f"event:{event['id']}", EventAdded(type="event", id=sub.id, event=event))

    def publish_metrics(self, job_id: str, points: Mapping[str, Points]) -> None:
        """Send points that are in the database by now."""
        for sub in self._of_job.get(job_id, ()):
            if "metrics" in sub.parts:
                sub.put_metrics(points)

    def publish_media(self, job_id: str, name: str) -> None:
        """Publish that a table or histogram is in the database by now."""
        for sub in self._of_job.get(job_id, ()):
            if "metrics" in sub.parts:
                sub.put_state(f"media:{name}", MediaAdded(type="media", id=sub.id, name=name))

    def publish_log(self, job_id: str, replica_id: str) -> None:
        """Publish that a log has grown; each follower reads on from where it is."""
        for sub in self._of_job.get(job_id, ()):
            if "logs" in sub.parts and sub.ready:
                offset = sub.log_offsets.get(replica_id, 0)
                sub.queue.put_log(LogWish(sub.id, job_id, replica_id, offset))

    def publish_frame(self, job_id: str, header: Header, frame: bytes) -> None:
        """Send one frame: the same bytes object to every follower."""
        self._ring(job_id).add(header, frame)
        part = _PART[header.kind]
        for sub in self._of_job.get(job_id, ()):
            if part in sub.parts and sub.ready:
                sub.queue.put_frame(sub.id, header.kind, header.count, frame)

    def publish_lost(self, job_id: str, frames: int) -> None:
        """Publish that frames of a stream never came."""
        for sub in self._of_job.get(job_id, ()):
            if sub.parts.isdisjoint(("ops", "sync")):
                continue
            if sub.ready:
                sub.queue.put_gap(sub.id, LOST, frames)
            else:
                sub.num_lost += frames

    def make_ready(self, subscription: Subscription) -> None:
        """Deliver frames from now on; frames lost since the subscription began are reported."""
        subscription.ready = True
        if subscription.num_lost:
            subscription.queue.put_gap(subscription.id, LOST, subscription.num_lost)
            subscription.num_lost = 0

    def publish_graph(self, job_id: str, replica_id: str, stream: int, graph_hash: str) -> None:
        """Publish which graph the following frames of a stream index."""
        used = StreamGraph(replica_id=replica_id, stream=stream, hash=graph_hash)
        self._ring(job_id).add(None, used)
        for sub in self._of_job.get(job_id, ()):
            if sub.ready:
                offer(sub, None, used)

    def replay_recent(self, subscription: Subscription) -> bool:
        """Queue the newest frames of a job for one subscription; False if none are in memory."""
        if subscription.job_id not in self._recent:
            return False
        for header, content in self._recent[subscription.job_id].all():
            offer(subscription, header, content)
        return True

    def _ring(self, job_id: str) -> Recent:
        while job_id not in self._recent and len(self._recent) >= MAX_RINGS:
            del self._recent[next(iter(self._recent))]
        return self._recent[job_id]

    def drop(self, job_id: str) -> None:
        """Forget the newest frames of a job that ended; its segments have them."""
        self._recent.pop(job_id, None)


def _put_job(subscriptions: Iterable[Subscription], view: dict[str, Any]) -> None:
    texts: dict[bool, str] = {}
    project = view["spec"]["project"]
    for sub in subscriptions:
        if "state" in sub.parts and sub.sight.sees(project):
            sees_env = sub.sight.sees_env(project)
            if sees_env not in texts:
                texts[sees_env] = encode(view if sees_env else without_env(view))
            message = Encoded.of("job", sub.id, "job", texts[sees_env])
            sub.put_state(f"job:{view['id']}", message)
            sub.see(view["id"])


def _without(points: Points, known: Points) -> Points:
    seen = set(zip(known["time_ns"], known["step"], strict=True))
    columns = zip(points["step"], points["time_ns"], points["value"], strict=True)
    kept = [point for point in columns if (point[1], point[0]) not in seen]
    return Points(step=[p[0] for p in kept], time_ns=[p[1] for p in kept], value=[p[2] for p in kept])


def offer(subscription: Subscription, header: Header | None, content: bytes | StreamGraph) -> None:
    """Queue one frame, or message among frames, for one subscription if it asked for such."""
    if isinstance(content, bytes):
        if header is not None and _PART[header.kind] in subscription.parts:
            subscription.queue.put_frame(subscription.id, header.kind, header.count, content)
    else:
        subscription.queue.put_in_stream(subscription.id, GraphUsed(type="graph", id=subscription.id, **content))
