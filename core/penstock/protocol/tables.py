"""Sparse tables of parameter servers: what a server reports of its part of each, and how the parts add up. Pure.

A server's EXCHANGE frame holds `tables`, a list of objects with the fields of `TableSums`. Numbers count from the start
of the process, so the newest frame is complete. An id is text, since JavaScript has no whole numbers of 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.errors import PeerError

MOST_HOT = 16
MOST_TABLES = 256  # of one server; more are left out of its reports


@dataclass(frozen=True, slots=True)
class TableSums:
    """One server's part of a table.

    `capacity`: rows that it may have; `held_bytes`: of rows, states and index. Ids, duplicates included: `pulled`, of
    which `absent` had no row yet, and `pushed`. `hot`: (id, pushes) of those pushed most, most first, estimated from a
    sample that stands for the newest `sampled` pushes; each may be too low by `missed`.
    """

    name: str
    width: int
    capacity: int
    rows: int
    held_bytes: int
    pulled: int
    absent: int
    pushed: int
    sampled: int
    missed: int
    hot: tuple[tuple[int, int], ...] = ()


_NUMBERS = tuple(field.name for field in fields(TableSums) if field.name not in ("name", "hot"))


@dataclass(frozen=True, slots=True)
class HotId:
    """`share`: of the pushes of the whole table, estimated. `pserver`: the server that has its row."""

    id: int
    share: float
    pserver: int


@dataclass(frozen=True, slots=True)
class Table:
    """A table over all servers. `parts`: by the server's index. `skew_*`: the largest part, in means of all parts."""

    name: str
    width: int
    capacity: int
    rows: int
    held_bytes: int
    pulled: int
    absent: int
    pushed: int
    skew_rows: float
    skew_pushes: float
    hot: tuple[HotId, ...]
    parts: Mapping[int, TableSums]


def tables_body(tables: Sequence[TableSums]) -> dict[str, Any]:
    """Return what a frame's body holds beside the exchange; nothing without tables."""
    if not tables:
        return {}
    bodies = [{**asdict(one), "hot": [[str(id_), pushes] for id_, pushes in one.hot]} for one in tables[:MOST_TABLES]]
    return {"tables": bodies}


def tables_of(body: Any) -> list[TableSums]:
    """Return the tables of a frame's body. Raises PeerError that says what is wrong with it."""
    found = body.get("tables", []) if isinstance(body, dict) else None
    if not isinstance(found, list) or len(found) > MOST_TABLES:
        raise PeerError(f"the tables of an EXCHANGE frame are {str(found)[:80]!r}; expected a list")
    return [_table(one) for one in found]


def _table(given: Any) -> TableSums:
    try:
        numbers = {name: _count(given[name]) for name in _NUMBERS}
        hot = tuple((_id(text), _count(pushes)) for text, pushes in given["hot"][:MOST_HOT])
        name = given["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"a table of an EXCHANGE frame is {str(given)[:80]!r}: {error!r}") from error
    if not isinstance(name, str):
        raise PeerError(f"a table of an EXCHANGE frame has the name {name!r}; expected text")
    return TableSums(name=name, hot=hot, **numbers)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _id(text: Any) -> int:
    if not isinstance(text, str) or len(text) > 20:
        raise ValueError(f"{str(text)[:40]!r} is no id")
    return int(text)


def joined(parts: Iterable[tuple[int, TableSums]]) -> list[Table]:
    """Join the parts of servers, as (index of the server, part), into tables, by name.

    Several parts of one server and table (it was restarted): the last stands.
    """
    by_name: dict[str, dict[int, TableSums]] = {}
    for pserver, part in parts:
        by_name.setdefault(part.name, {})[pserver] = part
    return [_joined(name, dict(sorted(found.items()))) for name, found in sorted(by_name.items())]


def _joined(name: str, parts: dict[int, TableSums]) -> Table:
    def total(field: str) -> int:
        return sum(getattr(part, field) for part in parts.values())

    pushed = total("pushed")

    def share(part: TableSums, pushes: int) -> float:
        """A part's sample stands for its newest pushes, and so for the part's share of all."""
        return pushes / max(part.sampled, 1) * part.pushed / max(pushed, 1)

    hot = [HotId(id_, share(part, n), pserver) for pserver, part in parts.items() for id_, n in part.hot]
    return Table(
        name=name,
        width=max(part.width for part in parts.values()),
        capacity=total("capacity"),
        rows=total("rows"),
        held_bytes=total("held_bytes"),
        pulled=total("pulled"),
        absent=total("absent"),
        pushed=pushed,
        skew_rows=_skew([part.rows for part in parts.values()]),
        skew_pushes=_skew([part.pushed for part in parts.values()]),
        hot=tuple(sorted(hot, key=lambda one: (-one.share, one.id))[:MOST_HOT]),
        parts=parts,
    )


def _skew(sizes: Sequence[int]) -> float:
    """Return the largest of sizes over their mean: 1 if all are alike."""
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0
