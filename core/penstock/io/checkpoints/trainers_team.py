"""The trainers of a job with parameter servers. Servers write what they keep, each its part; trainer 0 the rest.

In sync mode a checkpoint is due after so many rounds, by the servers' count, which a trainer that was started again
shares with the others. Trainer 0 stands between the same two rounds then, and no server begins the next one before it
pushes to it: the servers' parts are of one step. Other trainers wait for nothing: each leaves its text for that round
in the folder, for trainer 0's writer. There is no barrier, since a trainer that joins in the middle could not know
that the others wait for it. One that was lost or has left hands nothing in: after a bounded wait the checkpoint is
without its reader's position, and later ones do not wait for it.

In the other modes trainers have no common step, so the latest text of each is taken.

A preemption is agreed on in the same folder. In sync mode a trainer that has the notice says so once; when all have, or
have ended, trainer 0 names the next round as the last one before it pushes to it, so no other trainer has finished it.
In the other modes each trainer ends after the step that it is at, when servers have all that it has trained; trainer 0
saves once all others have. Another trainer reports a checkpoint when it finds its text in it.

If trainer 0 has ended, the first trainer that has not names the last round and writes, in sync mode. In the other modes
steps of two trainers do not compare, and its checkpoint could count as older than the last one: none is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import SpecError
from penstock.io.checkpoints.reading import places
from penstock.io.checkpoints.record import Collect, Kind, rank_file
from penstock.io.checkpoints.server_parts import check_origins
from penstock.io.checkpoints.team import Schedule, Team
from penstock.io.saves.manifest import ServersPart
from penstock.logger import warn_once
from penstock.program.program import Program
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import descriptor_of, remotes
from penstock.ps.settings import Copy, TrainerSettings

_log = logging.getLogger(__name__)
FOLDER = "servers"
WAIT_S = 60.0
"""So long a trainer may be behind trainer 0 when it hands in its text."""
_POLL_S = 0.01
_HANDED_IN = re.compile(r"handed-in\.(\d+)\.(\d+)\.json")
_READY, _ENDS = "preempted.{}.json", "ends-after.json"
_ANY, _LAST = 0, 1 << 60  # instead of a round: in other modes than sync; of a trainer that has ended
_pause = threading.Event()  # never set


class TrainersTeam(Team):
    """One for each manager. Raises Unavailable, PeerError, OSError."""

    kind: Kind = "pserver"

    def __init__(self, program: Program, folder: Path) -> None:
        self._descriptor, self._folder = descriptor_of(program), folder
        self.rank, self.num_ranks = self._descriptor.trainer, self._descriptor.num_trainers
        self._is_sync = self._descriptor.mode == "sync"
        self._gone: set[int] = set()
        self._servers_folder = ""  # that servers are writing into
        self._epoch = TrainerSettings.from_environ().epoch
        self._is_ready = False  # this trainer has said that it has the notice
        self._last_round: int | None = None  # of a preempted training, on trainer 0
        self._writes = self.rank == 0
        self._knows_words = self.rank > 0  # what trainers have left: whether it is of this run
        self._word(_LAST).unlink(missing_ok=True)  # of the incarnation before, if it had ended

    @property
    def writes(self) -> bool:
        return self._writes

    def _word(self, number: int) -> Path:
        return self._folder / f"handed-in.{self.rank}.{number}.json"

    @property
    def _client(self) -> TrainerClient:
        return remotes.client(str(self._descriptor))

    @property
    def _round(self) -> int:
        return self._client.links[0].round if self._is_sync else _ANY

    def is_due(self, schedule: Schedule, steps: int) -> bool:
        if schedule.every_s is not None and self.num_ranks > 1:
            raise SpecError(
                f"every_s={schedule.every_s:g} with {self.num_ranks} trainers and parameter servers: trainers agree on "
                "when to save by counting; use every_steps",
                got=schedule.every_s,
            )
        return schedule.by_steps(self._round if self._is_sync else steps) or schedule.by_time()

    def ends_after(self, steps: int, *, is_asked: bool) -> bool:
        if not is_asked:
            return False
        epochs = self._epochs()
        living = sorted(set(range(self.num_ranks)) - self._ended(epochs))
        if living[0] and not self._is_sync:
            warn_once(_log, "trainer 0, which writes checkpoints, has ended: none is written for the preemption", self)
            return False
        if living[0] != self.rank:
            return not self._is_sync or self._is_last_round(epochs.get(living[0]))
        if self._last_round is None and self._takes_over(steps) and self._are_ready(living[1:], epochs):
            self._last_round = self._round + self._is_sync
            self._write(self._folder / _ENDS, {"epoch": self._epoch, "round": self._last_round})
        return self._last_round == self._round

    def _takes_over(self, steps: int) -> bool:
        """Write checkpoints, if that is trainer 0's part and it has ended; not where one of later steps is there."""
        if self._writes:
            return True
        found = places(self._folder)
        if found and found[0].step >= steps:
            text = f"trainer 0 has ended after {found[0].name}: none is written for the preemption after step {steps}"
            warn_once(_log, text, self, about="takes over")
            return False
        self._writes, self._knows_words = True, False
        return True

    def _is_last_round(self, epoch: int | None) -> bool:
        """Say that this trainer has the notice; return whether the latest round is the last one.

        `epoch`: of the trainer that names it.
        """
        if not self._is_ready:
            self._write(self._folder / _READY.format(self.rank), {"epoch": self._epoch})
            self._is_ready = True
        named = _content(self._folder / _ENDS)
        return named.get("round") == self._round and named.get("epoch") == epoch

    def _ended(self, epochs: Mapping[int, int]) -> set[int]:
        """Return the trainers of this run that have closed their managers."""
        words = ((rank, path) for rank, of, path in self._left() if of == _LAST)
        return {rank for rank, path in words if _content(path).get("epoch") == epochs.get(rank)}

    def _are_ready(self, others: list[int], epochs: Mapping[int, int]) -> bool:
        """Whether each of the others, who have not ended, looks for the last round."""
        if not self._is_sync:
            return not others
        ready = (_content(self._folder / _READY.format(rank)).get("epoch") == epochs.get(rank, -1) for rank in others)
        return all(ready)

    def _epochs(self) -> Mapping[int, int]:
        """Return the newest incarnation of each trainer that the servers know."""
        return self._client.links[0].origin("").epochs

    def flush(self) -> None:
        if not self._is_sync:
            remotes.flush(str(self._descriptor))

    def hand_in(self, mine: str) -> Collect:
        number = self._round
        if not self._knows_words:
            self._forget_others(self._epochs())
        if not self._writes:
            self._leave(number, mine)
        return lambda: self._collect(number, mine)

    def _leave(self, number: int, text: str) -> None:
        self._write(self._word(number), {"epoch": self._epoch, "state": text})

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".handed-in.{self.rank}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)

    def _collect(self, number: int, mine: str) -> list[str]:
        self._client.finish_save(self._servers_folder)
        until = time.monotonic() + (WAIT_S if self._is_sync else 0)
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        gone = set() if number == self._last_round else self._gone  # all who have not ended have agreed on the last one
        while True:
            found = self._handed_in(number)
            missing = [rank for rank in others if rank not in found]
            if not set(missing) - gone or time.monotonic() > until:
                break
            _pause.wait(_POLL_S)
        for rank in sorted(set(missing) - gone) if self._is_sync else ():
            lacks = "the position of its reader; was it lost, or does it not call step() after each step?"
            _log.warning("trainer %d has not handed in its part of a checkpoint, which is without %s", rank, lacks)
        self._gone = set(missing)
        texts = [_read(found[rank])["state"] if rank in found else "" for rank in range(self.num_ranks)]
        texts[self.rank] = mine
        if self._is_sync:
            self._forget(number)
        return texts

    def _handed_in(self, number: int) -> dict[int, Path]:
        """Return what trainers have left for a round, else what they left when they ended."""
        found: dict[int, Path] = {}
        for rank, of, path in sorted(self._left()):
            if of == number or (of == _LAST and rank not in found):
                found[rank] = path
        return found

    def _left(self) -> list[tuple[int, int, Path]]:
        return [
            (int(match[1]), int(match[2]), path)
            for path in (self._folder.iterdir() if self._folder.is_dir() else ())
            if (match := _HANDED_IN.fullmatch(path.name))
        ]

    def _forget_others(self, epochs: Mapping[int, int]) -> None:
        """Remove what trainers of runs before this one have left.

        A trainer 0 that is started again in its place needs what others have left since, of whom some have ended. Of
        this run is what an incarnation has left that the servers know as its trainer's newest.
        """
        for rank, _, path in self._left():
            with suppress(FileNotFoundError):  # its trainer has been faster
                if _read(path)["epoch"] != epochs.get(rank):
                    path.unlink()
        self._knows_words = True

    def _forget(self, number: int) -> None:
        for _, of, path in self._left():
            if of <= number:
                path.unlink(missing_ok=True)

    def save_servers(self, work: Callable[[], Path]) -> ServersPart | None:
        if not self._writes:
            return None
        part = f"{FOLDER}/{secrets.token_hex(8)}"  # of this save alone: a request that comes twice has the same one
        self._servers_folder = str(work() / part)
        self._client.begin_save(self._servers_folder)
        return ServersPart(part, len(self._descriptor.endpoints))

    def restores(self, copy: Copy) -> None:
        remotes.get(str(self._descriptor))  # opened, if no program has done that yet
        origins = self._client.origins(copy.token)
        check_origins(copy, origins, self.rank)
        if not self._knows_words:
            self._forget_others(origins[self._descriptor.endpoints[0]].epochs)

    def saved_step(self, mine: str, step: int) -> int | None:
        if self._writes:
            return step
        for place in places(self._folder):
            with suppress(FileNotFoundError):  # removed since
                if (self._folder / place.name / rank_file(self.rank)).read_text(encoding="utf-8") == mine:
                    return place.step
        return None

    def close(self, last: str) -> None:
        try:
            self.flush()
        finally:
            if self.num_ranks > 1:
                self._leave(_LAST, last)
        if {rank for rank, of, _ in self._left() if of == _LAST} == set(range(self.num_ranks)) or self.num_ranks == 1:
            self._forget(_LAST)
            for name in (_ENDS, *(_READY.format(rank) for rank in range(1, self.num_ranks))):
                (self._folder / name).unlink(missing_ok=True)


def _content(path: Path) -> dict[str, Any]:
    """Return what a trainer has written, nothing where it has not."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return what a trainer has left: `epoch`, of its incarnation, and `state`, its text."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {"epoch": int(content.get("epoch", -1)), "state": str(content.get("state", ""))}
