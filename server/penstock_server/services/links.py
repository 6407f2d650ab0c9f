"""What the frames of a job say of the links between its trainers and parameter servers, for `penstock.diagnosis`. Pure.

Bytes are what trainers counted; times are a server's, from the record of its work: INPUT_EVENTS in the lane of each
trainer. Both are of a step. Over gRPC no arrival is recorded, and so there is no link. Where a server did more than its
telemetry's budget takes, whole drains are missing, and the times are too short: a slow link is then not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.diagnosis import Link
from penstock.protocol.frames import ROUNDS_LANE, Array, Column, Frame, Work
from penstock_server.schemas import api

_OWN = (Work.MERGE, Work.LOG, Work.UPDATE, Work.LOOK_UP)


@dataclass(slots=True)
class Worked:
    """What one pserver did in `span_ns`: nanoseconds by trainer, and of its own work for all of them."""

    span_ns: int = 0
    receive_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    answer_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    round_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    own_ns: int = 0


def worked(frames: Sequence[Frame], window_ns: int) -> Worked:
    """Add up the INPUT_EVENTS of one pserver that end within `window_ns` before its newest one."""
    found = Worked()
    if not frames:
        return found
    begin, spent, work, lane = (np.concatenate(each) for each in zip(*map(_events, frames), strict=True))
    if not len(begin):
        return found
    newest = int((begin + spent).max())
    recent = begin + spent >= newest - window_ns
    begin, spent, work, lane = begin[recent], spent[recent], work[recent], lane[recent]
    found.span_ns = newest - int(begin.min())
    by_trainer = {Work.RECEIVE: found.receive_ns, Work.ANSWER: found.answer_ns, Work.ROUND: found.round_ns}
    for kind, ns_of in by_trainer.items():
        mine = work == kind
        for trainer in np.unique(lane[mine]).tolist():
            if trainer < ROUNDS_LANE:
                ns_of[trainer] = int(spent[mine & (lane == trainer)].sum())
    found.own_ns = int(spent[np.isin(work, _OWN)].sum())
    return found


def _events(frame: Frame) -> tuple[Array, Array, Array, Array]:
    begin = frame.columns[Column.START_NS].astype("i8") + frame.t0_ns
    return (
        begin,
        frame.columns[Column.DURATION_NS].astype("i8"),
        frame.columns[Column.WORK],
        frame.columns[Column.THREAD],
    )


def links_of(
    now: api.Exchange, before: api.Exchange | None, servers: Mapping[int, Worked], turns_ns: Mapping[int, float],
    nodes: Mapping[int, str],
) -> tuple[Link, ...]:  # fmt: skip
    """Return the links over which bytes passed between two states of the exchange; None: since the beginning.

    `servers`: by index. `turns_ns`: of each trainer's step and the time until the next. `nodes`: their machines' names.
    """
    sent, received = _bytes(now), _bytes(now, answers=True)
    sent_before = {} if before is None else _bytes(before)
    received_before = {} if before is None else _bytes(before, answers=True)
    found = []
    for trainer, pserver in sorted(sent):
        at, did, turn_ns = (trainer, pserver), servers.get(pserver), turns_ns.get(trainer, 0.0)
        steps = now.steps.get(trainer, 0) - (0 if before is None else before.steps.get(trainer, 0))
        if did is None or did.span_ns <= 0 or turn_ns <= 0 or steps <= 0:
            continue
        of_a_step = turn_ns / did.span_ns
        link = Link(
            trainer,
            pserver,
            sent_bytes=(sent[at] - sent_before.get(at, 0)) / steps,
            receive_ns=did.receive_ns.get(trainer, 0) * of_a_step,
            received_bytes=(received[at] - received_before.get(at, 0)) / steps,
            answer_ns=did.answer_ns.get(trainer, 0) * of_a_step,
            round_ns=did.round_ns.get(trainer, 0) * of_a_step,
            work_ns=did.own_ns * of_a_step,
            node=nodes.get(trainer, ""),
        )
        found.append(link)
    return tuple(one for one in found if one.ns > 0)


def _bytes(exchange: api.Exchange, *, answers: bool = False) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = defaultdict(int)
    for cell in exchange.cells:
        found[cell.trainer, cell.pserver] += cell.received_bytes if answers else cell.sent_bytes
    return dict(found)
