"""Replicas on GPUs: device arguments of operators, tensors to the cards and back, streams and times of a step.

A Program knows one device, the one it was recorded on (CPU). On another device every `device` argument names that one:
those that the recording has set, and those of operators that take no tensor and would make their result on CPU.
`ReplicaMemory.devices` lists the devices of a DataParallel, one for each replica; CPU devices are allowed and give the
same graph in this process's memory, which is how tests run it. The graph is made by `graph/devices.py`; the order on
streams comes from the native `DevicePlan`, the times from pairs of events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.compat.torch import has_kernel, schema_of
from penstock.errors import SpecError
from penstock.exec.places import CUDAPlace
from penstock.graph.across import Across
from penstock.graph.build import build_graph
from penstock.graph.devices import build_device_graph
from penstock.graph.ssa import Graph, Mode, OpHandle
from penstock.native.engine import DevicePlan, Engine
from penstock.program.kernels import CAPTURED, resolve
from penstock.program.program import Program


def _device_position(schema: Any) -> int | None:
    return next((i for i, a in enumerate(schema.arguments) if a.name == "device" and "Device" in str(a.type)), None)


def takes_tensors(schema: Any) -> bool:
    """Whether an operator has operands that say where it runs."""
    return any("Tensor" in str(a.type) for a in schema.arguments)


def put_on_device(schema: Any, arguments: list[tuple[str, object]], device: torch.device) -> None:
    """Set the device among the arguments of a call, which are all there, in the order of the schema."""
    position = _device_position(schema)
    if position is not None and (arguments[position][1] is not None or not takes_tensors(schema)):
        arguments[position] = ("const", device)


def on_device(schema: Any, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Set the device among the arguments of a Python call: those that were given, by position and by name."""
    position = _device_position(schema)
    if position is None:
        return
    if position < len(args):
        args[position] = device
    elif kwargs.get("device") is not None or not takes_tensors(schema):
        kwargs["device"] = device


def moved(value: Any, device: torch.device) -> Any:
    """Return a result on the device; what a random operator without operands has made comes from the processor."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [moved(v, device) for v in value] if isinstance(value, list) else value


def refuse_without_kernel(graph: Graph, key: str = "CUDA") -> None:
    """Raise SpecError naming the first operator that a device of this kind cannot run."""
    for handle in first_of_each_type(graph.handles):
        name = handle.op.type.rsplit(".", 1)[0].replace(".", "::", 1)
        if not name.startswith("penstock::"):
            continue  # torch's own: it raises itself for what it lacks, and has fallbacks that cannot be asked for
        if not takes_tensors(schema_of(resolve(handle.op))) or not _has_kernel(name, key):
            raise SpecError(
                f"operator {handle.op.name!r} ({handle.op.type}, {handle.op.source or 'no line'}) has no kernel for "
                f"{key}; run this program with use_cuda=False",
                operator=handle.op.name,
            )


def first_of_each_type(handles: Iterable[OpHandle]) -> list[OpHandle]:
    """Return the first handle of each type of operator."""
    found: dict[str, OpHandle] = {}
    for handle in handles:
        if handle.op.type != CAPTURED:
            found.setdefault(handle.op.type, handle)
    return list(found.values())


def _has_kernel(name: str, key: str) -> bool:
    return any(has_kernel(name, k) for k in (key, "CompositeExplicitAutograd", "CompositeImplicitAutograd"))


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
        launches = self._engine.drain()  # emptied, so that its rings lose nothing that is counted
        taken, self._waiting = self._waiting, []
        lost, self._lost = self._lost, 0
        names = ("start_ns", "duration_ns", "op", "step", "thread")
        none = {name: launches[name][:0] for name in names}
        return {name: np.concatenate([e[name] for e in (none, *taken)]) for name in names} | {"lost": lost}


def streams_for(graph: Graph, devices: Devices) -> DeviceStreams | None:
    """Return the streams of a plan on GPUs, None elsewhere."""
    return DeviceStreams(graph, devices) if on_gpus(devices) else None


_PINNED_BYTES = 64 << 10  # smaller feeds are copied as they are: locking a page costs more than it saves


def devices_of(places: Sequence[CUDAPlace]) -> Devices:
    """Return the device of each place, and make the kernels of exchanges known. `places`: checked, see `places`."""
    import penstock.native.collectives  # noqa: F401 - replaces kernels that only GPUs need

    return tuple(torch.device("cuda", place.index) for place in places)


def build_for(
    devices: Devices, program: Program, *, mode: Mode, num_replicas: int, active: int, across: Across | None = None
) -> Graph:
    """Build the graph for replicas that share memory (no devices), or for those that do not.

    `across`: exchange with other processes; on devices each of them has one.
    """
    if not devices:
        return build_graph(program, mode=mode, num_replicas=num_replicas, active=active, across=across)
    graph = build_device_graph(program, mode=mode, num_replicas=num_replicas, active=active, across=across)
    if on_gpus(devices):
        refuse_without_kernel(graph)
    return graph


def fed(share: Mapping[str, torch.Tensor], device: torch.device | None) -> Mapping[str, torch.Tensor]:
    """Return a replica's feeds on its device; copied from locked memory without waiting, if large."""
    if device is None or device.type != "cuda":
        return share
    return {name: _sent(tensor, device) for name, tensor in share.items()}


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.nbytes < _PINNED_BYTES:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetched(values: list[torch.Tensor], devices: Devices) -> list[torch.Tensor]:
    """Return fetched tensors in this process's memory; waits for the devices."""
    return [v.cpu() for v in values] if on_gpus(devices) else values


def harvest(streams: Iterable[DeviceStreams | None], trace: DeviceTrace | None) -> None:
    """Move the events of the step that ran last to the trace, before anything is recorded over them."""
    if trace is not None:
        for one in streams:
            if one is not None:
                trace.add(one.events())
