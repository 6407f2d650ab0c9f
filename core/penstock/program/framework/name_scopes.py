"""`fluid.name_scope`: module paths of a Program's operators that the script names.

A scope of the same name at the same place of a Program is another one: `s1`, `s1_1`, `s1_2`, … A layer's own scope
(`record.context.name_scope`) is taken as it is, since its name is unique already.
Source: NameScope (python/paddle/fluid/framework.py, Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.program.record import context


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Put the operators recorded within the block under the module path `prefix`, numbered if there is one already."""
    name, numbers = prefix or "scope", context.default_main_program().num_scopes
    place = (context.current_scope(), name)
    numbers[place] = numbers.get(place, 0) + 1
    with context.name_scope(f"{name}_{numbers[place] - 1}" if numbers[place] > 1 else name):
        yield
