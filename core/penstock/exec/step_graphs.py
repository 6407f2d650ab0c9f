"""Steps on one GPU as CUDA graphs: a plan whose steps differ in their feeds alone is captured, and then replayed.

Launching an operator costs several microseconds of the processor, and most kernels of a small model run for less. A
replay launches all of them at once. A plan's first run launches operator by operator; the second does so by the thread
that will capture, so that the libraries have there what they make at their first call; the third captures and replays.
Nothing runs twice: what is captured is not executed.

What cannot be captured runs operator by operator, as before: a step that draws random numbers with a state that is read
as it is launched (all but dropout's), whose sizes or rows differ within a plan, that makes persistable tensors anew,
calls Python, or exchanges with other processes; and whatever CUDA refuses while it captures (an operator that waits for
the card). `StepGraph.reason` says why. Of a watched process the graph has an event behind each operator, so that
telemetry sees when it ran in every replay (`DevicePlan::capture_on`).

Invariant: what a plan reads and writes has the same addresses in every run: feeds (`card_feeds.py`), persistables
(until the scope's are replaced: then the plan is captured again), and fetched tensors, which the graph owns.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.exec.devices import Capture, DeviceStreams, DeviceTrace, StepGraph
from penstock.exec.lowering import Lowered
from penstock.graph.ssa import Graph
from penstock.logger import warn_once
from penstock.native.engine import Engine
from penstock.program.kernels import CAPTURED, resolve

_log = logging.getLogger(__name__)

CAPTURED_OPERATORS = frozenset(
    f"penstock.{name}.default"
    for name in (
        *("lookup_table", "sparse_sgd_", "sparse_adam_", "sparse_adagrad_", "sgd_", "adam_"),
        *("fused_sgd_", "fused_momentum_", "fused_adagrad_", "fused_adam_", "scale_loss_grad"),
        *("dropout", "dropout_backward", "auc", "accuracy"),
    )
)
"""Penstock's operators that launch the same kernels in every step. Others look at values, or call Python."""


_WAITS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_capturing = threading.Lock()
"""Held while a plan is captured: of a process torch captures one at a time."""


def obstacle(lowered: Lowered) -> str:
    """Return why the steps of a plan cannot be captured, as far as the plan says; '' if nothing speaks against it."""
    if len(lowered.random_states) > len(lowered.random_slots):
        return "it draws random numbers, whose state is read as the step is launched"
    if lowered.varying or (lowered.card_feeds is not None and lowered.card_feeds.vary):
        return "its sizes differ from step to step"
    if lowered.made_persistables:
        return f"it makes the persistable variable {lowered.made_persistables[0][0]!r} anew"
    return _obstacle_in(lowered.graph)


def _obstacle_in(graph: Graph) -> str:
    for handle in graph.handles:
        if handle.kind not in ("computation", "scale_loss_grad"):
            return f"the operator {handle.op.name!r} exchanges with others ({handle.kind})"
        if handle.op.type.startswith("penstock.") and handle.op.type not in CAPTURED_OPERATORS:
            return f"the operator {handle.op.name!r} ({handle.op.type}) may look at values"
        if handle.op.type != CAPTURED and _WAITS.intersection(resolve(handle.op).tags):
            return f"the operator {handle.op.name!r} ({handle.op.type}) waits for the card"
    return ""


