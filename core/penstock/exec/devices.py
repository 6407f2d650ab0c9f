"""Replicas on GPUs: which cards, how tensors get there and back, streams and times of a step.

`ReplicaMemory.devices` says that a DataParallel runs on devices, one for each replica; CPU devices are allowed and
give the same graph in this process's memory, which is how tests run it. Everything here is thin: the graph is made by
`graph/devices.py`, the order on streams by `device_streams.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from penstock.exec.device_arguments import refuse_without_kernel
from penstock.exec.device_streams import Devices, DeviceTrace, on_gpus
from penstock.exec.lowering import Lowered
from penstock.exec.places import CUDAPlace
from penstock.graph.across import Across
from penstock.graph.build import build_graph
from penstock.graph.devices import build_device_graph
from penstock.graph.passes import PassChoice
from penstock.graph.ssa import Graph, Mode
from penstock.program.program import Program

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


def passes_for(devices: Devices, choice: PassChoice) -> PassChoice:
    """Return the passes that make sense there: on devices none that chooses kernels or addresses of CPU memory."""
    if not devices:
        return choice
    return replace(
        choice, fuse_all_reduce=False, fuse_optimizer=False, fuse_add_act=False, matrix_kernels=False,
        reuse_buffers=False, inplace=False,
    )  # fmt: skip


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


def harvest(plans: Sequence[Lowered], trace: DeviceTrace | None) -> None:
    """Move the events of the step that ran last to the trace, before anything is recorded over them."""
    if trace is not None:
        for lowered in plans:
            if lowered.streams is not None:
                trace.add(lowered.streams.events())
