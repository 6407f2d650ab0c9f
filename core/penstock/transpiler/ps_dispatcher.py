"""Fluid's module path of the dispatchers."""

from penstock.transpile.dispatch import HashName, PSDispatcher, RoundRobin

__all__ = ["HashName", "PSDispatcher", "RoundRobin"]
