"""`fluid.core`: what Fluid's scripts name of its C++ module."""

from __future__ import annotations

import torch

from penstock.errors import EOFException, SpecError
from penstock.errors import PenstockError as EnforceNotMet
from penstock.exec.flags import flags_by_name, set_flags
from penstock.exec.parallel import ParallelExecutor
from penstock.exec.places import CPUPlace, CUDAPlace, is_compiled_with_cuda, kind_of
from penstock.exec.strategies import BuildStrategy, ExecutionStrategy
from penstock.lod_tensor import LoDTensor, LoDTensorArray
from penstock.scope import Scope
from penstock.settings import EAGER_DELETE, FUSE_GROUPS_SIZE, FUSE_MEMORY_SIZE


class VarDesc:
    """Fluid's descriptions of variables, of which scripts name the types."""

    class VarType:
        """Element types, as torch's dtypes, and kinds of variables."""

        BOOL, UINT8, INT8, INT16, INT32, INT64 = (
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        )  # fmt: skip
        FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
        LOD_TENSOR, SELECTED_ROWS, LOD_TENSOR_ARRAY = "dense", "selected_rows", "array"
        FEED_MINIBATCH, FETCH_LIST, READER, STEP_SCOPES, RAW = "feed", "fetch", "reader", "step_scopes", "raw"


class Place:
    """A place of any kind, which `set_place` sets."""

    def __init__(self) -> None:
        self._place: CPUPlace | CUDAPlace = CPUPlace()

    def set_place(self, place: CPUPlace | CUDAPlace) -> None:
        """Be that place."""
        self._place = place

    def _type(self) -> int:
        return kind_of(self._place)

    def _equals(self, other: object) -> bool:
        return self._place == (other._place if isinstance(other, Place) else other)

    def is_cpu_place(self) -> bool:
        """Whether it is the processor."""
        return isinstance(self._place, CPUPlace)

    def is_gpu_place(self) -> bool:
        """Whether it is a GPU."""
        return isinstance(self._place, CUDAPlace)

    def gpu_device_id(self) -> int:
        """Return the number of the GPU. Raises SpecError for the processor."""
        if isinstance(self._place, CUDAPlace):
            return self._place.index
        raise SpecError("gpu_device_id() of the processor: ask is_gpu_place() first")


def _set_eager_deletion_mode(threshold: float, fraction: float, fast: bool) -> None:
    """Set FLAGS_eager_delete_tensor_gb to `threshold` bytes; `fraction` and `fast` have no effect."""
    set_flags({EAGER_DELETE.name: threshold / 2**30})


def _set_fuse_parameter_group_size(size: int) -> None:
    """Set FLAGS_fuse_parameter_groups_size: gradients that are exchanged as one."""
    set_flags({FUSE_GROUPS_SIZE.name: size})


def _set_fuse_parameter_memory_size(size: float) -> None:
    """Set FLAGS_fuse_parameter_memory_size, MiB of gradients that are exchanged as one."""
    set_flags({FUSE_MEMORY_SIZE.name: size})


def get_cuda_device_count() -> int:
    """Return the number of GPUs that can be used."""
    return torch.cuda.device_count()


def is_float16_supported(place: object) -> bool:
    """Whether half precision runs on a place: on GPUs, in Fluid's operators too."""
    return (
        place.is_gpu_place() if isinstance(place, Place) else isinstance(place, CUDAPlace)
    ) and is_compiled_with_cuda()


def is_compiled_with_dist() -> bool:
    """Whether parameter servers and collectives are built in: always."""
    return True


globals = flags_by_name

__all__ = [
    "BuildStrategy", "CPUPlace", "CUDAPlace", "EOFException", "EnforceNotMet", "ExecutionStrategy", "LoDTensor",
    "LoDTensorArray", "ParallelExecutor", "Place", "Scope", "VarDesc", "get_cuda_device_count", "globals",
    "is_compiled_with_cuda", "is_compiled_with_dist", "is_float16_supported",
]  # fmt: skip
