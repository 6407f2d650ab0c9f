"""Handlers of trainers' requests: check the message against the blocks, dispatch it, build the answer.

A request that is refused has changed nothing. Runs on the transports' threads, many at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import torch

from penstock.errors import PeerError
from penstock.protocol.frames import Work
from penstock.ps.dispatcher import Dispatcher, Response
from penstock.ps.narrow import widened
from penstock.ps.persistence import Snapshotter
from penstock.ps.rounds.messages import (
    Barrier,
    Heartbeat,
    Join,
    Leave,
    Meet,
    Met,
    Pull,
    Push,
    Refuse,
    Ticket,
    TrainerIncarnation,
    TrainerRequest,
)
from penstock.ps.rows import are_within
from penstock.ps.state import ServerState, use_cores_for
from penstock.ps.storage import BlockSpec, Gradient
from penstock.ps.transport.local import Guarded, host_id, refusal
from penstock.ps.wire import ROWS, VALUES, Message, WireTensor, from_wire, to_wire


def gradient_of(message: Message, specs: dict[str, BlockSpec]) -> Gradient:
    """Return a push's gradient; values look at the message's bytes. Raises PeerError if it does not fit its block.

    Rows are copied before they are checked, since their sender could still change them.
    """
    block = str(message.fields["block"])
    names = [t.name for t in message.tensors]
    if names not in (["values"], ["rows", "values"]):
        raise PeerError(f"a push of {block!r} has the tensors {names}; expected [values] or [rows, values]")
    *rows, values = (from_wire(t) for t in message.tensors)
    return _gradient(block, [*(t.clone() for t in rows), values], specs, int(message.fields["trainer"]))


def gradients_of(message: Message, specs: dict[str, BlockSpec]) -> dict[str, Gradient]:
    """Return the gradients of a step by block, each as `gradient_of` does. Raises PeerError."""
    tensors = list(message.tensors)
    out: dict[str, Gradient] = {}
    while tensors:
        last = tensors.pop()
        block = last.name.removeprefix(VALUES)
        if block == last.name or block in out:
            raise PeerError(f"a step has the tensor {last.name!r} where the values of another block belong")
        found = [from_wire(last)]
        if tensors and tensors[-1].name == ROWS + block:
            found.insert(0, from_wire(tensors.pop()).clone())
        out[block] = _gradient(block, found, specs, int(message.fields["trainer"]))
    return out


def _gradient(block: str, tensors: list[torch.Tensor], specs: dict[str, BlockSpec], trainer: int) -> Gradient:
    spec = _spec(block, specs)
    values = widened(tensors[-1], spec.dtype)
    if values.dtype != spec.dtype:
        raise PeerError(f"a push of {block!r} is {values.dtype}; the block is {spec.dtype}")
    if len(tensors) == 1:
        if spec.is_table:
            raise PeerError(f"{block!r} is a table: a push of it has rows and values")
        if values.shape != spec.shape:
            raise PeerError(f"a push of {block!r} has the shape {list(values.shape)}; the block {list(spec.shape)}")
        return Gradient(values, None, trainer)
    rows = tensors[0]
    _check_rows(block, spec, rows)
    if values.shape != (len(rows), *spec.shape[1:]):
        expected = [len(rows), *spec.shape[1:]]
        raise PeerError(f"the values of a push of rows of {block!r} are {list(values.shape)}; expected {expected}")
    return Gradient(values, rows, trainer)


def pulled_blocks(message: Message, specs: dict[str, BlockSpec]) -> list[str]:
    """Return the dense blocks that a pull asks for. Raises PeerError."""
    text = str(message.fields["blocks"])
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a pull's blocks are no JSON: {text[:100]!r}") from error
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(names) > len(specs):
        raise PeerError(f"a pull's blocks are no list of names of at most {len(specs)} blocks: {text[:100]!r}")
    for name in names:
        if _spec(name, specs).is_table:
            raise PeerError(f"{name!r} is a table: its rows are looked up, it is not pulled")
    return names


def looked_up(message: Message, specs: dict[str, BlockSpec]) -> tuple[str, torch.Tensor]:
    """Return (table, ids) of a lookup; ids are copied, as rows of a push are. Raises PeerError."""
    table = str(message.fields["table"])
    if [t.name for t in message.tensors] != ["ids"]:
        raise PeerError(f"a lookup in {table!r} has the tensors {[t.name for t in message.tensors]}; expected [ids]")
    ids = from_wire(message.tensors[0]).clone()
    _check_rows(table, _spec(table, specs), ids)
    return table, ids


def _spec(block: str, specs: dict[str, BlockSpec]) -> BlockSpec:
    spec = specs.get(block)
    if spec is None:
        raise PeerError(f"block {block!r} is not on this server; it has {', '.join(specs) or 'none'}")
    return spec


def _check_rows(block: str, spec: BlockSpec, rows: torch.Tensor) -> None:
    if rows.dtype != torch.int64 or rows.dim() != 1 or not spec.shape:
        raise PeerError(f"rows of {block!r} are int64 [n] of a block with rows, not {rows.dtype} {list(rows.shape)}")
    if not spec.is_table and not are_within(rows, spec.shape[0]):
        low, high = (int(x) for x in torch.aminmax(rows))
        raise PeerError(f"rows {low} to {high} of {block!r}, which has {spec.shape[0]}")


def brought(message: Message) -> torch.Tensor | None:
    """Return a copy of what a `meet` brings: the request is over before the others have added it. Raises PeerError."""
    names = [t.name for t in message.tensors]
    if names not in ([], ["values"]):
        raise PeerError(f"a trainer comes to a meeting with the tensors {names}; expected [values] or none")
    if not names:
        return None
    values = from_wire(message.tensors[0])
    if values.dtype == torch.bool:
        raise PeerError("a trainer comes to a meeting with truth values, which have no sum; send them as numbers")
    return values.clone()


def total_of(parts: Sequence[object]) -> torch.Tensor | None:
    """Return the sum of what `brought` gave for each trainer. Raises PeerError if they do not fit each other."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    kinds = {"nothing" if not isinstance(p, torch.Tensor) else f"{p.dtype}{list(p.shape)}" for p in parts}
    if len(kinds) > 1:
        raise PeerError(f"the trainers that meet bring {', '.join(sorted(kinds))}; all have to bring the same")
    if not tensors:
        return None
    total = tensors[0].clone()
    for part in tensors[1:]:
        total += part
    return total


