"""The module that Fluid's manuals import DistributedStrategyFactory from."""

from __future__ import annotations

from penstock.fleet.strategy import DistributedStrategyFactory

__all__ = ["DistributedStrategyFactory"]
