"""Remotes of a trainer process, opened and closed, and fluid.communicator.Communicator, which sets one up.

A program names its servers by a descriptor, not its communicator: an operator finds the remote of its descriptor in
`remotes`, which opens it at the first use. Job, token and deadlines come from PENSTOCK_* variables (`ps.settings`),
mode, trainer and endpoints from the descriptor. A communicator is not thread-safe: the thread that starts it stops it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any, get_args

from penstock.errors import Bug, SpecError, Unavailable
from penstock.program.program import Program
from penstock.ps.remote import REMOTE_TYPES, Descriptor, Opener, PsMode, Remote, StepRemote, ThreadedRemote
from penstock.ps.settings import TrainerRuntimeConfig, TrainerSettings

if TYPE_CHECKING:  # programs without servers load no gRPC
    from penstock.ps.client import TrainerClient
    from penstock.ps.communicators.half_async import HalfAsyncCommunicator


class Remotes:
    """The remotes that a process has open: one for each descriptor, from its first use until it is closed.

    `opener` opens them. `configs`: descriptor -> how its communicator is set up, where one is. Thread-safe.
    """

    def __init__(self) -> None:
        self.opener: Opener = self.connect
        self.configs: dict[str, TrainerRuntimeConfig] = {}
        self._lock = threading.Lock()
        self._open: dict[str, Remote] = {}
        self._clients: dict[str, TrainerClient] = {}

    def get(self, descriptor: str, *, opens: bool = True) -> Remote:
        """Return the remote of a descriptor, opened if it is not open and `opens`. Raises ProgramError, Unavailable."""
        with self._lock:
            found = self._open.get(descriptor)
            if found is None and not opens:
                raise Unavailable(
                    f"the connection to servers as {descriptor!r} was closed by another thread during a step, which "
                    "they may have applied or not. Close it when no step runs"
                )
            if found is None:
                found = self._open[descriptor] = self.opener(Descriptor.parse(descriptor))
            return found

    def get_step(self, descriptor: str, *, opens: bool = True) -> StepRemote:
        """Return the remote of a descriptor that takes whole steps. Raises Bug, and as `get` does."""
        found = self.get(descriptor, opens=opens)
        if not isinstance(found, StepRemote):
            raise Bug(f"the remote {descriptor!r} takes no whole steps, but a graph was built for one that does")
        return found

    def get_threaded(self, descriptor: str) -> ThreadedRemote:
        """Return the open remote of a descriptor whose steps threads make together. Raises Bug, Unavailable."""
        found = self.get(descriptor, opens=False)
        if not isinstance(found, ThreadedRemote):
            raise Bug(f"the steps of the remote {descriptor!r} are those of one thread, but several have met for one")
        return found

    def flush(self, descriptor: str) -> None:
        """Send what waits in the communicator of a descriptor; nothing if none is open. Raises the exchange's error."""
        from penstock.ps.communicators.base import OverServers  # as in `communicate`

        with self._lock:
            found = self._open.get(descriptor)
        if isinstance(found, OverServers):
            found.flush()

    def close(self, descriptor: str) -> None:
        """Close a remote, if it is open."""
        with self._lock:
            found = self._open.pop(descriptor, None)
            client = self._clients.pop(descriptor, None)
        if found is not None:
            found.close()
        if client is not None:
            from penstock import telemetry  # as `_connect_client` does

            telemetry.end_exchange(client.counters)

    def opened(self) -> list[str]:
        """Return the descriptors of the remotes that are open."""
        with self._lock:
            return list(self._open)

    def connect(self, descriptor: Descriptor) -> Remote:
        """Connect a trainer to its servers, waiting until they have started. Raises SpecError, Unavailable, PeerError.

        GEO goes through its communicator; the other modes only where one is set up.
        """
        config = self.configs.get(str(descriptor))
        client = self._connect_client(descriptor)
        if descriptor.mode == "sync" or (config is None and descriptor.mode in ("async", "half_async")):
            client.serve_operators()
        if config is None and descriptor.mode != "geo":
            return client
        try:
            return communicate(client, config)
        except BaseException:
            self._clients.pop(str(descriptor), None)
            client.close()
            raise

    def _connect_client(self, descriptor: Descriptor) -> TrainerClient:
        from penstock import telemetry  # both at the first use: programs without servers load no gRPC
        from penstock.ps.client import TrainerClient  # as above

        client = TrainerClient(descriptor, TrainerSettings.from_environ())
        try:
            client.connect()
        except BaseException:
            client.close()
            raise
        self._clients[str(descriptor)] = client
        telemetry.exchange(client.counters, endpoints=[link.endpoint for link in client.links])
        return client

    def find_client(self, descriptor: str) -> TrainerClient | None:
        """Return the client under an open remote, for reads and calls that are no part of a step."""
        return self._clients.get(descriptor)

    def client(self, descriptor: str) -> TrainerClient:
        """Return the client under an open remote. Raises Unavailable."""
        client = self._clients.get(descriptor)
        if client is None:
            raise Unavailable(f"this process is not connected to servers as {descriptor!r} any more")
        return client


remotes = Remotes()
"""Of the process: an operator has nothing but the descriptor that stands in its program."""


