"""Storage of a parameter server: its interface, a lock for each block, and the checks of a message against it.

Storage holds blocks of parameters with their updates, and sparse tables. The server decides when to call it, Storage
what happens then. Implemented over a pserver program by `penstock.serving.storage`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import PeerError
from penstock.ps.rows import are_within
from penstock.ps.wire import ROWS, VALUES, Message, from_wire


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is applied to a block: `values` of the block's shape, or rows of it: `rows` int64[n], `values` [n, d].

    Torch tensors on the CPU. Rows count from the block's first row, or are ids of a table; they may repeat.
    `trainer`: its sender, in immediate modes; None for a merged one.
    """

    values: Any
    rows: Any | None = None
    trainer: int | None = None


class Storage(Protocol):
    """The blocks of one server. Calls for different blocks may run at the same time; for one block they do not.

    Invariant: what `state` yields, restored into a fresh storage of the same program, gives the same results as this.
    """

    def blocks(self) -> Sequence[str]:
        """Names of all blocks, tables included, in the program's order."""

    def begin_round(self) -> None:
        """Advance what a step shares over blocks: learning-rate schedule, step counters. Sync mode: once a round."""

    def check(self, block: str, gradient: Gradient) -> None:
        """Raise PeerError for a gradient that `update` would not take: asked before a round it may not disturb."""

    def check_room(self, block: str, gradient: Gradient) -> None:
        """Raise TableFull if `update` would make more rows than a table may have. The block's lock is held to both.

        Asked before an update is logged: one that fails halfway would be neither in the log nor out of the table.
        """

    def update(self, block: str, gradient: Gradient) -> None:
        """Apply one (merged) gradient, or in GEO one delta. In immediate modes it advances its own counters too.

        Raises PeerError for a block that is not here or a gradient that does not fit; nothing has changed then. The
        gradient's tensors are not changed: they may be a trainer's memory, and are logged afterwards.
        """

    def value(self, block: str) -> Any:
        """Return a dense block's tensor: the memory itself, not a copy."""

    def pulled(self, block: str, trainer: int) -> None:
        """Note that a trainer takes the dense block's value as it is now: delay compensation (DC-ASGD) is against it.

        Call it where the value is read, with no update of the block in between. Without DC-ASGD it does nothing.
        """

    def rows(self, block: str, ids: Any, *, create: bool) -> Any:
        """Return rows [n, d] of a block or table: a fresh tensor. `create`: a table gives missing ids rows.

        Raises PeerError (an id outside a block), TableFull.
        """

    def expire(self, block: str) -> int:
        """Drop rows of a table that were unused for as long as its program allows; return how many. 0 for others."""

    def state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, tensors) of everything a restart needs: values and optimizer state of each block, counters.

        An item is a copy, consistent in itself, that does not change. Names do not depend on how parameters are cut:
        `parameter@first_row` with a tensor for each variable of the update (under its name before the cut), `numbers`
        with what all blocks share, `table@server.part` with tensors `ids` and `rows`, `table@server.numbers` and
        `table@server.counts` with what its rows share (the former with the names of what stands in the rows, too). They
        are unique over servers.
        Parts of tables come last: all before is taken while nothing is updated, a part while its table is not.
        """

    def restore(self, name: str, tensors: dict[str, Any]) -> None:
        """Take back one item of `state`, written by this or another number of servers; what is not here is left out."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """`shape` of a dense block; of a table (0, width)."""

    dtype: torch.dtype
    shape: torch.Size
    is_table: bool


def describe(storage: Storage) -> dict[str, BlockSpec]:
    """Return what each block looks like, in the storage's order."""
    out = {}
    for name in storage.blocks():
        try:
            value = storage.value(name)
        except PeerError:  # only dense blocks have a value
            rows = storage.rows(name, torch.empty(0, dtype=torch.int64), create=False)
            out[name] = BlockSpec(rows.dtype, rows.shape, is_table=True)
        else:
            out[name] = BlockSpec(value.dtype, value.shape, is_table=False)
    return out


