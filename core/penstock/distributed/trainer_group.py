"""The trainers of a collective job, of which this process is one: their exchanges, and how they end.

Trainers exchange gradients at each step. One whose data has ended *joins*: until all have ended it takes part without
rows, so that no rank waits for it for ever and its parameters stay those of the others. Joining happens at the end of
the process by itself, and is logged. A rank that dies, fails or hangs ends the exchange of all others with an error
that names it. Nothing here knows programs: an executor defines how it takes part without rows (`Idle`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but torch does not list it

from penstock.distributed.exchange_ops import BEGINS, ENDED, HAS_ENDED, SIGNATURE
from penstock.distributed.failure_detector import FailureDetector
from penstock.distributed.interfaces import check_interfaces, names
from penstock.distributed.process_groups import NcclGroups, ProcessGroups
from penstock.distributed.ranks import Ranks
from penstock.distributed.rendezvous import Rendezvous, this_host
from penstock.distributed.shared_ring import NoSharedMemory, SharedRings
from penstock.errors import SpecError, Unavailable
from penstock.settings import COLLECTIVE_TRANSPORT

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

Idle = Callable[[Tensor], None]
"""How an executor takes part in a step without rows; given what the ranks have sent of the step."""


class TrainerGroup:
    """All trainers of the job. Made by `CollectiveProcess.form`."""

    def __init__(self, ranks: Ranks) -> None:
        check_interfaces(names())
        self.ranks = ranks
        transport = COLLECTIVE_TRANSPORT.read()
        exchange = (
            f"{COLLECTIVE_TRANSPORT}={transport}, nccl_comm_num={ranks.num_rings}, groups of {ranks.inter or 'all'}"
        )
        self._meeting = meeting = Rendezvous(ranks, exchange)  # it has the store, as long as the group lives
        self._label = label = f"job {ranks.meeting} {ranks.attempt}"
        self._on_gpus: NcclGroups | None = None
        self._lost: str | None = None
        self._knows = threading.Event()
        self._detector = FailureDetector(meeting, self._on_lost, self._on_left)
        self._steppers: dict[int, Idle] = {}
        self._logged_ends: set[int] = set()
        self._over = False
        try:
            self._rings = _rings(meeting, label, transport)
            meeting.mark("ready")
            meeting.wait_for("ready", "has not joined the others")
        except BaseException:
            self._detector.close()
            raise
        self._detector.start()
        atexit.register(self._at_exit, os.getpid())

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.ranks.rank

    @property
    def kind(self) -> str:
        """'ring': ranks of one host exchange through shared memory; 'group': through torch.distributed."""
        return self._rings.kind

    @property
    def rings(self) -> tuple[str, ...]:
        """Names of the exchanges that may be under way at a time, as operators know them."""
        return tuple(self._rings.names)

    def store(self, name: str) -> PrefixStore:
        """Return the store at which the trainers have met, for keys below `name`, over a connection of its own."""
        base = self._meeting.base.clone()  # type: ignore[attr-defined]  # torch has not typed it
        return PrefixStore(f"penstock/{self.ranks.attempt}/{name}", base)

    @property
    def cores(self) -> int:
        """Cores that this rank has to itself: ranks of one host share them."""
        return self._meeting.cores_each()

    def device_rings(self) -> tuple[str, ...]:
        """Return the names of the exchanges between GPUs. At the first call the trainers meet by NCCL, all at once."""
        if self._on_gpus is None:
            self._on_gpus = self._guarded(lambda: NcclGroups(self._meeting, f"{self._label} gpu", self._rings))
        return tuple(self._on_gpus.names)

    # -- steps -------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give every rank the tensors of rank 0, before the first step of a program. Raises Unavailable, SpecError."""
        mine = torch.tensor([sum(t.nbytes for t in tensors), BEGINS, len(tensors)])
        self._check_begun(self._guarded(lambda: self._rings.meet(mine)))
        self._guarded(lambda: (self._on_gpus or self._rings).broadcast(tensors))

    def numbers(self, mine: list[int]) -> list[list[int]]:
        """Return what every rank gave: equally many whole numbers of 64 bits, at most 64. All ranks call it, between
        steps. Raises Unavailable, SpecError.
        """
        begins = torch.tensor([len(mine), BEGINS, -1])  # no program has such a number of variables
        self._check_begun(self._guarded(lambda: self._rings.meet(begins)))
        found: list[list[int]] = self._guarded(lambda: self._rings.meet(torch.tensor(mine))).tolist()
        return found

    def take_part(self, signature: int, idle: Idle) -> None:
        """Note how this process takes part, without rows, in steps that have this signature."""
        self._steppers[signature] = idle

    def note(self, step: Tensor, steps: int) -> None:
        """Log once which ranks have ended, from what they have sent of a step."""
        for rank in (int(r) for r in torch.nonzero(step[:, ENDED])):
            if rank not in self._logged_ends:
                self._logged_ends.add(rank)
                text = "%s has no more data after %d steps; the others go on, and gradients are means over their rows"
                _log.info(text, self.ranks.name(rank), steps)

    def step_failed(self, error: BaseException) -> None:
        """Report to the others that this rank has not finished a step that they may be in."""
        self._give_up(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")

    def why(self) -> Unavailable | None:
        """Return the error that names the lost rank, if one is lost. Waits a moment for the detector to find out."""
        self._knows.wait(self._detector.finds_out_s)
        return Unavailable(self._lost) if self._lost else None

    def check(self) -> None:
        """Raise Unavailable if the job cannot go on."""
        if self._lost:
            raise Unavailable(self._lost)

    def join(self) -> None:
        """Take part in the others' steps without rows until the data of all has ended. Raises Unavailable.

        Then all may go on together, with another pass over the data.
        """
        is_logged = False
        mine = torch.zeros(3, dtype=torch.int64)
        mine[ENDED] = HAS_ENDED
        while True:
            step = self._guarded(lambda: self._rings.meet(mine))
            self._check_begun(step)
            at_work = [r for r in range(self.ranks.num_ranks) if not step[r, ENDED]]
            if not at_work:
                self._logged_ends.clear()
                return
            if not is_logged:
                is_logged = True
                others = f"{', '.join(map(self.ranks.name, at_work))} too ha{'s' if len(at_work) == 1 else 've'} ended"
                text = "%s has no more data; it takes part without rows until %s"
                _log.info(text, self.ranks.name(self.ranks.rank), others)
            stepper = self._steppers.get(int(step[at_work[0], SIGNATURE]))
            if stepper is None:
                error = SpecError(f"{self.ranks.name(at_work[0])} runs a program that this rank has never run")
                self.step_failed(error)
                raise error
            try:
                stepper(step)
            except Exception as error:
                self.step_failed(error)
                raise

    def _check_begun(self, step: Tensor) -> None:
        """Raise SpecError if some ranks begin a program, and others have ended without it or begin another."""
        begins = [r for r in range(self.ranks.num_ranks) if step[r, ENDED] == BEGINS]
        others = [r for r in range(self.ranks.num_ranks) if not torch.equal(step[r], step[begins[0]])] if begins else []
        if not others:
            return
        first, other = self.ranks.name(begins[0]), self.ranks.name(others[0])
        if step[others[0], ENDED] == HAS_ENDED:
            text = f"{other} has ended without a step of the program that {first} begins; each needs a batch at least"
        else:
            text = f"{first} begins a program that {other} does not begin: the ranks run different programs"
        text += (
            ". With unequal data, call collective.join() after each pass, or give all equally many batches (see the "
            "documentation of data sets on several trainers)"
        )
        error = SpecError(text)
        self.step_failed(error)
        raise error

    # -- the end -----------------------------------------------------------------------------------

    def _guarded(self, exchange: Callable[[], _Result]) -> _Result:
        """Exchange outside of a step."""
        self.check()
        try:
            return exchange()
        except (RuntimeError, Unavailable) as error:
            lost = self.why()
            if lost is None:
                self.step_failed(error)
                lost = Unavailable(str(error).splitlines()[0])
            raise lost from error

    def _on_left(self, rank: int) -> None:
        if not self._over:
            self._on_lost(rank, f"{self.ranks.name(rank)} has ended its part of the job, while others go on")

    def _on_lost(self, rank: int, why: str) -> None:
        self._lost = why
        self._fail_exchanges(why)
        self._knows.set()

    def _give_up(self, why: str) -> None:
        self._lost = self._lost or f"this trainer has not gone on: {why}"
        self._detector.fail(why)
        self._fail_exchanges(self._lost)
        self._knows.set()

    def _fail_exchanges(self, why: str) -> None:
        self._rings.fail(why)
        if self._on_gpus is not None:
            self._on_gpus.fail(why)

    def _at_exit(self, pid: int) -> None:
        if os.getpid() != pid:
            return  # a fork
        error = getattr(sys, "last_value", None)
        if error is not None and not self._lost:
            self._give_up(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")
        if self._lost:
            self._detector.linger()
            return
        try:
            self.join()
        except Exception as lost:  # noqa: BLE001 - the process's boundary: it is logged, and the status says so
            _log.error("the job has ended badly: %s", lost)
            self._detector.linger()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            logging.shutdown()  # handlers that buffer write their lines
            os._exit(1)  # an exception here would be printed, and the status still be 0
        self._over = True  # no rank exchanges any more, so one that leaves is not lost
        self._detector.leave()
        self._rings.close()


def _rings(meeting: Rendezvous, label: str, wanted: str) -> SharedRings | ProcessGroups:
    one_host = all(other.host == this_host() for other in meeting.present)
    if wanted == "shared_memory" and not one_host:
        raise SpecError(f"{COLLECTIVE_TRANSPORT} is 'shared_memory', but the trainers are on several hosts", got=wanted)
    if wanted != "gloo" and one_host:
        if meeting.ranks.inter:
            one_level = "hierarchical all-reduce has one level here"
            _log.warning("%s: all trainers are on one host, and share its memory", one_level)
        try:
            return SharedRings(meeting, label)
        except NoSharedMemory as error:
            if wanted == "shared_memory":
                raise NoSharedMemory(f"{error}; {COLLECTIVE_TRANSPORT} is {wanted!r}, 'gloo' does without") from error
            if meeting.ranks.rank == 0:
                _log.warning("the trainers exchange by Gloo, since shared memory cannot be used: %s", error)
    return ProcessGroups(meeting, label, "gloo")
