"""Fluid's `incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy`."""

from __future__ import annotations

from penstock.fleet.strategy import (
    AsyncStrategy,
    DistributedStrategy,
    GeoStrategy,
    HalfAsyncStrategy,
    StrategyFactory,
    SyncStrategy,
)
from penstock.ps.settings import ServerRuntimeConfig, TrainerRuntimeConfig

__all__ = [
    "AsyncStrategy", "DistributedStrategy", "GeoStrategy", "HalfAsyncStrategy", "ServerRuntimeConfig",
    "StrategyFactory", "SyncStrategy", "TrainerRuntimeConfig",
]  # fmt: skip
