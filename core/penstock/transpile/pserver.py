"""The programs of one parameter server: what it keeps, what it does with each gradient, and what its blocks begin with.

Block 0 is `listen_and_serv`, which serves the others. Block 1, in sync mode, is what a round does once: learning-rate
schedule and step counters. Then one block for each parameter block: regulariser and update on its rows, as the
trainer's program had them for the whole parameter. Fed is the block's gradient: in sync mode the mean over the
trainers, which is made by the round and not by operators, because the participants may change.

In immediate modes (async, half_async) nothing is shared between blocks that an update writes: each block begins with
its own copy of the schedule and counters that it needs. In GEO the trainers update, and a block adds their deltas.
Startup: random values follow from (seed, position), so they are made for the whole parameter, one at a time, and cut;
constants are made at the size of the block. Tables that are spread by id begin on first touch, and have nothing there.
Invariant: to the bit, startup values are those of a run on one machine, and the updates of all servers' blocks
together those of the program, row by row. Pure.
Source: get_pserver_program (Fluid 1.8), spec 3.3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ProgramError, SpecError
from penstock.logger import warn_once
from penstock.program.expr import Dim, sym
from penstock.program.ir import Arg, Operator, Ref, Role, VarDesc
from penstock.program.program import MemoryMark, Program
from penstock.ps.remote import LISTEN_AND_SERV, PsMode
from penstock.transpile.partition import Partition, Update
from penstock.transpile.placement import Placed, Placement
from penstock.transpile.schedules import needed
from penstock.transpile.tables import Renaming, add_table, describe_table

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """One block of a server's program, as `listen_and_serv` describes it. `block`: number of its update block."""

    name: str
    parameter: str
    first_row: int
    block: int

    def whole_name(self, name: str) -> str:
        """Return what a variable of the block was called before the cut."""
        number, own, owner = name.rpartition("@")
        if own and owner and owner == self.name:
            return number
        return name.removesuffix(self.name.removeprefix(self.parameter))


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """Arguments of `listen_and_serv`. `round_block`: 0 if there is none."""

    endpoint: str
    endpoints: tuple[str, ...]
    fanin: int
    mode: PsMode
    served: tuple[Served, ...]
    round_block: int

    @property
    def index(self) -> int:
        """Which of the job's servers this is."""
        return self.endpoints.index(self.endpoint)


def describe(program: Program) -> ServerDescription | None:
    """Return the description in a server's program; None for any other program."""
    ops = program.global_block().operators
    if not ops or ops[0].type != LISTEN_AND_SERV:
        return None
    said: Any = ops[0].args
    endpoint, endpoints, fanin, mode, blocks, parameters, first_rows, round_block = said
    served = [
        Served(text.rpartition(":")[0], parameter, first, int(text.rpartition(":")[2]))
        for text, parameter, first in zip(blocks, parameters, first_rows, strict=True)
    ]
    return ServerDescription(endpoint, tuple(endpoints), fanin, mode, tuple(served), round_block)


def delta_name(parameter: str) -> str:
    """Return the name of what GEO trainers send for a parameter."""
    return f"{parameter}@DELTA"


def pulled_name(block: str) -> str:
    """Return the name of what delay compensation feeds: the block as the pushing trainer pulled it last."""
    return f"{block}@PULLED"


def pserver_program(
    partition: Partition,
    placement: Placement,
    endpoint: str,
    *,
    startup: Program,
    mode: PsMode,
    num_trainers: int,
    dc_asgd: bool = False,
) -> Program:
    """Return the program of the server at `endpoint`. `startup`: the program's own, which says how tables begin.

    A server without blocks serves none, which is logged. Raises SpecError for an endpoint that is no server and for
    `dc_asgd` outside async mode, ProgramError for a table that no server can keep.
    """
    if endpoint not in placement.endpoints:
        raise SpecError(f"{endpoint!r} is none of the parameter servers {', '.join(placement.endpoints)}", got=endpoint)
    if dc_asgd and mode != "async":
        raise SpecError(f"enable_dc_asgd compensates for the delay of async updates; the mode is {mode!r}", got=mode)
    placed = placement.on(endpoint)
    if not placed:
        counts = f"{len(placement.blocks)} blocks for {len(placement.endpoints)} servers"
        warn_once(_log, f"server {endpoint} gets no parameter block: there are {counts}")
    return _Builder(partition, startup, mode, dc_asgd=dc_asgd).build(placement, endpoint, num_trainers, placed)


