"""Heartbeats of a trainer to its servers, by threads of their own: a server that is silent delays no other's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.errors import PeerError
from penstock.ps.server_link import ServerLink

_log = logging.getLogger(__name__)


class HeartbeatThread:
    """Heartbeats of one trainer to all its servers. A server that does not answer delays no heartbeat to another.

    `within_s`: how soon a silent server has to be noticed, if that is shorter than the leases.
    """

    def __init__(self, links: Sequence[ServerLink], *, within_s: float) -> None:
        self._links, self._every_s = list(links), within_s / 6
        self._stop = threading.Event()
        self._busy: set[int] = set()  # indices of links with a heartbeat on its way
        self._refused: set[int] = set()
        self._workers = ThreadPoolExecutor(len(self._links), thread_name_prefix="ps-heartbeat")
        self._thread = threading.Thread(target=self._run, name="ps-heartbeats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A server that is started again may have another lease.
        while not self._stop.wait(min([self._every_s, *(link.lease_s / 6 for link in self._links)])):
            for index, link in enumerate(self._links):
                if index not in self._busy and index not in self._refused and link.heartbeat_is_due():
                    self._busy.add(index)
                    try:
                        self._workers.submit(self._send, index, link)
                    except RuntimeError:
                        return  # the interpreter ends, or this is being closed

    def _send(self, index: int, link: ServerLink) -> None:
        try:
            link.heartbeat()
        except PeerError as error:  # the next call is refused as well, and raises it to the program
            self._refused.add(index)
            _log.error("%s", error)
        finally:
            self._busy.discard(index)

    def close(self) -> None:
        """Stop. A heartbeat that is on its way may arrive after a leave; it is refused then, without effect."""
        self._stop.set()
        self._thread.join()
        self._workers.shutdown(wait=False, cancel_futures=True)
