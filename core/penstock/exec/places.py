"""Where a Program runs, and how many replicas of it."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass

import torch

from penstock.errors import SpecError


@dataclass(frozen=True, slots=True)
class CPUPlace:
    """The processor."""


@dataclass(frozen=True, slots=True)
class CUDAPlace:
    """GPU `index` among the visible ones."""

    index: int = 0


Place = CPUPlace | CUDAPlace


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _say_detected(cores: int) -> None:
    print(f"penstock: CPU_NUM is not set; {cores} replicas run, one for each core", file=sys.stderr)


def cpu_num() -> int:
    """Return the number of CPU replicas: the environment's CPU_NUM, else the number of cores. Raises SpecError."""
    text = os.environ.get("CPU_NUM", "").strip()
    if not text:
        _say_detected(num_cores())
        return num_cores()
    if not text.isdecimal() or int(text) < 1:
        raise SpecError(f"the environment variable CPU_NUM is {text!r}; expected a whole number from 1 on")
    return int(text)


def cpu_places(device_count: int | None = None) -> list[CPUPlace]:
    """Return one place for each CPU replica."""
    return [CPUPlace()] * (device_count or cpu_num())


def cuda_places(device_ids: list[int] | None = None) -> list[CUDAPlace]:
    """Return one place for each visible GPU."""
    ids = list(range(torch.cuda.device_count())) if device_ids is None else device_ids
    return [CUDAPlace(i) for i in ids]


def is_compiled_with_cuda() -> bool:
    """Whether GPUs can be used here."""
    return torch.cuda.is_available()
