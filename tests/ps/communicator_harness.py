"""Makes communicators over servers in memory, and holds up, watches and ends what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.ps.fake_servers import FakeServers
from tests.support.waiting import LIMIT_S

from penstock.errors import Unavailable
from penstock.ps.communicators.asynchronous import AsyncCommunicator
from penstock.ps.communicators.geo import GeoCommunicator
from penstock.ps.communicators.half_async import HalfAsyncCommunicator
from penstock.ps.counters import Counters
from penstock.ps.remote import Descriptor, Remote
from penstock.ps.settings import CommunicatorSettings

SETTINGS = CommunicatorSettings(
    max_merge_var_num=1,
    send_queue_size=4,
    independent_recv_thread=True,
    min_send_grad_num_before_recv=0,
    thread_pool_size=2,
    merge_wait_s=0.0,
    is_sgd_optimizer=True,
)
WAIT_S = LIMIT_S  # for what has to happen; a test that waits so long fails


def descriptor(mode: Any, trainers: int = 1, push_every: int = 100) -> Descriptor:
    """Return a descriptor of trainer 0."""
    return Descriptor(mode, 0, trainers, ("host:1", "host:2"), push_every)


def ones(value: float = 1.0) -> list[torch.Tensor]:
    """Return the gradient of a variable of one block."""
    return [torch.full((2,), value, dtype=torch.float64)]


def zeros() -> dict[str, torch.Tensor]:
    """Return the parameters of the servers."""
    return {name: torch.zeros(2, dtype=torch.float64) for name in ("w", "v")}


class Gate:
    """Holds up the pushes of a variable until it is opened."""

    def __init__(self, variable: str = "w@GRAD") -> None:
        self.variable = variable
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()

    def __call__(self, variable: str) -> None:
        if variable == self.variable:
            self.arrived.release()
            assert self.opened.wait(WAIT_S)


Make = Callable[..., Any]
_MODES = {AsyncCommunicator: "async", HalfAsyncCommunicator: "half_async", GeoCommunicator: "geo"}


@contextmanager
def communicators() -> Iterator[Make]:
    """Yield what makes communicators; those that were made are closed at the end."""
    made: list[Remote] = []
    gates: list[Gate] = []

    def make(
        kind: Any,
        servers: FakeServers,
        settings: CommunicatorSettings = SETTINGS,
        *,
        trainers: int = 1,
        push_every: int = 100,
        **options: Any,
    ) -> Any:
        if isinstance(servers.before_push, Gate):
            gates.append(servers.before_push)
        of = descriptor(_MODES[kind], trainers, push_every)
        communicator = kind(servers, of, settings, counters=Counters(), **options)
        made.append(communicator)
        return communicator

    yield make
    for gate in gates:
        gate.opened.set()
    for communicator in made:
        communicator.close()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Start a call; return its thread and its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # judged by the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def joined(thread: threading.Thread) -> None:
    """Wait for a thread that has to end."""
    thread.join(WAIT_S)
    assert not thread.is_alive()


def away(variable: str) -> None:
    """What a server that is away does to a push."""
    raise Unavailable("host:1 is away", endpoint="host:1")
