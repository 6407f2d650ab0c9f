"""The rule about nodes whose disk is full: training goes on, and what it writes is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.diagnosis.case import Case
from penstock.diagnosis.sums import Finding, Trainer

FULL_BYTES = 16 << 20
"""Below this many free bytes a disk is full: no part of a recording or of a checkpoint fits."""


def disks(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Every node of the job whose disk is full."""
    for disk in case.sums.disks:
        if case.sums.running and disk.total_bytes > 0 and disk.free_bytes < FULL_BYTES:
            sentence = (
                f"the disk of {disk.node} is full: {disk.free_bytes / 1e6:.1f} MB of {disk.total_bytes / 1e6:,.0f} MB "
                "are free for logs, checkpoints and recorded telemetry"
            )
            yield Finding(cause="full_disk", sentence=sentence, share=1.0, ms=0.0, place=disk.node, tab="config")
