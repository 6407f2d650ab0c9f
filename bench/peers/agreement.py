"""Whether all contenders have trained the same: the losses, and how far each has moved every weight.

All start from the same values, see the same batches and take the same number of steps, so only rounding sets them
apart. A contender that skips an update, or takes another learning rate, may keep its loss within the band for a short
run, but it moves a weight not at all, or half as far.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.peers.contender import CONTENDERS, OURS, ROOF
from bench.peers.race import Results, check_losses
from bench.peers.remote import PeerFailed
from bench.workloads.fingerprint import Movement
from bench.workloads.workload import Workload

KNOWN_DEFECTS = {"paddle_pe_reduce": "table"}
"""Weights, by prefix, that a contender is known to train wrongly; it is said in the report instead of refused.

The Reduce mode of 2.6.2 on CPU mixes up one replica's rows of a shared sparse gradient after the first step, whatever
its settings. It moves as many bytes as it would rightly, so its rate stays, in its favour.
"""
HALF_ULP = 2.0**-24
"""What an update of a float32 is rounded by, at most, as a share of its value."""


def check_same_training(results: Results, workload: Workload) -> list[str]:
    """Raise PeerFailed if a contender has learned something else than the others; return the known defects seen."""
    compared = {key: losses for key, losses in results.losses.items() if CONTENDERS[key].compared}
    check_losses(compared, workload.loss_band)
    steps = results.num_steps * max(len(losses) for losses in results.losses.values())
    moved = {key: found for key, found in results.movements.items() if CONTENDERS[key].compared}
    return check_movements(moved, workload.movement_band, steps)


def check_movements(found: Mapping[str, Mapping[str, Movement]], band: float, num_steps: int) -> list[str]:
    """Raise PeerFailed, with every difference, if a contender has moved a weight otherwise than ours.

    Two movements whose difference is no longer than `band` of the longer one (and what rounding each of `num_steps`
    updates may add) differ in length by no more than that, and in their sum by sqrt(size) of it. Half the learning rate
    makes the lengths differ by 0.5, a missing update by 1. Of the rows of a table as large a share may differ.
    """
    ours, wrong, known = found[OURS], list[str](), list[str]()
    for key, theirs in found.items():
        if key in (OURS, ROOF):
            continue
        wrong += [f"{key} {name}" for name in ours.keys() - theirs.keys()]
        for name in sorted(ours.keys() & theirs.keys()):
            said = _apart(ours[name], theirs[name], band, num_steps)
            kind = known if name.startswith(KNOWN_DEFECTS.get(key, "\0")) else wrong
            kind += [f"{key} {name}: {said}"] if said else []
    if wrong:
        raise PeerFailed(f"not all have trained the same ({OURS}'s figures second): {'; '.join(wrong)}")
    return known


def _apart(ours: Movement, theirs: Movement, band: float, num_steps: int) -> str:
    """Say how two movements differ; nothing if it is by rounding."""
    longer = max(ours.norm, theirs.norm)
    allowed = band * longer + num_steps * HALF_ULP * max(ours.start, longer)
    if abs(ours.norm - theirs.norm) > allowed:
        return f"moved by {theirs.norm:.4g}, not {ours.norm:.4g}"
    if abs(ours.sum - theirs.sum) > theirs.size**0.5 * allowed:
        return f"moved to a sum of {theirs.sum:.4g}, not {ours.sum:.4g}"
    if abs(ours.rows - theirs.rows) > band * theirs.all_rows:
        return f"moved {theirs.rows} rows, not {ours.rows}, of {theirs.all_rows}"
    return ""
