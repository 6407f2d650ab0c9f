"""Prepared steps: what a server's native code may carry out without Python, between two of Python's decisions.

When the round machine is at rest, Python *prepares* what may come next (`native/src/ps/prepared.h`): the round, its
members, and for each set of blocks that was pushed together once a plan that updates them. Channels on one host then
answer steps and lookups that fit natively. At any time there is one owner of the round and of the blocks' memory:

native    from `prepare` until a hold. It closes rounds of which every member's step has come, or applies pushes, with
          the same operators in the same order as Python, and notes what has passed
Python    during a hold (`held`), which begins when nothing native is under way any more. First it catches up: the
          applied index at once, the machine before its next event, as if it had handled what has passed. The
          dispatcher holds while the machine handles an event, and prepares anew from where it is then; who has the
          lock of a block holds as long. Holds may overlap, and may be taken with the dispatcher's or blocks' locks:
          native code waits for neither

A step that waits for those of others is handed to Python by any hold, and after 250 ms in any case, as if it had just
come; so leases, stragglers, meetings and joins are Python's alone. What does not fit goes to Python too: another round
or epoch, a repetition, a push of other blocks, messages in parts, 8 MiB of gradients or more. Nothing is prepared where
Python has something to do at every step: tables, delay compensation, a round block that needs sizes or has
control flow, GEO, staged values, or a machine that is not at rest (a member that starts with a later round or is
expected back, a meeting, a refusal, a request that waits). Without rounds a schedule is part of each update: one with
control flow is prepared, and its kernel calls Python.

The log: native code appends the records that Python would (`native/src/ps/log_file.h`), a round before it is applied, a
push before it is acknowledged. Python appends under a hold, so records are in the order of the updates.

Leases: each request that is carried out renews its sender's, as of when it came, in the machine with the next hold.
A failed update leaves blocks half done, as it does in Python: nothing is prepared any more, and the server ends.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.errors import PenstockError
from penstock.native.channels import BlockWords, LogFile, Prepared, Traffic
from penstock.ps.durability.wal import AppliedIndex
from penstock.ps.rounds.messages import Standing
from penstock.ps.settings import ServerSettings
from penstock.ps.storage import BlockSpec, Gradient, Storage
from penstock.ps.transport.local import ANSWER_S
from penstock.ps.wire import ROWS, VALUES, dtype_name

_MODES = frozenset({"sync", "async", "half_async"})
_MAX_UPDATES = 32  # sets of blocks, as plans have it


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """An update of several blocks, for native code. `kept`: what has to live as long as `run`.

    `error`: (op_index, message, inputs) of a failed run -> the error.
    """

    run: Any
    kept: object
    error: Callable[[int, str, str], PenstockError]


@runtime_checkable
class PreparableStorage(Storage, Protocol):
    """Storage whose updates native code can run."""

    @property
    def is_preparable(self) -> bool:
        """Whether every update is of its blocks and of a round's numbers alone: no table, nothing that pulls change."""

    def prepared_update(self, blocks: Sequence[str], *, begins_round: bool) -> PreparedUpdate:
        """Return the update of these blocks, fed in this order, each with its values, or its rows and values.

        `begins_round`: it does what `begin_round` does before.
        """

    def rounds_passed(self) -> None:
        """Note that native code has begun rounds. All blocks' locks could be held."""


