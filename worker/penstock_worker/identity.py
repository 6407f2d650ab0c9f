"""Identity of this node: its id and token, kept in the state folder (0600), got once for a join token."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from penstock.backoff import Backoff
from penstock.client import Client
from penstock.errors import SpecError, Unavailable
from penstock.machine import memory
from penstock.machine.cores import usable_cores
from penstock.protocol.rest import NodeJoin
from penstock.tls import ClientCertificate
from penstock.version import __version__
from penstock_worker import lease

FILE = "node.json"
PILOT_JOIN_LIMIT_S = 300.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """`token` opens the agent's websocket at `url` and nothing else. `url`: of several servers, with commas between."""

    url: str
    node_id: str
    token: str


def load(state_dir: Path) -> Identity | None:
    """Return the identity that a former run kept, or None."""
    try:
        return Identity(**json.loads((state_dir / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise SpecError(f"{state_dir / FILE} is damaged ({error}); remove it and join again") from error


def write(state_dir: Path, identity: Identity) -> None:
    """Write what later runs load."""
    lease.write_json(state_dir / FILE, asdict(identity))


@dataclass(frozen=True, slots=True)
class Offer:
    """What of its machine a node offers to jobs."""

    cpus: int
    gpus: int
    memory_bytes: int


def offer(*, cpus: int | None = None, gpus: int | None = None, memory_bytes: int | None = None) -> Offer:
    """Return what is given, and of the rest what this process may use: a scheduler may have promised less than that."""
    return Offer(
        usable_cores() if cpus is None else cpus,
        num_gpus() if gpus is None else gpus,
        memory.usable_bytes() if memory_bytes is None else memory_bytes,
    )


def join(
    url: str,
    join_token: str,
    *,
    name: str | None,
    state_dir: Path,
    offer: Offer,
    is_pilot: bool = False,
    certificate: ClientCertificate | None = None,
) -> Identity:
    """Register this machine as a node and keep the answer. Raises what `Client` raises, SpecError among it.

    `is_pilot`: a former pilot of this name, on whatever host, has the same node. `certificate`: is shown to the server.
    """
    node = {
        "join_token": join_token,
        "name": name or socket.gethostname(),
        "host": socket.gethostname(),
        "cpus": offer.cpus,
        "gpus": offer.gpus,
        "memory_bytes": offer.memory_bytes,
        "version": __version__,
        **({"pilot": True} if is_pilot else {}),  # a server that does not know the field refuses it
    }
    with Client(url, token=None, certificate=certificate) as client:
        try:
            answer = client.register_node(cast(NodeJoin, node))
        except SpecError as error:
            if any(fault.get("pointer") == "/pilot" for fault in getattr(error, "errors", ())):
                raise SpecError(
                    f"the server at {url} is of a version without pilots: it would place jobs on one that leaves. "
                    "Upgrade the server, or join without --once and --ttl"
                ) from error
            raise
    identity = Identity(url, answer["node_id"], answer["node_token"])
    write(state_dir, identity)
    return identity


def join_within(
    join: Callable[[], Identity],
    limit_s: float = PILOT_JOIN_LIMIT_S,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Identity:
    """Retry a join while the server is unreachable, so long at most. Raises what the last attempt raised."""
    backoff, started = Backoff(0.5, 10.0, limit_s=limit_s), clock()
    while True:
        try:
            return join()
        except Unavailable as error:
            wait_s = backoff.wait_within_s(clock() - started)
            if wait_s is None:
                raise
            _log.warning("%s; next attempt in %.1f s", error, wait_s)
        sleep(wait_s)


def num_gpus() -> int:
    """Return the number of NVIDIA devices, as the driver lists them (torch would take seconds to load)."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
