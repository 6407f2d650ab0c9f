"""The thread that keeps a trainer a member while it computes or waits, and notices servers that are silent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.errors import PeerError
from penstock.ps.link import ServerLink


class Beating:
    """Beats of one trainer to all its servers. A server that does not answer holds up no beat to another.

    `within_s`: how soon a silent server has to be noticed; the lease, if that is shorter.
    """

    def __init__(self, links: Sequence[ServerLink], *, within_s: float) -> None:
        self._links, self._every_s = list(links), within_s / 6
        self._stop = threading.Event()
        self._busy: set[int] = set()  # indices of links with a beat on its way
        self._refused: set[int] = set()
        self._workers = ThreadPoolExecutor(len(self._links), thread_name_prefix="ps-beat")
        self._thread = threading.Thread(target=self._run, name="ps-beats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            for index, link in enumerate(self._links):
                if index not in self._busy and index not in self._refused and link.beat_is_due():
                    self._busy.add(index)
                    try:
                        self._workers.submit(self._beat, index, link)
                    except RuntimeError:
                        return  # the interpreter ends, or this is being closed

    def _beat(self, index: int, link: ServerLink) -> None:
        try:
            link.beat()
        except PeerError as error:  # the next call is refused as well, and raises it to the program
            self._refused.add(index)
            print(f"penstock: {error}", file=sys.stderr)
        finally:
            self._busy.discard(index)

    def close(self) -> None:
        """Stop. A beat that is on its way may arrive after a leave; it is refused then, and that is all."""
        self._stop.set()
        self._thread.join()
        self._workers.shutdown(wait=False, cancel_futures=True)
