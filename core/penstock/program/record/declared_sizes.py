"""Sizes that a script declares as numbers and feeds as others: Fluid does not check what layers.data is fed.

Such a size is a symbol of its own (f0, f1, …), whose size at hand is the declared one, as long as nothing depends on
the number. Where a call needs it, such as the depth of a product with a parameter, or a line of the script asks for it,
it becomes the declared number, or the size of another operand, in what was recorded, too; from then on a feed of
another size is an error that names the input. Blocks of control flow and torch's modules take the declared numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from penstock.compat.torch import tree_leaves
from penstock.program.expr import Dim, Expr
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.substitution import rewrite, substituted
from penstock.program.sequences import is_declared_size

Result = TypeVar("Result")


def open_positions(sizes: Sequence[int], lod_level: int) -> list[int]:
    """Return the positions of numbers in a declared shape that another number may be fed for.

    All of a shape without a batch; of [-1, steps, width] the steps. Images and rows of features keep their sizes: what
    is made of them depends on the numbers, sooner or later.
    """
    if lod_level or not sizes:
        return []
    if sizes[0] >= 0:
        return [at for at, size in enumerate(sizes) if size > 1]
    return [1] if len(sizes) == 3 and sizes[1] > 1 else []


def fix_sizes(recording: Recording, symbols: Collection[str]) -> None:
    """Take symbols for the numbers that were declared."""
    declared = recording.symbols.sizes.declared
    with substituted(recording, {symbol: declared[symbol] for symbol in symbols}):
        pass


Recording.fix_sizes = staticmethod(fix_sizes)


def fix_all(recording: Recording) -> None:
    """Take all sizes that are not fixed yet for the numbers that were declared."""
    symbols = [symbol for symbol in recording.program.symbols if is_declared_size(symbol)]
    if symbols:
        fix_sizes(recording, symbols)


def declared_shape(recording: Recording, shape: Sequence[Dim]) -> list[int]:
    """Return a shape as it was declared, with -1 for what only a feed knows."""
    declared = recording.symbols.sizes.declared
    return [declared.get(str(size), -1) if isinstance(size, Expr) else size for size in shape]


def ways_to_fix(recording: Recording, operands: Any) -> Iterator[Mapping[str, Dim]]:
    """Give what the declared sizes among the operands may be taken for, so that a call on them succeeds: sizes of
    others at the same position, counted from the last dimension; those at any position; then the declared numbers."""
    declared = recording.symbols.sizes.declared
    if not declared:
        return
    shapes = [shape for leaf in tree_leaves(operands) if (shape := _shape(recording, leaf))]
    asked = {symbol for shape in shapes for size in shape for symbol in _symbols(size)} & declared.keys()
    if not asked:
        return
    free = _free_symbols(recording)
    by_position: dict[str, Dim] = {}
    for position in range(-1, -max(map(len, shapes)) - 1, -1):
        sizes = [shape[position] for shape in shapes if len(shape) >= -position]
        by_position |= _solved(sizes, declared, free, by_position.keys())
    by_number: dict[str, Dim] = {}
    for number in sorted({declared[symbol] for symbol in asked}):
        sizes = [size for shape in shapes for size in shape if _at_hand(size, declared) == number]
        by_number |= _solved(sizes, declared, frozenset(), by_number.keys())
    yield from (names for names in (by_position, by_number) if names)
    yield {symbol: declared[symbol] for symbol in sorted(asked)}


def _free_symbols(recording: Recording) -> frozenset[str]:
    """The symbols of sizes that a feed alone tells, apart from rows of inputs."""
    program = recording.program
    rows = {
        symbol for var in program.variables.values() if var.feed for size in var.shape[:1] for symbol in _symbols(size)
    }
    return frozenset(program.symbols) - rows - recording.symbols.sizes.declared.keys()


def _shape(recording: Recording, leaf: Any) -> tuple[Dim, ...]:
    described = recording.program.variables.get(leaf.name) if hasattr(leaf, "fake") else None
    return () if described is None else described.shape


def _solved(
    sizes: Sequence[Dim], declared: Mapping[str, int], free: Collection[str], taken: Collection[str]
) -> dict[str, Dim]:
    """Declared and free sizes -> that of another operand, if all are equal as they were declared; numbers first."""
    known = [(size, number) for size in sizes if (number := _at_hand(size, declared)) is not None and number != 1]
    if len({number for _, number in known}) != 1:
        return {}
    others = [size for size, _ in known if not _is_open(size, declared)]
    target = next((size for size in others if isinstance(size, int)), (others or [known[0][0]])[0])
    if _symbols(target) & set(taken):
        return {}
    of_feeds = [size for size in sizes if isinstance(target, Expr) and _is_open(size, free)]
    own = [size for size, _ in known if _is_open(size, declared) and str(size) not in _symbols(target)]
    return {str(size): target for size in (*own, *of_feeds) if str(size) not in taken}


def _symbols(size: Dim) -> frozenset[str]:
    return size.symbols() if isinstance(size, Expr) else frozenset()


def _is_open(size: Dim, symbols: Collection[str]) -> bool:
    return isinstance(size, Expr) and size.op == "sym" and str(size.args[0]) in symbols


def _at_hand(size: Dim, declared: Mapping[str, int]) -> int | None:
    """The number that a size has as it was declared; None for one that only a feed knows."""
    if isinstance(size, int):
        return size
    return size.evaluate(declared) if size.symbols() <= declared.keys() else None


def takes_declared_sizes(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer that needs the number of a declared size have it: it is recorded again, with these sizes fixed."""

    @functools.wraps(layer)
    def call(*args: Any, **kwargs: Any) -> Any:
        recording, asked = _asked_of((args, kwargs))
        if recording is None:
            return layer(*args, **kwargs)
        for symbols in asked:
            try:
                with undone_on_failure(recording, renames=True):
                    return layer(*args, **kwargs)
            except Exception:  # noqa: BLE001 - of a layer that needs a number; else it fails once more
                rewrite(recording, recording.symbols.sizes.equal)  # what calls within the layer have fixed stays so
                fix_sizes(recording, [symbol for symbol in symbols if symbol in recording.program.symbols])
        return layer(*args, **kwargs)

    return call


def fix_operands(operands: Any) -> None:
    """Take the declared sizes among operands for their numbers."""
    recording, asked = _asked_of(operands)
    if recording is not None:
        fix_sizes(recording, asked[-1])


def _asked_of(operands: Any) -> tuple[Recording | None, list[set[str]]]:
    """The Recording of operands with declared sizes that are not fixed yet, None without any; and their symbols: those
    of last dimensions, of all but the first, of all."""
    leaves = [leaf for leaf in tree_leaves(operands) if getattr(leaf, "_recording", None) is not None]
    recording = next((leaf._recording for leaf in leaves if leaf._recording.symbols.sizes.declared), None)
    if recording is None:
        return None, []
    shapes = [_shape(recording, leaf) for leaf in leaves]
    declared = recording.symbols.sizes.declared.keys()
    parts = [[shape[start:] for shape in shapes if len(shape) > 1 or start == 0] for start in (-1, 1, 0)]
    asked = [{name for part in each for size in part for name in _symbols(size)} & declared for each in parts]
    return (recording, asked) if asked[-1] else (None, [])
