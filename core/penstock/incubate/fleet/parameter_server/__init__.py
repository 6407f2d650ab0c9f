"""Fluid's `incubate.fleet.parameter_server`."""
