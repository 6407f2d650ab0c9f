"""Streams and times of a plan on GPUs: the order comes from the native `DevicePlan`, the times from pairs of events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.graph.ssa import Graph
from penstock.native.engine import DevicePlan, Engine

Devices = tuple[torch.device, ...]

EXCHANGES = frozenset({"all_reduce", "reduce", "broadcast", "gather"})
_MAX_TIMES = 1 << 20  # events that wait for a drain; older ones are dropped and counted as lost


def on_gpus(devices: Devices) -> bool:
    """Whether replicas have streams and memories of their own."""
    return any(d.type == "cuda" for d in devices)


class DeviceStreams:
    """The streams of one plan. `guard`: another one than CUDA's, for tests."""

    def __init__(self, graph: Graph, devices: Devices, *, timed: bool = True, pretended: Any = None) -> None:
        indices = [d.index or 0 for d in devices]
        self.plan = DevicePlan(indices, timed=timed, pretended=pretended)
        for handle in graph.handles:
            self.plan.place(handle.replica, exchange=handle.kind in EXCHANGES)
        self.plan.seal(graph.edges())
        self._ops = np.array([h.index for h in graph.handles], dtype=np.uint32)
        self._threads = np.array([max(h.replica, 0) for h in graph.handles], dtype=np.uint16)
        self._began_ns = 0
        self._step = -1

    def run(self, step: int, launch: Callable[[], None]) -> None:
        """Launch a step within `begin` and `end`. After an error the devices have done what was launched."""
        self._began_ns, self._step = time.time_ns(), step
        self.plan.begin()
        try:
            launch()
        except BaseException:
            self._step = -1
            self.plan.abandon()
            raise
        self.plan.end()

    def events(self) -> dict[str, Any] | None:
        """Return the last step's events by the devices' clocks, as `Engine.drain` has them. Waits; None: no step."""
        if self._step < 0:
            return None
        times = np.array(self.plan.times(), dtype=np.float64).reshape(-1, 2) * 1e6
        step, self._step = self._step, -1
        return {
            "start_ns": self._began_ns + times[:, 0].astype(np.int64),
            "duration_ns": np.maximum(times[:, 1], 0).astype(np.uint32),
            "op": self._ops,
            "step": np.full(len(times), step, dtype=np.uint64),
            "thread": self._threads,
        }


class DeviceTrace:
    """What telemetry drains of an engine whose operators run on GPUs: when they ran there, not when they were launched.

    The training thread adds a step's events before the next step; the drain thread takes them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[dict[str, Any]] = []
        self._lost = 0

    def add(self, events: dict[str, Any] | None) -> None:
        """Keep a step's events for the next drain."""
        if events is None:
            return
        self._waiting.append(events)
        while sum(len(e["op"]) for e in self._waiting) > _MAX_TIMES:
            self._lost += len(self._waiting.pop(0)["op"])

    def drain(self) -> dict[str, Any]:
        """Return the columns of `Engine.drain`; the threads are the replicas."""
        launches = self._engine.drain()  # emptied, so that its rings lose nothing that somebody counts
        taken, self._waiting = self._waiting, []
        lost, self._lost = self._lost, 0
        names = ("start_ns", "duration_ns", "op", "step", "thread")
        none = {name: launches[name][:0] for name in names}
        return {name: np.concatenate([e[name] for e in (none, *taken)]) for name in names} | {"lost": lost}


def streams_for(graph: Graph, devices: Devices) -> DeviceStreams | None:
    """Return the streams of a plan on GPUs, None elsewhere."""
    return DeviceStreams(graph, devices) if on_gpus(devices) else None
