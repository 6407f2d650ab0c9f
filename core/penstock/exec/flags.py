"""Process-wide flags under Fluid's names: the last value of `set_flags`, else the environment, else the default."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from penstock.errors import SpecError
from penstock.logger import warn_once
from penstock.settings import (
    CHECK_NAN,
    EAGER_DELETE,
    FUSE_GROUPS_SIZE,
    FUSE_MEMORY_SIZE,
    MATRIX_KERNELS,
    SETTINGS,
    Setting,
    warn_deprecated,
)  # fmt: skip

_log = logging.getLogger(__name__)
T = TypeVar("T")

_KNOWN: Mapping[str, Setting[Any]] = {
    CHECK_NAN.same_as: CHECK_NAN,
    **{one.name: one for one in (MATRIX_KERNELS, FUSE_MEMORY_SIZE, FUSE_GROUPS_SIZE, EAGER_DELETE)},
}
_DEPRECATED = {MATRIX_KERNELS.same_as: MATRIX_KERNELS}
_OF_FLUID = frozenset(
    f"FLAGS_{name}"
    for name in (
        "allocator_strategy", "benchmark", "communicator_fake_rpc", "communicator_independent_recv_thread",
        "communicator_is_sgd_optimizer", "communicator_max_merge_var_num", "communicator_merge_sparse_grad",
        "communicator_min_send_grad_num_before_recv", "communicator_send_queue_size", "communicator_send_wait_times",
        "communicator_thread_pool_size", "conv_workspace_size_limit", "cpu_deterministic",
        "cudnn_batchnorm_spatial_persistent", "cudnn_deterministic", "cudnn_exhaustive_search",
        "cudnn_exhaustive_search_times", "dist_threadpool_size", "eager_delete_scope", "enable_cublas_tensor_op_math",
        "enable_parallel_graph", "enable_rpc_profiler", "fast_eager_deletion_mode", "fraction_of_cpu_memory_to_use",
        "fraction_of_cuda_pinned_memory_to_use", "fraction_of_gpu_memory_to_use", "free_idle_chunk",
        "gpu_memory_limit_mb", "init_allocated_mem", "initial_cpu_memory_in_mb", "initial_gpu_memory_in_mb",
        "inner_op_parallelism", "local_exe_sub_scope_limit", "max_inplace_grad_add",
        "memory_fraction_of_eager_deletion", "multiple_of_cupti_buffer_size", "paddle_num_threads",
        "pe_profile_fname", "print_sub_graph_dir", "reader_queue_speed_test_mode", "reallocate_gpu_memory_in_mb",
        "rpc_deadline", "rpc_disable_reuse_port", "rpc_get_thread_num", "rpc_prefetch_thread_num", "rpc_retry_times",
        "rpc_send_thread_num", "selected_gpus", "sync_nccl_allreduce", "tracer_profile_fname", "use_mkldnn",
        "use_ngraph", "use_pinned_memory",
    )
)  # fmt: skip
"""Flags of Fluid 1.8 that say how its own core allocates, sends or profiles: set here, no result depends on them."""
_OF_THE_ENVIRONMENT = frozenset(setting.name for setting in SETTINGS) & _OF_FLUID
_set: dict[str, Any] = {}  # of the process, as Fluid's flags are
_without_effect: dict[str, Any] = {}


def set_flags(flags: Mapping[str, object]) -> None:
    """Set flags for this process; one of Fluid's that has no effect here is kept, with a warning.

    Raises SpecError, with nothing set, for one that is unknown or has another value.
    """
    found = {name: _flag(name) for name in flags if name not in _OF_FLUID}
    _set.update({flag.name: flag.parsed(str(flags[name]).strip(), name) for name, flag in found.items()})
    for name in flags.keys() - found.keys():
        _keep(name, flags[name])


def get_flags(flags: str | Sequence[str]) -> dict[str, Any]:
    """Return the values of flags by name: of one without effect what was set, or None. Raises SpecError for others."""
    names = [flags] if isinstance(flags, str) else flags
    return {name: _without_effect.get(name) if name in _OF_FLUID else value_of(_flag(name)) for name in names}


def _keep(name: str, value: object) -> None:
    text = f"the flag {name} has no effect in Penstock"
    if name in _OF_THE_ENVIRONMENT:
        text = f"the flag {name} is read from the environment, when a job starts; set_flags does not change it"
    warn_once(_log, text, about=name)
    _without_effect[name] = value


class FlagsByName(MutableMapping[str, Any]):
    """Flags as a mapping, `fluid.core.globals()`. One of Fluid's that Penstock has not is kept, with a warning."""

    def __getitem__(self, name: str) -> Any:
        if name in _without_effect:
            return _without_effect[name]
        return value_of(_flag(name))

    def __setitem__(self, name: str, value: object) -> None:
        if name in _KNOWN or name in _DEPRECATED or not name.startswith("FLAGS_"):
            set_flags({name: value})
            return
        _keep(name, value)

    def __delitem__(self, name: str) -> None:
        raise SpecError(f"flag {name!r} cannot be taken away; set it to another value")

    def __iter__(self) -> Iterator[str]:
        return iter([*_KNOWN, *_without_effect])

    def __len__(self) -> int:
        return len(_KNOWN) + len(_without_effect)


def flags_by_name() -> FlagsByName:
    """Return the flags of this process as a mapping."""
    return FlagsByName()


def value_of(flag: Setting[T]) -> T:
    """Return the value of a flag now. Raises SpecError for one in the environment that is wrong."""
    return _set[flag.name] if flag.name in _set else flag.read()


def _flag(name: str) -> Setting[Any]:
    if name in _DEPRECATED:
        warn_deprecated(name, _DEPRECATED[name].name)
        return _DEPRECATED[name]
    if name not in _KNOWN:
        raise SpecError(f"flag {name!r} has no effect in Penstock; expected one of {sorted(_KNOWN)}", got=name)
    return _KNOWN[name]
