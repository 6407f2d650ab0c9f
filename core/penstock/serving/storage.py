"""What a parameter server keeps: the blocks of a pserver program over a scope, as `penstock.ps.storage.Storage`.

Update blocks are prepared once and write the scope's tensors in place. Each has a lock of its own, so that updates of
different blocks run at the same time and a snapshot takes each block between two updates.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from penstock.errors import Bug, PeerError, ProgramError
from penstock.machine.cores import usable_cores
from penstock.program import legality
from penstock.program.ir import Operator
from penstock.program.kernels import check_writes
from penstock.program.program import Program
from penstock.protocol.tables import TableSums
from penstock.ps.prepared import PreparedUpdate
from penstock.ps.remote import SPARSE_TABLE
from penstock.ps.rows import are_within, server_of
from penstock.ps.settings import Copy
from penstock.ps.storage import Gradient
from penstock.scope import Scope, tensor_of
from penstock.serving.blocks import PreparedBlock, TableBlock
from penstock.serving.plans import BlockUpdate, UpdatePlans
from penstock.serving.staged import StagedUpdates
from penstock.transpile.pserver import Served, ServerDescription, describe, pulled_name
from penstock.transpile.tables import is_scratch, is_state

NUMBERS, COUNTS = "numbers", "counts"
_ROUND = "\0round"  # no block's name
Tensors = dict[str, torch.Tensor]


class ProgramStorage:
    """Storage over (pserver program, scope). The scope has to hold what the server's startup program makes.

    `clock`: seconds, by which rows of tables age.
    Raises ProgramError for a program that serves nothing, or whose variables have no values.
    """

    def __init__(self, program: Program, scope: Scope, *, clock: Callable[[], float] = time.monotonic) -> None:
        description = describe(program)
        if description is None:
            raise ProgramError("the program has no listen_and_serv operator, so there is nothing to serve")
        legality.check(program)
        check_writes(program)
        self.description: ServerDescription = description
        self.restored = Copy()
        """The checkpoint that its values are from."""
        operators: dict[int, list[Operator]] = {}
        for op in program.operators:
            operators.setdefault(op.block, []).append(op)
        self._blocks: dict[str, _Dense | _Table] = {}
        for served in description.served:
            own = operators.get(served.block, [])
            is_table = any(op.type == SPARSE_TABLE for op in own)
            made = _Table(program, scope, served, own, clock) if is_table else _Dense(program, scope, served, own)
            self._blocks[served.name] = made
        updates = [u for b in self._blocks.values() if (u := b.update_of()) is not None]
        round_operators = operators.get(description.round_block, []) if description.round_block else []
        self._numbers = _persistables(program, scope, round_operators)
        self._round = PreparedBlock(program, round_operators, self._numbers)
        before = BlockUpdate(_ROUND, round_operators, self._numbers, ()) if round_operators else None
        self._plans = UpdatePlans(updates, num_threads=usable_cores(), round=before)
        self._round_lock = threading.Lock()
        others = [name for b in self._blocks.values() if b.update_of() is None for name in b.kept()]
        self._staged = StagedUpdates(program, updates, round_operators, self._numbers, others, self._round_lock)

    def limit_threads(self, most: int) -> None:
        """Update with at most so many threads, if there are as many cores. Before serving."""
        self._plans.limit_threads(most)
        for block in self._blocks.values():
            if isinstance(block, _Table):
                block.limit_threads(most)

    def blocks(self) -> Sequence[str]:
        """Return the names of all blocks, in the program's order."""
        return list(self._blocks)

    def begin_round(self) -> None:
        """Run the round block: learning-rate schedule and step counters."""
        with self._round_lock:
            self._round.run({})
            self._staged.changed()

    def stage(self, block: str, gradient: Gradient, slot: int = 0) -> torch.Tensor | None:
        """Return what a dense block will be after the next round with this gradient; None where it cannot be said.

        Raises PeerError, OperatorError.
        """
        found = self._found(block)
        if not isinstance(found, _Dense) or block not in self._staged or gradient.rows is not None:
            return None
        return self._staged.run(block, found.fed(gradient), slot)

    def take_staged(self, block: str, slot: int = 0) -> None:
        """Apply what was staged of a block in a slot last."""
        with self._found(block).lock:
            self._staged.take(block, slot)

    def check(self, block: str, gradient: Gradient) -> None:
        """Raise PeerError for a gradient that its block's update does not take."""
        self._found(block).check(gradient)

    def check_room(self, block: str, gradient: Gradient) -> None:
        """Raise TableFull if this update, the block's next, would make more rows than its table has room for."""
        found = self._found(block)
        if isinstance(found, _Table):
            found.check_room(gradient)

    def update(self, block: str, gradient: Gradient) -> None:
        """Apply one gradient. Raises PeerError, with nothing changed; TableFull."""
        self._found(block).update(gradient)

    def update_all(self, gradients: Mapping[str, Gradient]) -> None:
        """Apply a gradient to each of several blocks: at the same time, where their operators allow it."""
        fed: dict[str, list[torch.Tensor]] = {}
        for name, gradient in gradients.items():
            if name in self._plans:
                fed[name] = [gradient.values] if gradient.rows is None else [gradient.rows, gradient.values]
            else:
                self.update(name, gradient)
        with contextlib.ExitStack() as held:
            for name, block in self._blocks.items() if fed else ():
                if name in fed:
                    held.enter_context(block.lock)
            if fed:
                self._plans.run(fed)

    @property
    def is_preparable(self) -> bool:
        """Whether native code can run every update: no table, no control flow of rounds, nothing that pulls change."""
        return not self._round.needs_python and all(name in self._plans for name in self._blocks)

    def prepared_update(self, blocks: Sequence[str], *, begins_round: bool) -> PreparedUpdate:
        """Return the update of these blocks for native code. One of them is run at a time, with the blocks' locks.

        `begins_round`: as with `begin_round` before.
        """
        return self._plans.prepared(blocks, begins_round=begins_round)

    def rounds_passed(self) -> None:
        """Note that native code has begun rounds. With the blocks' locks."""
        with self._round_lock:
            self._staged.changed()

    def value(self, block: str) -> torch.Tensor:
        """Return a dense block's tensor. Raises PeerError for a table."""
        found = self._found(block)
        if isinstance(found, _Table):
            raise PeerError(f"{block!r} is a table, which is pulled by rows and has no value as a whole")
        return found.parameter

    def pulled(self, block: str, trainer: int) -> bool:
        """Keep the block's value for the delay compensation of the trainer's next push; False: the program has none."""
        found = self._found(block)
        return isinstance(found, _Dense) and found.remember(trainer)

    def rows(self, block: str, ids: torch.Tensor, *, create: bool) -> torch.Tensor:
        """Return rows [n, d]. Raises PeerError for a row outside the block, TableFull."""
        return self._found(block).rows(ids, create=create)

    def expire(self, block: str) -> int:
        """Drop the rows of a table that were not used for as long as the program sets; return how many."""
        found = self._found(block)
        return found.expire() if isinstance(found, _Table) else 0

    def tables(self) -> list[TableSums]:
        """Return what each table holds and what was asked of it, under the parameters' names."""
        tables = [block for block in self._blocks.values() if isinstance(block, _Table)]
        return [replace(one.table.sums(), name=one.served.parameter) for one in tables]

    def state(self) -> Iterator[tuple[str, Tensors]]:
        """Yield copies of all that a restart needs, item by item; see `Storage.state`."""
        with self._round_lock:
            numbers = {name: tensor.clone() for name, tensor in self._numbers.items()}
        if numbers:
            yield NUMBERS, numbers
        for block in self._blocks.values():
            yield from block.state(self.description.index)
        for block in self._blocks.values():
            if isinstance(block, _Table):
                yield from block.parts(self.description.index)

    def restore(self, name: str, tensors: Tensors) -> None:
        """Take back what of an item belongs here. Raises ProgramError for an item of another program."""
        parameter, _, part = name.rpartition("@")
        if not parameter:
            with self._round_lock:
                for number, tensor in self._numbers.items():
                    if number in tensors:
                        tensor.copy_(tensors[number])
                self._staged.changed()
            return
        for block in self._blocks.values():
            if block.served.parameter == parameter:
                block.restore(part, tensors, self.description)

    def states(self) -> dict[str, set[str]]:
        """Return, for each parameter that is here, what its optimizer keeps beside it, under names before the cut."""
        return {block.served.parameter: block.states() for block in self._blocks.values()}

    def _found(self, block: str) -> _Dense | _Table:
        found = self._blocks.get(block)
        if found is None:
            raise PeerError(f"block {block!r} is not on this server; it has {', '.join(self._blocks) or 'none'}")
        return found


