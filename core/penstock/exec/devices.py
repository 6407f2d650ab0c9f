"""Replicas on GPUs: device arguments of operators, tensors to the cards and back, streams and times of a step.

A Program knows one device, the one it was recorded on (CPU). On another device every `device` argument names that one:
those that the recording has set, and those of operators that take no tensor and would make their result on CPU.
`ReplicaMemory.devices` lists the devices of a DataParallel, one for each replica; CPU devices are allowed and give the
same graph in this process's memory, which is how tests run it. The graph is made by `graph/devices.py`; the order on
streams comes from the native `DevicePlan`, the times from pairs of events.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.compat.torch import ATTENTION_ON_CPU, has_kernel, schema_of
from penstock.errors import SpecError
from penstock.exec.places import CUDAPlace
from penstock.graph.across import Across
from penstock.graph.build import build_graph
from penstock.graph.devices import build_device_graph
from penstock.graph.interpret import Placed
from penstock.graph.ssa import Graph, Mode, OpHandle
from penstock.logger import warn_once
from penstock.native.engine import DevicePlan, Engine
from penstock.program.kernels import CAPTURED, resolve
from penstock.program.program import Program

_log = logging.getLogger(__name__)
Devices = tuple[torch.device, ...]


def _device_position(schema: Any) -> int | None:
    return next((i for i, a in enumerate(schema.arguments) if a.name == "device" and "Device" in str(a.type)), None)


def takes_tensors(schema: Any) -> bool:
    """Whether an operator has operands that say where it runs."""
    return any("Tensor" in str(a.type) for a in schema.arguments)


_ON_CARDS = {
    f"aten::{name}": ours
    for name, ours in zip(ATTENTION_ON_CPU, ("penstock::attention", "penstock::attention_backward"), strict=True)
}
"""Operators that torch records on CPU and has there alone -> ours with the same operands (composed_attention.cpp)."""


def kernel_name_on(name: str, device: torch.device | None) -> str:
    """Return the name of the operator that stands for another one ('aten::mm') on a device."""
    if device is None or device.type == "cpu":
        return name
    if name == "penstock::dropout" and has_card_dropout():
        return "penstock::card_dropout"
    return _ON_CARDS.get(name, name)


def has_card_dropout() -> bool:
    """Whether dropout is one kernel on GPUs (`native/card_kernels.py`). Tries it once, which takes a second."""
    from penstock.native import card_kernels  # registers it; only processes with GPUs need it

    reason = card_kernels.dropout_fault()
    if reason:
        warn_once(_log, f"dropout runs as a hundred small kernels, and steps with it are launched one by one: {reason}")
    return not reason


def kernel_on(kernel: Any, device: torch.device) -> Any:
    """Return the operator overload that stands for another one on a device."""
    schema = schema_of(kernel)
    name = kernel_name_on(schema.name, device)
    if name == schema.name:
        return kernel
    return getattr(torch.ops.penstock, name.removeprefix("penstock::")).default


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


def placed_on(devices: Devices) -> Placed | None:
    """Return what puts the calls of the interpreter on the replicas' devices; None where all are in this process."""
    if not devices:
        return None

    def place(handle: OpHandle, kernel: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        device = devices[max(handle.replica, 0)]
        on_device(schema_of(kernel), args, kwargs, device)
        return kernel_on(kernel, device)

    return place


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


EXCHANGES = frozenset({"all_reduce", "reduce", "broadcast", "gather"})
_FREE_CAPTURES = 4  # of a plan, whatever changes
_MAX_TIMES = 1 << 20  # events that wait for a drain; older ones are dropped and counted as lost


def on_gpus(devices: Devices) -> bool:
    """Whether replicas have streams and memories of their own."""
    return any(d.type == "cuda" for d in devices)


class DeviceStreams:
    """The streams of one plan. `trace`: gets the times of its steps. `pretended`: devices for tests, not CUDA's."""

    def __init__(
        self,
        graph: Graph,
        devices: Devices,
        *,
        timed: bool = True,
        trace: DeviceTrace | None = None,
        pretended: Any = None,
    ) -> None:
        self._timed, self._trace = timed, trace
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
        """Launch a step within `begin` and `end`. After an error the devices have done what was launched.

        The times of the step before are recorded over, so they go to the trace first.
        """
        self.harvest()
        self._began_ns, self._step = time.time_ns(), step
        self.plan.begin()
        try:
            launch()
        except BaseException:
            self._step = -1
            self.plan.abandon()
            raise
        self.plan.end()
        if self._trace is not None:
            self._trace.expect(step)

    def harvest(self, *, waits: bool = True) -> None:
        """Give the trace the times of the last step, once it has ended: then, or if it `waits` for that."""
        step = self._step
        if self._trace is not None and step >= 0 and (waits or self.plan.ended()):
            self._trace.add(self.events(), step)

    def events(self) -> dict[str, Any] | None:
        """Return the last step's events by the devices' clocks, as `Engine.drain` has them. Waits.

        None: there was no step, or no times are recorded.
        """
        if self._step < 0 or not self._timed:
            return None
        step, self._step = self._step, -1
        times = np.array(self.plan.times(), dtype=np.float64).reshape(-1, 2) * 1e6
        return {
            "start_ns": self._began_ns + times[:, 0].astype(np.int64),
            "duration_ns": np.maximum(times[:, 1], 0).astype(np.uint32),
            "op": self._ops,
            "step": np.full(len(times), step, dtype=np.uint64),
            "thread": self._threads,
        }


class DeviceTrace:
    """What telemetry drains of an engine whose operators run on GPUs: when they ran there, not when they were launched.

    The training thread adds a step's events once the devices have done it; the drain thread takes them. A step is
    reported after that, in the order of steps: telemetry takes what it drains later for another step's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[dict[str, Any]] = []
        self._lost = 0
        self._expected: set[int] = set()
        self._reports: deque[tuple[int, Callable[[], None]]] = deque()

    def expect(self, step: int) -> None:
        """Note that a step's events will be added."""
        self._expected.add(step)

    def add(self, events: dict[str, Any] | None, step: int) -> None:
        """Keep a step's events for the next drain, and report it if it waited for them."""
        if events is None:
            return
        self._waiting.append(events)
        while sum(len(e["op"]) for e in self._waiting) > _MAX_TIMES:
            self._lost += len(self._waiting.pop(0)["op"])
        self._expected.discard(step)
        self._report()

    def report(self, step: int, report: Callable[[], None]) -> None:
        """Call `report` as soon as the events of this step and of those before are there."""
        self._reports.append((step, report))
        self._report()

    def _report(self) -> None:
        while self._reports and self._reports[0][0] not in self._expected:
            self._reports.popleft()[1]()

    def drain(self) -> dict[str, Any]:
        """Return the columns of `Engine.drain`; the threads are the replicas."""
        launches = self._engine.drain()  # emptied, so that its rings lose nothing that is counted
        taken, self._waiting = self._waiting, []
        lost, self._lost = self._lost, 0
        names = ("start_ns", "duration_ns", "op", "step", "thread")
        none = {name: launches[name][:0] for name in names}
        return {name: np.concatenate([e[name] for e in (none, *taken)]) for name in names} | {"lost": lost}


@dataclass(slots=True)
class Capture:
    """One CUDA graph of a plan's step (`step_graphs.py`). `outputs`: by slot.

    `streams`: where the times of its operators are recorded.
    """

    streams: DeviceStreams | None
    graph: torch.cuda.CUDAGraph | None = None
    outputs: list[tuple[int, torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class StepGraph:
    """Whether the steps of one plan are replays of CUDA graphs. `reason`: why it is not captured.

    `addresses`: of its tensors, as they were captured.
    `captures`: one, or of a watched process two that take turns: the times of one are read while the other runs.
    """

    reason: str
    captures: list[Capture] = field(default_factory=list)
    runs: int = 0
    addresses: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()  # in the run before
    revision: int = -1  # of the scope, at which `persistables` were looked up
    persistables: tuple[int, ...] = ()
    num_captures: int = 0

    def is_current(self, addresses: tuple[int, ...]) -> bool:
        """Whether what was captured still reads and writes where the plan does."""
        return self.is_captured and self.addresses == addresses

    def is_worth_capturing(self, addresses: tuple[int, ...]) -> bool:
        """Whether to capture for these: not if they change in every run, as when a script sets a rate before each."""
        stays, self.seen = self.seen == addresses, addresses
        return stays or self.num_captures < _FREE_CAPTURES

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed."""
        return bool(self.captures) and self.captures[0].graph is not None

    @property
    def streams(self) -> Sequence[DeviceStreams | None]:
        """What records the times of replayed steps."""
        return [capture.streams for capture in self.captures]


def streams_for(graph: Graph, devices: Devices, trace: DeviceTrace | None) -> DeviceStreams | None:
    """Return the streams of a plan on GPUs, None elsewhere. `trace`: gets the times; without it none are recorded."""
    return DeviceStreams(graph, devices, timed=trace is not None, trace=trace) if on_gpus(devices) else None


@contextmanager
def on_default_streams(devices: Devices) -> Iterator[None]:
    """Run a block on the cards' default streams: after what the caller's hold, and before what they get next."""
    with ExitStack() as stack:
        for device in dict.fromkeys(devices) if on_gpus(devices) else ():
            current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            if current != default:
                default.wait_stream(current)
                stack.callback(current.wait_stream, default)
                stack.enter_context(torch.cuda.stream(default))
        yield


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


def fetched(values: list[torch.Tensor], devices: Devices) -> list[torch.Tensor]:
    """Return fetched tensors in this process's memory; waits for the devices."""
    return [v.cpu() for v in values] if on_gpus(devices) else values
