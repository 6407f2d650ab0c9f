"""Distributed tables in a server's program: rows by id, made on first touch, updated by the program's own operators.

The block of a table begins with `sparse_table`, which describes it and stands for reading and writing rows: it gives
the rows that a push names, once each, with the optimizer's state beside them, and the merged gradients. The update
operators of the program then work on these rows as they would on a whole table with every row in it. Pure.

Capacity is dict_size, the number of different ids. Of several servers each bounds what it has itself: an even share and
six standard deviations of a spread by hash, so that dict_size ids always fit (they would not in one of 10^9 jobs), and
one table has at most a little more.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr, evaluate, sym
from penstock.program.initializers import SEED
from penstock.program.ir import Arg, Operator, Output, Ref, Role, VarDesc
from penstock.program.program import Program
from penstock.ps.remote import SPARSE_TABLE
from penstock.transpile.joined_lookups import padding_of
from penstock.transpile.partition import Partition, Update

Settings = tuple[tuple[str, Arg], ...]

_FIRST = {
    "penstock.uniform.default": "uniform",
    "penstock.normal.default": "normal",
    "penstock.truncated_normal.default": "truncated_normal",
}


@dataclass(frozen=True, slots=True)
class Renaming:
    """New names of variables, and new sizes."""

    names: Mapping[str, str]
    sizes: Mapping[Dim, Dim]

    def name(self, name: str) -> str:
        """Return the new name of a variable."""
        return self.names.get(name, name)

    def dim(self, dim: Dim) -> Dim:
        """Return the new size for a size."""
        return self.sizes.get(dim, dim)

    def arg(self, value: Arg) -> Arg:
        """Return an operand with the new names and sizes. Plain integers are no sizes."""
        if isinstance(value, Ref):
            return Ref(self.name(value.name))
        if isinstance(value, Expr):
            return self.dim(value)
        if isinstance(value, tuple):
            return tuple(self.arg(v) for v in value)
        return value

    def operator(self, op: Operator, name: str, block: int) -> Operator:
        """Return the operator under another name, in another block; it updates no parameter of a trainer's program."""
        return replace(
            op,
            name=name,
            block=block,
            args=tuple(self.arg(a) for a in op.args),
            kwargs=tuple((k, self.arg(v)) for k, v in op.kwargs),
            outputs=tuple(self._output(o) for o in op.outputs),
            writes=tuple(self.name(w) for w in op.writes),
            role_vars=(),
        )

    def _output(self, value: Output) -> Output:
        if isinstance(value, tuple):
            return tuple(self.name(v) for v in value)
        return None if value is None else self.name(value)


def capacity_of(dict_size: int, num_servers: int) -> int:
    """Return how many ids one of `num_servers` takes, so that `dict_size` ids spread by hash always fit."""
    share = dict_size / num_servers
    return min(dict_size, math.ceil(share + 6.0 * math.sqrt(share)))


def is_scratch(name: str, parameter: str) -> bool:
    """Whether a state is the table that `program.training.gradients` merges duplicates in: zero between steps."""
    return name.endswith(f".merge.{parameter}")


def is_state(name: str, parameter: str) -> bool:
    """Whether a variable is what an optimizer keeps beside a parameter: `adam_0.moment1.w` beside `w`."""
    return name.endswith(f".{parameter}")


def check_tables(partition: Partition, startup: Program) -> None:
    """Raise ProgramError for a distributed table that no server could keep: in every process, before any has begun."""
    for update in partition.updates:
        if update.distributed:
            describe_table(partition, startup, update, num_servers=1)


def describe_table(partition: Partition, startup: Program, update: Update, num_servers: int) -> Settings:
    """Return the arguments of a table's `sparse_table`. Raises ProgramError for what no table can do."""
    _check(update)
    kind, a, b, seed = _first_values(startup, update.parameter)
    paddings = {padding_of(op) for op in partition.lookups(update.parameter)}
    # Lookups that do not agree leave it to the trainers, whose gradient of a padded row is zero.
    padding = paddings.pop() if len(paddings) == 1 else -1
    said = partition.program.variables[update.parameter]
    return (
        ("width", update.shape[1]),
        ("capacity", capacity_of(update.shape[0], num_servers)),
        ("first", kind),
        ("a", a),
        ("b", b),
        ("seed", seed),
        ("padding_idx", None if padding == -1 else padding),
        ("first_states", tuple(_constant(startup, name) for name in kept_states(update))),
        ("admit_after", said.admit_after),
        ("expire_after_s", said.expire_after_s),
    )


