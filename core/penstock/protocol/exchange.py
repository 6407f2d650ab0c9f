"""Contents of an EXCHANGE frame: what one process exchanged with parameter servers (or, a server, with trainers).

    {"peers": [str], "blocks": [str],
     "rows": [[peer, block, calls, sent_bytes, received_bytes, wait_ns, retries, staleness, merges]],
     "mode": "sync" | "half_async" | "async" | "geo", of a server, "cpu_ns": processor time of the process,
     "tables": of a server that has any, see `tables`,
     "lanes": {number: block}, of a server: the blocks whose numbers its INPUT_EVENTS have as threads}

`peer` and `block` are positions in the lists before. A trainer's peers are endpoints in the order of the job's servers,
and '' for what waits or is merged before it is sent; a server's are `trainer N`. Block '' holds what belongs to none
(barriers, heartbeats, calls for several blocks). The sums count from the start of the
process, so the newest frame of a process is complete, and one that is lost costs nothing. A frame's header holds the
trainer's newest step.

`matrix` joins the frames of a job into one cell for each (trainer, pserver, block). Calls, bytes, waits, retries and
merges before sending are the trainer's figures; `joined`, gradients that went into one update with others, is the
server's; staleness is one quantity that both may count, so the larger sum stands. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.errors import PeerError

MAX_ROWS = 2048
MAX_LANES = 256
MAX_DIGITS = 6  # of a trainer's index
REST = "(others)"
"""Block under which the smallest rows stand together, when there are more than `MAX_ROWS`."""


@dataclass(slots=True)
class Sums:
    """What was exchanged with one peer of one block, since the beginning. The order of the fields is a frame's.

    Bytes are of tensors; `wait_ns`: wall time in which the training waited in calls; that of several at once is split
    among them, so a trainer's waits add up to no more than passed. `staleness`: updates by others that a push did not
    know of, summed over pushes. `merges`: gradients that were merged into others before they were sent (trainer), or
    into one update (server).
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    wait_ns: int = 0
    retries: int = 0
    staleness: int = 0
    merges: int = 0

    def add(self, other: Sums) -> None:
        """Add another's figures to these."""
        self.calls += other.calls
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.wait_ns += other.wait_ns
        self.retries += other.retries
        self.staleness += other.staleness
        self.merges += other.merges

    def values(self) -> tuple[int, ...]:
        """Return the sums in the order of `FIELDS`."""
        return tuple(getattr(self, name) for name in FIELDS)


FIELDS = tuple(field.name for field in fields(Sums))


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One row of a frame."""

    peer: str
    block: str
    sums: Sums


@dataclass(frozen=True, slots=True)
class ProcessRows:
    """The newest frame of one process. `step`: the trainer's, 0 if it has none."""

    role: str
    index: int
    step: int
    rows: tuple[Exchanged, ...]
    peers: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Cell(Sums):
    """What trainer and pserver exchanged of one block, since the attempt began. Block '': what belongs to none.

    `joined`: gradients that the pserver joined with others into one update.
    """

    trainer: int
    pserver: int
    block: str
    joined: int = 0


def cell_of(given: Mapping[str, Any]) -> Cell:
    """Return a cell of the server's answer, without fields that are not ours. Raises PeerError if one is missing."""
    try:
        return Cell(**{field.name: given[field.name] for field in fields(Cell)})
    except KeyError as error:
        raise PeerError(f"a cell of the exchange has no {error}; it has {', '.join(given)}") from error


def body_of(rows: Mapping[tuple[str, str], Sums], endpoints: Sequence[str] = ()) -> dict[str, Any]:
    """Return the body of a frame. `endpoints`: the order of the peers; one that is not in it comes after.

    Of more than `MAX_ROWS` rows the smallest by bytes are summed, for each peer, in the block `REST`.
    """
    rows = _bounded(rows)
    peers = list(dict.fromkeys([*endpoints, *sorted({peer for peer, _ in rows})]))
    blocks = sorted({block for _, block in rows})
    peer_at = {peer: at for at, peer in enumerate(peers)}
    block_at = {block: at for at, block in enumerate(blocks)}
    ordered = sorted(rows.items(), key=lambda item: (peer_at[item[0][0]], item[0][1]))
    return {
        "peers": peers,
        "blocks": blocks,
        "rows": [[peer_at[peer], block_at[block], *sums.values()] for (peer, block), sums in ordered],
    }