def prepare(program: Program, scope: Scope) -> ProgramStorage:
    """Return a new storage, with which the program will serve: what is restored into it is served.

    The startup program has run before, and does not run again. Raises as ProgramStorage.
    """
    storage = scope.prepared[program] = ProgramStorage(program, scope)
    return storage


def prepared_storage(program: Program, scope: Scope) -> ProgramStorage:
    """Return the storage with which a program will serve, prepared now if it is not yet."""
    return scope.prepared.get(program) or prepare(program, scope)


def storage_to_serve(program: Program, scope: Scope) -> ProgramStorage:
    """Return the prepared storage, once, or a new one."""
    return scope.prepared.pop(program, None) or ProgramStorage(program, scope)


class _Dense:
    """One block of a parameter, with its update."""

    def __init__(self, program: Program, scope: Scope, served: Served, operators: Sequence[Operator]) -> None:
        self.served, self.lock = served, threading.Lock()
        kept = _persistables(program, scope, operators)
        if served.name not in kept:
            raise Bug(f"block {served.name!r} has no operator that updates it")
        self.parameter = kept[served.name]
        self._kept = kept
        self._block = PreparedBlock(program, operators, kept)
        self._fed = _fed_names(program, operators, served.name)
        self._operators = operators
        self._rows_symbol = str(program.variables[self._fed[0]].shape[0]) if len(self._fed) == 2 else ""
        pulled = pulled_name(served.name)
        self._pulled_name = pulled if pulled in program.variables else ""
        self._pulled: dict[int, torch.Tensor] = {}

    def update_of(self) -> BlockUpdate | None:
        """Return the update as a plan can have it; None if it needs sizes of the gradient, or what a trainer pulled."""
        if self._pulled_name or self._block.needs_sizes:
            return None
        return BlockUpdate(self.served.name, self._operators, self._kept, self._fed)

    def kept(self) -> Sequence[str]:
        return list(self._kept)

    def check(self, gradient: Gradient) -> None:
        self._checked(gradient)

    def fed(self, gradient: Gradient) -> Tensors:
        """Return what an update is fed. Raises PeerError."""
        fed, _ = self._checked(gradient)
        return fed

    def update(self, gradient: Gradient) -> None:
        fed, symbols = self._checked(gradient)
        with self.lock:
            if self._pulled_name:
                trainer = -1 if gradient.trainer is None else gradient.trainer
                fed[self._pulled_name] = self._pulled.get(trainer, self.parameter)
            self._block.run(fed, symbols)

    def _checked(self, gradient: Gradient) -> tuple[Tensors, dict[str, int]]:
        values, wanted = gradient.values, self.parameter
        if values.dtype != wanted.dtype:
            raise self._misfit(f"is {values.dtype}", f"{wanted.dtype}")
        if not self._rows_symbol:
            if gradient.rows is not None or values.shape != wanted.shape:
                raise self._misfit(_described(gradient), f"a tensor of shape {list(wanted.shape)}")
            return {self._fed[0]: values}, {}
        rows = gradient.rows
        if rows is None or rows.dim() != 1 or values.shape != (len(rows), *wanted.shape[1:]):
            raise self._misfit(_described(gradient), f"rows int64[n] and values [n, {list(wanted.shape[1:])}]")
        _check_rows(self.served, rows, len(wanted))
        return {self._fed[0]: rows, self._fed[1]: values}, {self._rows_symbol: len(rows)}

    def _misfit(self, got: str, expected: str) -> PeerError:
        return PeerError(f"a gradient of block {self.served.name!r} {got}; expected {expected}")

    def remember(self, trainer: int) -> bool:
        if not self._pulled_name:
            return False
        with self.lock:
            kept = self._pulled.get(trainer)
            if kept is None:
                self._pulled[trainer] = self.parameter.clone()
            else:
                kept.copy_(self.parameter)
        return True

    def rows(self, ids: torch.Tensor, *, create: bool) -> torch.Tensor:
        _check_rows(self.served, ids, len(self.parameter))
        if self.parameter.dim() == 2:  # asks for rows of memory before it copies them; index_select waits for each
            found: torch.Tensor = torch.ops.penstock.lookup_table.default(self.parameter, ids)
            return found
        return self.parameter.index_select(0, ids)

    def state(self, _server: int) -> Iterator[tuple[str, Tensors]]:
        with self.lock:
            copies = {whole: tensor.clone() for whole, tensor in self._named()}
        yield f"{self.served.parameter}@{self.served.first_row}", copies

    def restore(self, part: str, tensors: Tensors, description: ServerDescription) -> None:
        given = tensors.get(self.served.parameter)
        if given is None:
            raise _foreign(self.served, sorted(tensors))
        # A number has one row, which is the first.
        count, own = (len(t) if t.dim() else 1 for t in (given, self.parameter))
        begin = max(int(part), self.served.first_row)
        end = min(int(part) + count, self.served.first_row + own)
        if begin >= end:
            return
        with self.lock:
            for trainer in self._pulled_in(tensors):
                self._pulled.setdefault(trainer, self.parameter.clone())
            for whole, tensor in self._named():
                if whole in tensors:
                    self._take(whole, tensor, tensors[whole], int(part), begin, end)

    def _take(self, whole: str, mine: torch.Tensor, given: torch.Tensor, first: int, begin: int, end: int) -> None:
        """Copy rows begin..end of the parameter; of a number of this block's own, if its first row is among them."""
        if given.dim() != mine.dim() or given.shape[1:] != mine.shape[1:] or given.dtype != mine.dtype:
            raise _foreign(self.served, [f"{whole} {given.dtype}{list(given.shape)}"])
        if mine.dim() == self.parameter.dim() and mine.shape == self.parameter.shape and mine.dim():
            own = self.served.first_row
            mine[begin - own : end - own].copy_(given[begin - first : end - first])
        elif begin == self.served.first_row:
            mine.copy_(given)

    def _pulled_in(self, tensors: Tensors) -> list[int]:
        """Return the trainers whose pulled values an item holds, if the program compensates for delay."""
        prefix = pulled_name(self.served.parameter)
        names = tensors if self._pulled_name else ()
        return [int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]

    def states(self) -> set[str]:
        return {whole for whole, _ in self._named() if is_state(whole, self.served.parameter)}

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is stored by its name before the cut; scratch is zero between updates, shared numbers are not ours."""
        for name, tensor in self._kept.items():
            whole = self.served.whole_name(name)
            if not is_scratch(whole, self.served.parameter):
                yield whole, tensor
        for trainer, tensor in self._pulled.items():
            yield f"{pulled_name(self.served.parameter)}{trainer}", tensor


class _Table:
    """One server's part of a distributed table."""

    def __init__(
        self, program: Program, scope: Scope, served: Served, operators: Sequence[Operator], clock: Callable[[], float]
    ) -> None:
        self.served, self.lock = served, threading.Lock()
        self._numbers = _persistables(program, scope, operators)
        self._block = TableBlock(program, operators, self._numbers, clock=clock)
        self.table = self._block.table

    def kept(self) -> Sequence[str]:
        return list(self._numbers)

    def update_of(self) -> BlockUpdate | None:
        return None

    def check(self, gradient: Gradient) -> None:
        self._checked(gradient)

    def update(self, gradient: Gradient) -> None:
        rows, values = self._checked(gradient)
        with self.lock:
            self._block.update(rows, values)

    def limit_threads(self, most: int) -> None:
        self._block.limit_threads(most)

    def check_room(self, gradient: Gradient) -> None:
        rows, _ = self._checked(gradient)
        self._block.check_room(rows)

    def _checked(self, gradient: Gradient) -> tuple[torch.Tensor, torch.Tensor]:
        rows, values, width = gradient.rows, gradient.values, self.table.settings.width
        fits = rows is not None and rows.dtype == torch.int64 and values.dtype == torch.float32
        if rows is None or not fits or values.shape != (len(rows), width):
            raise PeerError(
                f"a gradient of table {self.served.name!r} {_described(gradient)}; expected rows int64[n] and values "
                f"float32[n, {width}]"
            )
        return rows, values

    def rows(self, ids: torch.Tensor, *, create: bool) -> torch.Tensor:
        return torch.from_numpy(self.table.pull(ids.numpy(), create=create, now=self._block.now()))

    def expire(self) -> int:
        with self.lock:
            return self._block.expire()

    def state(self, server: int) -> Iterator[tuple[str, Tensors]]:
        name = self.served.parameter
        with self.lock:
            numbers = {self.served.whole_name(n): t.clone() for n, t in self._numbers.items()}
        # Rows have their states side by side; tensors without elements name them.
        numbers |= {state: torch.empty(0) for state in self._block.columns[1:]}
        if numbers:
            yield f"{name}@{server}.{NUMBERS}", numbers
        counts = self.table.counts()
        if len(counts):
            yield f"{name}@{server}.{COUNTS}", {COUNTS: torch.from_numpy(counts)}

    def states(self) -> set[str]:
        return set(self._block.columns[1:])

    def parts(self, server: int) -> Iterator[tuple[str, Tensors]]:
        """Yield the rows, shard by shard."""
        name = self.served.parameter
        for part, (ids, rows) in enumerate(self.table.snapshot()):
            if len(ids):
                yield f"{name}@{server}.{part}", {"ids": torch.from_numpy(ids), "rows": torch.from_numpy(rows)}

    def restore(self, part: str, tensors: Tensors, description: ServerDescription) -> None:
        server, _, what = part.partition(".")
        if what == NUMBERS:
            # Of several servers' counters this one's; the last one's where there were fewer servers.
            for name, tensor in self._numbers.items():
                if self.served.whole_name(name) in tensors and int(server) <= description.index:
                    tensor.copy_(tensors[self.served.whole_name(name)])
            return
        if what == COUNTS:
            # Of several servers' this one's, as above; those of ids that are elsewhere now do no harm.
            if int(server) <= description.index:
                self.table.restore_counts(tensors[COUNTS].numpy())
            return
        if not {"ids", "rows"} <= tensors.keys():
            raise _foreign(self.served, sorted(tensors))
        ids, rows = tensors["ids"].numpy(), tensors["rows"].numpy()
        width = self.table.settings.width * len(self._block.columns)
        if rows.shape[1:] != (width,):
            raise _foreign(self.served, [f"rows of {list(rows.shape[1:])} values"])
        here = server_of(ids, len(description.endpoints)) == description.index
        with self.lock:
            self.table.restore(ids[here], rows[here], now=self._block.now())


