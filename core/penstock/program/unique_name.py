"""Generators of unique names: `fluid.unique_name`.

A Program counts its names by itself. Within `guard`, or after `switch`, one generator counts them for every Program
that is recorded in this process: two builds of one network, each under its own guard, give equal names. A parameter
that exists under such a name is shared, where sizes agree. Source: fluid.unique_name (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["UniqueNameGenerator", "generate", "guard", "switch"]


class UniqueNameGenerator:
    """Gives `<prefix><key>_<k>` with the next k of that key."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.ids: dict[str, int] = {}

    def __call__(self, key: str) -> str:
        number = self.ids.get(key, 0)
        self.ids[key] = number + 1
        return f"{self.prefix}{key}_{number}"


class _Generators:
    """`process`: what `generate` uses outside guards; `chosen`: what counts the names of Programs, if one does."""

    process = UniqueNameGenerator()
    chosen: UniqueNameGenerator | None = None


def chosen() -> UniqueNameGenerator | None:
    """Return the generator of the innermost guard, or of `switch`; None: each Program counts its own names."""
    return _Generators.chosen


def generate(key: str) -> str:
    """Return a name that this generator has not given before."""
    return (_Generators.chosen or _Generators.process)(key)


def switch(new_generator: UniqueNameGenerator | None = None) -> UniqueNameGenerator:
    """Use another generator from now on, a new one by default; return the one that was used before."""
    old = _Generators.chosen or _Generators.process
    _Generators.chosen = None if new_generator is _Generators.process else new_generator or UniqueNameGenerator()
    return old


@contextmanager
def guard(new_generator: str | bytes | UniqueNameGenerator | None = None) -> Iterator[None]:
    """Use a new generator within the block; a text is put before each of its names."""
    old = _Generators.chosen
    if isinstance(new_generator, bytes):
        new_generator = new_generator.decode()
    if not isinstance(new_generator, UniqueNameGenerator):
        new_generator = UniqueNameGenerator(new_generator or "")
    _Generators.chosen = new_generator
    try:
        yield
    finally:
        _Generators.chosen = old
