"""What waits for one browser, and the ladder for one that is slow. Decides without I/O.

State, figures and metrics are merged (only the newest state waits, points are appended), logs are positions in a
file, telemetry frames are bytes. What many browsers get is encoded once (`Encoded`). When frames pass the high
water, (1) INPUT_EVENTS and the oldest OP_EVENTS go, and are counted, except for the newest OP_EVENTS, so that a step
larger than the high water is seen; (2) after a second of this, neither is queued and the browser is notified; (3) at
the limit, or when it has not caught up for `slow_s`, the connection is to be closed with 4408. Once it has caught up it
is notified. Nothing but frames is ever dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.protocol.bounded import BoundedQueue, DropRule
from penstock.protocol.frames import Kind
from penstock.protocol.stream import Degraded, Gap, MetricsAdded, Points, ServerMessage

SLOW = 4408
DEGRADE_AFTER_S = 1.0
ROUND_BYTES = 256 << 10
EVENTS = frozenset({Kind.OP_EVENTS, Kind.INPUT_EVENTS})


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message as it is sent: the content was encoded once for all that get it. `id`: its subscription."""

    id: int
    text: str

    @classmethod
    def of(cls, kind: str, number: int, key: str, content: str) -> Encoded:
        """Return the message `kind` for subscription `number`, whose value of `key` is the JSON `content`."""
        return cls(number, f'{{"type":"{kind}","id":{number},"{key}":{content}}}')


