"""Invariants over what ran: I1 of processes, I6, I7, I8 and I12. Pure.

I1 a replica is started once; I6 a process outlives neither its replica's end nor, on a node that is reachable, its
loss; I7 a checkpoint is complete when it is committed, steps grow, and the newest is restored; I8 a stream has no
duplicate and no gap that is not counted; I12 whatever waits for another part (a lease, a stop, an unreachable replica)
waits no longer than its limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tools.chaos.history import CheckpointSeen, Event, History, LogSeen, Violation

from penstock.protocol.states import TERMINAL_REPLICA, JobState, NodeState, ReplicaState

Span = tuple[float, float]
_REACHABLE = {NodeState.READY, NodeState.CORDONED, NodeState.DRAINING, NodeState.DRAINED}


def replicas_start_once(history: History) -> Iterator[Violation]:
    """I1, of processes."""
    pids: dict[str, set[int]] = defaultdict(set)
    for seen in history.processes:
        pids[seen.replica_id].add(seen.pid)
    for replica_id, found in pids.items():
        if len(found) > 1:
            yield Violation("I1", replica_id, f"was started {len(found)} times: processes {sorted(found)}")


def nothing_outlives_its_replica(history: History) -> Iterator[Violation]:
    """I6. What ends a process takes `stop_s` and `slack_s` of time in which its node can be reached."""
    ended = {e.subject: e for e in history.events if e.kind == "replica" and e.after in TERMINAL_REPLICA}
    nodes = {one.id: one.node_id for one in history.replicas}
    allowed_s = history.limits.stop_s + history.limits.slack_s
    for seen in history.processes:
        end = ended.get(seen.replica_id)
        if end is None:
            if seen.replica_id not in nodes:
                yield Violation("I6", seen.replica_id, f"process {seen.pid} is of no replica that the server knows")
            continue
        if end.after != ReplicaState.LOST:  # its agent saw the end of everything that it had started
            if seen.last > end.at + history.limits.slack_s:
                what = f"process {seen.pid} lived {seen.last - end.at:.1f} s after its end was reported"
                yield Violation("I6", seen.replica_id, what)
            continue
        calm_s = sum(to - begin for begin, to in _calm(history, nodes[seen.replica_id], (end.at, seen.last)))
        if calm_s > allowed_s:
            what = f"process {seen.pid} lived {calm_s:.1f} s on a reachable node after its replica was lost"
            yield Violation("I6", seen.replica_id, what)


def checkpoints_are_whole(history: History) -> Iterator[Violation]:
    """I7."""
    of: dict[tuple[str, str], list[CheckpointSeen]] = defaultdict(list)
    for seen in sorted(history.checkpoints, key=lambda one: one.at):
        of[seen.job_id, seen.node_id].append(seen)
    for (job_id, node_id), found in of.items():
        newest = -1
        for seen in found:
            where = f"checkpoint {seen.step} on node {node_id}"
            if not seen.is_complete:
                yield Violation("I7", job_id, f"{where} was committed and is not complete")
            if seen.is_restored and seen.step < newest:
                yield Violation("I7", job_id, f"{where} was restored; {newest} had been committed")
            if not seen.is_restored and seen.step <= newest:
                yield Violation("I7", job_id, f"{where} was committed after {newest}")
            newest = max(newest, seen.step)


def streams_are_whole(history: History) -> Iterator[Violation]:
    """I8."""
    wrote: dict[str, int] = defaultdict(int)
    for seen in history.processes:
        wrote[seen.replica_id] = max(wrote[seen.replica_id], seen.wrote)
    for log in history.logs:
        yield from _log_is_whole(log, wrote[log.replica_id])
    counted = {one.job_id: one.lost for one in history.series}
    for series in history.series:
        missing = len(set(series.written) - set(series.unsent) - set(series.stored))
        unknown = set(series.stored) - set(series.written)
        name = f"attempt {series.attempt}" + (f", replica {series.replica_id}" if series.replica_id else "")
        if len(set(series.stored)) != len(series.stored):
            yield Violation("I8", series.job_id, f"{name}: a point of a series is there twice")
        left = counted[series.job_id]  # of what is counted for the job, what no other series lacks
        counted[series.job_id] = max(0, left - missing)
        if missing > left:
            yield Violation("I8", series.job_id, f"{name}: {missing} points are missing, {left} are counted")
        if unknown and series.replica_id:
            yield Violation("I8", series.job_id, f"{name}: points {sorted(unknown)[:5]} were never written")


def _log_is_whole(log: LogSeen, wrote: int) -> Iterator[Violation]:
    lines = list(log.numbers)
    if lines != list(range(len(lines))):
        at = next(i for i, number in enumerate(lines) if number != i)
        yield Violation("I8", log.replica_id, f"line {at} of its log is number {lines[at]}")
    elif log.is_over and len(lines) < wrote:
        yield Violation("I8", log.replica_id, f"its log has {len(lines)} of {wrote} lines")


def nothing_waits_for_ever(history: History) -> Iterator[Violation]:
    """I12. Time in which the server could not work counts for nothing."""
    limits = history.limits
    lease_s = limits.ttl_s + limits.grace_s + limits.slack_s
    bounds = {
        ("node", str(NodeState.UNREACHABLE)): lease_s,
        ("replica", str(ReplicaState.UNKNOWN)): lease_s,
        ("job", str(JobState.STOPPING)): lease_s + limits.stop_s,
    }
    for event, end in _stays(history):
        bound = bounds.get((event.kind, event.after))
        stayed_s = sum(to - begin for begin, to in undisturbed(history, None, [(event.at, end)]))
        if bound is not None and stayed_s > bound:
            what = f"was {event.after} for {stayed_s:.1f} s, {bound:g} s at most"
            yield Violation("I12", event.subject, what)
    yield from _leases_expire(history)


def _leases_expire(history: History) -> Iterator[Violation]:
    """A node whose agent is silent for longer than its lease is noticed."""
    allowed_s = history.limits.ttl_s + history.limits.slack_s
    for outage in history.outages:
        if outage.node_id is None:
            continue
        silent = [(outage.begin + allowed_s, outage.end)]
        for begin, end in undisturbed(history, None, silent):
            if end - begin > history.limits.slack_s and _reachable(history, outage.node_id, (begin, end)) == [
                (begin, end)
            ]:
                what = f"was reachable to the server for {end - outage.begin:.1f} s after its last message"
                yield Violation("I12", outage.node_id, what)


def _stays(history: History) -> Iterator[tuple[Event, float]]:
    """Yield each event with the time of its subject's next one."""
    last: dict[str, Event] = {}
    for event in history.events:
        before = last.get(event.subject)
        if before is not None:
            yield before, event.at
        last[event.subject] = event
    for event in last.values():
        yield event, history.ended_at


def _calm(history: History, node_id: str, span: Span) -> Sequence[Span]:
    """Return the parts of a span in which a node was reachable and nothing disturbed it or the server."""
    return undisturbed(history, node_id, _reachable(history, node_id, span))


def _reachable(history: History, node_id: str, span: Span) -> list[Span]:
    spans = [
        (max(event.at, span[0]), min(end, span[1]))
        for event, end in _stays(history)
        if event.subject == node_id and event.after in _REACHABLE
    ]
    joined: list[Span] = []
    for begin, end in sorted(one for one in spans if one[0] < one[1]):
        if joined and joined[-1][1] >= begin:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def undisturbed(history: History, node_id: str | None, spans: Sequence[Span]) -> list[Span]:
    """Take the outages of the server, and of a node, out of spans."""
    left = [one for one in spans if one[0] < one[1]]
    for outage in history.outages:
        if outage.node_id is None or outage.node_id == node_id:
            left = [piece for one in left for piece in _cut(one, (outage.begin, outage.end))]
    return left


def _cut(span: Span, hole: Span) -> list[Span]:
    pieces = [(span[0], min(span[1], hole[0])), (max(span[0], hole[1]), span[1])]
    return [piece for piece in pieces if piece[0] < piece[1]]
