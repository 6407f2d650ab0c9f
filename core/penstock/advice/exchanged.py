"""What a job's trainers exchanged with parameter servers, as its telemetry has it: the input of `advice.cluster`. Pure.

A *turn* is a step and the time until the next one begins. Sums of a frame count from the start of its process, so what
a step took is the difference of two frames over the steps, or of a server over the time, between them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.advice.recorded import Event
from penstock.protocol.exchange import ProcessRows

Mode = Literal["sync", "half_async", "async", "geo"]
SENT_AHEAD, SENT = "penstock.send_ahead.default", "penstock.send_step.default"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One step of one trainer, the mean of all trainers. `rows`: of its batch.

    `wait_ns`: in which it waited for servers; `sent_bytes`, `received_bytes`: to and from all servers; `skew`: bytes of
    the server with the most of them, over the mean of all; `ahead_ns`: from the first gradients that are sent during
    the backward pass to the message that closes the step, 0 where none are. `trainer_cpu_ns`, `server_cpu_ns`:
    processor time of the trainer, and of all servers for it. `cores`: of a host; `num_hosts`: on which the replicas
    run; `deviation_ns`: of turns.
    """

    mode: Mode
    num_pservers: int
    num_trainers: int
    rows: int
    turn_ns: float
    wait_ns: float
    sent_bytes: float
    received_bytes: float
    skew: float
    ahead_ns: float
    trainer_cpu_ns: float
    server_cpu_ns: float
    cores: int
    num_hosts: int
    deviation_ns: float = 0.0

    @property
    def own_ns(self) -> float:
        """The turn without its waits."""
        return max(0.0, self.turn_ns - self.wait_ns)


@dataclass(frozen=True, slots=True)
class Report:
    """One frame of a process. `at_ns`: by its own clock; `cpu_ns`: since its start; `mode`: a server's, '' if none."""

    rows: ProcessRows
    at_ns: int
    cpu_ns: int
    mode: str = ""


@dataclass(frozen=True, slots=True)
class _Between:
    """What two frames of a process differ by. `by_peer`: (sent, received, waited)."""

    steps: int
    passed_ns: int
    cpu_ns: int
    by_peer: Mapping[str, tuple[int, int, int]]


def exchanged_of(
    reports: Iterable[Sequence[Report]], *, turn_ns: float, deviation_ns: float, rows: int, ahead_ns: float, cores: int,
    num_hosts: int,
) -> Exchanged | None:  # fmt: skip
    """Return what the newest frames of each process say, oldest first; None if they do not say enough.

    That needs two frames with a step between of a trainer, and two of every server, with its mode and processor time.
    """
    all_ = [found for found in reports if len(found) > 1]
    trainers = [_between(found[0], found[-1]) for found in all_ if found[-1].rows.role == "trainer"]
    trainers = [one for one in trainers if one.steps > 0 and one.by_peer]
    served = [found for found in all_ if found[-1].rows.role == "pserver"]
    servers = [_between(found[0], found[-1]) for found in served]
    mode = next((known for found in served for known in get_args(Mode) if known == found[-1].mode), None)
    if not trainers or not servers or mode is None or turn_ns <= 0:
        return None
    share = sum(one.cpu_ns / max(1, one.passed_ns) for one in servers)  # of one core, of all servers
    each = [[sum(peer[at] for peer in one.by_peer.values()) / one.steps for at in range(3)] for one in trainers]
    sent, received, waited = (statistics.fmean(column) for column in zip(*each, strict=True))
    cpu_ns = statistics.fmean(one.cpu_ns / one.steps for one in trainers)
    return Exchanged(
        mode, len(servers), len(trainers), rows, turn_ns, min(waited, turn_ns), sent, received,
        _skew(trainers, len(servers)), ahead_ns, cpu_ns, share * turn_ns / len(trainers), max(1, cores),
        max(1, num_hosts), deviation_ns,
    )  # fmt: skip


def _between(first: Report, last: Report) -> _Between:
    before, after = _by_peer(first.rows), _by_peer(last.rows)
    nothing = (0, 0, 0)
    by_peer = {
        peer: (sums[0] - old[0], sums[1] - old[1], sums[2] - old[2])
        for peer, sums in after.items()
        for old in [before.get(peer, nothing)]
    }
    return _Between(
        last.rows.step - first.rows.step, last.at_ns - first.at_ns, max(0, last.cpu_ns - first.cpu_ns), by_peer
    )


def _by_peer(rows: ProcessRows) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for row in rows.rows:
        sums, old = row.sums, found[row.peer]
        found[row.peer] = old[0] + sums.sent_bytes, old[1] + sums.received_bytes, old[2] + sums.wait_ns
    return found


def _skew(trainers: Sequence[_Between], num_servers: int) -> float:
    """Return the bytes of the server with the most of them over the mean. '' is no server."""
    by_server: dict[str, int] = defaultdict(int)
    for one in trainers:
        for peer, (sent, received, _) in one.by_peer.items():
            if peer:
                by_server[peer] += sent + received
    total = sum(by_server.values())
    return max(by_server.values()) * num_servers / total if total else 1.0


def ahead_of(types: Mapping[int, str], steps: Sequence[Sequence[Event]]) -> float:
    """Return for how long a step sends gradients while it computes, in ns: the median of whole steps, 0 if never.

    `types`: of operators, by their index in the graph.
    """
    found = []
    for events in steps:
        begins: dict[str, list[int]] = {SENT_AHEAD: [], SENT: []}
        for op, _, start, _ in events:
            if types.get(op, "") in begins:
                begins[types[op]].append(start)
        if begins[SENT_AHEAD] and begins[SENT]:
            found.append(max(0, max(begins[SENT]) - min(begins[SENT_AHEAD])))
    return statistics.median(found) if found else 0.0


def deviation_of(values: Sequence[float]) -> float:
    """Return the standard deviation that the quartiles of values show, 0 of fewer than four."""
    if len(values) < 4:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 1.349
