"""A gRPC server between trainers and a parameter server, which loses requests and answers, and repeats requests.

It knows nothing of messages but their kind. What it does to the n-th call is drawn at random from `seed` and n.
"""

from __future__ import annotations

import collections
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

METHOD, SERVICE, NAME = "/penstock.ps.Parameters/Call", "penstock.ps.Parameters", "Call"
LATE_S = 0.05


class Faults:
    """What happens to requests. `seen`: of each kind. `done`: (what, kind) -> how often. Thread-safe.

    lost request   never passed on        lost answer     passed on, answered by an error
    twice          passed on twice        late            passed on, and again a little later, behind others
    """

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share
        self.seen: collections.Counter[str] = collections.Counter()
        self.done: collections.Counter[tuple[str, str]] = collections.Counter()
        self._number, self._lock = 0, threading.Lock()

    def draw(self, kind: str) -> str:
        """Return what happens to the next request, and count it; '': nothing."""
        kinds = ("lost request", "lost answer", "twice", "late")
        with self._lock:
            self._number += 1
            self.seen[kind] += 1
            chance = random.Random(f"{self._seed}/{self._number}")
            what = chance.choice(kinds) if chance.random() < self._share else ""
            if what:
                self.done[what, kind] += 1
        return what


class Relay:
    """Passes calls on to `endpoint`. `faults`: what it did. `host`: where it listens."""

    def __init__(self, endpoint: str, *, seed: int, share: float, host: str = "127.0.0.1") -> None:
        self.faults = Faults(seed, share)
        self._channel = grpc.insecure_channel(endpoint)
        self._on: Any = self._channel.stream_stream(METHOD)
        self._later: list[threading.Timer] = []
        self._server = grpc.server(ThreadPoolExecutor(64))
        method: Any = grpc.stream_stream_rpc_method_handler(self._call)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: method}),))
        self.endpoint = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        self._server.start()

    def _call(self, stream: Iterator[bytes], context: Any) -> Iterator[bytes]:
        sent = list(stream)
        kind = str(json.loads(sent[0][8:])["kind"])
        metadata = [(k, v) for k, v in context.invocation_metadata() if k in ("authorization", "penstock-job")]
        limit_s = context.time_remaining()

        def pass_on() -> list[bytes]:
            try:
                return list(self._on(iter(sent), timeout=limit_s, metadata=metadata))
            except grpc.RpcError as error:
                raise ConnectionError(str(error)) from error

        try:
            yield from self._fail(kind, pass_on)
        except ConnectionError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _fail(self, kind: str, pass_on: Callable[[], list[bytes]]) -> list[bytes]:
        what = self.faults.draw(kind)
        if what == "lost request":
            raise ConnectionError(what)
        answer = pass_on()
        if what == "lost answer":
            raise ConnectionError(what)
        if what == "twice":
            return pass_on()
        if what == "late" and kind != "leave":
            self._later.append(threading.Timer(LATE_S, lambda: self._again(pass_on)))
            self._later[-1].start()
        return answer

    def _again(self, pass_on: Callable[[], list[bytes]]) -> None:
        try:
            pass_on()
        except ConnectionError:
            self.faults.done["late and refused", ""] += 1

    def close(self) -> None:
        """End."""
        for timer in self._later:
            timer.join()
        self._server.stop(None).wait()
        self._channel.close()
