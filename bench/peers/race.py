"""Let contenders take turns, and check that the race was fair: none runs in another's turn, and all learn the same."""

from __future__ import annotations

import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from bench.peers import PeerMissing
from bench.peers.contender import OURS, ROOF
from bench.peers.kernels import Column
from bench.peers.remote import PeerFailed, Remote
from bench.workloads.fingerprint import Movement

QUIET_S = 0.05
QUIET_LIMIT_S = 5.0


class Contender(Protocol):
    """What takes turns."""

    @property
    def key(self) -> str: ...
    def run(self, num_steps: int) -> float:
        """Train so many steps and return the seconds."""
        ...

    def cpu_seconds(self) -> float:
        """Return the processor time used so far."""
        ...

    def rest(self) -> None:
        """A turn is over: use no processor until the next one."""
        ...


@dataclass(slots=True)
class Results:
    """Of each contender: seconds of every turn and the loss at its end. `missing`: why a peer is not there.

    `movements`: how far each weight is from its start after the last turn.
    `cpu_seconds`: processor time of all turns of a contender but the first, all its processes and threads.
    `idle_share`: the most processor time that one contender used while others had their turns, over that time.
    """

    num_steps: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    movements: dict[str, dict[str, Movement]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    idle_share: float = 0.0


def race(
    keys: Sequence[str],
    *,
    workload: Path,
    cores: int,
    column: Column,
    num_rounds: int,
    num_steps: int,
    needed: Collection[str] = (),
) -> Results:
    """Start every contender, let them take turns, check them, end them.

    A contender whose environment is missing, or that ends in one of its turns (torch's DDP with many sparse tables does
    now and then), is left out, and `missing` says why, unless it is `needed` or ours.
    Raises PeerMissing, PeerFailed. However it ends, no process is left.
    """
    results = Results(num_steps)
    with tempfile.TemporaryDirectory(prefix="penstock-race-") as folder, ended_by_signals():
        remotes: list[Remote] = []
        try:
            for key in keys:
                try:
                    one = Remote(key, workload=workload, folder=Path(folder), cores=cores, column=column)
                except PeerMissing as error:
                    if key in needed:
                        raise
                    results.missing[key] = str(error)
                    print(f"bench: without {key}: {error}", file=sys.stderr)
                    continue
                remotes.append(one)
                one.wait_ready()  # one after another: each builds with all cores
            alternate(remotes, results, num_rounds=num_rounds, needed={OURS, *needed})
            for one in remotes:
                if one.key in results.missing:
                    continue
                one.check()
                results.losses[one.key], results.movements[one.key] = one.losses, one.movements
        except BaseException:  # Ctrl-C too: no contender has to finish a turn
            for one in remotes:
                one.kill()
            raise
        for one in remotes:
            one.close()
    return results


def alternate(
    contenders: Sequence[Contender],
    results: Results,
    *,
    num_rounds: int,
    settle: Callable[[Contender], None] | None = None,
    needed: Collection[str] | None = None,
) -> None:
    """Let each contender warm up once, then run interleaved; fill in `seconds`, `cpu_seconds` and `idle_share`.

    The order is turned round after each round, so that none always runs on what the same other left in the caches.
    One that fails and is not among `needed` (None: all are) loses its figures and its further turns.
    """
    wait = settle or wait_until_quiet
    for contender in contenders:
        contender.run(results.num_steps)
        contender.rest()
        wait(contender)
        results.seconds[contender.key], results.cpu_seconds[contender.key] = [], 0.0
    start, before = time.monotonic(), {contender.key: contender.cpu_seconds() for contender in contenders}
    busy = dict.fromkeys(before, 0.0)
    left = list(contenders)
    for round_index in range(num_rounds):
        for contender in left if round_index % 2 == 0 else left[::-1]:
            begin, used = time.monotonic(), contender.cpu_seconds()
            try:
                results.seconds[contender.key].append(contender.run(results.num_steps))
            except PeerFailed as error:
                if needed is None or contender.key in needed:
                    raise
                left = [one for one in left if one is not contender]
                _drop(results, contender.key, round_index, error)
                continue
            contender.rest()
            wait(contender)
            results.cpu_seconds[contender.key] += contender.cpu_seconds() - used
            busy[contender.key] += time.monotonic() - begin
    whole = time.monotonic() - start
    for contender in left:
        idle = contender.cpu_seconds() - before[contender.key] - results.cpu_seconds[contender.key]
        results.idle_share = max(results.idle_share, idle / max(whole - busy[contender.key], 1e-9))


def _drop(results: Results, key: str, round_index: int, error: PeerFailed) -> None:
    results.missing[key] = f"failed in round {round_index + 1}: {error}"
    del results.seconds[key], results.cpu_seconds[key]
    print(f"bench: goes on without {key}, which {results.missing[key]}", file=sys.stderr)


def wait_until_quiet(contender: Contender) -> None:
    """Wait until the contender's threads have parked: some spin for a while after their work."""
    deadline = time.monotonic() + QUIET_LIMIT_S
    used = contender.cpu_seconds()
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        now = contender.cpu_seconds()
        if now == used:
            return
        used = now


def check_losses(losses: Mapping[str, Sequence[float]], band: float) -> None:
    """Raise PeerFailed if a loss is no number, or a last loss lies further than `band` from the median of all.

    All contenders started from the same values and saw the same batches; what remains is rounding.
    """
    last = {key: values[-1] for key, values in losses.items() if key != ROOF}
    shown = ", ".join(f"{key} {value:.5f}" for key, value in last.items())
    wrong = [key for key, values in losses.items() if not all(math.isfinite(value) for value in values)]
    if wrong:
        raise PeerFailed(f"a loss of {', '.join(wrong)} is not finite; last losses: {shown}")
    middle = statistics.median(last.values())
    off = [key for key, value in last.items() if abs(value - middle) > band]
    if off:
        raise PeerFailed(
            f"{', '.join(off)} learned something else: last losses {shown}; expected all within {band} of {middle:.5f}"
        )


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, so that children are ended."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    kept = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
