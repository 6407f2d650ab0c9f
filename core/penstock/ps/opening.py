"""Connection of a process to the servers that its program names, through the communicator of the mode.

Job, token and deadlines come from PENSTOCK_* variables (`ps.settings`), mode, trainer and endpoints from the program.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from penstock import telemetry
from penstock.errors import Unavailable
from penstock.protocol.exchange import Sums
from penstock.ps.client import TrainerClient
from penstock.ps.communicators.asynchronous import AsyncCommunicator
from penstock.ps.communicators.geo import GeoCommunicator
from penstock.ps.communicators.half_async import HalfAsyncCommunicator
from penstock.ps.remote import Descriptor, Remote
from penstock.ps.runtime_config import TrainerRuntimeConfig
from penstock.ps.settings import TrainerSettings


def communicate(client: TrainerClient, config: TrainerRuntimeConfig | None = None) -> Remote:
    """Return what a program of the client's mode talks to: the communicator of the mode, in sync the client itself.

    Raises SpecError; the client is the caller's then.
    """
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


def queue_depths(remote: Remote) -> dict[str, int]:
    """Return the number of gradients (in GEO: steps) that wait in a trainer, by variable; none without queues."""
    depths: Any = getattr(remote, "queue_depths", dict)
    return dict(depths())


_STARTED_NS = time.time_ns()  # the default incarnation: larger when the process is started again
_clients: weakref.WeakValueDictionary[str, TrainerClient] = weakref.WeakValueDictionary()


def open_remote(descriptor: Descriptor) -> Remote:
    """Connect a trainer to its servers, waiting until they have started. Raises SpecError, Unavailable, PeerError.

    GEO goes through its communicator; the others only where one is set up (`ps.communicator`).
    """
    client = open_client(descriptor)
    return communicate(client) if descriptor.mode == "geo" else client


def open_client(descriptor: Descriptor) -> TrainerClient:
    """Connect a trainer to its servers. Raises SpecError, Unavailable, PeerError."""
    client = TrainerClient(descriptor, TrainerSettings.from_environ(started_ns=_STARTED_NS))
    try:
        client.connect()
    except BaseException:
        client.close()
        raise
    _clients[str(descriptor)] = client
    telemetry.exchange(client.counters, endpoints=[link.endpoint for link in client.links])
    return client


def incarnation() -> int:
    """Return the epoch as which this process joins servers. Raises SpecError."""
    return TrainerSettings.from_environ(started_ns=_STARTED_NS).epoch


def opened_client(descriptor: str) -> TrainerClient:
    """Return the client under an open remote, for reads and calls that are no part of a step. Raises Unavailable."""
    client = _clients.get(descriptor)
    if client is None:
        raise Unavailable(f"this process talks to no servers as {descriptor!r} any more")
    return client


def opened_counters() -> dict[str, dict[tuple[str, str], Sums]]:
    """Return what each client of this process exchanged so far: descriptor -> (endpoint, block) -> sums."""
    return {descriptor: client.counters.rows() for descriptor, client in list(_clients.items())}


def prefetch_ahead(table: str, ids: Any, descriptor: str = "") -> bool:
    """Start to look up the rows of the next batch's ids while this batch is computed: `TrainerClient.prefetch_ahead`.

    Call it before `Executor.run` of the current batch, with the int64 ids that the next one feeds to `table`'s lookup,
    without those of its padding_idx. `descriptor`: of the program, if this process has several with such a table.
    Returns whether a client took it on. `Executor.train_from_dataset` does this by itself (`exec.rows_ahead`).
    """
    clients = list(_clients.values()) if not descriptor else [c for c in [_clients.get(descriptor)] if c is not None]
    taken = [client.prefetch_ahead(table, ids) for client in clients]  # all, not only the first
    return any(taken)


def forget_ahead(descriptor: str) -> None:
    """Drop rows that were prefetched for a step that does not run: much later they would be out of date."""
    client = _clients.get(descriptor)
    if client is not None:
        client.forget_ahead()