def communicate(client: TrainerClient, config: TrainerRuntimeConfig | None = None) -> Remote:
    """Return what a program of the client's mode talks to: the communicator of the mode, in sync the client itself.

    Raises SpecError; the client is the caller's then.
    """
    from penstock.ps.communicators.asynchronous import AsyncCommunicator  # these load a client's transports, see above
    from penstock.ps.communicators.geo import GeoCommunicator  # as above
    from penstock.ps.communicators.half_async import HalfAsyncCommunicator  # as above

    descriptor, counters = client.descriptor, client.counters
    settings = (config or TrainerRuntimeConfig()).settings(descriptor.mode)
    match descriptor.mode:
        case "async":
            return AsyncCommunicator(client, descriptor, settings, counters=counters)
        case "half_async":
            return HalfAsyncCommunicator(client, descriptor, settings, counters=counters)
        case "geo":
            return GeoCommunicator(client, descriptor, settings, counters=counters)
        case "sync":
            return client


class DistributedMode(IntEnum):
    """Fluid's numbers of the modes."""

    SYNC = 0
    ASYNC = 1
    HALF_ASYNC = 2
    GEO = 3


def descriptor_of(program: Program) -> Descriptor:
    """Return the servers that a trainer's program talks to. Raises SpecError for a program that talks to none."""
    for op in program.operators:
        if op.type in REMOTE_TYPES:
            # The only text with spaces among the arguments: names have none.
            return Descriptor.parse(next(a for a in op.args if isinstance(a, str) and " " in a))
    raise SpecError(
        "this program has no operator that talks to parameter servers; expected DistributeTranspiler's "
        "get_trainer_program(), or fleet.main_program"
    )


class Communicator:
    """The exchange of one trainer program. `envs`: a TrainerRuntimeConfig, or a dict with its keys.

    `mode` and `kwargs` are Fluid's; they have to agree with the program.
    """

    def __init__(
        self,
        program: Program,
        mode: int | str | None = None,
        kwargs: Mapping[str, object] | None = None,
        envs: TrainerRuntimeConfig | Mapping[str, object] | None = None,
    ) -> None:
        self.descriptor = descriptor_of(program)
        if mode is not None and _mode_named(mode) != self.descriptor.mode:
            raise SpecError(
                f"the program was made for {self.descriptor.mode} mode, but the communicator is asked for "
                f"{_mode_named(mode)}",
                got=mode,
                expected=self.descriptor.mode,
            )
        self.config = (
            envs if isinstance(envs, TrainerRuntimeConfig) else TrainerRuntimeConfig.from_dict(dict(envs or {}))
        )
        _check_kwargs(self.descriptor, kwargs or {})

    def start(self, *, connects: bool = True) -> None:
        """Connect to the servers and start the threads; nothing if it runs. Raises SpecError, Unavailable.

        Without `connects` the first run of the program does it.
        """
        if not self.is_running():
            remotes.configs[str(self.descriptor)] = self.config
            if connects:
                self._remote()

    def stop(self) -> None:
        """Send what waits, leave the servers, end the threads; nothing if it does not run.

        Raises the background's error if no call has raised it yet.
        """
        remotes.configs.pop(str(self.descriptor), None)
        remotes.close(str(self.descriptor))

    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return str(self.descriptor) in remotes.opened()

    def queue_depths(self) -> dict[str, int]:
        """Return how many gradients (in GEO: steps) wait in this trainer, by variable; none without queues."""
        depths: Any = getattr(self._remote(), "queue_depths", dict) if self.is_running() else dict
        return dict(depths())

    def set_threads(self, num: int) -> None:
        """Half-async: set how many threads will train with this program, before they begin. Else without effect."""
        threads = self._threads()
        if threads is not None:
            threads.set_participants(num)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Train within: when it ends, in whatever way, the other threads do not wait for this one any more."""
        threads = self._threads()
        with nullcontext() if threads is None else threads.participant():
            yield

    def _threads(self) -> HalfAsyncCommunicator | None:
        from penstock.ps.communicators.half_async import HalfAsyncCommunicator  # as in `communicate`

        remote = self._remote()
        return remote if isinstance(remote, HalfAsyncCommunicator) else None

    def _remote(self) -> Remote:
        return remotes.get(str(self.descriptor))


def _mode_named(mode: int | str) -> PsMode:
    for name in get_args(PsMode):
        if mode in (name, name.upper()) or (isinstance(mode, int) and mode == DistributedMode[name.upper()]):
            found: PsMode = name
            return found
    raise SpecError(f"no mode is called {mode!r}; there are {', '.join(m.name for m in DistributedMode)}", got=mode)


def _check_kwargs(descriptor: Descriptor, kwargs: Mapping[str, object]) -> None:
    expected: dict[str, object] = {
        "trainers": descriptor.num_trainers,
        "trainer_id": descriptor.trainer,
        "pserver_endpoints": list(descriptor.endpoints),
        "geo_need_push_nums": descriptor.push_every,
    }
    for name, value in kwargs.items():
        given = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
        if name not in expected and name != "push_vars":  # what is pushed stands in the program's operators
            raise SpecError(f"Communicator has no setting {name!r}; kwargs has {', '.join(expected)}", got=name)
        if name in expected and given != expected[name]:
            raise SpecError(f"{name} is {value!r}, but the program says {expected[name]!r}", got=value)