class _Builder:
    """Makes one server's program, block by block."""

    def __init__(self, partition: Partition, startup: Program, mode: PsMode, *, dc_asgd: bool) -> None:
        self.partition, self.source, self.startup = partition, partition.program, startup
        self.mode, self.dc_asgd = mode, dc_asgd
        self.program = Program(seed=startup.seed)
        self.num_servers = 1
        self.served: list[Served] = []

    def build(self, placement: Placement, endpoint: str, fanin: int, placed: Sequence[Placed]) -> Program:
        """Return the program."""
        self.num_servers = len(placement.endpoints)
        updates = [self.partition.update(one.parameter) for one in placed]
        round_block = 1 if self.mode == "sync" else 0
        operators: list[Operator] = []
        if self.mode == "sync":
            operators += self._numbers([n for u in updates for n in u.shared], "", round_block)[0]
        for number, (update, one) in enumerate(zip(updates, placed, strict=True), round_block + 1):
            operators += self._block(update, one, number)
            self.served.append(Served(one.name, one.parameter, one.block.first_row, number))
        listen = Operator(
            "listen_and_serv_0",
            LISTEN_AND_SERV,
            (
                endpoint,
                placement.endpoints,
                fanin,
                self.mode,
                tuple(f"{s.name}:{s.block}" for s in self.served),
                tuple(s.parameter for s in self.served),
                tuple(s.first_row for s in self.served),
                round_block,
            ),
            (None,),
            role=Role.RPC,
        )
        for op in (listen, *operators):
            self.program.append(op)
        return self.program

    # -- what all updates share ------------------------------------------------------------------------

    def _numbers(self, wanted: Iterable[str], owner: str, block: int) -> tuple[list[Operator], dict[str, str]]:
        """Describe the numbers `wanted`, and copy the operators that advance them into a block.

        `owner`: the update block that has numbers of its own; '' for those that all share. Return the operators, and
        the own names of the numbers that they advance. Numbers that no operator advances are shared in any case.
        """
        wanted = list(dict.fromkeys(wanted))
        operators = needed(self.partition.shared, wanted, self.source)
        storage = {name: var.storage for name, var in self.source.variables.items()}
        advanced = {storage[n] for op in operators for n in op.output_arg_names}
        used = dict.fromkeys((*wanted, *(n for op in operators for n in (*op.input_names(), *op.output_names()))))
        own = {n: f"{n}@{owner}" for n in used if owner and storage[n] in advanced}
        renaming = Renaming(own, {})
        for name in used:
            self._describe(name, renaming)
        end = f"@{owner}" if owner else ""
        return [renaming.operator(op, op.name + end, block) for op in operators], own

    # -- one block -------------------------------------------------------------------------------------

    def _block(self, update: Update, one: Placed, number: int) -> list[Operator]:
        if self.mode == "geo":
            return self._adding(update, one, number)
        private, own = ([], {}) if self.mode == "sync" else self._numbers(update.shared, one.name, number)
        if update.distributed:
            described = describe_table(self.partition, self.startup, update, self.num_servers)
            return private + add_table(self.program, self.source, update, described, own, number)
        suffix, fed = _suffix(one), fed_names(update, self.source)
        names = {n: n + suffix for n in _names_within(update)} | own
        names |= {n: gradient + suffix for n, gradient in fed.items()}
        sizes = self._sizes(update, number)
        renaming = Renaming(names, sizes)
        self._persistables(update, one)
        self._describe_fed(update, one, [f + suffix for f in fed.values()], number)
        for name in _made_by(update.operators):
            self._describe(name, renaming, _reshaped(self.source.variables[name], update, one, sizes))
        operators = [renaming.operator(op, op.name + suffix, number) for op in update.operators]
        gradient = update.gradient + suffix
        if self.dc_asgd and not update.sparse:
            operators = self._compensated(one, gradient, operators, number)
        return private + [replace(op, role_vars=((one.name, gradient),)) for op in operators]

    def _sizes(self, update: Update, number: int) -> dict[Dim, Dim]:
        """The number of rows of a sparse gradient is a symbol of its own in each block."""
        return {self.source.variables[update.sent[0]].shape[0]: sym(f"n_{number}")} if update.sparse else {}

    def _persistables(self, update: Update, one: Placed) -> None:
        shape = _block_shape(update, one)
        for name in (update.parameter, *update.state):
            var, block = self.source.variables[name], name + _suffix(one)
            self.program.add_variable(replace(var, name=block, storage=block, shape=shape))

    def _describe_fed(self, update: Update, one: Placed, names: Sequence[str], number: int) -> None:
        """Describe what a push feeds: a tensor, or rows and values."""
        shape, param = _block_shape(update, one), self.source.variables[update.parameter]
        if not update.sparse:
            self.program.add_variable(VarDesc(names[0], shape, param.dtype, feed=True, source=param.source))
            return
        rows = sym(f"n_{number}")
        self.program.symbols.append(str(rows))
        for name, size, dtype in zip(names, ((rows,), (rows, *shape[1:])), ("int64", param.dtype), strict=True):
            self.program.add_variable(VarDesc(name, size, dtype, feed=True, source=param.source))
        self.program.add_variable(
            VarDesc(self._sparse_name(update, one), shape, param.dtype, "selected_rows", rows=names[0],
                    values=names[1], source=param.source)
        )  # fmt: skip

    def _sparse_name(self, update: Update, one: Placed) -> str:
        return (delta_name(update.parameter) if self.mode == "geo" else update.gradient) + _suffix(one)

    def _compensated(self, one: Placed, gradient: str, operators: Sequence[Operator], number: int) -> list[Operator]:
        """Put g + g * g * (w - w as the trainer pulled it) in the place of g. Source: DC-ASGD, spec 3.3."""
        param, pulled = self.program.variables[one.name], pulled_name(one.name)
        self.program.add_variable(VarDesc(pulled, param.shape, param.dtype, feed=True, source=param.source))
        steps = (
            ("delay", "aten.sub.Tensor", (one.name, pulled)),
            ("square", "aten.mul.Tensor", (gradient, gradient)),
            ("change", "aten.mul.Tensor", (f"{gradient}.square", f"{gradient}.delay")),
            ("compensated", "aten.add.Tensor", (gradient, f"{gradient}.change")),
        )
        made = []
        for what, kind, operands in steps:
            self.program.add_variable(VarDesc(f"{gradient}.{what}", param.shape, param.dtype, source=param.source))
            made.append(
                Operator(f"{what}.{one.name}", kind, tuple(Ref(n) for n in operands), (f"{gradient}.{what}",),
                         role=Role.OPTIMIZE, module="dc_asgd", source=param.source, block=number)
            )  # fmt: skip
        instead = Renaming({gradient: f"{gradient}.compensated"}, {})
        return [*made, *(instead.operator(op, op.name, number) for op in operators)]

    def _adding(self, update: Update, one: Placed, number: int) -> list[Operator]:
        """GEO: param += delta."""
        if update.distributed:
            raise ProgramError(
                f"table {update.parameter!r} is distributed, but in GEO mode each trainer has a whole table; "
                "use is_sparse=True without is_distributed, or another mode",
                variable=update.parameter,
            )
        param, delta, suffix = self.source.variables[update.parameter], delta_name(update.parameter), _suffix(one)
        block = replace(param, name=one.name, storage=one.name, shape=_block_shape(update, one))
        self.program.add_variable(block)
        fed = [f"{delta}@ROWS{suffix}", f"{delta}@VALUES{suffix}"] if update.sparse else [delta + suffix]
        self._describe_fed(update, one, fed, number)
        operands: tuple[Arg, ...] = (Ref(one.name), *([0] if update.sparse else []), *(Ref(n) for n in fed))
        kind = "aten.index_add_.default" if update.sparse else "aten.add_.Tensor"
        return [
            Operator(f"add_.{one.name}", kind, operands, (None,), writes=(one.name,), role=Role.OPTIMIZE,
                     role_vars=((one.name, delta + suffix),), module="geo", source=param.source, block=number)
        ]  # fmt: skip

    def _describe(self, name: str, renaming: Renaming, shape: tuple[Dim, ...] | None = None) -> None:
        var = self.source.variables[name]
        new = renaming.name(name)
        if new not in self.program.variables:
            self.program.add_variable(
                replace(var, name=new, storage=renaming.name(var.storage), shape=var.shape if shape is None else shape)
            )


