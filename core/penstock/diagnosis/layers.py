"""Rules about what is repeated: one layer of several alike, or one operator of several alike, that is slower.

Layers are siblings if their module paths differ in one number alone ("layers.0" … "layers.43", "fc_0" … "fc_4") and
their matmuls are as much work: a layer that is larger by design is no straggler, and the first of a tower, which needs
no gradient of its input, is no measure for the others. Operators are siblings if they have the same type, role and
sizes.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.diagnosis.case import NOTICED, Case, ms, percent, where
from penstock.diagnosis.sums import Finding, OpSum, Trainer

LEAST = 4
"""Siblings from which one of them may be odd."""
ODD_LAYER = 1.5
ODD_OPERATOR = 2.0
"""Times the median of its siblings."""
_NUMBERED = re.compile(r"\d+$")
_OTHERS = ("communication", "input")


@dataclass(slots=True)
class _Layer:
    """One layer: nanoseconds of a step, on the workers that run it in turn, and its operators."""

    path: str
    ns: float = 0.0
    ops: list[OpSum] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Of one run of each of its operators."""
        return sum(op.flops for op in self.ops)


def layers(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """One layer of several alike, else one operator of several alike, that takes longer than its siblings."""
    one = max(stepping, key=lambda one: one.turn_ns)
    found = _odd_layer(case, one) or _odd_operator(case, one)
    if found is not None:
        yield found


def _odd_layer(case: Case, one: Trainer) -> Finding | None:
    best: Finding | None = None
    for siblings in _siblings(one):
        ordered = sorted(siblings, key=lambda layer: layer.ns)
        odd, median = ordered[-1], ordered[(len(ordered) - 1) // 2]
        more = odd.ns - median.ns
        if len(ordered) < LEAST or odd.ns < ODD_LAYER * median.ns or case.share(more) < NOTICED:
            continue
        if best is not None and best.share >= case.share(more):
            continue
        op = max(odd.ops, key=lambda op: op.total_ns)
        sentence = (
            f"`{odd.path}` takes {ms(odd.ns)} of each step, {odd.ns / max(median.ns, 1.0):.1f} times the median of its "
            f"{len(ordered) - 1} siblings; `{op.name}` takes most of it"
        )
        best = Finding(cause="layer", sentence=sentence, share=case.share(more), ms=more / 1e6, place=odd.path,
                       tab="graph", op=op.index, graph=one.graph)  # fmt: skip
    return best


def _siblings(one: Trainer) -> Iterable[list[_Layer]]:
    """Return layers whose paths differ in one number alone, and whose operations are as many."""
    found: dict[str, dict[str, _Layer]] = defaultdict(dict)
    for op in one.ops:
        if op.role in _OTHERS:
            continue
        parts = op.module.split(".")
        for at, part in enumerate(parts):
            if not _NUMBERED.search(part):
                continue
            path = ".".join(parts[: at + 1])
            layer = found[_NUMBERED.sub("*", path)].setdefault(path, _Layer(path))
            layer.ns += op.total_ns / (one.num_steps * one.workers)
            layer.ops.append(op)
    alike: dict[tuple[str, int], list[_Layer]] = defaultdict(list)
    for template, layers in found.items():
        for layer in layers.values():
            alike[template, layer.flops].append(layer)
    return alike.values()


def _odd_operator(case: Case, one: Trainer) -> Finding | None:
    alike: dict[tuple[str, str, str], list[OpSum]] = defaultdict(list)
    for op in one.ops:
        if op.count and op.role not in _OTHERS:
            alike[op.type, op.role, op.sizes].append(op)
    best: Finding | None = None
    for siblings in alike.values():
        if len(siblings) < LEAST:
            continue
        op = max(siblings, key=lambda op: op.total_ns / op.count)
        median = statistics.median(each.total_ns / each.count for each in siblings if each is not op)
        mean = op.total_ns / op.count
        more = (mean - median) * op.count / (one.num_steps * one.workers)
        if mean < ODD_OPERATOR * median or case.share(more) < NOTICED or (best and best.share > case.share(more)):
            continue
        sentence = (
            f"`{op.name}`{where(op)} takes {ms(mean)}, {mean / max(median, 1.0):.1f} times the median of its "
            f"{len(siblings) - 1} siblings of the same sizes: {percent(case.share(more))} of the step"
        )
        best = Finding(cause="operator", sentence=sentence, share=case.share(more), ms=more / 1e6, place=op.name,
                       tab="graph", op=op.index, graph=one.graph)  # fmt: skip
    return best
