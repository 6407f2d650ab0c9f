"""The sums of a job with what several rules need of them, and the words that their sentences share."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.diagnosis.sums import OpSum, Sums, Trainer

NOTICED = 0.12
"""Below this share of a turn nothing counts as slow."""


@dataclass(slots=True)
class Case:
    """The sums, and what several rules need of them."""

    sums: Sums
    turn_ns: float = 0.0
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    by_server: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    late: Trainer | None = None
    late_ns: float = 0.0

    def waiting_ns(self, one: Trainer) -> float:
        """Return what of a trainer's turn it waits for others: for servers, or where there are none in exchanges."""
        return self.waited[one.index] if self.by_server else one.role_ns("communication")

    def share(self, ns: float) -> float:
        """Return a time as a share of a turn."""
        return min(1.0, ns / self.turn_ns) if self.turn_ns > 0 else 0.0


def case_of(sums: Sums, stepping: Sequence[Trainer]) -> Case:
    """Return the case of trainers that have made steps."""
    case = Case(sums, statistics.median(one.turn_ns for one in stepping))
    for wait in sums.waits:
        case.waited[wait.trainer] += wait.wait_ns
        case.by_server[wait.trainer, wait.pserver] += wait.wait_ns
    if len(stepping) > 1:
        own = {one.index: one.turn_ns - case.waiting_ns(one) for one in stepping}
        last = max(stepping, key=lambda one: own[one.index])
        others = [own[one.index] for one in stepping if one is not last]
        case.late, case.late_ns = last, max(0.0, own[last.index] - statistics.median(others))
    return case


def where(op: OpSum) -> str:
    """Return its module, where the name does not say it."""
    last = op.module.rpartition(".")[2]
    grad = " grad" if op.role == "backward" else ""
    return f" of {last}{grad}" if last and last not in op.name else ""


def lane(one: Trainer) -> dict[str, str]:
    """Return the fields of the address by which the timeline shows a trainer's first lane, in its newest step."""
    step = {} if one.sampled_step is None else {"step": f"{one.sampled_step}"}
    return {"pin": f"trainer-{one.index}.0", **step}


def named(indices: Sequence[int]) -> str:
    """Return trainers by their numbers."""
    head = "trainer" if len(indices) == 1 else "trainers"
    return f"{head} {', '.join(str(index) for index in sorted(indices))}"


def ms(ns: float) -> str:
    """Return nanoseconds as milliseconds with their unit."""
    found = ns / 1e6
    return f"{found:.0f} ms" if found >= 100 else f"{found:.1f} ms" if found >= 1 else f"{found:.2f} ms"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{share * 100:.0f} %"
