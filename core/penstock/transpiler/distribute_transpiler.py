"""Fluid's module path of DistributeTranspiler."""

from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.transpiler import DistributeTranspiler

__all__ = ["DistributeTranspiler", "DistributeTranspilerConfig"]
