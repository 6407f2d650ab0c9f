"""Fluid's module path of the transpiler: `fluid.transpiler.RoundRobin`, `fluid.transpiler.HashName`, …"""

from penstock.program.memory_optimize import memory_optimize, release_memory
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.dispatch import HashName, PSDispatcher, RoundRobin
from penstock.transpile.geo import GeoSgdTranspiler
from penstock.transpile.transpiler import DistributeTranspiler
from penstock.transpiler import details

__all__ = [
    "DistributeTranspiler", "DistributeTranspilerConfig", "GeoSgdTranspiler", "HashName", "PSDispatcher", "RoundRobin",
    "details", "memory_optimize", "release_memory",
]  # fmt: skip
