"""Rows of ragged inputs while a Program is recorded: symbols of their own, which turn out to be equal to others.

An input with a lod_level has rows apart from the batch (program/sequences.py). Fluid says no more than -1 of either, so
a script may add the scores of one such input to the labels of another, or use it as what has one row a sample. Where a
call fails on operands with different rows, it is made again with these taken for the same: two ragged inputs with one
another, or one whose lengths no operator has read with the batch. So are other sizes that are known when fed, the steps
of two padded inputs. Where rows are a share of a ragged input's, s1 // 3, and others the batch, the call is made with
the former counted in the run (`penstock.expect_rows`); so is the batch where another operand has a fixed number of
rows, which Fluid compares in the run, too, and so are sums of the rows of inputs, s1 + s2 beside s3 + s4, as
`sequence_concat` gives them. An input may turn out to have several rows a sample (multiples.py), and positions to
have one (rows_of_positions.py). If all fails, the first error is raised and nothing has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from penstock.compat.torch import tree_leaves, tree_map
from penstock.program.expr import Dim, Expr, sym
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.record.declared_sizes import ways_to_fix
from penstock.program.record.multiples import inputs_to_multiply, multiplied
from penstock.program.record.recording import Recording
from penstock.program.record.rows_of_positions import rows_as_batch
from penstock.program.record.substitution import substituted
from penstock.program.sequences import LENGTHS, STEPS, batch_symbol, is_declared_size, ragged_feeds

Result = TypeVar("Result")


def with_equal_rows(
    recording: Recording, operands: Any, call: Callable[[Any], Result], count: Callable[[Any, Any], Any]
) -> Result:
    """Return `call(operands)`; where it fails, with the sizes of its operands taken for equal.

    Declared sizes (declared_sizes.py) come first. `operands`: a nest of Variables. `count(x, rows)` records x with its
    rows counted. Both leave nothing behind where they fail. Raises what `call` raises at first.
    """
    try:
        return call(operands)
    except Exception as error:  # noqa: BLE001 - raised below, if nothing helps
        first, names = error, _to_join(recording, operands)
        shares, sums = _shares_of_rows(recording, operands), _sums_of_rows(recording, operands)
        several, fixes = inputs_to_multiply(recording, operands), ways_to_fix(recording, operands)
    for fixed in fixes:
        try:
            with substituted(recording, fixed):
                return _with_counted_batch(recording.program, operands, fixed, call, count)
        except Exception as error:  # noqa: BLE001 - as above; of the sizes that were declared
            first = error
    if names:
        with contextlib.suppress(Exception), substituted(recording, names):
            return call(operands)
    if several:
        with contextlib.suppress(Exception), multiplied(recording, several):
            return call(operands)
    if of_positions := rows_as_batch(recording):
        with contextlib.suppress(Exception), substituted(recording, of_positions):
            return call(operands)
    for counted, rows in _rows_to_count(recording, operands, shares, sums):
        with contextlib.suppress(Exception):
            return call(_counted(operands, counted, rows, count))
    raise first


def _with_counted_batch(
    program: Program, operands: Any, fixed: Mapping[str, str | Dim], call: Callable[[Any], Result],
    count: Callable[[Any, Any], Any],
) -> Result:  # fmt: skip
    """Return `call(operands)`; where it fails, with the batch counted as the fixed rows of another operand.

    `fixed`: the declared sizes that are taken for others just now. Raises what `call` raises at first.
    """
    try:
        return call(operands)
    except Exception:
        batches, rows = _batches_of_fixed_rows(program, operands, fixed)
        if not batches:
            raise
        with contextlib.suppress(Exception):
            return call(_counted(operands, batches, rows, count))
        raise


def _rows_to_count(
    recording: Recording, operands: Any, shares: Collection[str], sums: Sequence[str]
) -> Iterator[tuple[Collection[str], Any]]:
    """Give operands whose rows may be counted in the run, and what they have to be."""
    sizes, program = recording.symbols, recording.program
    if shares:
        yield shares, sizes.size(sym(batch_symbol(program)))
    batches, rows = _batches_of_fixed_rows(program, operands, {})
    if batches:
        yield batches, rows
    if sums:
        yield sums[1:], sizes.size(program.variables[sums[0]].shape[0])


def _counted(operands: Any, names: Collection[str], rows: Any, count: Callable[[Any, Any], Any]) -> Any:
    return tree_map(lambda v: count(v, rows) if _name(v) in names else v, operands)


def join_rows(recording: Recording, operands: Any) -> None:
    """Take the rows of variables for equal, where they may be."""
    names = _to_join(recording, operands)
    if names:
        with substituted(recording, names):
            pass


def rename_symbols(recording: Recording, names: Mapping[str, str]) -> None:
    """Take symbols for others, in what was recorded and from now on."""
    if names:
        with substituted(recording, names):
            pass


def join_sizes(recording: Recording, left: Dim, right: Dim) -> None:
    """Take two sizes for equal that are known when fed, where neither is the rows of an input."""
    names = [str(size.args[0]) for size in (left, right) if isinstance(size, Expr) and size.op == "sym"]
    rows = {_rows(v.shape) for v in recording.program.variables.values() if v.feed}
    known = set(recording.program.symbols)
    if len(set(names)) == 2 and not rows & set(names) and known >= set(names):
        first, second = sorted(names, key=recording.program.symbols.index)
        rename_symbols(recording, {second: first})


def _to_join(recording: Recording, operands: Any) -> dict[str, str]:
    """Symbols of sizes among the operands -> the one to take for them; empty if there is nothing to take for equal."""
    shapes = [desc.shape for v in tree_leaves(operands) if (desc := _described(recording.program, v))]
    of_data = [name for name in recording.symbols.of_data if name not in recording.symbols.sizes.equal]
    if late := _late_rows_to_join(of_data, shapes):
        return late  # of other sizes, the next call on them asks
    return {**_rows_to_join(recording.program, shapes), **_other_sizes_to_join(recording.program, of_data, shapes)}


def _other_sizes_to_join(program: Program, of_data: Sequence[str], shapes: Sequence[tuple[Dim, ...]]) -> dict[str, str]:
    """Symbols at one position, counted from the last dimension, or of the same multiples there; none is of rows."""
    inputs = {_rows(v.shape) for v in program.variables.values() if v.feed and not v.name.endswith(STEPS)}
    inputs.update(filter(is_declared_size, program.symbols))
    names: dict[str, str] = {}
    for position in range(-1, -max(map(len, shapes), default=0) - 1, -1):
        at = [shape for shape in shapes if len(shape) >= -position]
        there = [size for shape in at if (size := _multiple(shape[position]))]
        kept = inputs.union(of_data) if any(len(shape) == -position for shape in at) else inputs
        for factor in dict.fromkeys(factor for factor, _ in there):
            found = {name for multiple, name in there if multiple == factor} - kept
            first, *rest = [name for name in (*program.symbols, *of_data) if name in found] or [""]
            names |= dict.fromkeys(rest, names.get(first, first))
    return names


def _multiple(size: Dim) -> tuple[int, str] | None:
    """The factor and the symbol of a size such as 30 * s1; None for another one."""
    name = _rows((size,))
    return (size.evaluate({name: 1}), name) if name and isinstance(size, Expr) else None


def _late_rows_to_join(of_data: Sequence[str], shapes: Sequence[tuple[Dim, ...]]) -> dict[str, str]:
    """Rows that follow from data, among which there is one other symbol at most, which they are taken for."""
    found = dict.fromkeys(_rows(shape) for shape in shapes)
    late = [name for name in of_data if name in found]
    others = [name for name in found if name and name not in late]
    if not late or len(late) + len(others) < 2 or len(others) > 1:
        return {}
    target, *rest = [*others, *late]
    return dict.fromkeys(rest, target)


def _rows_to_join(program: Program, shapes: Sequence[tuple[Dim, ...]]) -> dict[str, str]:
    found = dict.fromkeys(_rows(shape) for shape in shapes)
    found.pop("", None)
    inputs = {_rows(v.shape): v for v in ragged_feeds(program)}
    own = [name for name in program.symbols if name in found and name in inputs]
    others = [name for name in found if name not in inputs]
    if not own or len(found) < 2 or len(others) > 1:
        return {}
    if others and (others[0] != batch_symbol(program) or any(_lengths_read(program, inputs[name]) for name in own)):
        return {}
    target, *rest = [*others, *own]
    return dict.fromkeys(rest, target)


def _shares_of_rows(recording: Recording, operands: Any) -> set[str]:
    """The operands whose rows are a whole share of a ragged input's, where another one has the batch; else none."""
    program = recording.program
    described = [desc for v in tree_leaves(operands) if (desc := _described(program, v)) and desc.shape]
    rows = {_rows(v.shape) for v in ragged_feeds(program)}
    shares = {v.name for v in described if _is_share(v.shape[0], rows)}
    return shares if any(_rows(v.shape) == batch_symbol(program) != "" for v in described) else set()


