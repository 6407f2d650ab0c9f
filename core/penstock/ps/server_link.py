"""A trainer's connection to one server: calls that survive lost answers, cut connections and restarts.

a call        is retried, with the same key, until it is answered or the server was unreachable for `deadline_s`
unreachable   no answer to anything: a call may wait (for other trainers, for a server that saves) while heartbeats are
              answered
a heartbeat   is sent when nothing else was for a third of the lease. It also detects a half-open connection: one that
              is not answered breaks the calls in progress, which then reconnect
join, replay  precede the first call and follow every break: a server that was started again has forgotten the open
              round, and one that was not takes a replay for the repetition that it is
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch

from penstock.backoff import Backoff
from penstock.errors import PeerError, Unavailable
from penstock.logger import warn_once
from penstock.machine.capability import capability
from penstock.native.channels import NUM_CHANNELS, Session, next_number
from penstock.ps.counters import Counters
from penstock.ps.remote import Descriptor
from penstock.ps.retry import FIRST_S, LARGEST_S, Acknowledged, ChannelOpenings, Named, OpenRound, missed
from penstock.ps.rounds.messages import GIVE_UP, TrainerIncarnation
from penstock.ps.settings import TrainerSettings
from penstock.ps.transport.frames import Connection, close_connection
from penstock.ps.transport.local import Answered
from penstock.ps.transport.secure import Tls
from penstock.ps.transport.tcp import Address, Route
from penstock.ps.wire import Message, Origin, Value, WireTensor, from_wire, to_wire

_log = logging.getLogger(__name__)
WAIT_S = 600.0  # of one attempt; then it is repeated. Heartbeats detect a silent server before
LEAVE_S = 5.0  # the last server may end before its answer arrives
CHANNEL_S = 5.0  # for a server to open a channel
_MAX_REJOINS = 20
_TOGETHER = 8 << 20  # bytes of pushes that wait for their barrier

T = TypeVar("T")


class _NotAMember(Unavailable):
    """This trainer is not a member, or no longer."""


def address_of(endpoint: str, settings: TrainerSettings) -> Address:
    """Return how to reach a server. Raises OSError for a certificate that cannot be read."""
    ca = None if settings.tls is None else settings.tls.ca
    tls = None if ca is None else Tls(root=ca.read_bytes())
    return Address(endpoint, settings.job, settings.token, tls, settings.shared_memory, settings.channels)


class ServerLink:
    """One server, as one trainer uses it. Thread-safe. Sync mode has rounds; in others a block's pushes are numbered.

    Every call raises Unavailable naming the endpoint, or PeerError when the server refuses.
    """

    def __init__(
        self, index: int, descriptor: Descriptor, settings: TrainerSettings, counters: Counters, session: Session
    ) -> None:
        endpoint = descriptor.endpoints[index]
        self._session, self._index = session, index
        self.endpoint, self.sender = endpoint, TrainerIncarnation(descriptor.trainer, settings.epoch)
        self._mode, self._num_trainers = descriptor.mode, descriptor.num_trainers
        self._settings, self._counters = settings, counters
        self.lease_s = settings.lease_s  # at this server
        self.route = Route(address_of(endpoint, settings))
        self._round: OpenRound | None = None
        if descriptor.mode == "sync":
            tell = functools.partial(session.reached, index)
            self._round = OpenRound(endpoint, natively=lambda: session.round(index), tell=tell)
        # where there are no rounds
        self._acknowledged = Acknowledged(endpoint, natively=lambda: session.acknowledged(index))
        self._openings, self._narrows = ChannelOpenings(), descriptor.wire_dtype != "float32"
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._joining = threading.Lock()
        self._joined_as = 0  # counts joins; 0: not joined
        self._was_lost = False  # the server knew this trainer no more
        self._num_joins, self._num_failures, self._failure = 0, 0, ""
        self._sent_at = self._answered_at = time.monotonic()
        self._meeting = -1  # the next one's number; not known yet
        self._leaving = False
        self._ended = threading.Event()

    # -- what a trainer asks for -----------------------------------------------------------------

    @property
    def round(self) -> int:
        """The open round, in sync mode."""
        return 0 if self._round is None else self._round.number

    def join(self, limit_s: float) -> None:
        """Become a member. `limit_s`: how long the server may take to start."""
        self._retry(self._ready, "to be joined", limit_s, since_answer=False)

    def push(self, block: str, tensors: Named, *, owned: bool = False, together: bool = False, number: int = 0) -> None:
        """Push the gradient of a block: [("values", …)], or with ("rows", …) before. It is applied once.

        Returns when the server has it; in sync mode only the barrier confirms it, and to a server on this host, or
        `together` with others, it may bring it too. `owned`: the tensors' memory does not change any more, so sync mode
        needs no copy. `number`: of a push that was sent before, in the other modes.
        """
        if self._round is not None:
            # On one host a message costs more than its bytes; over a network it may travel while others are computed.
            waits = together or self.route.is_local
            number, kept = self._round.keep(block, tensors, owned=owned, waits=waits)
            for name, found in self._round.too_much(_TOGETHER) if waits else [(block, kept)]:
                self._push(name, number, found)
            return
        # One by one: a server takes a smaller number after a larger one for a repetition.
        with self._turns[block]:
            # Of the process, as the epoch is: a client that is opened again repeats no number.
            number = number or next_number()
            self._push(block, number, [to_wire(name, tensor) for name, tensor in tensors])
            self._acknowledged.note(number)

    def _push(self, block: str, number: int, views: Sequence[WireTensor]) -> None:
        of = "" if self._round is None else f" of round {number}"
        self._ask("push", f"to take {block!r}{of}", views, count_as=block, round=number, block=block)

    def barrier(self, reads: Sequence[str] = ()) -> Answered | None:
        """Wait until the round is applied. Sync mode only.

        Return what `pull(reads)` would now, if the same message could bring it.
        """
        if self._round is None:
            return None
        number, waiting = self._round.waiting()
        what = f"to apply round {number}"
        if not waiting and not reads:
            answered = self._ask("barrier", what, round=number)
            self._round.applied(int(answered.message.fields["round"]))
            return None
        views = [WireTensor(f"{t.name}:{block}", t.dtype, t.shape, t.data) for block, kept in waiting for t in kept]
        asked = json.dumps(list(reads))
        with self._counters.waiting(self.endpoint):
            answered = self._ask("step", what, views, count_as=None, round=number, blocks=asked)
        for block, kept in waiting:
            self._counters.add(self.endpoint, block, calls=1, sent_bytes=sum(len(t.data) for t in kept))
        self._counters.add(self.endpoint, calls=1)
        as_of = int(answered.message.fields["round"])
        self._round.applied(as_of)
        if reads and self._round.to_read() == as_of:
            return answered
        answered.release()  # a trainer that was disconnected continues with a later round, or reads nothing
        return None

    def copy_open_round(self) -> None:
        """Keep copies of what was pushed to the open round: memory that was not to change may change from now on."""
        if self._round is not None:
            with self._joining:  # no replay reads it meanwhile
                self._round.copy()

    def pull(self, blocks: Sequence[str]) -> Answered:
        """Read blocks: a tensor each, valid until the answer is released. Sync: as they begin the open round.

        Not counted here: the caller counts the blocks that it takes.
        """
        what = f"for {', '.join(blocks)}"
        return self._ask("pull", what, count_as=None, round=self._to_read(), blocks=json.dumps(list(blocks)))

    def lookup(self, table: str, ids: torch.Tensor, *, count_as: str = "", at_once: bool = False) -> Answered:
        """Read rows of a block or table: one tensor. `at_once`: as they are now, whatever round is open."""
        views = [to_wire("ids", ids)]
        number = 0 if at_once else self._to_read()
        what = f"for {len(ids)} rows of {table!r}"
        return self._ask("lookup", what, views, count_as=count_as, round=number, table=table)

    def changed(self, block: str) -> Answered:
        """Read what others changed of a block since the last call (GEO)."""
        return self._ask("changed", f"for what changed of {block!r}", count_as=block, block=block)

    def save(self, path: str) -> None:
        """Have the server save its part into a folder that it can reach."""
        self._ask("save", f"to save to {path}", path=path).release()

    def begin_save(self, path: str) -> None:
        """Have the server copy its part, and write it while it serves; `finish_save` waits for that."""
        self._ask("cut", f"to copy what is written to {path}", path=path).release()

    def finish_save(self, path: str) -> None:
        """Wait until the server has written what it has copied."""
        self._ask("written", f"to save to {path}", path=path).release()

    def origin(self, copy: str) -> Origin:
        """Return whether the server's values come from a checkpoint, by its token."""
        with self._ask("origin", "where its values come from", copy=copy) as answer:
            return Origin.parse(bytes(answer.tensors[0].data))

    def meet(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """Wait until all live trainers are here; return the sum of what they brought, if it was anything."""
        if self._meeting < 0:
            answered = self._ask("meet", "which meeting is next", number=-1)
            self._meeting = int(answered.message.fields["round"])
        views = [] if part is None else [to_wire("values", part)]
        number, self._meeting = self._meeting, -1  # after a refusal: whichever is next then
        answered = self._ask("meet", f"for meeting {number} of the trainers", views, number=number)
        self._meeting = number + 1
        if self._round is not None:
            self._round.catch_up(int(answered.message.fields["round"]))
        if part is None:
            return None
        with answered as answer:
            return from_wire(answer.tensors[0]).clone()

    def give_up_meeting(self, limit_s: float) -> None:
        """Wait in no meeting any more, and learn which round is open. Once, within `limit_s`. Raises as `_exchange`."""
        deadline = time.monotonic() + limit_s
        self._attempt(self._message("meet", number=GIVE_UP), limit_s, limit_s).release()
        if self._round is not None:
            left_s = max(deadline - time.monotonic(), 0.05)
            # Answered between rounds: one that is being applied is without this trainer.
            with self._attempt(self._message("pull", round=0, blocks="[]"), left_s, left_s) as answer:
                self._round.catch_up(int(answer.fields["round"]))

    def _to_read(self) -> int:
        return 0 if self._round is None else self._round.to_read()

    def heartbeat_is_due(self) -> bool:
        """Whether nothing was sent for a third of the lease, or of the time that the server may be unreachable."""
        silent_s = min(self.lease_s, self._settings.deadline_s) / 3
        sent_at = max(self._sent_at, self._session.sent_at(self._index))
        return self._num_joins > 0 and time.monotonic() - sent_at >= silent_s

    def heartbeat(self) -> None:
        """Renew the lease. A server that does not answer is left to the next call to report. Raises PeerError."""
        # A heartbeat is sent within half a lease. A half-open connection is noticed while there is time to find
        # another, of the lease and of the deadline.
        limit_s = min(self.lease_s / 4, self._settings.deadline_s / 3)
        try:
            self._attempt(self._message("beat"), limit_s, self._settings.deadline_s).release()
            self._counters.add(self.endpoint, calls=1)
        except Unavailable:
            self._counters.add(self.endpoint, retries=1)

    def give_up(self) -> None:
        """End calls that are being repeated: they raise what they last met."""
        self._ended.set()
        self._session.disarm(self._index)
        self.route.close()

    def arm(self) -> None:
        """Open channels, by which operators reach the server from now on, unless they do so already or it has none.

        Between two steps: the open round has no pushes. What fails is tried again (ChannelOpenings).
        """
        joined_as = self._joined_as
        if not joined_as or not self._may_arm():
            return
        opened: list[Connection] = []
        try:
            for _ in range(NUM_CHANNELS):
                connection, blocks = self.route.open_channel(self._message("channel"), deadline_s=CHANNEL_S)
                opened.append(connection)
        except (PeerError, Unavailable) as error:
            text = f"steps at {self.endpoint} go through gRPC, which takes several times the processor time: {error}"
            if self._openings.failed(time.monotonic(), is_refused=isinstance(error, PeerError)):
                warn_once(_log, text, self, about="channels")
        finally:
            if len(opened) < NUM_CHANNELS:
                for connection in opened:
                    close_connection(connection)
        if len(opened) < NUM_CHANNELS:
            return
        local = self.route.is_local
        shares = local and capability("memfd").present
        if self._session.arm(self._index, opened, blocks, self._to_read(), shares=shares, local=local):
            self._openings.succeeded()
        else:
            self._openings.failed(time.monotonic(), is_refused=True)
        # Lost meanwhile, and perhaps joined again: what gives a connection up disarms after it has said so.
        if self._joined_as != joined_as or self._leaving:
            self._session.disarm(self._index)

    def _may_arm(self) -> bool:
        if not self._openings.is_due(time.monotonic()) or self._session.is_armed_at(self._index):
            return False
        if self._narrows and not self.route.is_local:  # only Python narrows
            return False
        return self._round is None or not self._round.pushes()[1]

    def leave(self) -> None:
        """Leave the job, and end. Logs a warning if the server does not answer."""
        limit_s = min(LEAVE_S, self._settings.deadline_s)
        self._end_joining(limit_s)
        self._session.disarm(self._index)
        try:
            if self._num_joins:
                message = self._message("leave")
                self._retry(lambda left: self._leave(message, left), "to let go", limit_s, since_answer=False)
        except (Unavailable, PeerError) as error:
            _log.warning("trainer %d leaves without notifying its server: %s", self.sender.trainer, error)
        finally:
            self._ended.set()
            self.route.close()

    def _leave(self, message: Message, limit_s: float) -> None:
        with contextlib.suppress(_NotAMember):  # a server that was started again without its state: gone already
            self._exchange(message, limit_s).release()

    def _end_joining(self, limit_s: float) -> None:
        """See to it that no join follows the leave. One on its way is waited for, then broken."""
        self._leaving = True  # no join begins after this, and one that has begun holds the lock
        if self._joining.acquire(timeout=limit_s):
            self._joining.release()
        else:
            self.route.drop()

    # -- how it is asked -------------------------------------------------------------------------

    def _message(self, kind: str, tensors: Sequence[WireTensor] = (), **fields: Value) -> Message:
        sender: dict[str, Value] = {
            "job": self._settings.job,
            "trainer": self.sender.trainer,
            "epoch": self.sender.epoch,
        }
        return Message(kind, {**sender, **fields}, tensors)

    def _ask(
        self, kind: str, what: str, tensors: Sequence[WireTensor] = (), *, count_as: str | None = "",
        **fields: Value,
    ) -> Answered:  # fmt: skip
        message = self._message(kind, tensors, **fields)
        with nullcontext() if count_as is None else self._counters.waiting(self.endpoint, count_as):
            answered = self._retry(
                lambda left: self._attempt(message, WAIT_S, left), what, self._settings.deadline_s, since_answer=True
            )
        if count_as is not None:
            self._counters.add(
                self.endpoint,
                count_as,
                calls=1,
                sent_bytes=sum(len(t.data) for t in tensors),
                received_bytes=sum(len(t.data) for t in answered.message.tensors),
                staleness=int(answered.message.fields["staleness"]),
            )
        if not answered.message.tensors:
            answered.release()
        return answered

    def _retry(self, attempt: Callable[[float], T], what: str, limit_s: float, *, since_answer: bool) -> T:
        """Repeat `attempt(seconds left)` until it succeeds, or `limit_s` have passed; since the last word, or the call.

        Returns what it gave. Raises Unavailable, and what else it raises.
        """
        began = time.monotonic()
        backoff, rejoins = Backoff(FIRST_S, LARGEST_S, limit_s=limit_s), 0

        def unreachable_s() -> float:
            answered_at = max(began, self._answered_at, self._session.answered_at(self._index))
            return time.monotonic() - (answered_at if since_answer else began)

        while True:
            try:
                return attempt(max(limit_s - unreachable_s(), 0.05))
            except Unavailable as error:
                rejoins += isinstance(error, _NotAMember)
                silent_s = unreachable_s()
                pause = None if rejoins > _MAX_REJOINS or self._ended.is_set() else backoff.wait_within_s(silent_s)
                if pause is None:
                    raise self._unreachable(what, silent_s, limit_s, error) from error
                self._counters.add(self.endpoint, retries=1)
            self._ended.wait(pause)

    def _unreachable(self, what: str, unreachable_s: float, limit_s: float, error: Unavailable) -> Unavailable:
        return Unavailable(
            f"parameter server {self.endpoint} has been unreachable for {unreachable_s:.0f} s (limit {limit_s:.0f} s) "
            f"when trainer {self.sender.trainer} asked it {what}: {error}. Is it running? Started again at the same "
            "endpoint, with the PENSTOCK_PS_STATE_DIR that it had, it is found again",
            endpoint=self.endpoint,
        )

    def _attempt(self, message: Message, deadline_s: float, join_s: float) -> Answered:
        """Ask once, within `deadline_s`; join before if there is need to, within `join_s`. Raises as `_exchange`."""
        joined_as = self._ready(join_s)
        try:
            return self._exchange(message, deadline_s)
        except _NotAMember:
            self._lost(joined_as, breaks=False)
            raise
        except Unavailable:
            self._lost(joined_as, breaks=True)
            raise

    def _exchange(self, message: Message, deadline_s: float) -> Answered:
        """Ask once. Raises Unavailable, _NotAMember, PeerError."""
        self._sent_at = sent_at = time.monotonic()
        answered = self.route.call(message, deadline_s=deadline_s)
        self._answered_at = time.monotonic()
        answer = answered.message
        if answer.kind == "answer":
            self._session.renewed(self._index, sent_at)
            return answered
        answered.release()
        if answer.kind != "refuse":
            raise PeerError(f"{self.endpoint} answers {message.kind} with {answer.kind}")
        text = f"{self.endpoint} refuses {message.kind}: {answer.fields['reason']}"
        raise _NotAMember(text) if answer.fields["rejoin"] else PeerError(text, endpoint=self.endpoint)

    def _ready(self, limit_s: float) -> int:
        """Join, if there is need to; return which join is in force. Raises Unavailable after `limit_s` of silence."""
        joined_as, failures = self._joined_as, self._num_failures
        if joined_as:
            return joined_as
        if not self._joining.acquire(timeout=min(limit_s, WAIT_S)):
            raise Unavailable(f"{self.endpoint} has not let this trainer join")  # another thread asks it to
        try:
            if self._joined_as:
                return self._joined_as
            if self._leaving:
                raise Unavailable("this trainer has left")
            if self._num_failures != failures:
                raise Unavailable(self._failure)  # another thread has just tried
            try:
                self._join_and_replay(limit_s)
            except Unavailable as error:
                self._num_failures, self._failure = self._num_failures + 1, str(error)
                self.route.drop()
                raise
            self._num_joins += 1
            self._joined_as = self._num_joins
            return self._joined_as
        finally:
            self._joining.release()

    def _join_and_replay(self, limit_s: float) -> None:
        lease_s, deadline = self._settings.lease_s, time.monotonic() + limit_s
        agree = self._message("agree", mode=self._mode, trainers=self._num_trainers)
        with self._exchange(agree, min(lease_s, limit_s)) as answer:
            self._follow_lease(answer)
        acknowledged = self._acknowledged.newest  # before it is asked how far it is
        self._openings.succeeded()  # it may be another server than the one that had none
        with self._exchange(self._message("join"), min(lease_s, max(deadline - time.monotonic(), 0.05))) as answer:
            first = int(answer.fields["round"])
        if self._round is None:
            self._acknowledged.check(first, acknowledged)
            self._report_rejoin("")
            return
        self._round.joined(first)
        number, pushes = self._round.pushes()
        push_s = min(lease_s, self._settings.deadline_s)  # each anew: the server has just answered
        for block, views in pushes:
            self._exchange(self._message("push", views, round=number, block=block), push_s).release()
        self._report_rejoin(missed(number, first))

    def _follow_lease(self, answer: Message) -> None:
        """A server with a shorter lease loses this trainer sooner."""
        given = [float(from_wire(tensor)) for tensor in answer.tensors if tensor.name == "lease_s"]
        self.lease_s = min([self._settings.lease_s, *given])
        self._session.set_lease(self._index, self.lease_s)

    def _report_rejoin(self, missed: str) -> None:
        """Log it, once for each time, and what it means for the results."""
        if not self._num_joins:
            return
        was_lost, self._was_lost = self._was_lost, False
        if was_lost:
            # A server that was started again without its state answers the same: it does not know its former members.
            why = (
                f"it was declared lost by {self.endpoint}, which had no message from it for its lease ("
                f"PENSTOCK_PS_LEASE_S, {self.lease_s:g} s) or was started again,"
            )
        else:
            why = f"its connection to {self.endpoint} had failed,"
        _log.warning("trainer %d: %s and it has joined again%s", self.sender.trainer, why, missed)

    def _lost(self, joined_as: int, *, breaks: bool) -> None:
        """A call under this join has failed: the next one joins anew. `breaks`: calls in progress fail too."""
        if self._joined_as != joined_as:
            return
        with self._joining:
            if self._joined_as != joined_as:
                return
            self._joined_as, self._was_lost = 0, not breaks
            self._session.disarm(self._index)
            if breaks:
                self.route.drop()