def kept_states(update: Update) -> list[str]:
    """Return the states that stand beside each row."""
    return [n for n in update.state if not is_scratch(n, update.parameter)]


def add_table(
    program: Program, source: Program, update: Update, settings: Settings, own: Mapping[str, str], number: int
) -> list[Operator]:
    """Describe a table and its update in `program`; return the operators of block `number`.

    `own`: names that the block has of numbers.
    """
    param, gradient = source.variables[update.parameter], source.variables[update.gradient]
    pushed, used = sym(f"n_{number}"), sym(f"m_{number}")
    program.symbols += [str(pushed), str(used)]
    width = update.shape[1]
    states = kept_states(update)
    positions, merged = f"{update.gradient}@POSITIONS", f"{update.gradient}@MERGED"

    def describe(name: str, shape: tuple[Dim, ...], dtype: str, *, feed: bool = False) -> None:
        program.add_variable(VarDesc(name, shape, dtype, feed=feed, source=param.source))

    describe(gradient.rows, (pushed,), "int64", feed=True)
    describe(gradient.values, (pushed, width), param.dtype, feed=True)
    for name in (update.parameter, *states, merged):
        describe(name, (used, width), param.dtype)
    describe(positions, (used,), "int64")
    table = Operator(
        f"sparse_table_{number}",
        SPARSE_TABLE,
        (Ref(gradient.rows), Ref(gradient.values)),
        ((update.parameter, *states), positions, merged),
        settings,
        role=Role.DIST,
        source=param.source,
        block=number,
    )
    operators = [table]
    for name in update.state:
        if is_scratch(name, update.parameter):
            describe(name, (used, width), param.dtype)
            operators.append(
                Operator(f"zeros_like_{number}", "aten.zeros_like.default", (Ref(merged),), (name,), role=Role.OPTIMIZE,
                         block=number)
            )  # fmt: skip
    rows, values = update.sent
    sizes: dict[Dim, Dim] = {source.variables[rows].shape[0]: used}
    renaming = Renaming({**own, rows: positions, values: merged}, sizes)
    for op in update.operators:
        for name in op.output_names():
            var = source.variables[name]
            shape = tuple(sizes.get(d, d) for d in var.shape)
            program.add_variable(VarDesc(name, shape, var.dtype, storage=renaming.name(var.storage), source=var.source))
    return operators + [renaming.operator(op, op.name, number) for op in update.operators]


def _check(update: Update) -> None:
    table = f"distributed table {update.parameter!r}"
    if not update.sparse or len(update.shape) != 2:
        raise ProgramError(
            f"{table} is trained by a dense gradient; embedding(is_distributed=True) needs is_sparse=True",
            variable=update.parameter,
        )
    if update.dtype != "float32":
        raise ProgramError(
            f"{table} has {update.dtype}; tables that are spread by id hold float32. With is_distributed=False a table "
            "has any floating dtype",
            variable=update.parameter,
        )
    if not update.row_wise:
        raise ProgramError(
            f"{table}: its update takes all rows together (a norm of the whole table, as LarsMomentum does), and a "
            "server has the rows of its ids alone. Train it with another optimizer",
            variable=update.parameter,
        )


def _first_values(startup: Program, name: str) -> tuple[str, float, float, int]:
    """Return (kind, a, b, seed) of a table's first values. A seed of 0 becomes one that follows from the name."""
    op = _initialiser(startup, name)
    args: Any = op.args
    if op.type == "aten.full.default":
        return "constant", float(args[1]), 0.0, 0
    if op.type not in _FIRST:
        raise ProgramError(
            f"distributed table {name!r} begins with {op.type} ({op.source}); rows that are made on first touch begin "
            "constant, uniform, normal or truncated normal (Xavier and MSRA are)",
            variable=name,
        )
    # Without a seed each start of a server would draw other rows for ids that its log names but does not hold.
    base = startup.seed or zlib.crc32(name.encode())
    seed = evaluate(args[3], {SEED: base}) if isinstance(args[3], Expr) else int(args[3])
    return _FIRST[op.type], float(args[1]), float(args[2]), seed


def _constant(startup: Program, name: str) -> float:
    op = _initialiser(startup, name)
    args: Any = op.args
    if op.type != "aten.full.default":
        raise ProgramError(f"state {name!r} of a distributed table begins with {op.type}; expected a constant")
    return float(args[1])


def _initialiser(startup: Program, name: str) -> Operator:
    made = [op for op in startup.operators if name in op.output_names()]
    if len(made) != 1:
        raise ProgramError(
            f"{len(made)} operators of the startup program initialise {name!r}; a distributed table needs one",
            variable=name,
        )
    return made[0]
