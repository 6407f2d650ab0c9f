"""Values of blocks that trainers are sent before their round is applied, while other gradients are still on their way.

A trainer over a network sends gradients ahead of its step, and says what it will read. When the last trainer's part of
a block has come, the block is staged (`staging.py`), and its new value is sent to each of them that reads it: both
directions of a link are used at once. Trainers use it only when the answer of the step says that it holds: when the
round has taken just that staged update. Any other block is in the answer itself. Parts have no key and no answer, and
are not pushes: the step pushes them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.native.channels import Answers, Request
from penstock.ps.dispatcher import Dispatcher
from penstock.ps.state import ServerState, use_cores_for
from penstock.ps.storage import Gradient
from penstock.ps.transport.local import ANSWER_S


class OpenStep:
    """A step of which parts have come, over `channel`. `send` and `end` are thread-safe; the rest is its owner's."""

    def __init__(self, request: Request, channel: Answers) -> None:
        self.epoch, self.round, self.channel = request.epoch, request.round, channel
        self.parts: dict[str, Gradient] = {}
        self._trainer, self._reads = request.trainer, frozenset(request.reads())
        self._sent: dict[int, int] = {}
        self._is_ended = False
        self._lock = threading.Lock()

    def is_of(self, request: Request, channel: Answers) -> bool:
        """Whether a message ahead belongs to it."""
        return (self.epoch, self.round) == (request.epoch, request.round) and self.channel is channel

    def send(self, block: int, number: int, value: Tensor) -> None:
        """Send the staged value of a block, if it is read, the step is not answered, and no newer one was sent."""
        with self._lock:
            if not self._is_ended and block in self._reads and number > self._sent.get(block, 0):
                self.channel.send_early(self._trainer, self.round, block, value, ANSWER_S)
                self._sent[block] = number

    def end(self) -> dict[int, int]:
        """Send no more: its answer comes now. Return what was sent: the number of the staged value, by block."""
        with self._lock:
            self._is_ended = True
            return self._sent


def complete(parts: Sequence[Mapping[str, Gradient]], blocks: Sequence[str]) -> dict[str, tuple[Gradient, ...]]:
    """Return those of `blocks` of which every trainer's part is there, with the parts in the trainers' order."""
    return {b: tuple(of[b] for of in parts) for b in blocks if all(b in of for of in parts)}


class EarlyAnswers:
    """The open steps of a server in sync mode. Thread-safe."""

    def __init__(self, state: ServerState, dispatcher: Dispatcher, names: Sequence[str]) -> None:
        self._state, self._dispatcher, self._names = state, dispatcher, names
        self._numbers = {name: number for number, name in enumerate(names)}
        self._steps: dict[int, OpenStep] = {}  # by trainer
        self._lock = threading.Lock()

    @property
    def is_possible(self) -> bool:
        """Whether there are rounds, and blocks can be staged."""
        return self._state.settings.mode == "sync" and self._state.staging.is_possible

    def arrived(self, request: Request, channel: Answers) -> None:
        """Take what a message ahead of a step has brought; stage and send what is complete with it."""
        if not request.reads():
            return  # an older trainer, or its first step
        newest = {self._names[b]: Gradient(values, None, request.trainer) for b, values, _ in request.newest()}
        with self._lock:
            step = self._steps.get(request.trainer)
            if step is None or not step.is_of(request, channel):
                step = self._steps[request.trainer] = OpenStep(request, channel)
            step.parts |= newest
            members = self._dispatcher.expected(request.round)
            steps = [of for t in members if (of := self._steps.get(t)) is not None and of.round == request.round]
            are_here = bool(members) and len(steps) == len(members)
            ready = complete([of.parts for of in steps], list(newest)) if are_here else {}
        for block, gradients in ready.items():
            use_cores_for(gradients[0].values.nbytes)
            with self._state.locks.of([block]):
                staged = self._state.staging.stage(request.round, block, gradients, members)
            if staged is not None:
                for of in steps:
                    of.send(self._numbers[block], *staged)

    def end(self, trainer: int, channel: Answers) -> dict[int, int]:
        """The trainer's step is answered now, over this channel. Return what was sent early: see `OpenStep.end`."""
        with self._lock:
            step = self._steps.get(trainer)
            if step is None or step.channel is not channel:
                return {}
            del self._steps[trainer]
        return step.end()

    def closed(self, channel: Answers) -> None:
        """Forget the steps of a channel that has ended."""
        with self._lock:
            for trainer in [t for t, step in self._steps.items() if step.channel is channel]:
                self._steps.pop(trainer).end()
