"""Rendezvous of a job's ranks: a store that trainer 0 serves, a deadline, and an error that names the absent ranks.

Each rank claims its number, publishes where it is and how it exchanges, and waits until all have. After
PENSTOCK_COLLECTIVE_START_S (default 300) it fails with the ranks that have not arrived; a rank of this host that ends
meanwhile is noticed at once. Blocks the calling thread; other threads run.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but torch does not list them

from penstock.distributed.ranks import Ranks
from penstock.errors import PeerError, SpecError, Unavailable
from penstock.machine.cores import core_numbers, core_quota
from penstock.process.proc import start_ticks
from penstock.settings import COLLECTIVE_START_S

_POLL_S = 0.02
_pause = threading.Event()  # never set: a wait that gives way to other threads


@dataclass(frozen=True, slots=True)
class Presence:
    """What a rank publishes. `host`: equal for processes that can share memory. `endpoints`: as it knows them.

    `exchange`: settings that all ranks must share, in words. `cores`: numbers of those that it may run on; `quota`: how
    many of them at a time, by its control group, which all ranks of its host share.
    """

    host: str
    pid: int
    endpoints: str
    exchange: str = ""
    cores: tuple[int, ...] = ()
    quota: float | None = None


def this_host() -> str:
    """Name the kernel and the process namespace: processes that agree can open each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


def has_ended(pid: int) -> bool:
    """Return whether a process of this host is gone, or waits for its parent only (a zombie)."""
    return start_ticks(pid) is None


class Rendezvous:
    """The store and the ranks that have arrived. `present[r]`: what rank r has published.

    `exchange`: how this rank exchanges. Raises Unavailable, PeerError (a rank exchanges in another way),
    SpecError.
    """

    def __init__(self, ranks: Ranks, exchange: str = "") -> None:
        self.ranks = ranks
        self.present: list[Presence] = []
        self._deadline = time.monotonic() + COLLECTIVE_START_S.read()
        self.base = _open_store(ranks, self.left_s())
        self.store = PrefixStore(f"penstock/{ranks.attempt}", self.base)
        if self.store.add(f"claim/{ranks.rank}", 1) > 1:
            raise SpecError(
                f"two processes claim to be {ranks.name(ranks.rank)} of {ranks.num_ranks}; each trainer has a "
                "number of its own (trainer_id, PADDLE_TRAINER_ID)"
            )
        mine = Presence(this_host(), os.getpid(), ",".join(ranks.endpoints), exchange, core_numbers(), core_quota())
        self.store.set(f"here/{ranks.rank}", json.dumps(asdict(mine)))
        self.wait_for("here", "has not arrived")
        self.present = [Presence(**json.loads(self.store.get(f"here/{r}"))) for r in range(ranks.num_ranks)]
        for rank, other in enumerate(self.present):
            if other.endpoints != mine.endpoints:
                raise PeerError(
                    f"{ranks.name(rank)} trains with the trainers {other.endpoints!r}, {ranks.name(ranks.rank)} with "
                    f"{mine.endpoints!r}; all trainers of a job are given the same list"
                )
            if other.exchange != mine.exchange:
                raise PeerError(
                    f"{ranks.name(rank)} would exchange by {other.exchange}, {ranks.name(ranks.rank)} by "
                    f"{mine.exchange}; all trainers of a job are set up alike"
                )

    def cores_each(self) -> int:
        """Return how many cores this rank has, which it shares with ranks that may run on them, too; at least 1."""
        mine = self.present[self.ranks.rank]
        sharing = [p for p in self.present if p.host == mine.host and set(p.cores) & set(mine.cores)]
        here = [p for p in self.present if p.host == mine.host]
        fair = len(mine.cores) // max(1, len(sharing))
        return max(1, fair if mine.quota is None else min(fair, math.ceil(mine.quota) // len(here)))

    def left_s(self) -> float:
        """Seconds until the deadline for ranks to arrive; a little above 0 when it is over."""
        return max(self._deadline - time.monotonic(), 0.01)

    def mark(self, what: str) -> None:
        """Note that this rank has done something."""
        self.store.set(f"{what}/{self.ranks.rank}", "yes")

    def wait_for(self, what: str, words: str) -> None:
        """Wait until every rank has done something. Raises Unavailable naming those that have not (`words`)."""
        missing = set(range(self.ranks.num_ranks))
        began = time.monotonic()
        while True:
            missing = {r for r in missing if not self._has(f"{what}/{r}")}
            if not missing:
                return
            self._check_alive(missing, what)
            if time.monotonic() > self._deadline:
                names = ", ".join(self.ranks.name(r) for r in sorted(missing))
                raise Unavailable(
                    f"{names} {words} within {time.monotonic() - began:.0f} s ({COLLECTIVE_START_S}); "
                    f"{self.ranks.num_ranks} trainers meet at {self.ranks.meeting}. Was it started, can it reach it?",
                    ranks=sorted(missing),
                )
            _pause.wait(_POLL_S)

    def wait_for_key(self, key: str) -> None:
        """Wait for what rank 0 puts under a key. Raises Unavailable."""
        while not self._has(key):
            self._check_alive({0}, key)
            if time.monotonic() > self._deadline:
                raise Unavailable(f"{self.ranks.name(0)} has not set {key!r} in time ({COLLECTIVE_START_S})", ranks=[0])
            _pause.wait(_POLL_S)

    def _check_alive(self, missing: set[int], what: str) -> None:
        """Raise Unavailable if a rank of this host that is waited for has ended."""
        for rank in sorted(missing if self.present else ()):
            other = self.present[rank]
            if other.host == this_host() and has_ended(other.pid) and not self._has(f"{what}/{rank}"):
                raise Unavailable(f"{self.ranks.name(rank)} has ended before all were ready", ranks=[rank])

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except dist.DistError as error:
            raise Unavailable(
                f"{self.ranks.name(0)}, at whose store the trainers meet, is gone: {_first_line(error)}", ranks=[0]
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _open_store(ranks: Ranks, timeout_s: float) -> TCPStore:
    host, _, port = ranks.meeting.rpartition(":")
    serves = ranks.rank == 0 and not ranks.is_served
    try:
        return TCPStore(host, int(port), is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        if serves:
            raise SpecError(
                f"{ranks.name(0)} cannot serve the trainers' store at {ranks.meeting}: {_first_line(error)}",
                got=ranks.meeting,
            ) from error
        raise Unavailable(
            f"{ranks.name(0)} has not arrived within {timeout_s:.0f} s ({COLLECTIVE_START_S}): no process serves the "
            f"trainers' store at {ranks.meeting} ({_first_line(error)})",
            ranks=[0],
        ) from error
