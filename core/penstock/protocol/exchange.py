"""What an EXCHANGE frame says: what one process exchanged with parameter servers (or, a server, with trainers).

    {"peers": [str], "blocks": [str],
     "rows": [[peer, block, calls, sent_bytes, received_bytes, wait_ns, retries, staleness, merges]]}

`peer` and `block` are positions in the lists before. A trainer's peers are endpoints in the order of the job's servers,
and '' for what waits or is merged before it is sent; a server's are `trainer N`. Block '' holds what belongs to none
(barriers, beats, calls for several blocks). The sums count from the start of the
process, so the newest frame of a process says all, and one that is lost costs nothing. A frame's header holds the
trainer's newest step.

`matrix` joins the frames of a job into one cell for each (trainer, pserver, block). Calls, bytes, waits, retries and
merges before sending are the trainer's figures; `joined`, gradients that went into one update with others, is the
server's; staleness is one quantity that both may count, so the larger sum stands. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import PeerError

FIELDS = ("calls", "sent_bytes", "received_bytes", "wait_ns", "retries", "staleness", "merges")
MAX_ROWS = 2048
MAX_DIGITS = 6  # of a trainer's index
REST = "(others)"
"""Block under which the smallest rows stand together, when there are more than `MAX_ROWS`."""


class Sums(Protocol):
    """One row of counters, e.g. `penstock.ps.counters.Row`."""

    calls: int
    sent_bytes: int
    received_bytes: int
    wait_ns: int
    retries: int
    staleness: int
    merges: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One row of a frame. `values`: in the order of `FIELDS`."""

    peer: str
    block: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """The newest frame of one process. `step`: the trainer's, 0 if it has none."""

    role: str
    index: int
    step: int
    rows: tuple[Exchanged, ...]
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """What trainer and pserver exchanged of one block, since the attempt began."""

    trainer: int
    pserver: int
    block: str
    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    wait_ns: int = 0
    retries: int = 0
    staleness: int = 0
    merges: int = 0
    joined: int = 0


def body_of(rows: Mapping[tuple[str, str], Sums], endpoints: Sequence[str] = ()) -> dict[str, Any]:
    """Return the body of a frame. `endpoints`: the order of the peers; one that is not in it comes after.

    Of more than `MAX_ROWS` rows the smallest by bytes are summed, for each peer, in the block `REST`.
    """
    values = {key: tuple(int(getattr(row, name)) for name in FIELDS) for key, row in rows.items()}
    values = _bounded(values)
    peers = list(dict.fromkeys([*endpoints, *sorted({peer for peer, _ in values})]))
    blocks = sorted({block for _, block in values})
    peer_at = {peer: at for at, peer in enumerate(peers)}
    block_at = {block: at for at, block in enumerate(blocks)}
    ordered = sorted(values.items(), key=lambda item: (peer_at[item[0][0]], item[0][1]))
    return {
        "peers": peers,
        "blocks": blocks,
        "rows": [[peer_at[peer], block_at[block], *sums] for (peer, block), sums in ordered],
    }


def _bounded(values: dict[tuple[str, str], tuple[int, ...]]) -> dict[tuple[str, str], tuple[int, ...]]:
    if len(values) <= MAX_ROWS:
        return values
    num_peers = len({peer for peer, _ in values})
    by_size = sorted(values, key=lambda key: (key[1] != "", -values[key][1] - values[key][2], key))
    kept = {key: values[key] for key in by_size[: max(MAX_ROWS - num_peers, 0)]}
    for key in by_size[len(kept) :]:
        place = (key[0], REST)
        before = kept.get(place, (0,) * len(FIELDS))
        kept[place] = tuple(a + b for a, b in zip(before, values[key], strict=True))
    return kept


def rows_of(body: Any) -> tuple[tuple[str, ...], tuple[Exchanged, ...]]:
    """Return the peers and rows of a frame's body. Raises PeerError that says what is wrong with it."""
    if not isinstance(body, dict):
        raise PeerError(f"an EXCHANGE frame holds {str(body)[:80]!r}; expected an object")
    peers, blocks, rows = _texts(body.get("peers")), _texts(body.get("blocks")), body.get("rows")
    if peers is None or blocks is None or not isinstance(rows, list):
        raise PeerError("an EXCHANGE frame needs the lists peers and blocks, of text, and rows")
    return tuple(peers), tuple(_row(row, peers, blocks) for row in rows)


def _texts(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else None


def _row(row: Any, peers: list[str], blocks: list[str]) -> Exchanged:
    if not isinstance(row, list) or len(row) != 2 + len(FIELDS) or any(type(n) is not int or n < 0 for n in row):
        raise PeerError(f"a row of an EXCHANGE frame is {str(row)[:80]!r}; expected {2 + len(FIELDS)} whole numbers")
    if row[0] >= len(peers) or row[1] >= len(blocks):
        places = f"peer {row[0]} of {len(peers)}, block {row[1]} of {len(blocks)}"
        raise PeerError(f"a row of an EXCHANGE frame names {places}, which are not there")
    return Exchanged(peers[row[0]], blocks[row[1]], tuple(row[2:]))


def matrix(told: Iterable[Told], endpoints: Sequence[str] = ()) -> list[Cell]:
    """Join the newest frames of the processes of an attempt. `endpoints`: those of pserver 0, 1, …, if known.

    Several processes of one role and index (one was restarted) are summed. A peer that is nobody's is left out.
    """
    told = list(told)
    at = _servers(told, endpoints)
    cells: dict[tuple[int, int, str], dict[str, dict[str, int]]] = {}
    for one in told:
        for row in one.rows:
            pair = _pair(one, row.peer, at)
            if pair is None:
                continue
            sums = cells.setdefault((*pair, row.block), {}).setdefault(one.role, dict.fromkeys(FIELDS, 0))
            for name, value in zip(FIELDS, row.values, strict=True):
                sums[name] += value
    return [_cell(key, sides) for key, sides in sorted(cells.items())]


def _cell(key: tuple[int, int, str], sides: Mapping[str, Mapping[str, int]]) -> Cell:
    nothing = dict.fromkeys(FIELDS, 0)
    trainer, server = sides.get("trainer", nothing), sides.get("pserver", nothing)
    staleness = max(trainer["staleness"], server["staleness"])
    trainer_index, pserver_index, block = key
    sums = {**trainer, "staleness": staleness, "joined": server["merges"]}
    return Cell(trainer_index, pserver_index, block, **sums)


def _servers(told: Sequence[Told], endpoints: Sequence[str]) -> dict[str, int]:
    known = list(endpoints)
    for one in told:
        if one.role == "trainer":
            known += [peer for peer in one.peers if peer and peer not in known]
    return {endpoint: index for index, endpoint in enumerate(known)}


def _pair(one: Told, peer: str, at: Mapping[str, int]) -> tuple[int, int] | None:
    """Return (trainer, pserver) that a row is about."""
    if one.role == "trainer":
        return None if peer not in at else (one.index, at[peer])
    word, _, number = peer.partition(" ")
    is_one = word == "trainer" and number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
    return (int(number), one.index) if is_one else None
