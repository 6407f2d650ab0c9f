"""Contracts of private names: functions that are called after the name whose behaviour they hold."""

from __future__ import annotations

from collections.abc import Callable

CONTRACTS: dict[str, Callable[[], None]] = {}


def contract(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function the contract of the name that it is called after."""
    CONTRACTS[function.__name__] = function
    return function
