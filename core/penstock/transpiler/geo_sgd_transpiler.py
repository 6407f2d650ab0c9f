"""Fluid's module path of GeoSgdTranspiler."""

from penstock.transpile.geo import GeoSgdTranspiler

__all__ = ["GeoSgdTranspiler"]
