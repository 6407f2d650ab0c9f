"""Other servers, trainers, modes and links for a job's advice: reads its EXCHANGE frames for `penstock.advice.cluster`.

Decides without I/O: `services.advice` has read the frames.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.advice.cluster import Cluster, Placed, advise, current_of
from penstock.advice.exchanged import Exchanged, Report, ahead_of, deviation_of, exchanged_of
from penstock.advice.recorded import Event, Recorded
from penstock.errors import PeerError
from penstock.protocol.exchange import ProcessRows, process_of, rows_of
from penstock.protocol.frames import decode
from penstock_server.schemas import api

FRAMES_BYTES = 4 << 20
WINDOW_NS = 15 * 10**9
"""Of the newest frames of a process: two that lie as far apart as this at most are compared."""
TOO_LITTLE = (
    "other numbers of servers and trainers are not predicted: that takes a second of training in which all "
    "trainers and servers have reported twice, each with a Penstock that reports processor time"
)
GEO = "GEO: other modes and links are not predicted"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a job's processes sent. `raw`: EXCHANGE frames, oldest first; `replicas`: of the attempt.

    `between_ns`: from the end of a step to the beginning of the next; `cores`: of a node, 0 if unknown.
    """

    raw: Sequence[bytes]
    replicas: Sequence[api.Replica]
    between_ns: float
    cores: int


def clusters_of(
    heard: Heard | None, run: Recorded, steps: Sequence[Sequence[Event]]
) -> tuple[list[api.AdvisedCluster], str]:
    """Return the settings, most samples/s first, and what a reader has to know; nothing for a job without servers."""
    if heard is None:
        return [], ""
    exchanged = _exchanged(heard, run, steps)
    if exchanged is None:
        return [], TOO_LITTLE
    current = current_of(exchanged)
    return [_answer(one) for one in advise(exchanged, current)], _note(exchanged, current)


def _exchanged(heard: Heard, run: Recorded, steps: Sequence[Sequence[Event]]) -> Exchanged | None:
    spans = [max(s + d for _, _, s, d in one) - min(s for _, _, s, _ in one) for one in steps if one]
    found = exchanged_of(
        _reports(heard).values(), turn_ns=run.step_ns + heard.between_ns, deviation_ns=deviation_of(spans),
        rows=run.rows, ahead_ns=ahead_of({index: op.type for index, op in enumerate(run.graph.ops)}, steps),
        cores=heard.cores or run.cores, num_hosts=len({one.host for one in _newest(heard)}),
    )  # fmt: skip
    roles = Counter(one.role for one in _newest(heard))
    is_whole = found is not None and (found.num_pservers, found.num_trainers) == (roles["pserver"], roles["trainer"])
    return found if is_whole else None


def _newest(heard: Heard) -> list[api.Replica]:
    """Return the newest replica of each role and index: one that was lost and replaced has two."""
    newest = {(one.role, one.index): one for one in sorted(heard.replicas, key=lambda one: one.stream)}
    return list(newest.values())


def _reports(heard: Heard) -> Mapping[int, list[Report]]:
    """Return the reports of each process of the window. What is no report is left out."""
    by_stream = {replica.stream: replica for replica in _newest(heard)}
    found: dict[int, list[Report]] = {}
    for data in heard.raw:
        try:
            frame = decode(data)  # it was recorded undecoded
            peers, rows = rows_of(frame.body)
            mode, cpu_ns = process_of(frame.body)
        except PeerError:
            continue
        replica = by_stream.get(frame.stream)
        if replica is not None and cpu_ns:
            one = ProcessRows(replica.role, replica.index, frame.step, rows, peers)
            found.setdefault(frame.stream, []).append(Report(one, frame.t0_ns, cpu_ns, mode))
    return {
        stream: [one for one in reports if one.at_ns >= reports[-1].at_ns - WINDOW_NS]
        for stream, reports in found.items()
    }


def _note(run: Exchanged, current: Cluster) -> str:
    where = (
        f"all replicas share the {run.cores} cores of one host, more of them too"
        if current.is_shared
        else f"each replica has a host of its own; waits and bytes show links of about {current.link_gbit:.2g} Gbit/s"
    )
    found = f"{where}; each trainer keeps its batch of {run.rows} rows"
    return f"{found}. {GEO}" if current.mode == "geo" else found


def _answer(one: Placed) -> api.AdvisedCluster:
    cluster = one.cluster
    return api.AdvisedCluster(
        name=cluster.name, pservers=cluster.num_pservers, trainers=cluster.num_trainers, mode=cluster.mode,
        link_gbit=round(cluster.link_gbit, 3) if cluster.link_gbit else None, shares_cores=cluster.is_shared,
        step_ms=round(one.turn_ns / 1e6, 4), wait_ms=round(one.wait_ns / 1e6, 4), rows=one.rows,
        samples_per_s=round(one.samples_per_s, 1), current=one.is_current, can_run=one.can_run, reason=one.reason,
    )  # fmt: skip
