"""What each of the four training modes forces, whatever else is configured. Pure data; source: spec 1.9.

The fields are Fluid's: there the communicator made the difference, so even Sync has `sync_mode` False, and is known
by `completely_not_async`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["sync", "half_async", "async", "geo"]
Value = bool | int

_RUNTIME: Mapping[str, Value] = {
    "sync_mode": False, "runtime_split_send_recv": True, "half_async": False, "completely_not_async": False,
    "geo_sgd_mode": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forced:
    """Fields of the three strategies that a mode decides, in the order in which they may be set."""

    program: Mapping[str, Value]
    execute: Mapping[str, Value]
    build: Mapping[str, Value]


def forced(mode: Mode, *, update_frequency: int = 100) -> Forced:
    """Return the fields that `mode` decides. `update_frequency`: batches between two exchanges (GEO)."""
    half = {**_RUNTIME, "half_async": True}
    programs: dict[Mode, Mapping[str, Value]] = {
        "sync": {**half, "completely_not_async": True},
        "half_async": half,
        "async": _RUNTIME,
        "geo": {**_RUNTIME, "geo_sgd_mode": True, "geo_sgd_need_push_nums": update_frequency},
    }
    barrier = {"use_thread_barrier": True} if mode in ("sync", "half_async") else {}
    return Forced(programs[mode], barrier, {"async_mode": True})


def mode_of(fields: Mapping[str, Value]) -> Mode:
    """Return the mode that the fields of a DistributeTranspilerConfig ask for; what says nothing else is half-async."""
    if fields["sync_mode"] or fields["completely_not_async"]:
        return "sync"
    if not fields["runtime_split_send_recv"]:
        return "half_async"
    if fields["geo_sgd_mode"]:
        return "geo"
    return "half_async" if fields["half_async"] else "async"
