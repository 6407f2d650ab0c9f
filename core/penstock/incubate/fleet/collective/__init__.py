"""Fluid's `incubate.fleet.collective`."""

from __future__ import annotations

from penstock.fleet.collective import (
    CollectiveFleet,
    CollectiveOptimizer,
    DistributedStrategy,
    TrainStatus,
    fleet,
)

Collective = CollectiveFleet

__all__ = ["Collective", "CollectiveOptimizer", "DistributedStrategy", "TrainStatus", "fleet"]