class StepGraphs:
    """Captures and replays the plans of one executor on one GPU; a plan holds its graph. `name`: of the program.

    `trace`: gets the times of each step's operators; None: they are not recorded. Not thread-safe, as the executor.
    """

    def __init__(self, device: torch.device, name: str, trace: DeviceTrace | None) -> None:
        self._device, self._name, self._trace = device, name, trace
        self._recorder = _event_recorder() if trace is not None else 0
        self._engine = Engine(1, max_running=1, intra_op_threads=1)  # of one worker: the calling thread
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def run(self, lowered: Lowered, step: int) -> bool:
        """Run a step, or return False: then the caller runs it operator by operator. Raises EngineError."""
        state = lowered.step_graph
        if state is None:
            state = lowered.step_graph = StepGraph(obstacle(lowered) or self._untimed())
        if state.reason:
            return False
        state.runs += 1
        if state.runs == 1:
            return False
        if state.runs == 2:
            self._warm_up(lowered, state, step)
            return True
        addresses = _addresses(lowered, state)
        if state.is_worth_capturing(addresses) and not state.is_current(addresses):
            self._capture_all(lowered, state, addresses, step)
        if not state.is_current(addresses):
            return False
        capture = state.captures[state.runs % len(state.captures)]
        assert capture.graph is not None
        with torch.cuda.device(self._device):
            if capture.streams is None:
                capture.graph.replay()
            else:
                capture.streams.run(step, partial(self._beside, capture.graph.replay))
        for slot, tensor in capture.outputs:
            lowered.plan.set(slot, tensor)
        return True

    def _beside(self, launch: Callable[[], None]) -> None:
        """Launch on the stream that captures, in the order of the one that computes."""
        side, main = self._on_stream(), torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                launch()
        finally:
            main.wait_stream(side)

    def close(self) -> None:
        """Release the thread; the plans release their graphs."""
        self._pool = None
        self._engine.close()

    def _untimed(self) -> str:
        """Return why operators could not be timed, if they have to be."""
        if self._trace is None or self._recorder:
            return ""
        return "the CUDA runtime, which records times within a graph, is not found"

    def _on_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch has not typed it
        return self._stream

    def _warm_up(self, lowered: Lowered, state: StepGraph, step: int) -> None:
        """Run a step by the thread that captures, on the default stream.

        Not on the one that captures: what cuBLAS allocates for a stream at its first call has to come from the graph's
        memory. torch.compile frees the workspaces of all streams (`_cuda_clearCublasWorkspaces`).
        """
        assert lowered.streams is not None
        state.captures = [Capture(self._timed_streams(lowered)) for _ in range(1 if self._trace is None else 2)]
        lowered.streams.run(step, lambda: self._engine.run(lowered.plan, step))

    def _timed_streams(self, lowered: Lowered) -> DeviceStreams | None:
        if self._trace is None:
            return None
        made, side = DeviceStreams(lowered.graph, lowered.devices, trace=self._trace), self._on_stream()
        made.plan.capture_on(side.stream_id, self._device.index or 0, record=self._recorder, stream=side.cuda_stream)
        return made

    @contextmanager
    def _redirected(self, lowered: Lowered, capture: Capture) -> Iterator[None]:
        """Have the plan's operators run on the stream that captures."""
        lowered.plan.use_devices(None if capture.streams is None else capture.streams.plan)
        try:
            yield
        finally:
            lowered.plan.use_devices(None if lowered.streams is None else lowered.streams.plan)

    def _capture_all(self, lowered: Lowered, state: StepGraph, addresses: tuple[int, ...], step: int) -> None:
        """Capture the plan, or note why that is not possible. Executes nothing."""
        for capture in state.captures:
            capture.graph, capture.outputs = None, []
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        try:
            with _capturing:
                for capture in state.captures:
                    self._capture(lowered, capture, step)
        except (PenstockError, RuntimeError) as error:
            torch.cuda.set_stream(current)  # a refused capture leaves torch on its own
            self._pool = None
            first = (str(error.__context__ or error).strip().splitlines() or [type(error).__name__])[0]
            state.reason, state.captures = f"CUDA does not capture it: {first}", []
            warn_once(_log, f"program {self._name!r} runs operator by operator, not as a CUDA graph: {state.reason}")
            torch.cuda.synchronize(self._device)
            return
        state.addresses, state.num_captures = addresses, state.num_captures + 1

    def _capture(self, lowered: Lowered, capture: Capture, step: int) -> None:
        graph, side = torch.cuda.CUDAGraph(), self._on_stream()
        if capture.streams is not None:
            capture.streams.harvest()
            capture.streams.plan.begin_capture()
        with (
            self._redirected(lowered, capture),
            torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
        ):
            self._engine.run(lowered.plan, step)
        if capture.streams is not None:
            capture.streams.plan.end_capture()
        passing = ((slot, lowered.plan.get(slot)) for slot in lowered.passing)
        capture.graph, capture.outputs = graph, [(slot, tensor) for slot, tensor in passing if tensor is not None]


def _event_recorder() -> int:
    """Return the address of cudaEventRecordWithFlags in the runtime that torch has loaded, 0 if that is not found."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for path in {line.split(maxsplit=5)[-1].strip() for line in maps if "libcudart" in line}:
        function = getattr(ctypes.CDLL(path), "cudaEventRecordWithFlags", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _addresses(lowered: Lowered, state: StepGraph) -> tuple[int, ...]:
    """Return where feeds and persistables of a plan lie: the number of the feeds' block, then an address for each."""
    if state.revision != lowered.bound_revision:
        state.revision = lowered.bound_revision
        variables = lowered.graph.variables.items()
        found = (lowered.plan.get(lowered.slots[key]) for key, variable in variables if variable.persistable)
        state.persistables = tuple(tensor.data_ptr() for tensor in found if tensor is not None)
    return 0 if lowered.card_feeds is None else lowered.card_feeds.num_blocks, *state.persistables
