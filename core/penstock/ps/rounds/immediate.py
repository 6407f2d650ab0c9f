"""No rounds between trainers: each push is applied at once. The server's side of async, half-async and GEO.

one block      its pushes are applied one after another (a lock per block, with the queue behind it kept here)
a push         (trainer, epoch, step, block) is applied once: steps of one trainer and block only grow, so the last one
               is all that has to be remembered; a repetition of the one being applied waits for it
a new epoch    starts to count its steps again
a join         is answered with the number of the newest step applied of this incarnation, 0 if there is none: one that
               has more acknowledged detects by it that this server was restarted without its state
a step         is its pushes, answered once when the last of them is, with the refusal of any
a pull         is answered at once with what is there; a barrier too, since there are no rounds
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.ps.rounds.machine import Membership, RoundMachine
from penstock.ps.rounds.messages import (
    AllLeft,
    AppliedPush,
    Apply,
    Barrier,
    FailedPush,
    Heartbeat,
    Instruction,
    Join,
    Leave,
    Lost,
    Meet,
    Payload,
    Pull,
    Push,
    Refuse,
    Release,
    Reply,
    Standing,
    Step,
    Tick,
    Ticket,
    TrainerIncarnation,
)


@dataclass(slots=True)
class _Waiting:
    """A push that is applied now or waits for its turn. `tickets`: all requests for it."""

    push: Push
    tickets: list[Ticket]


@dataclass(slots=True)
class _Block:
    """`version`: updates applied so far. The first of `queue` is being applied."""

    version: int = 0
    queue: deque[_Waiting] = field(default_factory=deque)


@dataclass(slots=True)
class _OpenStep:
    """A step of which `left` pushes are not answered yet."""

    left: int
    event: Step
    refusal: Refuse | None = None


class ImmediateUpdates(RoundMachine):
    """The machine of one pserver. Not thread-safe: one event at a time.

    `applied`: (trainer, block) -> (epoch, step) of the newest applied push, e.g. restored with a snapshot.
    """

    def __init__(self, members: Membership, *, applied: dict[tuple[int, str], tuple[int, int]] | None = None) -> None:
        super().__init__(members)
        self.applied = dict(applied or {})
        self._blocks: dict[str, _Block] = {}
        self._seen: dict[tuple[int, str], int] = {}  # (trainer, block) -> version at its last pull
        self._steps: dict[Ticket, _OpenStep] = {}
        self._finished = False
        self.handlers = {
            Join: self._join, Heartbeat: self._heartbeat, Push: self._push, Barrier: self._heartbeat, Pull: self._pull,
            Step: self._step, Leave: self._leave, Meet: self._meet, Tick: self._tick, AppliedPush: self._applied_push,
            FailedPush: self._failed_push,
        }  # fmt: skip

    def _join(self, event: Join) -> list[Instruction]:
        reason = self.members.refusal(event.sender)
        if reason:
            return [Refuse(event.ticket, reason)]
        if self.members.is_new(event.sender):
            self.members.join(event.sender, self.now, 0)
        else:
            self.members.touch(event.sender, self.now)
        return [Reply(event.ticket, self._newest_step(event.sender))]

    def _newest_step(self, sender: TrainerIncarnation) -> int:
        keys = ((trainer, epoch, step) for (trainer, _), (epoch, step) in self.applied.items())
        return max(
            (step for trainer, epoch, step in keys if (trainer, epoch) == (sender.trainer, sender.epoch)), default=0
        )

    def _heartbeat(self, event: Heartbeat | Barrier) -> list[Instruction]:
        return [Reply(event.ticket, 0)]

    def _meet(self, event: Meet) -> list[Instruction]:
        return self.meetings.meet(event, 0)

    def _pull(self, event: Pull) -> list[Instruction]:
        self._note_read(event)
        return [Reply(event.ticket, 0)]

    def _note_read(self, event: Pull | Step) -> None:
        early = event.read_early if isinstance(event, Step) else {}
        for name, block in self._blocks.items():
            self._seen[event.sender.trainer, name] = early.get(name, block.version)

    def standing(self) -> Standing | None:
        """Versions, and what trainers have read and pushed, if no push is under way."""
        is_busy = self._finished or self._steps or any(b.queue for b in self._blocks.values())
        members = {} if is_busy or self.meetings.waiting else self.members.at_rest()
        if not members:
            return None
        pushed = {key: step for key, (epoch, step) in self.applied.items() if members.get(key[0]) == epoch}
        versions = {name: block.version for name, block in self._blocks.items()}
        return Standing(0, members, versions=versions, read=dict(self._seen), pushed=pushed)

    def passed(self, now: Standing) -> None:
        """Pushes have been applied, and parameters read."""
        super().passed(now)
        for name, version in now.versions.items():
            self._blocks.setdefault(name, _Block()).version = version
        self._seen |= now.read
        self.applied |= {(t, block): (now.members[t], step) for (t, block), step in now.pushed.items()}

    def version(self, block: str) -> int:
        """Return how many updates of a block have been reported as applied."""
        return self._blocks[block].version if block in self._blocks else 0

    def _leave(self, event: Leave) -> list[Instruction]:
        trainer = event.sender.trainer
        self.members.leave(trainer)
        # All its pushes are answered: it may come back under the same epoch, and count its steps from the beginning.
        self.applied = {key: newest for key, newest in self.applied.items() if key[0] != trainer}
        return [Reply(event.ticket, 0), *self._finish_if_empty()]

    def _tick(self, event: Tick) -> list[Instruction]:
        lost = self.members.expire(self.now)
        return [*(Lost(t) for t in lost), *self._finish_if_empty()]

    def _finish_if_empty(self) -> list[Instruction]:
        if self._finished or not self.members.all_left or any(b.queue for b in self._blocks.values()):
            return []
        self._finished = True
        return [AllLeft()]

    # -- pushes ----------------------------------------------------------------------------------

    def _step(self, event: Step) -> list[Instruction]:
        if not event.payloads:
            if event.reads:
                self._note_read(event)
            return [Reply(event.ticket, event.round)]
        self._steps[event.ticket] = _OpenStep(len(event.payloads), event)
        pushes = (Push(event.ticket, event.sender, event.round, b, p) for b, p in event.payloads.items())
        return [one for push in pushes for one in self._once(self._push(push))]

    def _once(self, instructions: list[Instruction]) -> list[Instruction]:
        """Return the instructions with one answer for all pushes of a step."""
        return [one for given in instructions if (one := self._answer_of(given)) is not None]

    def _answer_of(self, given: Instruction) -> Instruction | None:
        step = self._steps.get(given.ticket) if isinstance(given, (Reply, Refuse)) else None
        if step is None:
            return given
        assert isinstance(given, (Reply, Refuse))
        step.left -= 1
        if isinstance(given, Refuse):
            step.refusal = given
        if step.left:
            return None
        del self._steps[given.ticket]
        if step.refusal is None and step.event.reads:
            self._note_read(step.event)
        return step.refusal or given

    def _push(self, event: Push) -> list[Instruction]:
        newest = self.applied.get((event.sender.trainer, event.block))
        if newest is not None and (event.sender.epoch, event.round) <= newest:
            return [Reply(event.ticket, event.round), Release(event.payload)]
        block = self._blocks.setdefault(event.block, _Block())
        for waiting in block.queue:
            if (waiting.push.sender, waiting.push.round) == (event.sender, event.round):
                waiting.tickets.append(event.ticket)
                return [Release(event.payload)]
        block.queue.append(_Waiting(event, [event.ticket]))
        return self._apply_first(event.block) if len(block.queue) == 1 else []

    def _apply_first(self, name: str) -> list[Instruction]:
        block = self._blocks[name]
        push = block.queue[0].push
        behind = block.version - self._seen.get((push.sender.trainer, name), 0)
        return [Apply(push.payload, name, push.sender, push.round, behind)]

    def _applied_push(self, event: AppliedPush) -> list[Instruction]:
        name = self._block_of(event.payload)
        block = self._blocks[name]
        done = block.queue.popleft()
        block.version += 1
        trainer = done.push.sender.trainer
        self.applied[trainer, name] = (done.push.sender.epoch, done.push.round)
        # Its own update does not make the sender's view older.
        self._seen[trainer, name] = self._seen.get((trainer, name), 0) + 1
        return self._once(self._next(block, name, [Reply(t, done.push.round) for t in done.tickets]))

    def _failed_push(self, event: FailedPush) -> list[Instruction]:
        name = self._block_of(event.payload)
        block = self._blocks[name]
        failed = block.queue.popleft()
        return self._once(self._next(block, name, [Refuse(t, event.reason) for t in failed.tickets]))

    def _next(self, block: _Block, name: str, out: list[Instruction]) -> list[Instruction]:
        while block.queue and self._is_applied(block.queue[0].push):
            late = block.queue.popleft()
            out += [*(Reply(t, late.push.round) for t in late.tickets), Release(late.push.payload)]
        return [*out, *(self._apply_first(name) if block.queue else []), *self._finish_if_empty()]

    def _is_applied(self, push: Push) -> bool:
        """Whether a newer step, or a newer incarnation, was applied while this one waited."""
        newest = self.applied.get((push.sender.trainer, push.block))
        return newest is not None and (push.sender.epoch, push.round) <= newest

    def _block_of(self, payload: Payload) -> str:
        return next(n for n, b in self._blocks.items() if b.queue and b.queue[0].push.payload == payload)
