"""Gradient exchange of each parameter, computed from the events of complete steps. Pure.

For one parameter in one step:
  time  = sum of the durations of its exchange operators (`Sync.ops`), of one that serves k parameters a k-th each;
  wait  = start of the first of them minus the end of the *first-arriving* producer of the gradient, at least 0:
          how long the earliest replica's gradient lay there for the latest;
  bytes = bytes of one replica's gradient times replicas; for a sparse one, the bytes of what its gather operators
          read (or the update, where it reads every replica's rows in place): row ids and rows of every replica, at
          the sizes of this plan's batch.

Producers are found once for each graph: the operators with an edge into the exchange from outside of it, and of these,
the most specific group that has any: those that write the gradient, else those of the backward pass, else all (an edge
may also stand for a write that must wait for a reader).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.protocol.frames import Array, Column
from penstock.protocol.graphdoc import GraphDocument, Sync
from penstock.telemetry.events import Events, Index, Mask

_NEVER = np.int64(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class StepExchanges:
    """What was exchanged, by step and parameter: arrays of shape [steps, parameters]."""

    ran: Mask
    time_ns: npt.NDArray[np.int64]
    wait_ns: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Ragged lists of slots, flattened for `reduceat`; an empty list holds the slot that nothing writes."""

    flat: Index
    begin: Index


class GraphExchanges:
    """The exchanges of one graph, prepared for arrays. Immutable."""

    def __init__(self, document: GraphDocument) -> None:
        exchanges = [sorted(set(sync.ops)) for sync in document.syncs]
        producers = _producers(document)
        relevant = sorted({op for group in (*exchanges, *producers) for op in group})
        slot_of = {op: slot for slot, op in enumerate(relevant)}
        self.num_params = len(document.syncs)
        self.bytes = np.array([_bytes(sync, document) for sync in document.syncs], np.int64)
        self._num_slots = len(relevant) + 1
        self._slot = np.full(len(document.ops) + 1, -1, np.intp)
        self._slot[relevant] = np.arange(len(relevant))
        self._exchanges = _group(exchanges, slot_of, unused=len(relevant))
        self._producers = _group(producers, slot_of, unused=len(relevant))
        self._sharers = np.maximum(np.bincount(self._exchanges.flat, minlength=self._num_slots), 1)

    def exchanged(self, events: Events, row: Index, *, num_rows: int) -> StepExchanges:
        """Return the exchanges of whole steps. `row`: for each event, which of `num_rows` steps it belongs to."""
        slot = self._slot.take(events.op, mode="clip")  # an operator that the document lacks falls on the last, -1
        used = np.flatnonzero(slot >= 0)
        where = row[used] * self._num_slots + slot[used]
        started, took = events.start_ns[used], events.duration_ns[used]
        shape = (num_rows, self._num_slots)
        start, end, time = np.full(shape, _NEVER), np.full(shape, _NEVER), np.zeros(shape, np.int64)
        start.reshape(-1)[where] = started
        end.reshape(-1)[where] = started + took
        time.reshape(-1)[where] = took
        first_start = np.minimum.reduceat(start[:, self._exchanges.flat], self._exchanges.begin, axis=1)
        first_end = np.minimum.reduceat(end[:, self._producers.flat], self._producers.begin, axis=1)
        time_ns = np.add.reduceat((time // self._sharers)[:, self._exchanges.flat], self._exchanges.begin, axis=1)
        ran = first_start != _NEVER
        timed = ran & (first_end != _NEVER)
        wait_ns = np.where(timed, np.maximum(first_start - np.where(timed, first_end, 0), 0), 0)
        return StepExchanges(ran, time_ns, wait_ns)

    def columns(self, exchanged: StepExchanges) -> dict[Column, Array]:
        """Return the columns of a SYNC frame: one row for each parameter that was exchanged, ascending."""
        count = exchanged.ran.sum(axis=0)
        param = np.flatnonzero(count)
        return {
            Column.PARAM: param,
            Column.COUNT: count[param],
            Column.BYTES: (count * self.bytes)[param],
            Column.TOTAL_NS: exchanged.time_ns.sum(axis=0)[param],
            Column.WAIT_NS: exchanged.wait_ns.sum(axis=0)[param],
        }


def _bytes(sync: Sync, document: GraphDocument) -> int:
    if not sync.sparse:
        return sync.bytes * document.num_replicas
    ops = [document.ops[op] for op in sync.ops]
    parts = (f"{sync.gradient}@ROWS", f"{sync.gradient}@VALUES")
    read = [v for op in ops for v in op.inputs if op.kind == "gather" or v.name in parts]
    return sum(math.prod(value.shape) * _item_bytes(value.dtype) for value in read)


def _item_bytes(dtype: str) -> int:
    """Return the bytes of one element: a type's name ends with its bits, or is one byte wide ("bool")."""
    bits = re.search(r"\d+$", dtype)
    return 1 if bits is None else int(bits[0]) // 8


def _producers(document: GraphDocument) -> list[list[int]]:
    into: dict[int, list[int]] = {}
    for origin, target in document.edges:
        into.setdefault(target, []).append(origin)
    return [_producers_of(sync, document, into) for sync in document.syncs]


def _producers_of(sync: Sync, document: GraphDocument, into: dict[int, list[int]]) -> list[int]:
    exchange = set(sync.ops)
    before = sorted({origin for op in exchange for origin in into.get(op, ())} - exchange)
    writers = [op for op in before if any(value.name == sync.gradient for value in document.ops[op].outputs)]
    backward = [op for op in before if document.ops[op].role == "backward"]
    return writers or backward or before


def _group(lists: Sequence[Sequence[int]], slot_of: dict[int, int], *, unused: int) -> _Groups:
    slots = [[slot_of[op] for op in ops] or [unused] for ops in lists]
    lengths = np.array([len(group) for group in slots], np.intp)
    flat = np.array([slot for group in slots for slot in group], np.intp)
    return _Groups(flat, np.cumsum(lengths) - lengths)
