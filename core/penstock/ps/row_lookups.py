"""Lookups of a trainer's rows of tables at its servers, over messages, and those of the next batch before its step.

over a network   each id is asked for once, all servers at the same time; a server on this host that has all rows gets
                 the ids as they are
ahead            rows of the next batch are looked up in the background, and taken by the lookup of the same ids. In
                 sync mode by native code after the round (`native/src/ps/next_rows.h`), else by a thread of Python
                 while the step runs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
import torch

from penstock.errors import PeerError
from penstock.native.channels import Session
from penstock.ps.at_once import at_once
from penstock.ps.counters import Counters
from penstock.ps.prefetch import Prefetcher
from penstock.ps.rows import Part, Table, check_rows, is_whole, parts_of, put_back, unique
from penstock.ps.server_link import ServerLink
from penstock.ps.wire import Message, bytes_of, from_wire

Tensor = torch.Tensor


def is_local(table: Table, links: Sequence[ServerLink]) -> bool:
    """Whether one server has all rows of a table, and is on this host."""
    return is_whole(table) and links[table.at[0]].route.is_local


class RowLookups:
    """Of one trainer. Thread-safe. `pool`: makes the calls of several servers."""

    def __init__(
        self, links: Sequence[ServerLink], session: Session, counters: Counters, pool: Executor, *, sync: bool
    ) -> None:
        self._links, self._session, self._counters, self._pool, self._sync = links, session, counters, pool, sync
        self._prefetcher = Prefetcher(session.set_ahead)
        self._tables: dict[str, Table] = {}
        self._shapes: dict[str, tuple[int, torch.dtype]] = {}

    def look_up(self, table: Table, ids: Tensor, out: Tensor) -> None:
        """Pull the rows of `ids` into `out`, or take what `prefetch_ahead` has looked up for these ids."""
        self._tables[table.name], self._shapes[table.name] = table, (out.shape[1], out.dtype)
        if self._sync and len(ids) and self._session.take_next(table.name, ids, out):
            return
        found = None if self._sync else self._prefetcher.take(table.name, ids)
        if found is not None:
            with self._counters.waiting("", table.name):
                rows = found.result()
            out.copy_(rows)
        elif len(ids):
            self._look_up(table, ids, out, now=False)

    def begin_ahead(self) -> None:
        """`prefetch_ahead` is for the next batch from now on. Sync: what it was asked for before is dropped."""
        self._session.begin_next()

    def prefetch_ahead(self, table: str, ids: Tensor) -> bool:
        """Look up in the background what the next step's lookup in `table` will ask for: the same int64[n] ids.

        Async and half-async: that lookup then takes the result, which may lack updates that are pushed meanwhile,
        as any read in these modes. Sync: the rows that the next step reads are made by this step's round, so they are
        looked up as soon as that is over, if fused operators end it over channels. Returns False before the first
        lookup in a table, in sync mode without channels, and if a step has ended since `begin_ahead`. Errors are
        raised by the lookup that takes the result; in sync mode they are dropped.
        """
        of, shape = self._tables.get(table), self._shapes.get(table)
        if of is None or shape is None or not len(ids):
            return False
        width, dtype = shape
        if self._sync:
            own, rows = ids.detach().cpu().reshape(-1).clone(), torch.empty(ids.numel(), width, dtype=dtype)
            return self._session.look_up_next(table, own, of.blocks, of.at, of.heights, rows)

        def look_up(own: Tensor) -> Tensor:
            out = torch.empty(len(own), width, dtype=dtype)
            self._look_up(of, own, out, now=True)
            return out

        self._prefetcher.start(table, ids.detach().cpu().reshape(-1).contiguous(), look_up)
        return True

    def forget_ahead(self) -> None:
        """Drop what `prefetch_ahead` has looked up and no step has taken."""
        self._prefetcher.forget()
        self._session.forget_next()

    def close(self) -> None:
        """Forget what Python looks up ahead, and end its thread."""
        self._prefetcher.close()

    def _look_up(self, table: Table, ids: Tensor, out: Tensor, *, now: bool) -> None:
        if is_local(table, self._links):
            check_rows(table, ids)
            self._read_part(table, Part(0, ids, slice(0, len(ids))), now, partial(_copy_bytes, out))
            return
        different, inverse = unique(ids)
        parts = [p for p in parts_of(table, different) if len(p.rows)]
        if len(parts) == 1:
            self._read_part(table, parts[0], now, lambda rows: put_back(rows, inverse, out))
            return
        whole = torch.empty(len(different), out.shape[1], dtype=out.dtype)
        at_once(self._pool, [partial(self._read_part, table, p, now, partial(_put, whole, p.positions)) for p in parts])
        put_back(whole, inverse, out)

    def _read_part(self, table: Table, part: Part, now: bool, use: Callable[[Tensor], object]) -> None:
        link, block = self._links[table.at[part.index]], table.blocks[part.index]
        with link.lookup(block, part.rows, count_as=block, at_once=now) as answer:
            (rows,) = _tensors(answer, 1, link.endpoint)
            width, dtype = self._shapes[table.name]
            if rows.shape != (len(part.rows), width) or rows.dtype != dtype:
                raise PeerError(
                    f"{link.endpoint} answers {len(part.rows)} ids of {block!r} with {rows.dtype}{list(rows.shape)}; "
                    f"expected {dtype}[{len(part.rows)}, {width}]",
                    variable=table.name,
                )
            use(rows)


def _put(whole: Tensor, positions: slice | Tensor, rows: Tensor) -> None:
    whole[positions] = rows


def _copy_bytes(mine: Tensor, theirs: Tensor) -> None:
    np.copyto(bytes_of(mine), bytes_of(theirs))


def _tensors(answer: Message, expected: int, endpoint: str) -> list[Tensor]:
    if len(answer.tensors) != expected:
        raise PeerError(f"{endpoint} answers with {len(answer.tensors)} tensors; expected {expected}")
    return [from_wire(t) for t in answer.tensors]
