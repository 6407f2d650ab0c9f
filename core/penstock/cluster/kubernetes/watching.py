"""A copy of a collection of the API server, kept by list and watch: what is asked for often costs no request.

A thread lists once, then follows the events from the list's resource version on. A watch that ends is continued from
the last event; one whose version has expired (410 Gone) begins with a list again. While the server is unreachable, the
copy is not given out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from penstock.cluster.kubernetes.api import Api, Expired, Object
from penstock.cluster.provisioner import EngineAway
from penstock.errors import PenstockError

LEAST_WATCH_S = 1.0
"""Rest before the next request after a watch that was shorter, or one whose version had expired."""
_log = logging.getLogger(__name__)


class Copy:
    """The objects of a collection by name, as of one resource version. No I/O."""

    def __init__(self, listed: Object) -> None:
        self.version: str = listed["metadata"]["resourceVersion"]
        self.objects: dict[str, Object] = {one["metadata"]["name"]: one for one in listed["items"]}

    def apply(self, event: Object) -> None:
        """Take an event of a watch."""
        found = event["object"]
        self.version = found["metadata"]["resourceVersion"]
        if event["type"] == "DELETED":
            self.objects.pop(found["metadata"]["name"], None)
        elif event["type"] in ("ADDED", "MODIFIED"):
            self.objects[found["metadata"]["name"]] = found


class Watched:
    """The copy of a collection, and the thread that keeps it, which begins with the first look."""

    def __init__(
        self, api: Api, path: str, selector: str, *, watch_s: float, wait: Callable[[float], bool] | None = None
    ) -> None:
        self._api, self._path, self._watch_s = api, path, watch_s
        self._selector = {"labelSelector": selector}
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._lock = threading.Condition()
        self._copy: Copy | None = None
        self._error: PenstockError | None = None
        self._thread: threading.Thread | None = None

    def objects(self, limit_s: float = 30.0) -> list[Object]:
        """Return what there is. Raises EngineAway, or what the server refuses, while the copy is not kept."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name=f"watch {self._path}", daemon=True)
                self._thread.start()
            if not self._lock.wait_for(lambda: self._copy is not None or self._error is not None, limit_s):
                raise EngineAway(f"Kubernetes has not listed {self._path} within {limit_s:g} s")
            if self._error is not None:
                raise self._error
            assert self._copy is not None
            return list(self._copy.objects.values())

    def close(self) -> None:
        """End the thread, within the time of a watch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._list_if_need_be()
                began = time.monotonic()
                self._watch_once()
                failures = 0
                if time.monotonic() - began < LEAST_WATCH_S:  # a proxy that ends watches
                    self._wait(LEAST_WATCH_S)
            except Expired:
                self._forget(None)
                self._wait(LEAST_WATCH_S)
            except PenstockError as error:
                self._forget(error)
                failures += 1
                self._wait(min(0.25 * 2**failures, 30.0))
            except Exception as error:  # noqa: BLE001 the thread's boundary: a look raises it
                _log.exception("the watch of %s failed", self._path)
                self._forget(EngineAway(f"the watch of {self._path} failed: {error!r}"))
                self._wait(30.0)

    def _list_if_need_be(self) -> None:
        if self._copy is not None:
            return
        copy = Copy(self._api.get(self._path, **self._selector))
        with self._lock:
            self._copy, self._error = copy, None
            self._lock.notify_all()

    def _watch_once(self) -> None:
        copy = self._copy
        assert copy is not None
        query = {**self._selector, "resourceVersion": copy.version}
        for event in self._api.watch(self._path, query, self._watch_s):
            with self._lock:
                copy.apply(event)
            if self._stop.is_set():
                return

    def _forget(self, error: PenstockError | None) -> None:
        with self._lock:
            self._copy, self._error = None, error
            self._lock.notify_all()
