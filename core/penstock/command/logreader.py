"""Print the logs of a job's replicas as they grow: whole lines when there are several, bytes as they come for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.command.describe import label
from penstock.command.output import emit_json

if TYPE_CHECKING:
    from penstock.protocol.rest import Job, LogChunk, Replica


class Source(Protocol):
    """Gives pieces of logs; `Client` does."""

    def logs(self, job_id: str, replica_id: str, *, offset: int = 0) -> LogChunk:
        """Return the piece that begins at a byte offset. Raises Unavailable."""
        ...


class Lines:
    """Cuts the texts of several logs into lines: what has no end yet waits for it. No I/O."""

    def __init__(self) -> None:
        self._rest: dict[str, str] = {}

    def add(self, name: str, text: str) -> list[str]:
        """Return the lines that are whole now. A carriage return inside a line stays in it."""
        *whole, rest = (self._rest.get(name, "") + text).split("\n")
        self._rest[name] = rest
        return whole

    def flush(self) -> list[tuple[str, str]]:
        """Return (name, what never got an end) of each log that has some."""
        rest, self._rest = self._rest, {}
        return [(name, text) for name, text in rest.items() if text]


class LogReader:
    """Prints what is new, from where it stopped; of a replica of an attempt before as well, until its log has ended."""

    def __init__(self, client: Source, *, json: bool) -> None:
        self._client = client
        self._json = json
        self._offsets: dict[str, int] = {}
        self._known: dict[str, Replica] = {}
        self._finished: set[str] = set()
        self._lines = Lines()

    def print_new(self, job: Job, chosen: Sequence[Replica]) -> bool:
        """Print the next piece of each log; return whether there was any. Raises Unavailable in between."""
        self._known.update({replica["id"]: replica for replica in chosen})
        current = {replica["id"] for replica in chosen}
        labelled = len(chosen) > 1
        more = False
        for replica_id, replica in self._known.items():
            if replica_id in self._finished:
                continue
            offset = self._offsets.get(replica_id, 0)
            piece = self._client.logs(job["id"], replica_id, offset=offset)
            if piece["next_offset"] == offset:
                if replica_id not in current and piece["eof"]:
                    self._finished.add(replica_id)
                continue
            self._offsets[replica_id] = piece["next_offset"]
            self._print(replica, piece, labelled=labelled)
            more = True
        return more

    def close(self) -> None:
        """Print lines that never got an end."""
        for replica_id, text in self._lines.flush():
            print(f"[{label(self._known[replica_id])}] {text}", flush=True)

    def _print(self, replica: Replica, piece: LogChunk, *, labelled: bool) -> None:
        if self._json:
            emit_json({**piece, "role": replica["role"], "index": replica["index"]})
        elif labelled:
            for line in self._lines.add(replica["id"], piece["text"]):
                print(f"[{label(replica)}] {line}", flush=True)
        else:
            print(piece["text"], end="", flush=True)