def _persistables(program: Program, scope: Scope, operators: Sequence[Operator]) -> Tensors:
    """Return the tensors that operators keep, by name. Raises ProgramError for one without a value."""
    variables = program.variables
    used = dict.fromkeys(variables[n].storage for op in operators for n in op.input_names())
    return {name: tensor_of(scope, program, name) for name in used if variables[name].persistable}


def _fed_names(program: Program, operators: Sequence[Operator], block: str) -> list[str]:
    """Return what a push feeds: the gradient, or its rows and its values."""
    used = {n for op in operators for n in op.input_names()}
    for var in program.variables.values():
        if var.kind == "selected_rows" and var.values in used:
            return [var.rows, var.values]
    names = [n for n in program.variables if n in used and program.variables[n].feed and n != pulled_name(block)]
    if len(names) != 1:
        raise ProgramError(f"block {block!r} is updated with {names}; expected one gradient", variable=block)
    return names


def _check_rows(served: Served, rows: torch.Tensor, number: int) -> None:
    if rows.dtype != torch.int64:
        raise PeerError(f"rows of block {served.name!r} are {rows.dtype}; expected int64")
    if not are_within(rows, number):
        low, high = (int(x) for x in rows.aminmax())
        raise PeerError(
            f"rows {low} to {high} of block {served.name!r} are asked for, which has rows 0 to {number - 1}: rows "
            f"{served.first_row} to {served.first_row + number - 1} of {served.parameter!r}"
        )


def _described(gradient: Gradient) -> str:
    of_rows = "" if gradient.rows is None else f" and rows {gradient.rows.dtype}{list(gradient.rows.shape)}"
    return f"has values {gradient.values.dtype}{list(gradient.values.shape)}{of_rows}"


def _foreign(served: Served, got: list[str]) -> ProgramError:
    return ProgramError(
        f"a snapshot of {served.parameter!r} holds {got}, which is not what this program keeps of it: another "
        "program wrote it",
        variable=served.parameter,
    )