def fed_names(update: Update, source: Program) -> dict[str, str]:
    """Return, for each variable that the trainer sends, what it is fed as: the gradient, clipped or not."""
    if not update.sparse:
        return {update.sent[0]: update.gradient}
    gradient = source.variables[update.gradient]
    return dict(zip(update.sent, (gradient.rows, gradient.values), strict=True))


def _suffix(one: Placed) -> str:
    """`.block1` for a parameter that is cut, nothing for a whole one."""
    return one.name.removeprefix(one.parameter)


def _block_shape(update: Update, one: Placed) -> tuple[Dim, ...]:
    return update.shape if one.block.whole else (one.block.num_rows, *update.shape[1:])


def _made_by(operators: Iterable[Operator]) -> list[str]:
    return list(dict.fromkeys(n for op in operators for n in op.output_names()))


def _names_within(update: Update) -> list[str]:
    """What a block has of its own: parameter, state, temporaries."""
    return [update.parameter, *update.state, *_made_by(update.operators)]


def _reshaped(var: VarDesc, update: Update, one: Placed, sizes: dict[Dim, Dim]) -> tuple[Dim, ...]:
    if var.shape and var.shape[0] in sizes:
        return (sizes[var.shape[0]], *var.shape[1:])
    return _block_shape(update, one) if var.shape == update.shape else var.shape