_MAX_TRAINER = 1 << 31


def sender_of(trainer: int, epoch: int) -> TrainerIncarnation:
    """Return who sends a request. Raises PeerError for numbers that no trainer has."""
    if not 0 <= trainer < _MAX_TRAINER or epoch < 0:
        raise PeerError(f"trainer {trainer} of epoch {epoch} cannot be")
    return TrainerIncarnation(trainer, epoch)


class Requests:
    """Answers the messages of trainers. `address`, `port`: of its sockets, once they are known.

    `admit`: called before each join, whose thread it may hold; what it raises refuses it.
    """

    def __init__(
        self, state: ServerState, dispatcher: Dispatcher, snapshotter: Snapshotter,
        admit: Callable[[TrainerIncarnation], None],
    ) -> None:  # fmt: skip
        self._state, self._dispatcher, self._snapshotter, self._admit = state, dispatcher, snapshotter, admit
        self.address = ""
        self.port = 0
        self._kinds: dict[str, Callable[[Message, TrainerIncarnation], Message | Guarded]] = {
            "agree": self._agree,
            "join": self._join,
            "beat": lambda m, s: self._plain(lambda ticket: Heartbeat(ticket, s)),
            "leave": lambda m, s: self._plain(lambda ticket: Leave(ticket, s)),
            "barrier": lambda m, s: self._plain(lambda ticket: Barrier(ticket, s, int(m.fields["round"]))),
            "push": self._push, "step": self._step, "pull": self._pull, "lookup": self._lookup,
            "changed": self._changed, "save": self._save, "cut": self._save, "written": self._save, "meet": self._meet,
            "origin": self._origin,
        }  # fmt: skip

    def answer(self, message: Message) -> Message | Guarded:
        """Answer one message. Raises PenstockError, which refuses it."""
        if message.kind == "where":
            return Message("here", {"host": host_id(), "address": self.address})
        if message.kind == "port":
            return Message("listens", {"port": self.port})
        kind = self._kinds.get(message.kind)
        if kind is None:
            raise PeerError(f"a {message.kind} message is no request")
        self.check_job(message)
        return kind(message, sender_of(int(message.fields["trainer"]), int(message.fields["epoch"])))

    def check_job(self, message: Message) -> None:
        """Raise PeerError for a message of another job."""
        if message.fields["job"] != self._state.settings.job:
            raise PeerError(f"this server is of job {self._state.settings.job!r}, not {message.fields['job']!r}")

    def _agree(self, message: Message, sender: TrainerIncarnation) -> Message:
        settings, fields = self._state.settings, message.fields
        if (fields["mode"], fields["trainers"]) != (settings.mode, settings.fanin):
            raise PeerError(
                f"trainer {sender.trainer} is of a job of {fields['trainers']} trainers in mode {fields['mode']}; this "
                f"server is of one of {settings.fanin} in mode {settings.mode}. Give transpile(…), or the strategy, "
                "the same sync_mode, config and number of trainers in every process"
            )
        lease = to_wire("lease_s", torch.tensor([settings.lease_s], dtype=torch.float64))
        return Message("answer", {"round": 0, "staleness": 0}, [lease])

    def _join(self, _message: Message, sender: TrainerIncarnation) -> Message:
        self._admit(sender)
        return self._plain(lambda ticket: Join(ticket, sender))

    def _plain(self, make: Callable[[Ticket], TrainerRequest]) -> Message:
        return _reply(self._dispatcher.dispatch(make))

    def _push(self, message: Message, sender: TrainerIncarnation) -> Message:
        gradient = gradient_of(message, self._state.specs)
        self._state.storage.check(str(message.fields["block"]), gradient)
        # A round is applied when this answer is long given. Immediate updates are waited for, and read from where
        # the bytes are.
        payload = self._state.payloads.hold(gradient, copied=self._state.settings.mode == "sync")
        number, block = int(message.fields["round"]), str(message.fields["block"])
        self._count(sender, block, received=message)
        response = self._dispatcher.dispatch(
            lambda ticket: Push(ticket, sender, number, block, payload), payloads=[payload]
        )
        return _reply(response)

    def _step(self, message: Message, sender: TrainerIncarnation) -> Message | Guarded:
        """Take pushes, wait at the barrier, and read: each as if it had come by itself, so all may be repeated."""
        if self._state.settings.mode != "sync":
            raise PeerError(f"steps are of sync mode; this server's is {self._state.settings.mode}")
        blocks, gradients = pulled_blocks(message, self._state.specs), gradients_of(message, self._state.specs)
        for block, gradient in gradients.items():
            self._state.storage.check(block, gradient)
        number = int(message.fields["round"])
        for block, gradient in gradients.items():
            reply = self._push_in_place(sender, number, block, gradient)
            if reply.kind == "refuse":
                return reply
        reply = self._plain(lambda ticket: Barrier(ticket, sender, number))
        if reply.kind == "refuse" or not blocks:
            return reply
        return self._read(blocks, sender, int(reply.fields["round"]))

    def _push_in_place(self, sender: TrainerIncarnation, number: int, block: str, gradient: Gradient) -> Message:
        # Not copied: the request's own barrier is answered when they are applied, or refused when they are released.
        payload = self._state.payloads.hold(gradient, copied=False)
        sizes = [t.nbytes for t in (gradient.values, gradient.rows) if t is not None]
        self._state.counters.add(f"trainer {sender.trainer}", block, calls=1, received_bytes=sum(sizes))
        return _reply(
            self._dispatcher.dispatch(lambda ticket: Push(ticket, sender, number, block, payload), payloads=[payload])
        )

    def _pull(self, message: Message, sender: TrainerIncarnation) -> Message | Guarded:
        return self._read(pulled_blocks(message, self._state.specs), sender, int(message.fields["round"]))

    def _read(self, blocks: list[str], sender: TrainerIncarnation, number: int) -> Message | Guarded:
        reply = _reply(self._dispatcher.dispatch(lambda ticket: Pull(ticket, sender, number)))
        if reply.kind == "refuse":
            return reply
        tensors = [to_wire(name, self._state.storage.value(name)) for name in blocks]
        for tensor in tensors:
            self._count(sender, tensor.name, sent=[tensor])
        return Guarded(Message("answer", reply.fields, tensors), self.reading(blocks, sender.trainer))

    @contextlib.contextmanager
    def reading(self, blocks: list[str], trainer: int) -> Iterator[None]:
        """Hold blocks still while the storage's own memory is copied into the answer: it is never copied twice.

        In sync mode the machine answers pulls only between rounds. But a round may close while an answer is on its way
        to a trainer that it does not wait for (one that joins, or was lost), so the locks are needed there too;
        otherwise they are free then.
        """
        with self._state.locks.of(blocks):
            for block in blocks:
                self._state.applied.changed.read_whole(block, trainer)
                # A record only where an update depends on what was read.
                if self._state.storage.pulled(block, trainer) and self._state.log.is_kept:
                    self._state.log.append(Message("pulled", {"trainer": trainer, "block": block}))
            yield

    def _lookup(self, message: Message, sender: TrainerIncarnation) -> Message:
        table, ids = looked_up(message, self._state.specs)
        number = int(message.fields["round"])
        reply = _reply(self._dispatcher.dispatch(lambda ticket: Pull(ticket, sender, number)))
        if reply.kind == "refuse":
            return reply
        spec = self._state.specs[table]
        use_cores_for(len(ids) * spec.shape[1:].numel() * spec.dtype.itemsize)
        with self._state.locks.of([table]), self._state.work.of_block(Work.LOOK_UP, table):
            rows = self._state.storage.rows(table, ids, create=True)
        answer = [to_wire("rows", rows)]
        self._count(sender, table, received=message, sent=answer)
        return Message("answer", reply.fields, answer)

    def _changed(self, message: Message, sender: TrainerIncarnation) -> Message:
        block = str(message.fields["block"])
        if block not in self._state.specs or not self._state.specs[block].shape:
            raise PeerError(f"block {block!r} has no rows on this server")
        if self._state.settings.mode != "geo":
            raise PeerError(f"what others changed is known in geo mode; this server's is {self._state.settings.mode}")
        reply = _reply(self._dispatcher.dispatch(lambda ticket: Heartbeat(ticket, sender)))
        if reply.kind == "refuse":
            return reply
        with self._state.locks.of([block]):
            rows = torch.from_numpy(self._state.applied.changed.take(block, sender.trainer))
            values = self._state.storage.rows(block, rows, create=False)
        answer = [to_wire("rows", rows), to_wire("values", values)]
        self._count(sender, block, sent=answer)
        return Message("answer", reply.fields, answer)

    def _save(self, message: Message, sender: TrainerIncarnation) -> Message:
        reply = _reply(self._dispatcher.dispatch(lambda ticket: Heartbeat(ticket, sender)))
        made = self._snapshotter
        how = {"save": made.save, "cut": made.begin_save, "written": made.finish_save}
        if reply.kind != "refuse":
            how[message.kind](str(message.fields["path"]))
        return reply

    def _origin(self, message: Message, sender: TrainerIncarnation) -> Message:
        reply = _reply(self._dispatcher.dispatch(lambda ticket: Heartbeat(ticket, sender)))
        if reply.kind == "refuse":
            return reply
        text = self._snapshotter.origin(str(message.fields["copy"])).text()
        letters = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
        return Message("answer", reply.fields, [to_wire("text", letters)])

    def _meet(self, message: Message, sender: TrainerIncarnation) -> Message:
        part, number = brought(message), int(message.fields["number"])
        response = self._dispatcher.dispatch(lambda ticket: Meet(ticket, sender, number, part))
        total = None if not isinstance(response.answer, Met) else total_of(response.answer.parts)
        reply = _reply(response)
        return reply if total is None else Message("answer", reply.fields, [to_wire("values", total)])

    def _count(
        self,
        sender: TrainerIncarnation,
        block: str,
        *,
        received: Message | None = None,
        sent: list[WireTensor] | None = None,
    ) -> None:
        # A server receives what trainers send: the words are those of the server.
        self._state.counters.add(
            f"trainer {sender.trainer}", block, calls=1,
            received_bytes=sum(len(t.data) for t in received.tensors) if received else 0,
            sent_bytes=sum(len(t.data) for t in sent or ()),
        )  # fmt: skip


def _reply(response: Response) -> Message:
    answer = response.answer
    if isinstance(answer, Refuse):
        return refusal(answer.reason, rejoin=answer.rejoin)
    return Message("answer", {"round": answer.round, "staleness": response.staleness})
