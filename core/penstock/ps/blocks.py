"""The blocks of a server: what they look like, a lock for each, and whether what a trainer sends fits them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import PeerError
from penstock.ps.rows import are_within
from penstock.ps.storage import Gradient, Storage
from penstock.ps.tensors import from_wire
from penstock.ps.wire import ROWS, VALUES, Message


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

    Rows are copied before they are checked, since who sent them could still change them.
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