_FULL = "aten.full.default"
_CAPTURED = "penstock.captured"


def pserver_startup(pserver: Program, startup: Program) -> Program:
    """Return the startup program of a server's program. `startup`: that of the program before it was distributed.

    Raises ProgramError for a variable that `startup` does not make.
    """
    description = describe(pserver)
    if description is None:
        raise ProgramError("a server's startup program is made for a pserver program; this one has no listen_and_serv")
    builder = _StartupBuilder(startup)
    for served in description.served:
        builder.add(_kept_by(pserver, served.block), served, pserver)
    if description.round_block:
        shared = Served("", "", 0, description.round_block)
        builder.add(_kept_by(pserver, description.round_block), shared, pserver)
    return builder.finished()


def _kept_by(program: Program, block: int) -> list[str]:
    """Return the persistable variables that a block uses."""
    operators = program.block(block).operators if block < program.num_blocks else []
    variables = program.variables
    used = dict.fromkeys(n for op in operators for n in (*op.input_names(), *op.output_names()))
    return [n for n in dict.fromkeys(variables[n].storage for n in used) if variables[n].persistable]


class _StartupBuilder:
    """Collects which rows of which variable are kept, then records one variable after the other."""

    def __init__(self, startup: Program) -> None:
        self.startup = startup
        self.program = Program(seed=startup.seed, memory_mark=MemoryMark(frozenset(), skip_grads=False))
        self.wanted: dict[str, dict[str, tuple[int, VarDesc]]] = {}

    def add(self, names: Iterable[str], served: Served, pserver: Program) -> None:
        """Ask for the variables of a block."""
        for name in names:
            parts = self.wanted.setdefault(served.whole_name(name), {})
            parts.setdefault(name, (served.first_row, pserver.variables[name]))

    def finished(self) -> Program:
        """Return the program."""
        for whole, parts in self.wanted.items():
            operators = needed(self.startup.operators, [whole], self.startup)
            if not operators:
                raise ProgramError(
                    f"the startup program does not initialise {whole!r}; give transpile the startup program that "
                    "belongs to the program",
                    variable=whole,
                )
            if len(operators) == 1 and operators[0].type == _FULL:
                self._constants(operators[0], parts)
            else:
                self._cut(whole, operators, parts)
        return self.program

    def _constants(self, op: Operator, parts: dict[str, tuple[int, VarDesc]]) -> None:
        for number, (name, (_, var)) in enumerate(parts.items()):
            self.program.add_variable(var)
            args: tuple[Arg, ...] = (var.shape, *op.args[1:])
            self.program.append(replace(op, name=_numbered(op.name, number), args=args, outputs=(name,)))

    def _cut(self, whole: str, operators: tuple[Operator, ...], parts: dict[str, tuple[int, VarDesc]]) -> None:
        # The whole variable has its own name, unless a block that is the whole variable has it.
        own = self.startup.variables[whole]
        only = list(parts) == [whole]
        for op in operators:
            for name in op.output_names():
                var = self.startup.variables[name]
                kept = only and name == whole
                self.program.add_variable(parts[name][1] if kept else replace(var, persistable=False, parameter=False))
            if op.type == _CAPTURED:
                self.program.captured[str(op.args[0])] = self.startup.captured[str(op.args[0])]
            self.program.append(op)
        if not only:
            for name, (first, var) in parts.items():
                self._part(own, name, first, var)

    def _part(self, whole: VarDesc, name: str, first: int, var: VarDesc) -> None:
        """A copy of the rows that the block has: a view would keep the whole parameter alive."""
        source = Ref(whole.name)
        if var.shape != whole.shape:
            view = f"{name}@VIEW"
            self.program.add_variable(VarDesc(view, var.shape, var.dtype, storage=whole.name, source=var.source))
            rows = int(str(var.shape[0]))
            args: tuple[Arg, ...] = (source, 0, first, first + rows)
            self.program.append(Operator(f"slice.{name}", "aten.slice.Tensor", args, (view,), source=var.source))
            source = Ref(view)
        self.program.add_variable(var)
        self.program.append(Operator(f"clone.{name}", "aten.clone.default", (source,), (name,), source=var.source))


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name
