"""The communicator of a mode, over a trainer's client."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.errors import PeerError
from penstock.native.remote import Remote
from penstock.ps.client import TrainerClient
from penstock.ps.communicators.asynchronous import AsyncCommunicator
from penstock.ps.communicators.geo import GeoCommunicator
from penstock.ps.communicators.half_async import HalfAsyncCommunicator
from penstock.ps.runtime_config import TrainerRuntimeConfig
from penstock.ps.tensors import from_wire


class ClientServers:
    """A TrainerClient as `background.Servers`."""

    def __init__(self, client: TrainerClient) -> None:
        self._client = client
        self.send, self.send_rows, self.recv, self.prefetch = (
            client.send,
            client.send_rows,
            client.recv,
            client.prefetch,
        )
        self.send_barrier, self.fetch_barrier, self.geo = client.send_barrier, client.fetch_barrier, client.geo
        self.close = client.close

    def changed(self, block: str, at: int) -> tuple[Tensor, Tensor]:
        """Return (rows, their values), memory of its own. Raises Unavailable, PeerError."""
        link = self._client.links[at]
        with link.changed(block) as answer:
            found = {tensor.name: from_wire(tensor).clone() for tensor in answer.tensors}
        if found.keys() != {"rows", "values"} or len(found["rows"]) != len(found["values"]):
            raise PeerError(
                f"{link.endpoint} answers what changed of {block!r} with the tensors {sorted(found)}; expected as many "
                "rows as values",
                variable=block,
            )
        return found["rows"], found["values"]


def communicate(client: TrainerClient, config: TrainerRuntimeConfig | None = None) -> Remote:
    """Return what a program of the client's mode talks to: the communicator of the mode, in sync the client itself.

    Raises SpecError; the client is the caller's then.
    """
    descriptor, counters = client.descriptor, client.counters
    settings = (config or TrainerRuntimeConfig()).settings(descriptor.mode)
    servers = ClientServers(client)
    match descriptor.mode:
        case "async":
            return AsyncCommunicator(servers, descriptor, settings, counters=counters)
        case "half_async":
            return HalfAsyncCommunicator(servers, descriptor, settings, counters=counters)
        case "geo":
            return GeoCommunicator(servers, descriptor, settings, counters=counters)
        case "sync":
            return client


def queue_depths(remote: Remote) -> dict[str, int]:
    """Return the number of gradients (in GEO: steps) that wait in a trainer, by variable; none without queues."""
    depths: Any = getattr(remote, "queue_depths", dict)
    return dict(depths())