def _bounded(rows: Mapping[tuple[str, str], Sums]) -> Mapping[tuple[str, str], Sums]:
    if len(rows) <= MAX_ROWS:
        return rows
    num_peers = len({peer for peer, _ in rows})
    by_size = sorted(rows, key=lambda key: (key[1] != "", -rows[key].sent_bytes - rows[key].received_bytes, key))
    kept = {key: replace(rows[key]) for key in by_size[: max(MAX_ROWS - num_peers, 0)]}
    for key in by_size[len(kept) :]:
        kept.setdefault((key[0], REST), Sums()).add(rows[key])
    return kept


def process_body(mode: str, cpu_ns: int) -> dict[str, Any]:
    """Return what a frame's body says of its process. `mode`: of a server's rounds, '' for none."""
    return ({"mode": mode} if mode else {}) | {"cpu_ns": cpu_ns}


def lanes_body(lanes: Mapping[int, str]) -> dict[str, Any]:
    """Return what a frame's body says of the lanes of a server's work: the block of each, by THREAD."""
    return {"lanes": {str(lane): name for lane, name in lanes.items()}} if lanes else {}


def lanes_of(body: Any) -> dict[int, str]:
    """Return the block of each lane; nothing of what is none. An older server's frames have none."""
    lanes = body.get("lanes") if isinstance(body, dict) else None
    given = list(lanes.items())[:MAX_LANES] if isinstance(lanes, dict) else []
    return {int(lane): name for lane, name in given if isinstance(name, str) and lane.isascii() and lane.isdecimal()}


def process_of(body: Any) -> tuple[str, int]:
    """Return mode and processor time since the start in ns, '' and 0 where the frame has none. Raises PeerError."""
    mode, cpu_ns = body.get("mode", ""), body.get("cpu_ns", 0)
    if not isinstance(mode, str) or type(cpu_ns) is not int or cpu_ns < 0:
        raise PeerError(
            f"an EXCHANGE frame has mode {str(mode)[:40]!r} and cpu_ns {str(cpu_ns)[:40]!r}; expected text and a count"
        )
    return mode, cpu_ns


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
    return Exchanged(peers[row[0]], blocks[row[1]], Sums(*row[2:]))


def matrix(processes: Iterable[ProcessRows], endpoints: Sequence[str] = ()) -> list[Cell]:
    """Join the newest frames of the processes of an attempt. `endpoints`: those of pserver 0, 1, …, if known.

    Several processes of one role and index (one was restarted) are summed. A peer that is no known server is left out.
    """
    processes = list(processes)
    at = _servers(processes, endpoints)
    cells: dict[tuple[int, int, str], dict[str, Sums]] = {}
    for one in processes:
        for row in one.rows:
            pair = _pair(one, row.peer, at)
            if pair is not None:
                cells.setdefault((*pair, row.block), {}).setdefault(one.role, Sums()).add(row.sums)
    return [_cell(key, sides) for key, sides in sorted(cells.items())]


def _cell(key: tuple[int, int, str], sides: Mapping[str, Sums]) -> Cell:
    trainer, server = sides.get("trainer", Sums()), sides.get("pserver", Sums())
    trainer_index, pserver_index, block = key
    cell = Cell(trainer=trainer_index, pserver=pserver_index, block=block, joined=server.merges)
    cell.add(trainer)
    cell.staleness = max(trainer.staleness, server.staleness)
    return cell


def _servers(processes: Sequence[ProcessRows], endpoints: Sequence[str]) -> dict[str, int]:
    known = list(endpoints)
    for one in processes:
        if one.role == "trainer":
            known += [peer for peer in one.peers if peer and peer not in known]
    return {endpoint: index for index, endpoint in enumerate(known)}


def _pair(one: ProcessRows, peer: str, at: Mapping[str, int]) -> tuple[int, int] | None:
    """Return (trainer, pserver) that a row is about."""
    if one.role == "trainer":
        return None if peer not in at else (one.index, at[peer])
    word, _, number = peer.partition(" ")
    is_one = word == "trainer" and number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
    return (int(number), one.index) if is_one else None