def encode(content: object) -> str:
    """Return compact JSON."""
    return json.dumps(content, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class LogWish:
    """The browser is to get what a log holds from `offset`."""

    subscription: int
    job_id: str
    replica_id: str
    offset: int


@dataclass(frozen=True, slots=True)
class Round:
    """What to send next: messages first, then a piece of each log, then frames (or messages among them)."""

    messages: list[ServerMessage | Encoded]
    logs: list[LogWish]
    stream: list[bytes | ServerMessage]


class _Waiting(NamedTuple):
    content: bytes | ServerMessage
    subscription: int


def append_points(waiting: dict[str, Points], points: Mapping[str, Points]) -> None:
    """Append points to those of the same series."""
    for name, series in points.items():
        mine = waiting.setdefault(name, Points(step=[], time_ns=[], value=[]))
        mine["step"] += series["step"]
        mine["time_ns"] += series["time_ns"]
        mine["value"] += series["value"]


@dataclass(slots=True)
class BrowserQueue:
    """The queue of one browser connection. `wake` is called whenever something new waits."""

    high_water_bytes: int
    limit_bytes: int
    slow_s: float
    monotonic: Callable[[], float]
    wake: Callable[[], None]
    dropped_rows: int = 0
    slow: bool = False
    _state: dict[str, ServerMessage | Encoded] = field(default_factory=dict)
    _figures: dict[int, dict[str, str]] = field(default_factory=dict)
    _metrics: dict[int, dict[str, Points]] = field(default_factory=dict)
    _gaps: dict[int, dict[str, int]] = field(default_factory=dict)
    _logs: dict[tuple[int, str], LogWish] = field(default_factory=dict)
    _frames: BoundedQueue[_Waiting] = field(init=False)
    _congested_since: float | None = None
    _degraded: bool = False
    _notified: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._frames = BoundedQueue(
            [
                DropRule(frozenset({Kind.INPUT_EVENTS}), self.high_water_bytes),
                DropRule(frozenset({Kind.OP_EVENTS}), self.high_water_bytes, keep_newest=True),
            ]
        )

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frames that wait."""
        return self._frames.size_bytes

    def put_state(self, key: str, message: ServerMessage | Encoded) -> None:
        """Queue a message; it replaces the one of the same key that waits."""
        self._state.pop(key, None)
        self._state[key] = message
        self.wake()

    def put_figures(self, subscription: int, figures: Mapping[str, str]) -> None:
        """Queue figures as JSON by job; they replace those of the same jobs that wait."""
        self._figures.setdefault(subscription, {}).update(figures)
        self.wake()

    def put_metrics(self, subscription: int, points: Mapping[str, Points]) -> None:
        """Queue points behind those that wait."""
        append_points(self._metrics.setdefault(subscription, {}), points)
        self.wake()

    def put_log(self, wish: LogWish) -> None:
        """Queue the rest of a log; a wish that waits for the same log stays."""
        self._logs.setdefault((wish.subscription, wish.replica_id), wish)
        self.wake()

    def put_in_stream(self, subscription: int, message: ServerMessage) -> None:
        """Queue a message that keeps its place among the frames."""
        self._frames.push(None, 0, 0, _Waiting(message, subscription))
        self.wake()

    def put_frame(self, subscription: int, kind: Kind, rows: int, frame: bytes) -> None:
        """Queue a frame, and climb the ladder if the browser is behind."""
        if self.slow:
            return
        if self._degraded and kind in EVENTS:
            self._drop(subscription, kind, rows)
        else:
            is_over = self.frame_bytes + len(frame) > self.high_water_bytes
            for entry in self._frames.push(kind, rows, len(frame), _Waiting(frame, subscription)):
                self._drop(entry.item.subscription, entry.kind or kind, entry.rows)
            if is_over and self._congested_since is None:
                self._congested_since = self.monotonic()
        self._judge(subscription)
        self.wake()

    def put_gap(self, subscription: int, kind: str, rows: int) -> None:
        """Queue a notice of lost rows; it adds to what waits."""
        gaps = self._gaps.setdefault(subscription, {})
        gaps[kind] = gaps.get(kind, 0) + rows
        self.wake()

    def take(self) -> Round | None:
        """Take what to send next; None if nothing waits."""
        if not (self._state or self._figures or self._metrics or self._gaps or self._logs or self._frames):
            return None
        messages = list(self._state.values())  # first, so that a snapshot comes before figures of its jobs
        for number, figures in self._figures.items():
            content = ",".join(f'"{job_id}":{one}' for job_id, one in figures.items())
            messages.append(Encoded.of("figures", number, "jobs", f"{{{content}}}"))
        messages += [Gap(type="gap", id=n, dropped=dropped) for n, dropped in self._gaps.items()]
        messages += [MetricsAdded(type="metrics", id=n, series=series) for n, series in self._metrics.items()]
        logs = list(self._logs.values())
        self._state, self._figures, self._gaps, self._metrics, self._logs = {}, {}, {}, {}, {}
        stream: list[bytes | ServerMessage] = []
        size = 0
        while size < ROUND_BYTES and (entry := self._frames.pop()) is not None:
            size += entry.size_bytes
            stream.append(entry.item.content)
        if not self._frames:
            self._congested_since, self._degraded = None, False
            stream += [Degraded(type="degraded", id=n, reason=None) for n in sorted(self._notified)]
            self._notified.clear()
        return Round(messages, logs, stream)

    def forget(self, subscription: int) -> None:
        """Drop everything that waits for a subscription which ended."""
        self._figures.pop(subscription, None)
        self._metrics.pop(subscription, None)
        self._notified.discard(subscription)
        self._gaps.pop(subscription, None)
        self._logs = {key: wish for key, wish in self._logs.items() if key[0] != subscription}
        self._frames.discard(lambda waiting: waiting.subscription == subscription)
        self._state = {key: m for key, m in self._state.items() if _subscription(m) != subscription}

    def _judge(self, subscription: int) -> None:
        if self._congested_since is None:
            return
        behind_s = self.monotonic() - self._congested_since
        if self.frame_bytes > self.limit_bytes or behind_s >= self.slow_s:
            self.slow = True
        elif behind_s >= DEGRADE_AFTER_S and not self._degraded:
            self._degraded = True
            self._notified.add(subscription)
            reason = "this browser is behind: operator events are left out until it has caught up"
            self.put_state(f"degraded:{subscription}", Degraded(type="degraded", id=subscription, reason=reason))

    def _drop(self, subscription: int, kind: Kind, rows: int) -> None:
        gaps = self._gaps.setdefault(subscription, {})
        gaps[kind.name] = gaps.get(kind.name, 0) + rows
        self.dropped_rows += rows


def _subscription(message: ServerMessage | Encoded) -> int:
    return message.id if isinstance(message, Encoded) else message["id"]
