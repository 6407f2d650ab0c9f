"""Values of blocks that trainers are sent before their step is applied, while other gradients are still on their way.

A trainer over a network sends gradients ahead of its step, and says what it will read. The block of each is staged
(`staging.py`), in sync mode when the last trainer's part has come, and its new value is sent to the trainers that read
it: both directions of a link are used at once. A trainer uses it only when the answer of the step says that it holds.
Any other block is in the answer itself. Parts have no key and no answer, and are not pushes: the step pushes them.

sync            a value holds if the round has taken just that staged update
without rounds  a value holds if the step is applied. Where others have updated the block since it was staged, the push
                is computed anew, and the trainer's value lacks these updates, as if it had been read before them: the
                staleness of its next push counts them
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

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
        self.versions: dict[str, int] = {}  # of what was sent, without rounds
        self._trainer, self._reads = request.trainer, frozenset(request.reads())
        self._sent: dict[int, int] = {}  # block -> number of the newest value
        self._is_ended = False
        self._lock = threading.Lock()

    def is_of(self, request: Request, channel: Answers) -> bool:
        """Whether a message ahead belongs to it."""
        return (self.epoch, self.round) == (request.epoch, request.round) and self.channel is channel

    def send(self, block: int, number: int, value: Tensor) -> bool:
        """Send the staged value of a block, if it is read, the step is not answered, and no newer one was sent."""
        with self._lock:
            if self._is_ended or block not in self._reads or number <= self._sent.get(block, 0):
                return False
            self.channel.send_early(self._trainer, self.round, block, value, ANSWER_S)
            self._sent[block] = number
            return True

    def end(self) -> dict[int, int]:
        """Send no more: its answer comes now. Return what was sent: the number of the staged value, by block."""
        with self._lock:
            self._is_ended = True
            return self._sent


def complete(parts: Sequence[Mapping[str, Gradient]], blocks: Sequence[str]) -> dict[str, tuple[Gradient, ...]]:
    """Return those of `blocks` of which every trainer's part is there, with the parts in the trainers' order."""
    return {b: tuple(of[b] for of in parts) for b in blocks if all(b in of for of in parts)}


class EarlyAnswers:
    """The open steps of a server, and what is sent early of them: the base of both kinds. Thread-safe."""

    modes: frozenset[str]

    def __init__(self, state: ServerState, dispatcher: Dispatcher, names: Sequence[str]) -> None:
        self._state, self._dispatcher, self._names = state, dispatcher, names
        self._numbers = {name: number for number, name in enumerate(names)}
        self._steps: dict[int, OpenStep] = {}  # by trainer
        self._lock = threading.Lock()

    @property
    def is_possible(self) -> bool:
        """Whether blocks can be staged in the mode of the server."""
        return self._state.settings.mode in self.modes and self._state.staging.is_possible

    def arrived(self, request: Request, channel: Answers) -> None:
        """Take what a message ahead of a step has brought; stage and send what is complete with it."""
        if not request.reads():
            return  # an older trainer, or its first step
        newest = {self._names[b]: Gradient(values, None, request.trainer) for b, values, _ in request.newest()}
        with self._lock:
            step = self._steps.get(request.trainer)
            if step is None or not step.is_of(request, channel):
                step = self._steps[request.trainer] = OpenStep(request, channel)
        self._stage(request, step, newest)

    def _stage(self, request: Request, step: OpenStep, newest: dict[str, Gradient]) -> None:
        raise NotImplementedError

    def read_early(self, trainer: int, channel: Answers) -> dict[str, int]:
        """Return the versions of the values that the trainer's step has been sent, for `Step.read_early`."""
        step = self._open(trainer, channel)
        return {} if step is None else step.versions

    def end(self, trainer: int, channel: Answers) -> dict[int, int]:
        """The trainer's step is answered now, over this channel. Return what was sent early: see `OpenStep.end`."""
        step = self._open(trainer, channel)
        if step is None:
            return {}
        with self._lock:
            if self._steps.get(trainer) is step:
                del self._steps[trainer]
        return step.end()

    def _open(self, trainer: int, channel: Answers) -> OpenStep | None:
        with self._lock:
            step = self._steps.get(trainer)
        return step if step is not None and step.channel is channel else None

    def holding(self, round: int, sent: Mapping[int, int]) -> Collection[int]:
        """Return which of the values in `sent` hold after their step is applied. Under the lock of a block, if any."""
        raise NotImplementedError

    def closed(self, channel: Answers) -> None:
        """Forget the steps of a channel that has ended, and what is staged of them."""
        with self._lock:
            ended = [self._steps.pop(t) for t, step in list(self._steps.items()) if step.channel is channel]
        for step in ended:
            step.end()
            self._drop(step)

    def _drop(self, step: OpenStep) -> None:
        """What was staged of a step that does not come any more is of no use."""


class RoundAnswers(EarlyAnswers):
    """Of a server in sync mode."""

    modes = frozenset({"sync"})

    def _stage(self, request: Request, step: OpenStep, newest: dict[str, Gradient]) -> None:
        with self._lock:
            step.parts |= newest
            members = self._dispatcher.expected(request.round)
            steps = [of for t in members if (of := self._steps.get(t)) is not None and of.round == request.round]
            are_here = bool(members) and len(steps) == len(members)
            ready = complete([of.parts for of in steps], list(newest)) if are_here else {}
        for block, gradients in ready.items():
            use_cores_for(gradients[0].values.nbytes)
            with self._state.locks.of([block]):
                staged = self._state.staging.stage(request.round, block, gradients, members)
                self._state.prepared.withdraw()  # native code takes nothing that is staged
            if staged is not None:
                for of in steps:
                    of.send(self._numbers[block], *staged)

    def holding(self, round: int, sent: Mapping[int, int]) -> Collection[int]:
        """Return those of which the round has taken the staged update."""
        taken = self._state.staging.taken(round) if sent else {}
        return {block for block, number in sent.items() if number == taken.get(self._names[block])}


class PushAnswers(EarlyAnswers):
    """Of a server without rounds. A trainer's steps and its messages ahead are handled by one thread."""

    modes = frozenset({"async", "half_async"})

    def _stage(self, request: Request, step: OpenStep, newest: dict[str, Gradient]) -> None:
        step.parts |= newest
        for block, gradient in newest.items():
            use_cores_for(gradient.values.nbytes)
            with self._state.locks.of([block]):
                version = self._dispatcher.version(block)
                value = self._state.staged_pushes.stage(block, gradient)
                self._state.prepared.withdraw()  # native code takes nothing that is staged
            if value is not None and step.send(self._numbers[block], 1, value):
                step.versions[block] = version + 1  # with its own push

    def _drop(self, step: OpenStep) -> None:
        for block, gradient in step.parts.items():
            with self._state.locks.of([block]):
                self._state.staged_pushes.drop(block, gradient)

    def holding(self, round: int, sent: Mapping[int, int]) -> Collection[int]:
        """Return all: the step has pushed what they were computed with."""
        return sent.keys()


def early_answers(state: ServerState, dispatcher: Dispatcher, names: Sequence[str]) -> EarlyAnswers:
    """Return those of the server's mode. `names`: of its blocks, by their numbers."""
    kind = RoundAnswers if state.settings.mode in RoundAnswers.modes else PushAnswers
    return kind(state, dispatcher, names)
