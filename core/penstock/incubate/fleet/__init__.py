"""Fluid's `incubate.fleet`."""