class PreparedSteps:
    """What one server has prepared. Thread-safe. `native`: None where nothing ever is."""

    def __init__(
        self, settings: ServerSettings, storage: Storage, specs: Mapping[str, BlockSpec], traffic: Traffic,
        applied: AppliedIndex,
    ) -> None:  # fmt: skip
        self._applied, self._is_sync = applied, settings.mode == "sync"
        self._names = list(specs)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._words = [
            BlockWords(
                values=json.dumps(VALUES + name), rows=json.dumps(ROWS + name), name=json.dumps(name),
                dtype=json.dumps(dtype_name(spec.dtype)),
            )
            for name, spec in specs.items()
        ]  # fmt: skip
        self._lock = threading.Lock()  # of what has passed
        self._passed: Standing | None = None
        self._staleness: Counter[int] = Counter()
        self._known: set[frozenset[tuple[str, bool]]] = set()
        self._updates: list[PreparedUpdate] = []
        self._storage = storage if isinstance(storage, PreparableStorage) else None
        self.native: Prepared | None = None
        if self._storage is not None and settings.mode in _MODES and self._storage.is_preparable:
            values = [storage.value(name) for name in self._names]
            if all(value.is_contiguous() for value in values):
                self.native = Prepared(traffic, values, sync=self._is_sync, limit_s=ANSWER_S)

    def log_to(self, file: LogFile) -> None:
        """Log what native code applies. Before anything is prepared."""
        if self.native is not None:
            self.native.log_to(file, self._words)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Own the round and the blocks: nothing native is under way, and what it has done is known."""
        native = self.native
        if native is None:
            yield
            return
        native.hold()
        try:
            self._catch_up(native)
            yield
        finally:
            native.release()

    def _catch_up(self, native: Prepared) -> None:
        with self._lock:
            found = native.take()
            if found is None:
                return
            number, members, versions, staleness = found
            self._staleness.update(staleness)
            named = list(zip(self._names, range(len(self._names)), strict=True))
            of_blocks = [] if self._is_sync else [(m, name, at) for m in members for name, at in named]
            passed = Standing(
                number,
                {trainer: epoch for trainer, epoch, *_ in members},
                {trainer: at for trainer, _, at, *_ in members if at >= 0},
                {} if self._is_sync else {name: versions[at] for name, at in named if versions[at]},
                {(m[0], name): m[3][at] for m, name, at in of_blocks if versions[at]},
                {(m[0], name): m[4][at] for m, name, at in of_blocks if m[4][at] >= 0},
            )
            if self._is_sync and self._applied.round != number:
                self._applied.round = number
                assert self._storage is not None
                self._storage.rounds_passed()
            for (trainer, block), step in passed.pushed.items():
                self._applied.applied[trainer, block] = (passed.members[trainer], step)
            self._passed = passed

    def take_passed(self) -> Standing | None:
        """Return where native code has come to since the last call, for the machine; None if it did nothing. Held."""
        with self._lock:
            passed, self._passed = self._passed, None
            return passed

    def prepare(self, standing: Standing | None) -> None:
        """Let native code go on from here, if anywhere, when nothing is held. Held, all that has passed being known."""
        native = self.native
        if native is None:
            return
        if standing is None:
            native.withdraw()
            return
        if self._is_sync:
            native.prepare(standing.round, [(t, epoch, [], []) for t, epoch in standing.members.items()], [])
            return
        members = [
            (
                trainer, epoch,
                [standing.read.get((trainer, name), 0) for name in self._names],
                [standing.pushed.get((trainer, name), -1) for name in self._names],
            )
            for trainer, epoch in standing.members.items()
        ]  # fmt: skip
        native.prepare(0, members, [standing.versions.get(name, 0) for name in self._names])

    def withdraw(self) -> None:
        """Let native code begin nothing before `prepare`. Held."""
        if self.native is not None:
            self.native.withdraw()

    def learn(self, gradients: Mapping[str, Gradient]) -> None:
        """Note which blocks are pushed together: native code can apply such a push from now on."""
        if self.native is None or not gradients:
            return
        kinds = frozenset((name, gradient.rows is not None) for name, gradient in gradients.items())
        if kinds in self._known or len(self._known) >= _MAX_UPDATES:
            return
        assert self._storage is not None
        names = sorted(gradients)
        update = self._storage.prepared_update(names, begins_round=self._is_sync)
        with self._lock:
            if kinds not in self._known:
                self.native.know(
                    [self._numbers[n] for n in names], [gradients[n].rows is not None for n in names], update.run
                )
                self._updates.append(update)
                self._known.add(kinds)

    @property
    def failure(self) -> PenstockError | None:
        """The error of an update that has failed half done."""
        found = None if self.native is None else self.native.failure
        if found is None:
            return None
        number, op_index, message, inputs = found
        return self._updates[number].error(op_index, message, inputs)

    def staleness(self) -> Counter[int]:
        """Return how many pushes that native code has applied were how many updates of others behind."""
        with self.held(), self._lock:
            return self._staleness.copy()
