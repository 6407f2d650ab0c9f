"""A storage over torch tensors, as a server's program would be: momentum, a schedule of the rate, tables of rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PeerError
from penstock.protocol.tables import TableSums
from penstock.ps.storage import Gradient
from penstock.ps.table import TableFull

PARTS = 4


class TorchStorage:
    """`dense`: name -> shape; `tables`: name -> (width, capacity). Everything begins at a function of its name.

    Its rate falls from round to round (sync), or from push to push of a block (immediate): a push too many, too few or
    out of order changes all that follows. `before`: runs before an update, for tests.
    """

    def __init__(
        self, dense: dict[str, tuple[int, ...]], tables: dict[str, tuple[int, int]] | None = None, *,
        sync: bool = True, geo: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.sync, self.geo = sync, geo
        self.rounds = 0
        sizes = {name: torch.Size(shape).numel() for name, shape in dense.items()}
        self.values = {n: torch.linspace(-1, 1, sizes[n], dtype=dtype).reshape(s) for n, s in dense.items()}
        self.speed = {name: torch.zeros_like(v) for name, v in self.values.items()}
        self.steps = dict.fromkeys([*dense, *(tables or {})], 0)
        self.widths = {name: width for name, (width, _) in (tables or {}).items()}
        self.capacity = {name: capacity for name, (_, capacity) in (tables or {}).items()}
        self.rows_of: dict[str, dict[int, Tensor]] = {name: {} for name in self.widths}
        self.before: Callable[[str], None] = lambda block: None
        self.inside: set[str] = set()
        self.overlaps: list[str] = []
        self.expired: list[str] = []
        self.guard = threading.Lock()

    def blocks(self) -> Sequence[str]:
        return [*self.values, *self.rows_of]

    def expire(self, block: str) -> int:
        self.expired.append(block)
        return 0

    def tables(self) -> Sequence[TableSums]:
        return []

    def begin_round(self) -> None:
        self.rounds += 1

    def check(self, block: str, gradient: Gradient) -> None:
        if block in self.rows_of and gradient.rows is None:
            raise PeerError(f"{block!r} takes rows")

    def check_room(self, block: str, gradient: Gradient) -> None:
        if block in self.rows_of:
            room = self.capacity[block] - len(self.rows_of[block])
            if gradient.rows is not None and len(set(gradient.rows.tolist()) - self.rows_of[block].keys()) > room:
                raise TableFull(f"table {block!r} is full")

    def update(self, block: str, gradient: Gradient) -> None:
        with self.guard:
            if block in self.inside:
                self.overlaps.append(block)
            self.inside.add(block)
        try:
            self.before(block)
            self._update(block, gradient)
        finally:
            with self.guard:
                self.inside.discard(block)

    def update_all(self, gradients: Mapping[str, Gradient]) -> None:
        for block, gradient in gradients.items():
            self.update(block, gradient)

    def _update(self, block: str, gradient: Gradient) -> None:
        if block in self.rows_of:
            self._update_table(block, gradient)
            return
        value, speed = self.values[block], self.speed[block]
        if self.geo:
            if gradient.rows is None:
                value += gradient.values
            else:
                value.index_add_(0, gradient.rows, gradient.values)
            return
        self.steps[block] += 1
        dense = gradient.values
        if gradient.rows is not None:
            dense = torch.zeros_like(value).index_add_(0, gradient.rows, gradient.values)
        speed.mul_(0.5).add_(dense)
        value.sub_(speed * self._rate(block))

    def _rate(self, block: str) -> float:
        return 0.1 / (1 + (self.rounds if self.sync else self.steps[block]))

    def _update_table(self, block: str, gradient: Gradient) -> None:
        ids: Tensor = gradient.rows  # type: ignore[assignment]  # the server has checked that there are some
        for id in ids.tolist():
            self._row(block, id)
        self.steps[block] += 1
        for id, values in zip(ids.tolist(), gradient.values, strict=True):
            self.rows_of[block][id] -= values * self._rate(block)

    def _row(self, table: str, id: int) -> Tensor:
        rows = self.rows_of[table]
        if id not in rows:
            if len(rows) >= self.capacity[table]:
                raise TableFull(f"table {table!r} is full")
            rows[id] = torch.full((self.widths[table],), float(id % 7))
        return rows[id]

    def value(self, block: str) -> Tensor:
        if block not in self.values:
            raise PeerError(f"{block!r} has no value")
        return self.values[block]

    def pulled(self, block: str, trainer: int) -> bool:
        return False

    def rows(self, block: str, ids: Tensor, *, create: bool) -> Tensor:
        if block in self.values:
            return self.values[block][ids]
        if not create:
            known = self.rows_of[block]
            found = [known.get(i, torch.full((self.widths[block],), float(i % 7))) for i in ids.tolist()]
        else:
            found = [self._row(block, i) for i in ids.tolist()]
        return torch.stack(found) if found else torch.empty(0, self.widths[block])

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        steps = {f"steps of {b}": torch.tensor(n) for b, n in self.steps.items()}
        yield "numbers", {"rounds": torch.tensor(self.rounds), **steps}
        for name, value in self.values.items():
            yield f"{name}@0", {"value": value.clone(), "speed": self.speed[name].clone()}
        for name, width in self.widths.items():
            for part in range(PARTS):
                ids = sorted(i for i in self.rows_of[name] if i % PARTS == part)
                rows = torch.stack([self.rows_of[name][i] for i in ids]) if ids else torch.empty(0, width)
                yield f"{name}@0.{part}", {"ids": torch.tensor(ids, dtype=torch.int64), "rows": rows}

    def restore(self, name: str, tensors: dict[str, Any]) -> None:
        if name == "numbers":
            self.rounds = int(tensors["rounds"])
            self.steps = {b: int(tensors.get(f"steps of {b}", torch.tensor(n))) for b, n in self.steps.items()}
            return
        block = name.partition("@")[0]
        if block in self.rows_of:
            self.rows_of[block] |= dict(zip(tensors["ids"].tolist(), tensors["rows"].clone(), strict=True))
        elif block in self.values:
            self.values[block].copy_(tensors["value"])
            self.speed[block].copy_(tensors["speed"])

    def everything(self) -> dict[str, Tensor]:
        """Return all that there is, to compare."""
        tables = {f"{t} {i}": row.clone() for t, rows in self.rows_of.items() for i, row in sorted(rows.items())}
        return {**{n: v.clone() for n, v in self.values.items()}, **tables}
