"""The agent's shell: it holds the websocket, renews the lease file, and carries out what `reconcile` decides.

Everything runs on one event loop. A lost connection changes nothing here but the lease, which is not renewed: the
replicas go on, and those of jobs that ask for a stop end when their guards see its grace pass. Cancellation: `stop()`
ends all replicas within 10 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidMessage, InvalidStatus, WebSocketException

from penstock.backoff import Backoff
from penstock.client import AuthError, Client, is_loopback
from penstock.errors import PeerError, SpecError, UserError
from penstock.failover import ServerAddresses
from penstock.machine.findings import Finding
from penstock.process import cell, proc
from penstock.protocol.agent import (
    Desired,
    DesiredSet,
    FromServer,
    LeaseRenewed,
    LogAck,
    PilotTerms,
    RecordOrder,
    Refused,
    StackAnswer,
    StackOrder,
    Welcome,
)
from penstock.protocol.clocks import ClockWatch
from penstock.settings import NODE_ADDRESS
from penstock.tls import ClientCertificate, advice_on_silence, context_for
from penstock.version import __version__
from penstock_worker import lease, messages, pilot, ports, stacks, statedirs
from penstock_worker.accounts import Account, open_way
from penstock_worker.background import in_thread
from penstock_worker.identity import FILE, Identity
from penstock_worker.machine import look_at_machine
from penstock_worker.outgoing import Outgoing
from penstock_worker.reconcile import NONE_PREEMPTED, Forget, Life, Observed, Preempt, Start, Stop, reconcile
from penstock_worker.replica import Replica, life, load
from penstock_worker.snapshots import SnapshotCache

BACKOFF_MIN_S, BACKOFF_MAX_S = 0.2, 5.0
IDLE_S = 0.1  # how often a quiet sender looks whether a log has grown
# Of a signalled stop, together below 10 s: SIGTERM's turn, SIGKILL's, reading the telemetry sockets, reporting the ends
# after their last frames, then without, closing the connection.
STOP_GRACE_MAX_S, KILL_MAX_S, DRAIN_S, FAREWELL_S, CLOSE_S = 5.0, 2.0, 0.5, 0.5, 0.5
MAX_MESSAGE_BYTES = 16 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """`grace_s`: overrides the server's grace (for tests and for nodes that must stop sooner).

    `pilot`: of an agent that another scheduler runs for a while.
    `hidden`: what replicas are not to see, besides the node's token. `certificate`: what is shown to the server.
    `account`: as whom replicas run; None: as the agent's user. `labels`: of the node, by key.
    """

    state_dir: Path
    grace_s: float | None = None
    pilot: pilot.Terms | None = None
    hidden: tuple[Path, ...] = ()
    certificate: ClientCertificate | None = None
    account: Account | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class Agent:
    """One node. Only one may use a state folder at a time (`__main__` holds a lock)."""

    def __init__(self, identity: Identity, settings: Settings) -> None:
        self._identity = identity
        self._servers = ServerAddresses(identity.url)
        self._settings = settings
        self._instance = secrets.token_hex(8)
        self._lease_path = settings.state_dir / "lease.json"
        self._lease = lease.read(self._lease_path) or lease.Lease(lease.now(), settings.grace_s or 0.0)
        self._cache = SnapshotCache(settings.state_dir / "snapshots", self._download)
        self._replicas: dict[str, Replica] = {}
        self._desired: dict[str, Desired] | None = None
        self._preempted = NONE_PREEMPTED
        self._keep_state: list[str] | None = None
        self._removing: dict[Path, asyncio.Task[None]] = {}
        self._outgoing: Outgoing | None = None
        self._tasks = asyncio.TaskGroup()
        self._work: dict[str, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._stopping = False
        self._leaving = False
        self._heartbeat_at = 0.0
        self._clocks = ClockWatch()
        self._grace_s = self._lease.grace_s
        self._findings: tuple[Finding, ...] = ()
        self._draining = ""  # why this pilot drains
        self._drain_sent = self._drain_confirmed = False
        self._ends_at: float | None = None  # when what runs here is stopped, of a pilot that was asked to leave
        self._served = False

    async def run(self) -> None:
        """Serve until `stop`. Raises AuthError if the server has refused this node for longer than the grace."""
        async with self._tasks:
            cell.delegate()
            if self._settings.account is not None:
                await in_thread(open_way, self._settings.state_dir)
            self._findings = await in_thread(look_at_machine, self._settings.state_dir)
            await self._adopt()
            connection = self._tasks.create_task(self._connect_forever())
            course = self._tasks.create_task(self._follow_pilot())
            await self._stop.wait()
            await self._stop_replicas()
            self._leaving = True
            for task in (connection, course, *self._work.values(), *self._removing.values(), *self._asked):
                task.cancel()

    def stop(self) -> None:
        """Ask `run` to end all replicas and to return. A second call kills them at once."""
        if self._stop.is_set():
            self._stop_all(now=True)
        self._stop.set()

    # Replicas

    async def _adopt(self) -> None:
        folder = self._settings.state_dir / "replicas"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            desired = load(path)
            replica = None if desired is None else self._replica(desired)
            if replica is None or not await replica.adopt(self._settings.account):
                _log.info("removing %s, which never came to run", path)
                await asyncio.to_thread(shutil.rmtree, path)
                continue
            self._replicas[replica.desired.replica_id] = replica
            if not replica.report.terminal:
                _log.info("adopted replica %s", replica.desired.replica_id)
                self._watch(replica, replica.watch())

    def _replica(self, desired: Desired) -> Replica:
        folder = self._settings.state_dir / "replicas" / desired.replica_id
        return Replica(desired, folder, changed=self._on_change, wake=self._wake.set)

    def _refuse(self, order: Refused) -> Desired:
        """Report a replica that cannot be read as ended, unless it is here; return what stands for its order."""
        known = self._replicas.get(order.replica_id)
        if known is not None:
            return known.desired
        stub = messages.stub(order)
        if not self._stopping:
            _log.warning("replica %s is refused: %s", order.replica_id, order.detail)
            replica = self._replica(stub)
            self._replicas[order.replica_id] = replica
            self._watch(replica, replica.refuse(order.detail))
        return stub

    def _watch(self, replica: Replica, course: Coroutine[None, None, None]) -> None:
        self._work[replica.desired.replica_id] = self._tasks.create_task(course)

    def _on_change(self) -> None:
        self._wake.set()
        self._changed.set()
        self._reconcile()

    def _reconcile(self) -> None:
        if self._desired is None or self._stopping:
            return
        observed = {key: Observed(value.desired.epoch, life(value)) for key, value in self._replicas.items()}
        for instruction in reconcile(self._desired, observed, self._preempted):
            match instruction:
                case Start(desired):
                    replica = self._replica(desired)
                    self._replicas[desired.replica_id] = replica
                    self._watch(replica, self._run(replica))
                case Stop(replica_id):
                    self._replicas[replica_id].stop()
                case Preempt(replica_id, order):
                    self._replicas[replica_id].preempt(order)
                case Forget(replica_id):
                    self._replicas.pop(replica_id).forget()
                    self._work.pop(replica_id, None)

        self._remove_state()

    def _run(self, replica: Replica) -> Coroutine[None, None, None]:
        shown = self._settings.certificate
        hidden = (*self._settings.hidden, self._settings.state_dir / FILE, *([] if shown is None else [shown.key]))
        return replica.run(
            self._cache, self._lease_path, self._lease.end, hidden=hidden, account=self._settings.account
        )

    def _remove_state(self) -> None:
        """Remove what pservers of jobs that are over left here, beside the event loop: it may be much."""
        if self._keep_state is None:
            return
        alive = [replica.desired.job_id for replica in self._replicas.values() if not replica.report.terminal]
        for path in statedirs.over(self._settings.state_dir, self._keep_state, alive):
            if path not in self._removing:
                self._removing[path] = self._tasks.create_task(self._remove(path))

    async def _remove(self, path: Path) -> None:
        await in_thread(shutil.rmtree, path, ignore_errors=True)
        del self._removing[path]

    def _stop_all(self, *, now: bool) -> None:
        for replica in self._replicas.values():
            if not replica.report.terminal:
                replica.stop(now=now)

    # Pilots

    async def _follow_pilot(self) -> None:
        """Carry out what `pilot.decide` says, until it says to leave."""
        terms = self._settings.pilot
        while terms is not None:
            match pilot.decide(terms, self._pilot_facts()):
                case pilot.Drain(why) if not self._draining:
                    _log.info("this pilot drains: %s", why)
                    self._draining = why
                    self._heartbeat_at = 0.0
                    self._wake.set()
                case pilot.Leave(why):
                    _log.info("this pilot leaves: %s", why)
                    self._draining = why
                    self._stop.set()
                    return
            await asyncio.sleep(IDLE_S)

    def _pilot_facts(self) -> pilot.Facts:
        busy = any(life(replica) is not Life.SETTLED for replica in self._replicas.values())
        has_job = bool(self._keep_state) or busy or bool(self._desired)
        return pilot.Facts(lease.now(), busy, self._served, has_job, self._drain_confirmed)

    def _pilot_terms(self) -> PilotTerms | None:
        terms = self._settings.pilot
        if terms is None:
            return None
        return PilotTerms(once=terms.once, seconds_left=terms.seconds_left(lease.now()), leaving=self._draining)

    async def _let_save(self, stop_s: float) -> float:
        """Let the server ask jobs to save first, on all of their nodes; return what is left of `stop_s` then."""
        begin, limit_s = lease.now(), stop_s * pilot.SAVE_SHARE
        saving = [replica for replica in self._replicas.values() if replica.saves_first]
        if saving and self._outgoing is not None:
            self._ends_at, self._heartbeat_at = begin + limit_s, 0.0
            self._wake.set()
            await self._until(lambda: all(replica.report.terminal for replica in saving), limit_s)
        return stop_s - (lease.now() - begin)

    async def _stop_replicas(self) -> None:
        grace_s = STOP_GRACE_MAX_S
        if self._settings.pilot is not None:
            self._draining = self._draining or "its pilot was stopped"
            grace_s = await self._let_save(self._settings.pilot.stop_s)
            for replica in self._replicas.values():
                replica.preempted_by = self._draining
        self._stopping = True
        for replica_id, replica in self._replicas.items():
            if replica.guard_pid is None and replica_id in self._work:
                self._work[replica_id].cancel()  # it downloads, or unpacks
        self._stop_all(now=False)
        if not await self._until_all_ended(grace_s):
            self._stop_all(now=True)
            await self._until_all_ended(KILL_MAX_S)
        await self._until(lambda: not any(r.draining for r in self._replicas.values()), DRAIN_S)
        if not await self._confirm_ends() and self._outgoing is not None:
            self._outgoing.ends_first = True
            await self._confirm_ends()

    async def _confirm_ends(self) -> bool:
        self._heartbeat_at = 0.0  # its answer confirms the ends
        self._wake.set()
        return self._outgoing is not None and await self._until(
            lambda: all(r.confirmed for r in self._replicas.values()), FAREWELL_S
        )

    async def _until_all_ended(self, timeout_s: float) -> bool:
        return await self._until(lambda: all(r.report.terminal for r in self._replicas.values()), timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    def _download(self, sha256: str, path: Path) -> None:
        identity, shown = self._identity, self._settings.certificate
        with Client(self._servers.from_current, token=identity.token, certificate=shown) as client:
            client.download_snapshot(sha256, path)

    # Connection

    async def _connect_forever(self) -> None:
        backoff = Backoff(BACKOFF_MIN_S, BACKOFF_MAX_S)
        # Not `while True`: a task group whose child fails while it is cancelled reports the failure alone (3.11).
        while not self._leaving:
            url, was_welcome = self._servers.current, False
            try:
                was_welcome = await self._connection(url)
            except InvalidStatus as error:
                self._refused(url, error)
            except SpecError as error:  # a certificate that is being renewed
                _log.warning("%s", error)
            except (OSError, WebSocketException) as error:
                is_closed = isinstance(error, InvalidMessage | ConnectionResetError)
                advice = advice_on_silence(url, self._settings.certificate) if is_closed else ""
                _log.warning("%s is unreachable: %s%s", url, error, advice)
            self._outgoing = None
            if was_welcome:
                backoff.reset()
                self._servers.succeeded()
            elif not self._go_to_next(url):
                continue
            await asyncio.sleep(backoff.wait_s())

    def _go_to_next(self, url: str) -> bool:
        """Use the next server; return whether none of them has answered."""
        have_all_failed = self._servers.failed(url)
        if len(self._servers) > 1:
            _log.info("the next server is %s", self._servers.current)
        return have_all_failed

    def _refused(self, url: str, error: InvalidStatus) -> None:
        status = error.response.status_code
        why = messages.explanation(error.response.body)
        _log.warning("%s answers %d to this node%s", url, status, f": {why}" if why else "")
        if status in (401, 403) and self._servers.refused(url) and lease.now() > self._lease.end:
            raise AuthError(
                f"{url} does not accept this node ({self._identity.node_id}, HTTP {status}): "
                + (why or "make a join token with 'penstock agent token' and join again with --join-token")
                + self._left_running()
            )

    def _left_running(self) -> str:
        pids = [str(r.guard_pid) for r in self._replicas.values() if r.guard_pid is not None and not r.report.terminal]
        return f"; what runs here goes on until then: end it with 'kill {' '.join(pids)}'" if pids else ""

    async def _connection(self, url: str) -> bool:
        """Hold one connection until it breaks. Returns whether it came to a welcome."""
        welcomed = False
        parts = urlsplit(url)
        address = parts._replace(scheme="wss" if parts.scheme == "https" else "ws", path="/api/v1/agent").geturl()
        async with connect(
            address,
            additional_headers={"Authorization": f"Bearer {self._identity.token}"},
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            ssl=await in_thread(context_for, address, self._settings.certificate),
            close_timeout=CLOSE_S,
            proxy=None if is_loopback(url) else True,
        ) as websocket:
            try:
                outgoing, ttl_s = await self._greet(websocket)
                welcomed = True
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send(websocket, outgoing, ttl_s))
                    tasks.create_task(self._receive(websocket, outgoing, ttl_s))
            except* (OSError, WebSocketException, PeerError, UserError) as group:
                _log.warning("connection to %s ended: %s", url, group.exceptions[0])
        return welcomed

    async def _greet(self, websocket: ClientConnection) -> tuple[Outgoing, float]:
        reports = [replica.report for replica in self._replicas.values()]
        offered = await in_thread(ports.offer, random.Random())
        address = _address(websocket)
        await websocket.send(
            messages.hello(
                version=__version__,
                boot_id=proc.boot_id(),
                reports=reports,
                address=address,
                ports=offered,
                findings=self._findings,
                instance=self._instance,
                pilot=self._pilot_terms(),
                labels=self._settings.labels,
            ).encode()
        )
        sent_at = lease.now()
        async with asyncio.timeout(10):
            welcome = messages.parse(messages.text_of(await websocket.recv()))
        if not isinstance(welcome, Welcome):
            raise PeerError(
                f"the server's first message is {welcome.type!r}; expected a welcome"
            )  # it may hold secrets
        self._grace_s = welcome.grace_s if self._settings.grace_s is None else self._settings.grace_s
        self._renew(sent_at + welcome.lease_ttl_s)
        self._outgoing = Outgoing(self._replicas, welcome.log_offsets)
        self._drain_sent = self._drain_confirmed = False
        self._heartbeat_at = 0.0
        _log.info("connected to %s as node %s", self._servers.current, welcome.node_id)
        return self._outgoing, welcome.lease_ttl_s

    def _renew(self, expires_at: float) -> None:
        self._lease = lease.Lease(expires_at, self._grace_s)
        try:
            lease.write(self._lease_path, self._lease)
        except OSError as error:  # a full disk must not cost the connection; replicas that heed the lease may stop
            _log.warning("the lease could not be written: %s", error)

    async def _send(self, websocket: ClientConnection, outgoing: Outgoing, ttl_s: float) -> None:
        while True:
            self._wake.clear()
            idle = True
            for message in outgoing.turn(lease.now()):
                await websocket.send(message)
                idle = False
            if lease.now() >= self._heartbeat_at and not outgoing.awaiting:
                self._heartbeat_at = lease.now() + ttl_s / 3
                outgoing.heartbeat_sent(lease.now())
                await websocket.send(self._heartbeat())
            if idle:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._wake.wait()

    def _heartbeat(self) -> str:
        self._drain_sent = bool(self._draining)
        self._clocks.sent(time.time_ns())
        ends_in_s = None if self._ends_at is None else max(0.0, self._ends_at - lease.now())
        return messages.heartbeat(self._draining, ends_in_s, self._clocks.offset, self._settings.state_dir)

    async def _receive(self, websocket: ClientConnection, outgoing: Outgoing, ttl_s: float) -> None:
        while True:
            async with asyncio.timeout(ttl_s):  # every heartbeat is answered: silence is a dead connection
                text = messages.text_of(await websocket.recv())
            self._on_message(messages.parse(text), outgoing)

    def _on_message(self, message: FromServer, outgoing: Outgoing) -> None:
        match message:
            case DesiredSet(replicas=replicas, refused=refused, keep_state=keep_state):
                self._keep_state, self._preempted = keep_state, message.preempted
                self._served = self._served or bool(keep_state) or bool(replicas)
                self._desired = {desired.replica_id: desired for desired in replicas}
                for order in refused:
                    self._desired[order.replica_id] = self._refuse(order)
            case LeaseRenewed(ttl_s=ttl_s, stored=stored):
                self._clocks.returned(message.received_ns, message.answered_ns, time.time_ns())
                sent_at = outgoing.heartbeat_answered(stored=stored)
                for replica in self._replicas.values():
                    replica.trim_spool()
                self._drain_confirmed = self._drain_confirmed or self._drain_sent
                if sent_at is not None:
                    self._renew(sent_at + ttl_s)
            case LogAck(replica_id=replica_id, log_offset=offset, full=full):
                outgoing.log_acked(replica_id, offset, full=full)
            case StackOrder() | RecordOrder():
                self._on_request(message, outgoing)
            case Welcome():
                raise PeerError("the server sent a second welcome")
        self._on_change()

    def _on_request(self, order: StackOrder | RecordOrder, outgoing: Outgoing) -> None:
        """Do what a person has asked of a replica."""
        if isinstance(order, StackOrder):
            task = self._tasks.create_task(self._take_stacks(order, outgoing))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        elif (replica := self._replicas.get(order.replica_id)) is not None:
            replica.relay.record_in_full(order.seconds)

    async def _take_stacks(self, order: StackOrder, outgoing: Outgoing) -> None:
        replica = self._replicas.get(order.replica_id)
        pid = guard = None
        if replica is not None and replica.report.state == "RUNNING":
            pid, guard = replica.report.pid, replica.guard_pid
        try:
            answer = await in_thread(stacks.answer, order.request_id, pid, guard, order.skip)
        except Exception as error:  # noqa: BLE001  # read from what may be anything: this agent goes on
            _log.exception("the stacks of replica %s were not taken", order.replica_id)
            said = f"the agent could not take them: {error!r}"[:500]
            answer = StackAnswer(request_id=order.request_id, error=said, skip=order.skip)
        outgoing.answers.append(answer.encode())
        self._wake.set()


def _address(websocket: ClientConnection) -> str:
    """Return the address of this node on the way to the server, or what PENSTOCK_NODE_ADDRESS says."""
    return NODE_ADDRESS.read() or str(websocket.local_address[0])
