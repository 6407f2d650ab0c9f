"""A parameter server: a storage behind a round machine, for trainers on this host and others.

`serve` blocks until every trainer has left; then nothing of it is left, no thread and no socket. It ends with an error
when trainers do not come, or when an update cannot be carried out: the log is then as it was after the last update that
was acknowledged, and a server that is started again continues from there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock import telemetry
from penstock.errors import PeerError, PenstockError, SpecError, Unavailable
from penstock.ps.channel_requests import ChannelRequests
from penstock.ps.dispatcher import Dispatcher, Stragglers
from penstock.ps.durability.server_snapshots import StateLock
from penstock.ps.handover import Handover
from penstock.ps.persistence import Recovered, Snapshotter, has_state, other_state, recover_server, restore_from
from penstock.ps.requests import Requests
from penstock.ps.rounds.immediate import ImmediateUpdates
from penstock.ps.rounds.machine import Membership, RoundMachine
from penstock.ps.rounds.messages import Tick, TrainerIncarnation
from penstock.ps.rounds.sync import SyncRounds
from penstock.ps.settings import ServerSettings
from penstock.ps.state import ServerState, Updates
from penstock.ps.storage import Storage
from penstock.ps.transport.local import Guarded, LineServer, listener_beside
from penstock.ps.transport.secure import Tls, server_context
from penstock.ps.transport.tcp import TcpServer
from penstock.ps.wire import Message

_log = logging.getLogger(__name__)
TICK_S = 0.25
LOOK_S = 1.0  # between looks at the size of the log
SIGNAL_S = 0.5  # at most so much later than it came is a signal handled


def serve(settings: ServerSettings, storage: Storage) -> None:
    """Serve until every trainer has left. Raises Unavailable, SpecError, PeerError, OSError.

    The server starts and stops on a thread of its own: Python runs handlers of signals in the main thread, between any
    two of its instructions, and one that raised while a transport starts would leave that open for ever.
    """
    server = ParameterServer(settings, storage)
    with ThreadPoolExecutor(1, thread_name_prefix="ps-server") as thread:
        try:
            served = thread.submit(_serve, server)
            # A signal that another thread receives, or this one just before it sleeps, does not wake this one.
            while not wait([served], SIGNAL_S).done:
                pass
        except BaseException:
            server.interrupt()
            raise
    served.result()


def _serve(server: ParameterServer) -> None:
    with server:
        server.start()
        server.wait()


class ParameterServer:
    """One server. `counters`: by trainer and block; `staleness`: updates behind -> number of pushes."""

    def __init__(self, settings: ServerSettings, storage: Storage) -> None:
        self._state = ServerState(settings, storage)
        self.settings, self.counters = settings, self._state.counters
        self._ended, self._stopping = threading.Event(), threading.Event()
        self._has_finished = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._transports: list[LineServer | TcpServer] = []
        self._is_open = self._uses_grpc = False
        self._handover: Handover | None = None
        self.port = 0

    @property
    def staleness(self) -> dict[int, int]:
        """How many pushes were how many updates of others behind."""
        return dict(self._updates.staleness + self._state.prepared.staleness())

    # -- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Recover what there is, and listen. Raises what `serve` does; nothing is left open then."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        settings, state = self.settings, self._state
        self._state_lock = StateLock(settings.folder)
        self._is_open = True
        recovered, is_recut = self._recover()
        state.goes_on = is_recut or (settings.folder is not None and has_state(settings.folder))
        state.open_log(recovered.next_sequence)
        machine = self._machine(recovered)
        self._updates = Updates(state)
        self._dispatcher = Dispatcher(machine, self._updates, self)
        self.snapshotter = Snapshotter(state, self._dispatcher)
        if is_recut:
            self.snapshotter.take()  # the next start goes on from here, whatever becomes of the other servers' state
        self._stragglers = Stragglers(settings, self._dispatcher, time.monotonic())
        if machine.members.all_left:  # it was killed between the last leave and its end
            self.finished()
        self._listen()
        for name, run in (("ps-tick", self._tick), ("ps-snapshot", self._snapshots)):
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
            self._threads[-1].start()
        telemetry.exchange(self.counters, tables=state.storage.tables, mode=settings.mode, work=state.work)

    def _machine(self, recovered: Recovered) -> RoundMachine:
        """Return the machine that goes on from there."""
        settings, applied = self.settings, self._state.applied
        members = Membership(expected=settings.fanin, lease_s=settings.lease_s)
        members.restore(recovered.roster, time.monotonic())
        if settings.mode == "sync":
            return SyncRounds(members, round=applied.round)
        return ImmediateUpdates(members, applied=applied.applied)

    def _recover(self) -> tuple[Recovered, bool]:
        settings, state, folder = self.settings, self._state, self.settings.folder
        if folder is None:
            self._look_for_handover()
            return Recovered(), False
        others = other_state(folder) if settings.num_servers else []
        if others:
            cuts = [snapshot.cut for snapshot in restore_from(others, state.storage)]
            if any(cut.job != settings.job for cut in cuts):
                raise SpecError(f"{settings.state_dir} has the state of job {cuts[0].job!r}, not {settings.job!r}")
            state.applied.round = max(cut.round for cut in cuts)
            self._report(logging.INFO, f"goes on from what {len(others)} servers left in {settings.state_dir}")
            return Recovered(), True
        found = recover_server(folder, state.storage, state.applied, job=settings.job, blocks=list(state.specs))
        if found.next_sequence:
            self._report(logging.INFO, f"goes on from {folder}, with {found.num_records} updates of its log")
        return found, False

    def _listen(self) -> None:
        settings = self.settings
        requests = Requests(self._state, self._dispatcher, self.snapshotter, self._admit)
        channels = ChannelRequests(self._state, self._dispatcher, requests)
        local = LineServer(requests.answer, job=settings.job, token=settings.token, channels=channels)
        self._transports.append(local)
        requests.address = local.address
        files, tls = settings.tls, None
        if files is not None and files.cert is not None and files.key is not None:
            tls = Tls(key=files.key.read_bytes(), certificate=files.cert.read_bytes())
        try:
            context = None if tls is None else server_context(tls)
        except PeerError as error:
            text = f"steps go through gRPC, which takes several times the processor time: {error}"
            self._report(logging.WARNING, text)
        else:
            listener = listener_beside(settings.endpoint)
            streams = LineServer(
                requests.answer, job=settings.job, token=settings.token, channels=channels, listener=listener,
                tls=context,
            )  # fmt: skip
            self._transports.append(streams)
            requests.port = listener.getsockname()[1]

        def over_grpc(message: Message) -> Message | Guarded:
            self._uses_grpc |= message.kind not in ("where", "port")  # with which a trainer finds another way
            return requests.answer(message)

        # Barriers and reads of a sync round hold a thread while they wait.
        remote = TcpServer(
            over_grpc, address=settings.endpoint, job=settings.job, token=settings.token,
            num_threads=32 + 16 * settings.fanin, tls=tls,
        )  # fmt: skip
        self._transports.append(remote)
        self.port = remote.port

    # -- handover, where no folder is configured ----------------------------------------------------

    def _look_for_handover(self) -> None:
        folder, unset = self.settings.handover_dir, "no PENSTOCK_PS_STATE_DIR is set"
        anew = "a server that is started again begins anew"
        if folder is None:
            self._report(logging.WARNING, f"{unset}: {anew}")
            return
        try:
            found = Handover(folder, lambda text: self._report(logging.INFO, text))
            found.check_writable()
            with contextlib.suppress(Unavailable):  # the server before is still writing: looked for again at joins
                found.look()
        except OSError as error:
            self._report(logging.WARNING, f"{unset}, and {folder} cannot be used ({error}): {anew}")
            return
        self._handover = found
        how = f"stopped by a signal, it leaves its state in {folder} for the next start; killed, it leaves nothing"
        self._report(logging.WARNING, f"{unset}: {how}")
        if found.is_open:
            self._report(logging.INFO, f"{folder} has the state of a server that was stopped, if its trainers go on")

    def _admit(self, sender: TrainerIncarnation) -> None:
        """Before a trainer joins: see `Handover.admit`. One that will be refused decides nothing.

        Raises Unavailable, PeerError.
        """
        if self._handover is None:
            return
        with self._dispatcher.frozen():
            is_refused = bool(self._dispatcher.machine.members.refusal(sender))
        if not is_refused:
            self._handover.admit(sender, self._take_over)

    def _take_over(self, path: Path) -> None:
        """Go on from what the server before has left. If that fails, this one ends with the error.

        Raises Unavailable then: the trainers may meet a server that can, so they are not refused.
        """
        state, settings = self._state, self.settings
        try:
            found = recover_server(
                path.parent, state.storage, state.applied, job=settings.job, blocks=list(state.specs)
            )
            with self._dispatcher.frozen():
                self._dispatcher.machine = self._machine(found)
            state.goes_on = True
        except Exception as error:
            self._failure = self._failure or error
            self._ended.set()
            raise Unavailable(f"the server cannot go on: {error}") from error

    def _holds_handover(self) -> bool:
        """Take hold of where the state is left, if trainers may still be training: the first thing at the end.

        Whether there are any is known when the last request has ended.
        """
        handover = self._handover
        if handover is None or not hasattr(self, "snapshotter") or self._has_finished or self._failure is not None:
            return False
        have_ended = not self._uses_grpc and not any(
            transport.num_clients for transport in self._transports if isinstance(transport, LineServer)
        )  # all trainers: of this host then, and none is connected
        if have_ended:
            return False
        try:
            handover.hold()
        except (Unavailable, OSError) as error:
            self._report(logging.ERROR, f"its state cannot be left in {handover.folder}: {error}")
            return False
        return True

    def _hand_over(self, handover: Handover) -> None:
        """Leave the state to the next server. The last thing that a server does."""
        if self._has_finished or self._failure is not None:
            return  # since it was held
        with self._dispatcher.frozen():
            roster = self._dispatcher.machine.members.roster()
        if not roster.newest.keys() - roster.left:
            return  # none has joined, so what the server before has left is not decided on, and stays
        handover.clear()
        try:
            self.snapshotter.write_at(handover.folder)
        except Exception as error:  # noqa: BLE001  # memory may run out, too: whatever it is, its log says so
            text = f"its state cannot be left in {handover.folder}, so trainers cannot go on: {error}"
            self._report(logging.ERROR, text)
            return
        how = "Started again here with the same command, before trainers give up (PENSTOCK_PS_DEADLINE_S), it goes on"
        self._report(logging.INFO, f"was stopped during training, and leaves its state in {handover.folder}. {how}")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all trainers have left; return whether they have. Raises what ended the server early."""
        self._ended.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return self._has_finished

    def interrupt(self) -> None:
        """Let `wait` return, from any thread, though trainers have not left."""
        self._ended.set()

    def close(self) -> None:
        """End: stop listening, and release files and threads. A second call does nothing.

        Requests that wait are refused if all trainers had left. Else connections break: trainers reconnect to a server
        that is started again.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._stopping.set()
        hands_over = self._holds_handover()  # before its port is free
        if self._handover is not None:
            self._handover.stop()
        if hasattr(self, "_dispatcher"):
            self._dispatcher.stop("the server has ended", refuses=self._has_finished)
        for transport in self._transports:
            transport.close()
        for thread in self._threads:
            thread.join()
        telemetry.end_exchange(self.counters)  # nothing changes any more; the process may go on, without these tables
        try:
            if self._has_finished and self._failure is None:
                self._state.log.append(Message("finished", {}))
                self.snapshotter.take(is_finished=True)
            elif self._handover is not None and hands_over:
                self._hand_over(self._handover)
        finally:
            if self._handover is not None:
                self._handover.let_go()
            if hasattr(self, "_updates"):
                self._updates.close()
            self._state.log.close()
            self._state_lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- background threads ----------------------------------------------------------------------

    def _tick(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self._dispatcher.notify(Tick(TICK_S))
                report = self._stragglers.look(time.monotonic())
            except Exception as error:  # noqa: BLE001  # recorded, and raised by `wait`
                self.failed(error)
                return
            if report:
                self._report(logging.WARNING, report)

    def _wait_for_snapshot(self, *, by_size: bool) -> bool:
        """Wait until one is due, by time or by the size of the log; return False when the server ends."""
        due = time.monotonic() + self.settings.snapshot_every_s
        while not self._stopping.wait(min(LOOK_S, max(0.0, due - time.monotonic()))):
            if time.monotonic() >= due or (by_size and self.snapshotter.is_due):
                return True
        return False

    def _snapshots(self) -> None:
        succeeds = True  # after a failure it would be due at every look
        while self._wait_for_snapshot(by_size=succeeds):
            try:
                self._expire()  # before: what a snapshot holds and what is logged after it are within capacity
                self.snapshotter.take()
                succeeds = True
            except (OSError, PenstockError) as error:  # the log still has everything
                succeeds = False
                self._report(logging.ERROR, f"the snapshot failed, the one before holds: {error}")
            except Exception as error:  # noqa: BLE001  # recorded, and raised by `wait`
                self.failed(error)
                return

    def _expire(self) -> None:
        for name, spec in self._state.specs.items():
            if not spec.is_table:
                continue
            with self._state.locks.of([name]):
                dropped = self._state.storage.expire(name)
            if dropped:
                text = f"dropped {dropped} rows of table {name!r}, which were unused for as long as the program allows"
                self._report(logging.INFO, text)

    def _report(self, level: int, what: str) -> None:
        _log.log(level, "parameter server %d at %s: %s", self.settings.index, self.settings.endpoint, what)

    # -- what the dispatcher reports (dispatcher.Lifecycle) -------------------------------------

    def lost(self, trainer: int) -> None:
        """Report a lost trainer."""
        silent = f"no message from it for {self.settings.lease_s:g} s"
        self._report(logging.WARNING, f"trainer {trainer} is lost: {silent}. The others go on without it")

    def finished(self) -> None:
        """Every trainer has left."""
        self._has_finished = True
        self._ended.set()

    def failed(self, error: BaseException) -> None:
        """End with an error. Trainers receive one that another start would meet again."""
        if self._failure is None:
            self._failure = error
        is_final = isinstance(error, PenstockError) and not isinstance(error, Unavailable)
        self._dispatcher.stop(f"the server has ended: {error}", refuses=is_final)
        self._ended.set()
