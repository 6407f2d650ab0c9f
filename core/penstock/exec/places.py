"""Where a Program runs, and how many replicas of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from penstock.errors import SpecError
from penstock.logger import warn_once
from penstock.machine.cores import usable_cores
from penstock.settings import CPU_NUM, SELECTED_GPUS, VISIBLE_GPUS

_log = logging.getLogger(__name__)


class _Comparable:
    """What scripts of Fluid ask places; the names are Fluid's."""

    __slots__ = ()

    def _type(self) -> int:
        """Return a number for the kind of place."""
        return kind_of(self)

    def _equals(self, other: object) -> bool:
        """Whether it is the same place."""
        return self == other


@dataclass(frozen=True, slots=True)
class CPUPlace(_Comparable):
    """The processor."""


@dataclass(frozen=True, slots=True)
class CUDAPlace(_Comparable):
    """GPU `index` among the visible ones."""

    index: int = 0

    def gpu_device_id(self) -> int:
        """Return `index`."""
        return self.index


Place = CPUPlace | CUDAPlace


def kind_of(place: object) -> int:
    """Return Fluid's number for the kind of a place."""
    return (CPUPlace, CUDAPlace).index(type(place))


def num_cores() -> int:
    """Return the cores that this process may use: its affinity mask, bounded by the quota of its control group."""
    return usable_cores()


def cpu_num() -> int:
    """Return the number of CPU replicas: the environment's CPU_NUM, else the number of cores. Raises SpecError."""
    num = CPU_NUM.read()
    if num is None:
        num = num_cores()
        warn_once(_log, f"CPU_NUM is not set; {num} replicas run, one for each core")
    return num


def cpu_places(device_count: int | None = None) -> list[CPUPlace]:
    """Return one place for each CPU replica."""
    return [CPUPlace()] * (device_count or cpu_num())


def cuda_places(device_ids: list[int] | None = None) -> list[CUDAPlace]:
    """Return one place for each GPU: those given, else FLAGS_selected_gpus, else every visible one.

    Numbers count the visible GPUs: torch reads CUDA_VISIBLE_DEVICES. Raises SpecError for one that is not there.
    """
    visible = torch.cuda.device_count()
    ids = (SELECTED_GPUS.read() or range(visible)) if device_ids is None else device_ids
    for i in ids:
        if not 0 <= i < visible:
            raise SpecError(f"GPU {i} is asked for, but {_visible(visible)}", got=i)
    return [CUDAPlace(i) for i in ids]


def get_places(device_count: int | None = None, device_type: str | None = None) -> list[CPUPlace] | list[CUDAPlace]:
    """Return `device_count` places of a type: 'CPU', 'GPU' (or 'CUDA'), or 'AUTO': GPUs if there are any.

    Raises SpecError for another type, and for more GPUs than there are. Source: fluid.layers.get_places.
    """
    kind = (device_type or "AUTO").upper()
    if kind not in ("AUTO", "CPU", "GPU", "CUDA"):
        raise SpecError(f"get_places is given the device type {device_type!r}; expected 'CPU', 'GPU' or 'AUTO'")
    if kind == "CPU" or (kind == "AUTO" and not torch.cuda.device_count()):
        return cpu_places(device_count)
    return cuda_places(None if device_count is None else list(range(device_count)))


def _visible(count: int) -> str:
    """Describe how many GPUs a user has, and why."""
    if torch.version.cuda is None and torch.version.hip is None and not count:
        return "this torch has no CUDA"
    limit = VISIBLE_GPUS.text()
    return f"{count} are visible" + (f" (CUDA_VISIBLE_DEVICES is {limit!r})" if limit is not None else "")


def gpus_for(what: str, places: list[CUDAPlace] | None = None) -> list[CUDAPlace]:
    """Return the GPUs that `what` asks for: `places`, or all. Raises SpecError, saying what to pass instead."""
    visible = torch.cuda.device_count()
    if not visible:
        raise SpecError(f"{what}: {_visible(visible)}; pass use_cuda=False, or CPU places")
    return cuda_places(None if places is None else [p.index for p in places])


def device_of(place: Place) -> torch.device:
    """Return torch's device of a place. Raises SpecError if there is no such GPU."""
    if isinstance(place, CPUPlace):
        return torch.device("cpu")
    return torch.device("cuda", gpus_for(f"{place!r}", [place])[0].index)


def is_compiled_with_cuda() -> bool:
    """Whether GPUs can be used here."""
    return torch.cuda.is_available()
