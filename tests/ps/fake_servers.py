"""Parameter servers in memory, for communicators: every call is applied at once, and may be held up or fail."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.ps.remote import SendCall
from penstock.ps.rows import Table, parts_of, summed


class FakeServers:
    """`servers`: block -> value. A push subtracts `lr` times the gradient, or with `geo` adds the delta."""

    def __init__(self, values: dict[str, Tensor], *, lr: float = 1.0, geo: bool = False) -> None:
        self.values = {name: value.clone() for name, value in values.items()}
        self.scale = 1.0 if geo else -lr
        self.lock = threading.Lock()
        self.pushes: list[tuple[str, Tensor]] = []
        self.tables: defaultdict[int, float] = defaultdict(float)  # id -> sum of what was pushed
        self.row_pushes: list[tuple[Tensor, Tensor]] = []
        self.calls: list[str] = []
        self.before_push: Callable[[str], None] = lambda variable: None
        self.num_at_once = self.most_at_once = 0
        self.others_changed: dict[str, Tensor] = {}
        self.is_closed = self.serves_operators = False
        self.num_threads = 0

    def serve_operators(self, num_threads: int = 1) -> None:
        self.serves_operators, self.num_threads = True, num_threads

    def leave_threads(self) -> None:
        self.calls.append("leave_threads")

    def leave_threads_for(self, thread: int) -> None:
        self.calls.append("leave_threads_for")

    def fail_threads(self) -> None:
        self.calls.append("fail_threads")

    def end_threads(self) -> None:
        self.num_threads = 0

    num_pushed_together = 0

    def waiting_threads(self) -> dict[str, int]:
        return {}

    def withdraw_operators(self) -> None:
        self.serves_operators = False

    def _pushing(self, variable: str) -> None:
        with self.lock:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            self.before_push(variable)
        finally:
            with self.lock:
                self.num_at_once -= 1

    def send(self, variable: str, blocks: Sequence[str], at: Sequence[int], values: Sequence[Any]) -> None:
        self._pushing(variable)
        with self.lock:
            self.calls.append(f"send {variable}")
            for name, value in zip(blocks, values, strict=True):
                self.pushes.append((name, value.clone()))
                self.values[name] += self.scale * value

    def send_rows(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], rows: Any, values: Any
    ) -> None:
        self._pushing(variable)
        with self.lock:
            self.calls.append(f"send_rows {variable}")
            ids, sums = summed(rows, values)
            self.row_pushes.append((ids, sums))
            for part in parts_of(Table.of(variable, blocks, at, heights), ids) if heights else ():
                self.values[blocks[part.index]][part.rows] += self.scale * sums[part.positions]
            for id, value in zip(ids.tolist(), sums, strict=True):
                self.tables[id] += float(value.sum())

    def send_barrier(self) -> None:
        self.calls.append("send_barrier")

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        with self.lock:
            self.calls.append(f"recv {variable}")
            for name, mine in zip(blocks, out, strict=True):
                mine.copy_(self.values[name])

    def send_step(self, pushes: Sequence[SendCall]) -> None:
        self.calls.append("send_step")
        for push in pushes:
            if push.rows is None:
                self.send(push.variable, push.blocks, push.at, push.values)
            else:
                self.send_rows(push.variable, push.blocks, push.at, push.heights, push.rows, *push.values)

    def recv_step(self, variables: Sequence[str], blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        self.calls.append("recv_step")
        self.recv("", blocks, at, out)

    def fetch_barrier(self) -> None:
        self.calls.append("fetch_barrier")

    def prefetch(
        self, table: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], ids: Any, out: Any
    ) -> None:
        out.copy_(torch.cat([self.values[b] for b in blocks])[ids])

    def geo(self, *arguments: Any) -> None:
        raise NotImplementedError

    def geo_step(self, calls: Sequence[Any]) -> None:
        raise NotImplementedError

    def changed(self, block: str, at: int) -> tuple[Tensor, Tensor]:
        with self.lock:
            rows = self.others_changed.pop(block, torch.empty(0, dtype=torch.int64))
            return rows, self.values[block][rows]

    def change_by_others(self, block: str, rows: Tensor, deltas: Tensor) -> None:
        """What another trainer does."""
        with self.lock:
            self.values[block].index_add_(0, rows, deltas)
            seen = self.others_changed.get(block, torch.empty(0, dtype=torch.int64))
            self.others_changed[block] = torch.unique(torch.cat([seen, rows]))

    def add_by_others(self, block: str, delta: float) -> None:
        """What another trainer does to a dense block, between two calls of this one."""
        with self.lock:
            self.values[block] += delta

    def close(self) -> None:
        self.is_closed = True
