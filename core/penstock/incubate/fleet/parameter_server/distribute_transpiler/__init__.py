"""Fluid's `incubate.fleet.parameter_server.distribute_transpiler`."""

from __future__ import annotations

from penstock.fleet.parameter_server import DistributedOptimizer, fleet

TranspilerOptimizer = DistributedOptimizer

__all__ = ["TranspilerOptimizer", "fleet"]
