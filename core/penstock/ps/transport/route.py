"""The way to one server: shared memory if it runs on this host and its socket can be reached, else gRPC.

A route is found at the first call, and again after `drop`: a server that was started again listens at another socket.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from penstock.errors import Unavailable
from penstock.log import warn_once
from penstock.ps.transport.local import Answered, LocalClient, host_id
from penstock.ps.transport.remote import RemoteClient, Tls
from penstock.ps.wire import Message

_log = logging.getLogger(__name__)
WHERE_S = 5.0  # for a server's answer to `where`

Client = LocalClient | RemoteClient


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach a server. `local`: whether shared memory may be used at all."""

    endpoint: str
    job: str
    token: str = field(repr=False)
    tls: Tls | None = None
    local: bool = True


class Route:
    """Calls to one server. Thread-safe. `drop` breaks the calls in progress: they raise Unavailable."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False

    @property
    def is_local(self) -> bool:
        """Whether calls go through shared memory now."""
        return isinstance(self._client, LocalClient)

    def call(self, message: Message, *, deadline_s: float) -> Answered:
        """Send a request and return its answer. Raises Unavailable, PeerError. Not repeated.

        `deadline_s`: for all of it, finding the way too.
        """
        client = self._client
        if client is not None:
            return client.call(message, deadline_s=deadline_s)
        deadline = time.monotonic() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):
            raise Unavailable(f"no way to {self.address.endpoint} was found within {deadline_s:.0f} s")
        try:
            if self._closed:
                raise Unavailable(f"the connection to {self.address.endpoint} is closed")
            client = self._client
            if client is None:
                client = self._client = self._connect(deadline)
        finally:
            self._lock.release()
        return client.call(message, deadline_s=_left(deadline))

    def _connect(self, deadline: float) -> Client:
        to = self.address
        remote = RemoteClient(to.endpoint, job=to.job, token=to.token, tls=to.tls)
        try:
            local = self._local_client(remote, deadline) if to.local else None
        except BaseException:
            remote.close()
            raise
        if local is None:
            return remote
        remote.close()
        return local

    def _local_client(self, remote: RemoteClient, deadline: float) -> LocalClient | None:
        with remote.call(Message("where", {}), deadline_s=min(_left(deadline), WHERE_S)) as here:
            if here.kind != "here" or here.fields["host"] != host_id() or not here.fields["address"]:
                return None
            local = LocalClient(str(here.fields["address"]), job=self.address.job, token=self.address.token)
        try:
            local.call(Message("where", {}), deadline_s=min(_left(deadline), WHERE_S)).release()
        except Unavailable as error:
            local.close()
            text = f"{self.address.endpoint} is on this host, but its socket cannot be reached ({error}); TCP is used"
            warn_once(_log, text, self, about="socket")
            return None
        except BaseException:
            local.close()
            raise
        return local

    def drop(self) -> None:
        """Forget the way: calls in progress break, and the next one finds another."""
        # Without the lock: its holder is connecting, with a deadline of its own.
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """End: calls in progress break, later ones are refused."""
        self._closed = True
        self.drop()


def _left(deadline: float) -> float:
    """Return the seconds until then; never none, which would be taken for no limit."""
    return max(deadline - time.monotonic(), 0.001)
