"""Events and instructions of the round machines. Plain data, no I/O.

An *event* is a request of a trainer (it has a ticket, under which it is answered exactly once), the passing of time, or
the completion of an instruction. An *instruction* is what the server has to do. Payloads are numbers: the server holds
the bytes, the machine decides what becomes of them. Every payload that is handed in comes back exactly once, in
`Close`, `Apply` or `Release`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GIVE_UP = -2
"""Number of a `Meet` that ends the sender's wait in a meeting."""

Ticket = int
Payload = int


@dataclass(frozen=True, slots=True)
class TrainerIncarnation:
    """A trainer's incarnation. `epoch` grows when the trainer is started again; an older one is refused."""

    trainer: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TrainerRequest:
    """A request of a trainer: answered exactly once, under its ticket."""

    ticket: Ticket
    sender: TrainerIncarnation


@dataclass(frozen=True, slots=True)
class Join(TrainerRequest):
    """A trainer asks to take part, for the first time or again. Answered with the round that it starts with."""


@dataclass(frozen=True, slots=True)
class Heartbeat(TrainerRequest):
    """A trainer is alive. Every other request shows it too."""


@dataclass(frozen=True, slots=True)
class Push(TrainerRequest):
    """The gradient of one block for one round. (trainer, epoch, round, block) makes it idempotent."""

    round: int
    block: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Step(TrainerRequest):
    """All that a trainer pushes in a round or step, by block, and in sync mode its barrier: each as if by itself.

    `reads`: when it is answered, the trainer reads parameters, as of then; of the blocks in `read_early`, which have no
    rounds, it has read this version before, with its own push of the step.
    """

    round: int
    payloads: Mapping[str, Payload]
    reads: bool = False
    read_early: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Barrier(TrainerRequest):
    """A trainer has pushed all of a round. Answered when the round is applied: then nothing of it can be lost."""

    round: int


@dataclass(frozen=True, slots=True)
class Pull(TrainerRequest):
    """A trainer wants parameters in which the rounds before `round` are applied."""

    round: int


@dataclass(frozen=True, slots=True)
class Leave(TrainerRequest):
    """A trainer has no more data."""


@dataclass(frozen=True, slots=True)
class Meet(TrainerRequest):
    """A trainer comes to meeting `number` of all live members with `part`; -1 only asks which number comes next.

    So does GIVE_UP, after which its sender is at no meeting.
    """

    number: int
    part: object = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `every_s`: the interval of ticks; a much longer gap means that the server itself was paused."""

    every_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Applied:
    """The shell has merged, logged and applied what `Close` named."""

    round: int


@dataclass(frozen=True, slots=True)
class FailedRound:
    """The shell could not apply the round that `Close` named; nothing has changed. All at its barrier are refused."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """The shell has logged and applied what `Apply` named."""

    payload: Payload


@dataclass(frozen=True, slots=True)
class FailedPush:
    """The shell could not apply what `Apply` named; nothing has changed. Its sender is refused."""

    payload: Payload
    reason: str


Event = TrainerRequest | Tick | Applied | FailedRound | AppliedPush | FailedPush


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a machine at rest stands, from which native code may go on for it, and where that has come to.

    `members`: trainer -> epoch; `seen_at`: trainer -> when a request of it was carried out natively last. Without
    rounds `versions`: block -> updates applied; `read`: (trainer, block) -> its version when the trainer read it last;
    `pushed`: (trainer, block) -> number of its newest push applied.
    """

    round: int
    members: Mapping[int, int]
    seen_at: Mapping[int, float] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    read: Mapping[tuple[int, str], int] = field(default_factory=dict)
    pushed: Mapping[tuple[int, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request. `round`: the open round, which is also the number of rounds applied."""

    ticket: Ticket
    round: int


@dataclass(frozen=True, slots=True)
class Met:
    """Answer a `Meet`: all are there. `parts`: what they brought, by trainer; `round`: the open round."""

    ticket: Ticket
    round: int
    parts: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error. `rejoin`: the sender is unknown, and may join and retry."""

    ticket: Ticket
    reason: str
    rejoin: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Forget a payload: a duplicate, or of a trainer that is gone."""

    payload: Payload


@dataclass(frozen=True, slots=True)
class Close:
    """Merge each block's payloads (mean over them), log, apply, then report `Applied`, or `FailedRound`.

    `members`: its participants.
    """

    round: int
    contributions: Mapping[str, tuple[Payload, ...]]
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Log and apply one push at once, then report `AppliedPush`. Pushes of one block are asked for one by one.

    `staleness`: updates of the block by others since its sender last pulled.
    """

    payload: Payload
    block: str
    sender: TrainerIncarnation
    round: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A trainer's lease has run out."""

    trainer: int


@dataclass(frozen=True, slots=True)
class AllLeft:
    """Every trainer has left: stop serving."""


Instruction = Reply | Met | Refuse | Release | Close | Apply | Lost | AllLeft
