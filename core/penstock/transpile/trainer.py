"""The trainer's programs. Main: forward, backward, clipping as recorded; gradients go to servers, parameters come back.

Each gradient is sent right after the operator that makes it. Sync: one barrier over all sends, then the parameters are
pulled, then a barrier over all pulls. Asynchronous modes have no barriers: a parameter is pulled after its own send.
A table with sparse gradients is looked up on the servers; this process never allocates it.
GEO: it trains by itself, tables included; `geo` follows each update of a parameter, and the communicator behind it
counts the steps, pushes the difference divided by the number of trainers, and adds what the others have changed.
Startup: what the servers keep is not made here; what they share is pulled, so all trainers begin with the same values.
Source: get_trainer_program, GeoSgdTranspiler (Fluid 1.8), spec 3.2, 3.4, 3.6; `recv` writes the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.program.ir import Arg, Operator, Ref, Role, TorchConst, VarDesc
from penstock.program.program import Program
from penstock.ps import remote_ops as _remote_ops  # noqa: F401 - registers the operators
from penstock.ps.remote import (
    FETCH_BARRIER,
    GEO,
    PREFETCH,
    RECV,
    REMOTE_TYPES,
    SEND,
    SEND_BARRIER,
    SEND_ROWS,
    Descriptor,
)
from penstock.transpile.joined_lookups import joined_lookups, padding_of
from penstock.transpile.partition import LOOKUP, Partition, Update, is_clip
from penstock.transpile.placement import Placed, Placement
from penstock.transpile.schedules import on_both_sides

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED


MODULE = "parameter_server"
_SPLIT = "aten.split_with_sizes.default"
_RPC = Role.OPTIMIZE | Role.RPC
_DIST = Role.OPTIMIZE | Role.DIST


class RemoteCalls:
    """Adds variables to `program` and returns operators that talk to servers, which the caller puts in their places.

    A *token* is an empty tensor: something has happened. Names: `w@GRAD.block0` (in sync mode with several trainers
    `w@GRAD.block0.trainer_1`) are rows of a gradient, `w.block0` rows of a parameter; both are views, so
    nothing is copied. `w@GRAD@SENT`, `w@RECEIVED`, `@SEND_BARRIER@` and `@FETCH_BARRIER@` are tokens.
    """

    def __init__(self, program: Program, placement: Placement, descriptor: Descriptor) -> None:
        self.program, self.placement, self.descriptor = program, placement, descriptor
        self._index = {endpoint: i for i, endpoint in enumerate(placement.endpoints)}

    # -- gradients -----------------------------------------------------------------------------------

    def send(self, update: Update) -> list[Operator]:
        """Return what pushes the gradient of `update`; the last one makes its token."""
        placed = self.placement.of_parameter(update.parameter)
        where: tuple[Arg, ...] = (str(self.descriptor), update.parameter, _names(placed), self._at(placed))
        token = self._token(f"{update.gradient}@SENT")
        if update.sparse:
            rows, values = update.sent
            heights = () if update.distributed else tuple(p.block.num_rows for p in placed)
            args: tuple[Arg, ...] = (Ref(rows), Ref(values), *where, heights)
            return [self._operator("send", SEND_ROWS, args, (token,), role=_RPC, update=update)]
        operators, parts = self._cut(update, update.sent[0], f"{update.gradient}.block", self._suffix(), placed)
        args = (tuple(Ref(p) for p in parts), *where)
        return [*operators, self._operator("send", SEND, args, (token,), role=_RPC, update=update)]

    def send_barrier(self, tokens: Iterable[str]) -> Operator:
        """Return what ends the sending of a step."""
        made = self._token("@SEND_BARRIER@")
        args = (tuple(Ref(t) for t in tokens), str(self.descriptor))
        return self._operator("send_barrier", SEND_BARRIER, args, (made,), role=_RPC)

    # -- parameters ----------------------------------------------------------------------------------

    def recv(self, update: Update, after: Sequence[str]) -> list[Operator]:
        """Return what pulls a parameter in place, after the tokens `after`; the last one makes its token."""
        placed = self.placement.of_parameter(update.parameter)
        operators, parts = self._cut(update, update.parameter, f"{update.parameter}.block", "", placed)
        token = self._token(f"{update.parameter}@RECEIVED")
        args: tuple[Arg, ...] = (
            tuple(Ref(p) for p in parts), tuple(Ref(t) for t in after), str(self.descriptor), update.parameter,
            _names(placed), self._at(placed),
        )  # fmt: skip
        pull = self._operator("recv", RECV, args, (token,), writes=parts, role=_RPC, update=update)
        return [*operators, pull]

    def fetch_barrier(self, tokens: Iterable[str]) -> Operator:
        """Return what ends the pulling of a step."""
        made = self._token("@FETCH_BARRIER@")
        args = (tuple(Ref(t) for t in tokens), str(self.descriptor))
        return self._operator("fetch_barrier", FETCH_BARRIER, args, (made,), role=_RPC)

    # -- tables, GEO -----------------------------------------------------------------------------------

    def prefetch(self, lookup: Operator, update: Update) -> Operator:
        """Return what asks the servers for the rows that `lookup` would read of a table of this process."""
        placed = self.placement.of_parameter(update.parameter)
        heights = () if update.distributed else tuple(p.block.num_rows for p in placed)
        ids = lookup.args[1]
        padding = padding_of(lookup)
        args: tuple[Arg, ...] = (
            ids, str(self.descriptor), update.parameter, _names(placed), self._at(placed), heights, update.shape[1],
            TorchConst("dtype", update.dtype), None if padding == -1 else padding,
        )  # fmt: skip
        name = self.program.unique_operator("prefetch")
        return Operator(
            name, PREFETCH, args, lookup.outputs, role=lookup.role, module=lookup.module,
            source=lookup.source, train_only=lookup.train_only,
        )  # fmt: skip

    def prefetch_together(self, lookups: Sequence[Operator], update: Update) -> list[Operator]:
        """Return what asks for the rows of several lookups of one table with one call, and cuts them into views."""
        if len(lookups) < 2:
            return [self.prefetch(lookup, update) for lookup in lookups]
        program, first = self.program, lookups[0]
        ids = [program.variables[lookup.input_names()[1]] for lookup in lookups]
        outputs = tuple(lookup.output_names()[0] for lookup in lookups)
        lead = ids[0].shape[:-1] or ids[0].shape
        flat = len(ids[0].shape) == 1  # then ids become columns, else they are put behind each other
        sizes = (1,) * len(ids) if flat else tuple(int(str(var.shape[-1])) for var in ids)
        ask = self.prefetch(first, update)
        together = program.add_variable(VarDesc(f"{ask.name}@IDS", (*lead, sum(sizes)), ids[0].dtype)).name
        rows = program.add_variable(
            VarDesc(f"{ask.name}@ROWS", (*lead, sum(sizes), update.shape[1]), update.dtype, source=first.source)
        ).name
        for name, var in list(program.variables.items()):
            if var.storage in outputs:
                program.variables[name] = replace(var, storage=rows)
        join = replace(
            ask, name=program.unique_operator("join_ids"), type="aten.stack.default" if flat else "aten.cat.default",
            args=(tuple(Ref(var.name) for var in ids), len(lead)), outputs=(together,),
        )  # fmt: skip
        cut = replace(
            ask, name=program.unique_operator("split_rows"), type="aten.unbind.int" if flat else _SPLIT,
            args=(Ref(rows), *(() if flat else (sizes,)), len(lead)), outputs=(outputs,),
        )  # fmt: skip
        return [join, replace(ask, args=(Ref(together), *ask.args[1:]), outputs=(rows,)), cut]

    def geo(self, update: Update) -> Operator:
        """Return what exchanges a parameter with the servers now and then."""
        placed = self.placement.of_parameter(update.parameter)
        args: tuple[Arg, ...] = (
            Ref(update.parameter), Ref(update.sent[0]) if update.sparse else None, str(self.descriptor),
            update.parameter, _names(placed), self._at(placed), tuple(p.block.num_rows for p in placed),
        )  # fmt: skip
        token = self._token(f"{update.parameter}@EXCHANGED")
        writes = (update.parameter,)
        return self._operator("geo", GEO, args, (token,), writes=writes, role=_RPC, update=update)

    # -- parts -----------------------------------------------------------------------------------------

    def _cut(
        self, update: Update, source: str, prefix: str, suffix: str, placed: Sequence[Placed]
    ) -> tuple[list[Operator], tuple[str, ...]]:
        """Return (operators that cut `source` into views, the views); the variable itself if it is not cut."""
        if placed[0].block.whole:
            return [], (source,)
        base = self.program.variables[source]
        names = tuple(f"{prefix}{p.block.index}{suffix}" for p in placed)
        for name, one in zip(names, placed, strict=True):
            shape = (one.block.num_rows, *update.shape[1:])
            self.program.add_variable(VarDesc(name, shape, base.dtype, storage=base.storage, source=base.source))
        sizes = tuple(p.block.num_rows for p in placed)
        args: tuple[Arg, ...] = (Ref(source), sizes)
        return [self._operator("split_byref", _SPLIT, args, (names,), role=_DIST, update=update)], names

    def _suffix(self) -> str:
        several = self.descriptor.mode == "sync" and self.descriptor.num_trainers > 1
        return f".trainer_{self.descriptor.trainer}" if several else ""

    def _at(self, placed: Iterable[Placed]) -> tuple[int, ...]:
        return tuple(self._index[p.endpoint] for p in placed)

    def _token(self, name: str) -> str:
        return self.program.add_variable(VarDesc(name, (0,), "int64")).name

    def _operator(
        self,
        base: str,
        type_: str,
        args: tuple[Arg, ...],
        outputs: tuple[str | tuple[str, ...], ...],
        *,
        role: Role,
        writes: tuple[str, ...] = (),
        update: Update | None = None,
    ) -> Operator:
        pairs = ((update.parameter, update.gradient),) if update is not None else ()
        source = update.operators[0].source if update is not None else ""
        name = self.program.unique_operator(base)
        return Operator(
            name, type_, args, outputs, writes=writes, role=role, role_vars=pairs, module=MODULE, source=source
        )


def _names(placed: Iterable[Placed]) -> tuple[str, ...]:
    return tuple(p.name for p in placed)


def make_trainer_program(
    program: Program, partition: Partition, placement: Placement, descriptor: Descriptor
) -> set[str]:
    """Rewrite `program` in place, for all modes but GEO; return the persistable variables that left this process.

    What a clone for test that was made before may use has not. Raises ProgramError, with `program` unchanged, for a
    table that is used other than by lookups.
    """
    tables = {u.parameter: u for u in partition.updates if u.sparse}
    _check_tables(partition, tables)
    forward = _used_forward(program)
    calls = RemoteCalls(program, placement, descriptor)
    updates = [partition.update(name) for name in placement.parameters()]
    operators = _with_sends(partition, updates, tables, calls)
    operators += _pulls([u for u in updates if not u.sparse], updates, calls)
    gone = _remove(program, partition.program.global_block().operators, operators)
    for name in tables:
        program.variables[name] = replace(program.variables[name], distributed=True)
    program.operators[:] = operators
    program.revision += 1
    return gone - forward | set(tables)


def _used_forward(program: Program) -> set[str]:
    """What operators that were recorded as the forward pass use: a clone for test may still run those of rates."""
    operators = (op for op in program.operators if op.role & Role.FORWARD)
    return {program.variables[n].storage for op in operators for n in (*op.input_names(), *op.output_arg_names)}


def is_server_side(op: Operator) -> bool:
    """Whether an operator of a minimised program runs on servers."""
    return bool(op.role & _UPDATE) and not is_clip(op)


def is_transpiled(program: Program) -> bool:
    """Whether a program talks to servers already."""
    return any(op.type in REMOTE_TYPES for op in program.operators)


def _check_tables(partition: Partition, tables: Mapping[str, Update]) -> None:
    for op in (*partition.compute, *partition.local):
        of = {parameter for parameter, _ in op.role_vars}
        for name in op.input_names():
            looks_up = op.type == LOOKUP and name == op.input_names()[0]
            if name in tables and not looks_up:
                raise ProgramError(
                    f"operator {op.name!r} ({op.source}) uses table {name!r}, whose rows are on parameter servers: a "
                    "trainer can look them up (fluid.layers.embedding) and nothing else. Use is_sparse=False for it",
                    operator=op.name,
                    variable=name,
                )
        clipped = of & tables.keys()
        if is_clip(op) and clipped:
            raise ProgramError(
                f"operator {op.name!r} ({op.source}) clips the sparse gradient of table {min(clipped)!r}, for which a "
                "trainer needs as much memory as the table takes; its rows are on parameter servers. Clip the other "
                "parameters only (fluid.clip.set_gradient_clip(clip, param_list=…)), or use is_sparse=False for it",
                operator=op.name,
                variable=min(clipped),
            )


def _with_sends(
    partition: Partition, updates: Iterable[Update], tables: Mapping[str, Update], calls: RemoteCalls
) -> list[Operator]:
    """The operators that stay, with lookups of `tables` asked of servers, and each send right after what it sends."""
    waiting = {u.parameter: (u, set(u.sent)) for u in updates}
    operators: list[Operator] = []
    recorded = partition.program.global_block().operators
    own = {op.name: op for op in calls.program.operators}  # with the roles that a clone for test goes by
    together = joined_lookups(recorded, tables, partition.program.variables)
    earlier = {view.name for joined in together.values() for view in joined.views}
    both = on_both_sides(partition.program, partition.shared, (*partition.compute, *partition.local))
    for op in recorded:
        if (is_server_side(op) and op.name not in both) or op.name in earlier:
            continue
        joined = together.get(op.name)
        if joined is None:
            operators.append(own[op.name])
        else:
            operators += [*joined.views, *calls.prefetch_together(joined.lookups, tables[op.input_names()[0]])]
        made = set(op.output_names())
        for parameter, (update, missing) in list(waiting.items()):
            missing -= made
            if not missing:
                operators += calls.send(update)
                del waiting[parameter]
    return operators


def _pulls(dense: Iterable[Update], updates: Iterable[Update], calls: RemoteCalls) -> list[Operator]:
    sent = {u.parameter: f"{u.gradient}@SENT" for u in updates}
    operators: list[Operator] = []
    barrier: tuple[str, ...] = ()
    if calls.descriptor.mode == "sync":
        operators.append(calls.send_barrier(sent.values()))
        barrier = operators[-1].output_names()
    received: list[str] = []
    for update in dense:
        operators += calls.recv(update, barrier or (sent[update.parameter],))
        received += operators[-1].output_names()
    if barrier:
        operators.append(calls.fetch_barrier(received or barrier))
    return operators


def _remove(program: Program, recorded: Iterable[Operator], kept: Iterable[Operator]) -> set[str]:
    """Remove the variables that only operators of servers mention; return the persistable ones."""
    variables = program.variables
    mentioned = {n for op in kept for n in (*op.input_names(), *op.output_names())}
    mentioned |= {variables[n].storage for n in mentioned if n in variables}
    removed = {n for op in recorded if is_server_side(op) for n in (*op.input_names(), *op.output_names())}
    gone = {n for n in removed - mentioned if n in variables and not variables[n].parameter and not variables[n].feed}
    gradients = {v for u in variables.values() if u.kind == "selected_rows" for v in (u.rows, u.values)}
    persistable = {n for n in gone if variables[n].persistable}
    for name in gone - gradients:
        del variables[name]
    return persistable


def make_geo_program(program: Program, partition: Partition, placement: Placement, descriptor: Descriptor) -> None:
    """Rewrite `program` in place. Raises ProgramError, with `program` unchanged, for a distributed table."""
    for update in partition.updates:
        if update.distributed:
            raise ProgramError(
                f"table {update.parameter!r} is distributed, so no trainer has all of it; in GEO mode each trainer "
                "trains a copy of its own. Use is_distributed=False, or another mode",
                variable=update.parameter,
            )
    calls = RemoteCalls(program, placement, descriptor)
    last = {u.operators[-1].name: u for u in partition.updates}
    operators: list[Operator] = []
    for op in partition.program.global_block().operators:
        operators.append(op)
        if op.name in last:
            operators.append(calls.geo(last[op.name]))
    program.operators[:] = operators
    program.revision += 1


def check_startup(startup: Program, updates: Iterable[Update]) -> None:
    """Raise ProgramError if a parameter is not initialised by `startup`."""
    made = {n for op in startup.operators for n in op.output_names()}
    for update in updates:
        if update.parameter not in made:
            raise ProgramError(
                f"parameter {update.parameter!r} is not initialised by the startup program that transpile was given. "
                "Pass the one that belongs to the program: transpile(…, startup_program=…)",
                variable=update.parameter,
            )


def make_trainer_startup(
    startup: Program, gone: Set[str], partition: Partition, placement: Placement, descriptor: Descriptor
) -> None:
    """Rewrite `startup` in place: leave out the variables `gone`, and pull every parameter that is still there."""
    startup.operators[:] = [
        op for op in startup.operators if not gone & {*op.output_names(), *op.input_names(), *op.writes}
    ]
    for name in gone & startup.variables.keys():
        del startup.variables[name]
    calls = RemoteCalls(startup, placement, descriptor)
    received: list[str] = []
    for name in placement.parameters():
        if name not in gone:
            for op in calls.recv(partition.update(name), ()):
                startup.append(op)
            received += startup.operators[-1].output_names()
    startup.append(calls.fetch_barrier(received))
