"""Handlers of the requests that come over channels: a step's gradients and reads, lookups of rows.

Decoding, checks, gathering and answers are native (`native/src/ps`); here is what the round machine decides, once for a
request, and the locks of blocks. What is refused has changed nothing. Runs on the channels' threads, many at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch

from penstock.errors import PeerError
from penstock.native.channels import AHEAD, LOOK_UP, STEP, Answers, Request
from penstock.protocol.frames import Work
from penstock.ps.dispatcher import Dispatcher, Response
from penstock.ps.early import early_answers
from penstock.ps.requests import Requests, sender_of
from penstock.ps.rounds.messages import Pull, Refuse, Reply, Step, TrainerIncarnation
from penstock.ps.state import ServerState, use_cores_for
from penstock.ps.storage import Gradient
from penstock.ps.transport.local import ANSWER_S
from penstock.ps.wire import Message, to_wire


class ChannelRequests:
    """Opens channels, and answers what comes over them."""

    def __init__(self, state: ServerState, dispatcher: Dispatcher, requests: Requests) -> None:
        self._state, self._dispatcher, self._requests = state, dispatcher, requests
        self._names = list(state.specs)
        self._fitting: set[tuple[str, bool]] = set()  # (block, is dense): gradients that its update takes
        self._early = early_answers(state, dispatcher, self._names)
        self.in_parts = self._early.is_possible
        self.traffic, self.prepared = state.traffic, state.prepared.native
        self._has_rounds = state.settings.mode == "sync"
        state.counters.also(self._counted)

    def _counted(self) -> Iterator[tuple[tuple[str, str], Mapping[str, int]]]:
        for trainer, block, sums in self.traffic.sums():
            yield (f"trainer {trainer}", self._names[block]), sums

    def open(self, message: Message) -> Message:
        """Answer a request to make its connection a channel: with the blocks, in the order of their numbers."""
        self._requests.check_job(message)
        sender_of(int(message.fields["trainer"]), int(message.fields["epoch"]))
        if message.tensors:
            raise PeerError("a request to open a channel has no tensors")
        use_cores_for(0)  # what native code merges on this thread
        names = torch.frombuffer(bytearray(json.dumps(self._names), "utf-8"), dtype=torch.uint8)
        return Message("answer", {"round": 0, "staleness": 0}, [to_wire("blocks", names)])

    def answer(self, request: Request, channel: Answers) -> None:
        """Answer one request. Raises PenstockError, which refuses it."""
        self._dispatcher.check_prepared()
        if request.kind == AHEAD:
            self._early.arrived(request, channel)
            return  # has no answer
        sender = sender_of(request.trainer, request.epoch)
        early: list[int] = []
        if request.kind == STEP:
            response, early = self._step(request, sender, channel)
        elif request.kind == LOOK_UP:
            response = self._look_up(request, sender, channel)
        else:
            raise PeerError(f"a message of kind {request.kind} is no request")
        deadline, answer = time.monotonic() + ANSWER_S, response.answer
        if isinstance(answer, Refuse):
            channel.refuse(answer.reason, answer.rejoin, deadline)
        else:
            channel.answer(answer.round, response.staleness, deadline, early)

    def closed(self, channel: Answers) -> None:
        """A channel has ended."""
        self._early.closed(channel)

    def _step(self, request: Request, sender: TrainerIncarnation, channel: Answers) -> tuple[Response, list[int]]:
        """Take pushes, in sync mode wait for the round, and read. Return which values were sent early, and hold."""
        try:
            read_early = self._early.read_early(request.trainer, channel)
            with self._state.work.of_trainer(Work.ROUND, request.trainer) if self._has_rounds else nullcontext():
                response = self._pushed(request, sender, read_early)
        finally:
            sent = self._early.end(request.trainer, channel)
        reads = request.reads()
        if isinstance(response.answer, Refuse) or not reads:
            return response, []
        # Locks are enough: a round is applied under those of all blocks, so it is read whole or not at all.
        names = [self._names[block] for block in reads]
        with self._requests.reading(names, sender.trainer):
            hold = self._early.holding(request.round, sent)
            early = [b for b in reads if b in hold]
            rest = [b for b in reads if b not in hold]
            channel.stage(rest, [self._state.storage.value(self._names[b]) for b in rest])
        return response, early

    def _pushed(self, request: Request, sender: TrainerIncarnation, early: Mapping[str, int]) -> Response:
        state, number = self._state, request.round
        reads = request.reads()
        gradients = {
            self._names[block]: Gradient(values, rows, sender.trainer) for block, values, rows in request.gradients()
        }
        for block, gradient in gradients.items():
            # Sizes and dtype are checked. What else there is to check is the same for every gradient of the kind.
            if (block, gradient.rows is None) not in self._fitting:
                state.storage.check(block, gradient)
                self._fitting.add((block, gradient.rows is None))
        # Not copied: the request is answered when they are applied, or refused when they are released.
        payloads = {block: state.payloads.hold(gradient, copied=False) for block, gradient in gradients.items()}
        response = self._dispatcher.dispatch(
            lambda ticket: Step(ticket, sender, number, payloads, bool(reads), early), payloads=payloads.values()
        )
        if isinstance(response.answer, Reply):
            state.prepared.learn(gradients)
        return response

    def _look_up(self, request: Request, sender: TrainerIncarnation, channel: Answers) -> Response:
        number = request.round
        block, ids = request.ids()
        name, spec = self._names[block], self._state.specs[self._names[block]]
        response = self._dispatcher.dispatch(lambda ticket: Pull(ticket, sender, number))
        if isinstance(response.answer, Refuse):
            return response
        size = len(ids) * spec.shape[1:].numel() * spec.dtype.itemsize
        use_cores_for(size)
        storage = self._state.storage
        with self._state.locks.of([name]):
            value = None if spec.is_table else storage.value(name)
            if value is not None and value.is_contiguous():
                channel.stage_rows(block, value, ids)
            else:
                with self._state.work.of_block(Work.LOOK_UP, name):
                    rows = storage.rows(name, ids, create=True)
                channel.stage([block], [rows])
        return response
