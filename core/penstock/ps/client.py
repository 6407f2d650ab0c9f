"""Client of the parameter servers, for programs that run by steps: sync, async, half-async without communicator.

sync         pushes of a step, a barrier at every server at once, reads of what the round made
async        each push is applied at once; barriers do nothing
rows         duplicates are summed before they travel; each server gets its part, numbered as it numbers them
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch

from penstock.errors import PeerError, SpecError, Unavailable
from penstock.logger import warn_once
from penstock.native.channels import Session, close_session, open_session
from penstock.native.intra_op import use_intra_op_threads_here
from penstock.ps.at_once import at_once
from penstock.ps.counters import Counters
from penstock.ps.heartbeats import HeartbeatThread
from penstock.ps.narrow import narrowed
from penstock.ps.prefetch import StepRead
from penstock.ps.remote import Descriptor, GeoCall, SendCall
from penstock.ps.row_lookups import RowLookups, is_local
from penstock.ps.rows import Table, check_rows, parts_of, summed
from penstock.ps.server_link import WAIT_S, ServerLink
from penstock.ps.settings import TrainerSettings
from penstock.ps.wire import Origin, WireTensor, bytes_of, from_wire

_log = logging.getLogger(__name__)
Tensor = torch.Tensor
_Call = tuple[int, Callable[[], None]]  # a server, and what is asked of it
_SMALL = 1024  # elements
REPORT_S = 3.0  # between two lines about servers that are not ready
GIVE_UP_S = 3.0  # for a server to answer a trainer that gives up a meeting


class TrainerClient:
    """One trainer at its servers; a `ps.remote.Remote`. Made by `connect`, which waits for the servers."""

    def __init__(self, descriptor: Descriptor, settings: TrainerSettings) -> None:
        self.descriptor, self.settings = descriptor, settings
        self._sync = descriptor.mode == "sync"
        self._session = Session(
            descriptor.trainer,
            settings.epoch,
            sync=self._sync,
            limit_s=WAIT_S,
            lease_s=settings.lease_s,
            num_servers=len(descriptor.endpoints),
        )
        self.counters = Counters()
        self.counters.also(self._native_sums)
        self.links = [
            ServerLink(i, descriptor, settings, self.counters, self._session) for i in range(len(descriptor.endpoints))
        ]
        self._reads = [StepRead(link, learns=self._sync) for link in self.links]
        # Barriers of all servers, and the reads and pushes of operators that run at the same time. What they copy is
        # copied by them: torch's own threads would spin beside a step that has all cores.
        self._pool = ThreadPoolExecutor(
            2 * len(self.links) + 2, "ps-call", initializer=use_intra_op_threads_here, initargs=(1,)
        )
        self.rows = RowLookups(self.links, self._session, self.counters, self._pool, sync=self._sync)
        self._lock = threading.Lock()
        self._heartbeat: HeartbeatThread | None = None
        self._closed = self._is_direct = False

    def connect(self) -> None:
        """Join every server. Logs every 3 s which are not ready. Raises Unavailable naming them, PeerError."""
        limit_s = self.settings.start_s
        joining = {self._pool.submit(link.join, limit_s): link.endpoint for link in self.links}
        waiting, begun = set(joining), time.monotonic()
        while waiting:
            done, waiting = wait(waiting, REPORT_S, FIRST_COMPLETED)
            failed = [f for f in done if f.exception() is not None and not isinstance(f.exception(), Unavailable)]
            if failed:
                for link in self.links:
                    link.give_up()
                failed[0].result()
            if not done:
                names = ", ".join(sorted(joining[f] for f in waiting))
                passed_s = time.monotonic() - begun
                _log.info("waiting for the parameter servers %s to start (%.0f of %.0f s)", names, passed_s, limit_s)
        failed_at = [joining[f] for f in joining if f.exception() is not None]
        if failed_at:
            raise Unavailable(
                f"the parameter servers {', '.join(failed_at)} did not start within {limit_s:.0f} s "
                "(PENSTOCK_PS_START_S). Were they started, at these endpoints?"
            )
        self._heartbeat = HeartbeatThread(self.links, within_s=self.settings.deadline_s)

    def serve_operators(self, num_threads: int = 1) -> None:
        """Let operators of programs with this descriptor reach the servers without Python; see `Servers`."""
        self._session.meet(num_threads)
        self._is_direct = True
        open_session(str(self.descriptor), self._session)
        self._arm()

    def withdraw_operators(self) -> None:
        """Undo `serve_operators`. An operator that is at the servers finishes there."""
        self._is_direct = False
        close_session(str(self.descriptor), self._session)

    def leave_threads(self) -> None:
        """The calling thread is none of those that train in step any more."""
        self._session.leave_meeting()

    def leave_threads_for(self, thread: int) -> None:
        """As if the thread with this native identifier called `leave_threads`. It has ended."""
        self._session.leave_meeting_for(thread)

    def fail_threads(self) -> None:
        """The exchange has failed: threads that wait for each other do not any more, and raise."""
        self._session.fail_meeting()

    def end_threads(self) -> None:
        """No threads train in step any more. Returns when what they have brought is pushed."""
        self._session.meet(0)

    @property
    def num_pushed_together(self) -> int:
        """How many steps of several threads operators have pushed."""
        return self._session.num_met

    def waiting_threads(self) -> Mapping[str, int]:
        """Return how many gradients operators hold that wait for those of other threads, by the names of blocks."""
        return self._session.waiting()

    def _arm(self) -> None:
        """Open channels to servers that have none, or none any more. After each step that Python did."""
        if self._is_direct and not self._closed and not self._session.is_armed:
            at_once(self._pool, [link.arm for link in self.links])

    def _native_sums(self) -> Iterator[tuple[tuple[str, str], Mapping[str, int]]]:
        for at, link in enumerate(self.links):
            for block, sums in self._session.sums(at):
                if any(sums.values()):
                    yield (link.endpoint, block), sums

    # -- gradients -------------------------------------------------------------------------------

    def send(self, variable: str, blocks: Sequence[str], at: Sequence[int], values: Sequence[Tensor]) -> None:
        """Push the gradient of each block. Returns when the servers have it."""
        with self._beside_steps():
            self._at_servers(self._calls(SendCall(variable, blocks, at, values)))

    def send_rows(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], rows: Tensor,
        values: Tensor,
    ) -> None:  # fmt: skip
        """Push a sparse gradient: duplicates summed, each part to its server.

        One server on this host that has all rows sums them itself: finding duplicates costs more than bringing them.
        A part without rows is pushed only where a round of the server has to advance the block's optimizer with it:
        ranges of rows in sync mode.
        """
        with self._beside_steps():
            self._at_servers(self._calls(SendCall(variable, blocks, at, [values], heights, rows)))

    def send_step(self, pushes: Sequence[SendCall]) -> None:
        """Push all of a step without copies of the gradients; sync: wait until every server has applied the round."""
        number = self._session.begin_step()
        if why := self._session.take_why():
            text = f"steps go through gRPC, which takes several times the processor time: {why}"
            warn_once(_log, text, self, about="channels")
        try:
            self._at_servers([call for push in pushes for call in self._calls(push, owned=True, number=number)])
            self.send_barrier()
        except BaseException:
            for link in self.links:  # a replay must not read memory that has been reused by then
                link.copy_open_round()
            raise
        finally:
            self._session.end_step()
        self._arm()

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Push within, while no operator steps: numbers of pushes have to arrive in their order. Sync has none."""
        if self._sync or not self._is_direct:
            yield
            return
        self._session.begin_push()
        try:
            yield
        finally:
            self._session.end_push()

    def _at_servers(self, calls: Iterable[_Call]) -> None:
        """Make each server's calls one after another, those of several servers at the same time."""
        of_server: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        for server, call in calls:
            of_server[server].append(call)
        at_once(self._pool, [partial(_in_order, of_one) for of_one in of_server.values()])

    def _calls(self, push: SendCall, *, owned: bool = False, number: int = 0) -> list[_Call]:
        """Return (server, call) for each block. `owned`: the tensors do not change before the barrier is answered.

        `number`: of a step that may have been applied; async.
        """
        if push.rows is not None:
            return self._calls_with_rows(push, owned=owned, number=number)
        calls: list[_Call] = []
        for block, server, value in zip(push.blocks, push.at, push.values, strict=True):
            push_part = partial(self.links[server].push, owned=owned, together=owned, number=number)
            calls.append((server, partial(push_part, block, [("values", self._on_wire(server, value))])))
        return calls

    def _calls_with_rows(self, push: SendCall, *, owned: bool, number: int) -> list[_Call]:
        table = Table.of(push.variable, push.blocks, push.at, push.heights)
        (values,) = push.values
        if is_local(table, self.links):
            check_rows(table, push.rows)
            tensors = [("rows", push.rows), ("values", values)]
            push_all = partial(self.links[table.at[0]].push, owned=owned, number=number)
            return [(table.at[0], partial(push_all, table.blocks[0], tensors))]
        different, sums = summed(push.rows, values)
        merges = len(push.rows) - len(different)
        self.counters.add(self.links[table.at[0]].endpoint, table.blocks[0], merges=merges)
        calls: list[_Call] = []
        for part in parts_of(table, different):
            if len(part.rows) or (self._sync and push.heights):
                server = table.at[part.index]
                tensors = [("rows", part.rows), ("values", self._on_wire(server, sums[part.positions]))]
                push_part = partial(self.links[server].push, owned=True, together=owned, number=number)
                calls.append((server, partial(push_part, table.blocks[part.index], tensors)))
        return calls

    def _on_wire(self, server: int, values: Tensor) -> Tensor:
        """Return what to push: in the descriptor's dtype to a server that is reached over a network."""
        return values if self.links[server].route.is_local else narrowed(values, self.descriptor.wire_dtype)

    def send_barrier(self) -> None:
        """Sync: wait until every server, those without blocks too, has applied the round."""
        if self._sync:
            self._session.forget_next()  # the answer may be lost, or not waited for to the end
            at_once(self._pool, [read.barrier for read in self._reads])

    # -- parameters ------------------------------------------------------------------------------

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Tensor]) -> None:
        """Pull each block into `out[i]`: all blocks of one server with one message."""
        of_server: defaultdict[int, list[int]] = defaultdict(list)
        for index, server in enumerate(at):
            of_server[server].append(index)
        at_once(
            self._pool,
            [
                partial(self._recv_from, server, [blocks[i] for i in indices], [out[i] for i in indices])
                for server, indices in of_server.items()
            ],
        )

    def recv_step(
        self, variables: Sequence[str], blocks: Sequence[str], at: Sequence[int], out: Sequence[Tensor]
    ) -> None:
        """Pull all that a step reads, and end its reads."""
        self.recv("", blocks, at, out)
        self.fetch_barrier()

    def _recv_from(self, server: int, blocks: Sequence[str], out: Sequence[Tensor]) -> None:
        link = self.links[server]

        def copy(found: Sequence[WireTensor]) -> None:
            for block, mine, theirs in zip(blocks, out, found, strict=True):
                _copy(block, mine, theirs, link.endpoint)
                self.counters.add(link.endpoint, block, calls=1, received_bytes=len(theirs.data))

        with self.counters.waiting(link.endpoint, blocks[0]):
            self._reads[server].read(blocks, copy)

    def fetch_barrier(self) -> None:
        """All of this step is pulled."""
        for read in self._reads:
            read.end_step()

    # -- rows ------------------------------------------------------------------------------------

    def prefetch(
        self, table: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], ids: Tensor, out: Tensor
    ) -> None:
        """Pull the rows of `ids` into `out`, from all servers at the same time; over a network each id once."""
        self.rows.look_up(Table.of(table, blocks, at, heights), ids, out)

    def changed(self, block: str, at: int) -> tuple[Tensor, Tensor]:
        """GEO: return the rows of a block that others changed since the last call, int64[n], and their values now."""
        link = self.links[at]
        with link.changed(block) as answer:
            found = {tensor.name: from_wire(tensor).clone() for tensor in answer.tensors}
        if found.keys() != {"rows", "values"} or len(found["rows"]) != len(found["values"]):
            raise PeerError(
                f"{link.endpoint} answers what changed of {block!r} with the tensors {sorted(found)}; expected as many "
                "rows as values",
                variable=block,
            )
        return found["rows"], found["values"]

    def geo(
        self,
        variable: str,
        blocks: Sequence[str],
        at: Sequence[int],
        heights: Sequence[int],
        parameter: Tensor,
        rows: Tensor | None,
    ) -> None:
        """Not of this client: GEO has a communicator of its own."""
        raise SpecError(f"mode {self.descriptor.mode!r} has no GEO exchange")

    def geo_step(self, calls: Sequence[GeoCall]) -> None:
        """Not of this client, as `geo`."""
        for call in calls:
            self.geo(call.variable, call.blocks, call.at, call.heights, call.parameter, None)

    def save(self, folder: str) -> None:
        """Have each server save what it keeps into a part of its own of `folder`, which it has to be able to reach."""
        at_once(self._pool, [partial(link.save, folder) for link in self.links])

    def begin_save(self, folder: str) -> None:
        """Have each server copy what `save` writes; each writes it while it serves."""
        at_once(self._pool, [partial(link.begin_save, folder) for link in self.links])

    def finish_save(self, folder: str) -> None:
        """Wait until the servers have written what they have copied. Any thread. Raises PeerError if one has not."""
        for link in self.links:  # not by the pool, whose threads the steps that go on meanwhile need
            link.finish_save(folder)

    def origins(self, copy: str) -> dict[str, Origin]:
        """Return each server's origin with regard to a checkpoint, by endpoint."""
        found = at_once(self._pool, [partial(link.origin, copy) for link in self.links])
        return {link.endpoint: origin for link, origin in zip(self.links, found, strict=True)}

    def meet(self, part: Tensor | None) -> Tensor | None:
        """Wait until all live trainers call this; return the sum of their parts. For None: only wait.

        They meet at every server, since none knows the waits at another; the first has the parts. Sync: rounds go on
        meanwhile without this trainer. One that cannot wait to the end takes part from the open round on.
        """
        self._session.forget_next()
        calls = [partial(self._meet_at, link, part if at == 0 else None) for at, link in enumerate(self.links)]
        try:
            return at_once(self._pool, calls)[0]
        except BaseException:
            self._give_up_meeting()
            raise

    def _meet_at(self, link: ServerLink, part: Tensor | None) -> Tensor | None:
        try:
            return link.meet(part)
        except Exception:
            raise
        except BaseException:  # an interrupt, after which calls to the other servers would wait on
            self._give_up_meeting()
            raise

    def _give_up_meeting(self) -> None:
        """As far as servers answer soon. Of one that does not, the next call learns the round."""

        def give_up(link: ServerLink) -> None:
            with suppress(Unavailable, PeerError):
                link.give_up_meeting(GIVE_UP_S)

        at_once(self._pool, [partial(give_up, link) for link in self.links])

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave every server. What was sent in these modes waits nowhere, so nothing is to be pushed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.close()
        self.rows.close()
        close_session(str(self.descriptor), self._session)
        for read in self._reads:
            read.end_step()
        at_once(self._pool, [link.leave for link in self.links])
        self._pool.shutdown()


def _in_order(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _copy(block: str, mine: Tensor, theirs: WireTensor, endpoint: str) -> None:
    dtype = str(mine.dtype).removeprefix("torch.")
    if theirs.shape != tuple(mine.shape) or theirs.dtype != dtype:
        raise PeerError(
            f"{endpoint} has {block!r} as {theirs.dtype}{list(theirs.shape)}; this trainer's program has "
            f"{dtype}{list(mine.shape)}. Were both made by the same transpiler call?",
            variable=block,
        )
    if mine.numel() < _SMALL:
        mine.copy_(from_wire(theirs))
    else:  # numpy lets other threads run, and needs no threads of torch's own
        np.copyto(bytes_of(mine), np.frombuffer(theirs.data, np.uint8))
