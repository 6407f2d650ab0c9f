"""Fluid's `incubate.fleet.base`."""