def _batches_of_fixed_rows(program: Program, operands: Any, fixed: Mapping[str, str | Dim]) -> tuple[set[str], int]:
    """The operands whose rows are the batch, and the one number that others have there, counted from the last size."""
    shapes = {v.name: v.shape for leaf in tree_leaves(operands) if (v := _described(program, leaf)) and v.shape}
    batch = sym(batch_symbol(program))
    batches = {name: len(shape) for name, shape in shapes.items() if shape[0] == batch}
    at = [shape[-dims] for dims in batches.values() for shape in shapes.values() if len(shape) >= dims]
    known = {size for own in at if isinstance(size := fixed.get(str(own), own), int) and size > 1}
    return (set(batches), known.pop()) if len(known) == 1 else (set(), 0)


def _sums_of_rows(recording: Recording, operands: Any) -> list[str]:
    """The operands whose rows are sums of those of several ragged inputs, where they are not the same sums."""
    rows = {_rows(v.shape) for v in ragged_feeds(recording.program)}
    described = [desc for v in tree_leaves(operands) if (desc := _described(recording.program, v)) and desc.shape]
    sums = [
        v for v in described if isinstance(v.shape[0], Expr) and v.shape[0].op == "+" and v.shape[0].symbols() <= rows
    ]
    return list(dict.fromkeys(v.name for v in sums)) if len({v.shape[0] for v in sums}) > 1 else []


def _is_share(size: Dim, rows: set[str]) -> bool:
    return isinstance(size, Expr) and size.op == "//" and bool(size.symbols()) and size.symbols() <= rows


def _name(value: Any) -> str:
    return getattr(value, "name", "") if hasattr(value, "fake") else ""


def _described(program: Program, value: Any) -> VarDesc | None:
    return program.variables.get(_name(value))


def _rows(shape: tuple[Dim, ...]) -> str:
    """The symbol of the rows, or of what they are a multiple of."""
    rows = shape[0] if shape else None
    symbols = rows.symbols() if isinstance(rows, Expr) and rows.op in ("sym", "*") else frozenset()
    return next(iter(symbols)) if len(symbols) == 1 else ""


def _lengths_read(program: Program, var: VarDesc) -> bool:
    name = var.name + LENGTHS
    return any(name in op.input_names() for op in program.operators)
