"""Symbols that sizes stand for from now on: in what was recorded, and in sizes that exist already.

Programs that were cloned from one another have their symbols in common, so a change of one is a change of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from penstock.program.expr import Dim, Expr, renamed
from penstock.program.ir import Arg, Guard, Operator, VarDesc
from penstock.program.record import arithmetic
from penstock.program.record.recording import Recording
from penstock.program.record.relations import Relation
from penstock.program.sequences import LENGTHS, batch_symbol, ragged_feeds


@contextmanager
def substituted(recording: Recording, names: Mapping[str, str | Dim]) -> Iterator[None]:
    """Take symbols for other sizes within the block, and from then on if it succeeds."""
    sizes = recording.symbols.sizes
    before = dict(sizes.equal)
    sizes.take_as_equal({**{old: _followed(new, names) for old, new in before.items()}, **names})
    try:
        yield
    except BaseException:
        sizes.take_as_equal(before)
        raise
    _drop_lengths(recording, names)
    for one in {recording, *recording.symbols.recordings}:
        rewrite(one, names)


def _drop_lengths(recording: Recording, names: Mapping[str, str | Dim]) -> None:
    """Forget the lengths, which nothing reads, of rows that are the batch now."""
    program = recording.program
    for var in ragged_feeds(program):
        rows = var.shape[0].symbols() if isinstance(var.shape[0], Expr) else frozenset()
        if batch_symbol(program) in {names.get(row) for row in rows}:
            recording.drop(var.name + LENGTHS)


def rewrite(recording: Recording, names: Mapping[str, str | Dim]) -> None:
    """Replace symbols in what was recorded."""
    program = recording.program
    for name, var in program.variables.items():
        if any(isinstance(d, Expr) and d.symbols() & names.keys() for d in var.shape):
            program.variables[name] = of_sizes(var, names)
    program.operators[:] = [of_operator(op, names) for op in program.operators]
    guards = [replace(g, left=_renamed(g.left, names), right=_renamed(g.right, names)) for g in program.guards]
    program.guards[:] = [guard for guard in dict.fromkeys(guards) if _possible(guard)]
    program.symbols[:] = [name for name in program.symbols if name not in names]
    program.revision += 1


def _followed(size: str | Dim, names: Mapping[str, str | Dim]) -> str | Dim:
    return names.get(size, size) if isinstance(size, str) else _renamed(size, names)


def _renamed(dim: Dim, names: Mapping[str, str | Dim]) -> Dim:
    if not isinstance(dim, Expr) or not dim.symbols() & names.keys():
        return dim
    return arithmetic.of_dim(renamed(dim, names)).dim


def of_sizes(var: VarDesc, names: Mapping[str, str | Dim]) -> VarDesc:
    """Return a variable with symbols of its shape replaced."""
    return replace(var, shape=tuple(_renamed(d, names) for d in var.shape))


def of_operator(op: Operator, names: Mapping[str, str | Dim]) -> Operator:
    """Return an operator with symbols of its operands replaced."""
    args = tuple(_argument(a, names) for a in op.args)
    kwargs = tuple((k, _argument(v, names)) for k, v in op.kwargs)
    return op if (args, kwargs) == (op.args, op.kwargs) else replace(op, args=args, kwargs=kwargs)


def _argument(value: Arg, names: Mapping[str, str | Dim]) -> Arg:
    if isinstance(value, Expr):
        return _renamed(value, names)
    return tuple(_argument(v, names) for v in value) if isinstance(value, tuple) else value


def _possible(guard: Guard) -> bool:
    """Whether a guard may hold: that two sizes differ was asked before they were taken for equal."""
    left, right = arithmetic.of_dim(guard.left), arithmetic.of_dim(guard.right)
    return Relation(guard.relation, left, right).always() is None