class BlockLocks:
    """A lock for each block: held while it is updated, read or copied. Several are taken in one order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._locks = {name: threading.Lock() for name in sorted(names)}

    @contextlib.contextmanager
    def of(self, names: Sequence[str]) -> Iterator[None]:
        """Hold the locks of these blocks."""
        with contextlib.ExitStack() as stack:
            for name in sorted(set(names)):
                stack.enter_context(self._locks[name])
            yield

    @contextlib.contextmanager
    def all(self) -> Iterator[None]:
        """Hold every lock."""
        with self.of(list(self._locks)):
            yield


def gradient_of(message: Message, specs: dict[str, BlockSpec]) -> Gradient:
    """Return a push's gradient; values look at the message's bytes. Raises PeerError if it does not fit its block.

    Rows are copied before they are checked, since their sender could still change them.
    """
    block = str(message.fields["block"])
    names = [t.name for t in message.tensors]
    if names not in (["values"], ["rows", "values"]):
        raise PeerError(f"a push of {block!r} has the tensors {names}; expected [values] or [rows, values]")
    *rows, values = (from_wire(t) for t in message.tensors)
    return _gradient(block, [*(t.clone() for t in rows), values], specs, int(message.fields["trainer"]))


def gradients_of(message: Message, specs: dict[str, BlockSpec]) -> dict[str, Gradient]:
    """Return the gradients of a step by block, each as `gradient_of` does. Raises PeerError."""
    tensors = list(message.tensors)
    out: dict[str, Gradient] = {}
    while tensors:
        last = tensors.pop()
        block = last.name.removeprefix(VALUES)
        if block == last.name or block in out:
            raise PeerError(f"a step has the tensor {last.name!r} where the values of another block belong")
        found = [from_wire(last)]
        if tensors and tensors[-1].name == ROWS + block:
            found.insert(0, from_wire(tensors.pop()).clone())
        out[block] = _gradient(block, found, specs, int(message.fields["trainer"]))
    return out


def _gradient(block: str, tensors: list[torch.Tensor], specs: dict[str, BlockSpec], trainer: int) -> Gradient:
    spec, values = _spec(block, specs), tensors[-1]
    if values.dtype != spec.dtype:
        raise PeerError(f"a push of {block!r} is {values.dtype}; the block is {spec.dtype}")
    if len(tensors) == 1:
        if spec.is_table:
            raise PeerError(f"{block!r} is a table: a push of it has rows and values")
        if values.shape != spec.shape:
            raise PeerError(f"a push of {block!r} has the shape {list(values.shape)}; the block {list(spec.shape)}")
        return Gradient(values, None, trainer)
    rows = tensors[0]
    _check_rows(block, spec, rows)
    if values.shape != (len(rows), *spec.shape[1:]):
        expected = [len(rows), *spec.shape[1:]]
        raise PeerError(f"the values of a push of rows of {block!r} are {list(values.shape)}; expected {expected}")
    return Gradient(values, rows, trainer)


def pulled_blocks(message: Message, specs: dict[str, BlockSpec]) -> list[str]:
    """Return the dense blocks that a pull asks for. Raises PeerError."""
    text = str(message.fields["blocks"])
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a pull's blocks are no JSON: {text[:100]!r}") from error
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(names) > len(specs):
        raise PeerError(f"a pull's blocks are no list of names of at most {len(specs)} blocks: {text[:100]!r}")
    for name in names:
        if _spec(name, specs).is_table:
            raise PeerError(f"{name!r} is a table: its rows are looked up, it is not pulled")
    return names


def looked_up(message: Message, specs: dict[str, BlockSpec]) -> tuple[str, torch.Tensor]:
    """Return (table, ids) of a lookup; ids are copied, as rows of a push are. Raises PeerError."""
    table = str(message.fields["table"])
    if [t.name for t in message.tensors] != ["ids"]:
        raise PeerError(f"a lookup in {table!r} has the tensors {[t.name for t in message.tensors]}; expected [ids]")
    ids = from_wire(message.tensors[0]).clone()
    _check_rows(table, _spec(table, specs), ids)
    return table, ids


def _spec(block: str, specs: dict[str, BlockSpec]) -> BlockSpec:
    spec = specs.get(block)
    if spec is None:
        raise PeerError(f"block {block!r} is not on this server; it has {', '.join(specs) or 'none'}")
    return spec


def _check_rows(block: str, spec: BlockSpec, rows: torch.Tensor) -> None:
    if rows.dtype != torch.int64 or rows.dim() != 1 or not spec.shape:
        raise PeerError(f"rows of {block!r} are int64 [n] of a block with rows, not {rows.dtype} {list(rows.shape)}")
    if not spec.is_table and not are_within(rows, spec.shape[0]):
        low, high = (int(x) for x in torch.aminmax(rows))
        raise PeerError(f"rows {low} to {high} of {block!r}, which has {spec.shape[0]}")
