"""Makes the operators that talk to servers, with their views and tokens, for one program of one trainer.

A *token* is an empty tensor that says that something has happened. Names: `w@GRAD.block0` (in sync mode with several
trainers `w@GRAD.block0.trainer_1`) are rows of a gradient, `w.block0` rows of a parameter; both are views, so nothing
is copied. `w@GRAD@SENT`, `w@RECEIVED`, `@SEND_BARRIER@` and `@FETCH_BARRIER@` are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.program.ir import Arg, Operator, Ref, Role, TorchConst, VarDesc
from penstock.program.program import Program
from penstock.ps import remote_ops as _remote_ops  # noqa: F401 - registers the operators
from penstock.ps.remote import FETCH_BARRIER, GEO, PREFETCH, RECV, SEND, SEND_BARRIER, SEND_ROWS, Descriptor
from penstock.transpile.joined_lookups import padding_of
from penstock.transpile.partition import Update
from penstock.transpile.placement import Placed, Placement

MODULE = "parameter_server"
_SPLIT = "aten.split_with_sizes.default"
_RPC = Role.OPTIMIZE | Role.RPC
_DIST = Role.OPTIMIZE | Role.DIST


class RemoteCalls:
    """Adds variables to `program` and returns operators, which the caller puts in their places."""

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
