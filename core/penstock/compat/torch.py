"""Private and unstable names of torch that Penstock needs: the only module that may touch one.

Invariant: each name below has its reason beside it and a contract test with the same name in
`tests/compat`; `tools/private_names.py --list` prints them. A leaf: imports torch alone, and costs no more than
`import torch`. `CPP_NAMES` holds the private
names that the C++ sources use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing.reductions as _reductions
import torch.overrides
import torch.utils._python_dispatch as _python_dispatch
import torch.utils._pytree as _pytree
import torch.utils.checkpoint as _checkpoint
from torch.autograd.graph import _engine_run_backward

# ---------------------------------------------------------------- modes and nests of operands


class TorchDispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """The base of the recorder's mode: it sees each ATen call below autograd; without it nothing is recorded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: True has torch._dynamo imported at the first call, a second of processor time."""
        return False


disable_current_modes = _python_dispatch._disable_current_modes
"""Runs a block outside the recorder's modes; without it a captured value would be recorded instead of copied."""

tree_map = _pytree.tree_map
"""Applies a function to the leaves of nested operands as torch nests them; operands in a dict would be missed."""

tree_leaves = _pytree.tree_leaves
"""Lists the leaves of nested operands; Variables within lists and dicts would not be found."""

tree_flatten = _pytree.tree_flatten
"""Takes a nest of results apart; calls that return several tensors could not be probed for their shapes."""

tree_unflatten = _pytree.tree_unflatten
"""Puts a nest of results together again, the inverse of `tree_flatten`."""


def all_threads_config() -> Any:
    """Return torch.profiler's setting that records every thread; without it the engine's threads are not seen."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


# ---------------------------------------------------------------- operators and the dispatcher

OpOverload = torch._ops.OpOverload
"""The type of an operator overload: sets an operator that a Program names apart from other attributes of torch.ops."""


def schema_of(overload: Any) -> Any:
    """Return an operator's schema: names, types and writes of its arguments, without which no write is declared."""
    return overload._schema


def qualified_name(func: Any) -> str:
    """Return 'penstock::gru' for an operator packet, else ''; without it penstock.gru is taken for torch.gru."""
    return str(getattr(func, "_qualified_op_name", ""))


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator ('aten::add.Tensor') has a kernel for a dispatch key; else a GPU fails within a step."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def check_value(holds: Any, message: Callable[[], str]) -> None:
    """Raise ValueError unless a condition holds; of symbols it becomes a guard, where `if` would fix the batch."""
    if holds is True:
        return  # torch's own check imports sympy, which costs a quarter of a second
    torch._check_value(holds, message)  # type: ignore[no-untyped-call]  # torch has not typed it


# ---------------------------------------------------------------- autograd


def running_sequence_number() -> int | None:
    """Return the number of the autograd node that runs now; without it a backward operator has no module and line."""
    node: Any = torch._C._current_autograd_node()  # typed as if there always were one
    return None if node is None else int(node._sequence_nr())


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets: it pairs forward and backward operators."""
    return int(torch._C._autograd._get_sequence_nr())


WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"
"""The name of the node that an operator without a derivative leaves, which drops the gradient with a warning."""


def gradients(
    output: torch.Tensor | Sequence[torch.Tensor],
    seed: torch.Tensor | Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    create_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return what torch.autograd.grad returns, and keep the tape; grad itself imports sympy to compare shapes."""
    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        _several(output),
        _several(seed),
        True,
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def _several(tensors: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


@contextmanager
def autograd_in_kernels() -> Iterator[None]:
    """Run a block with autograd on, within a kernel too, above which it is excluded; else a kernel has no tape."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; without it a failed recording cannot be undone."""
    return int(tensor._version)


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Put back what `version_of` returned; else autograd refuses tensors whose recorded write was undone."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


# ---------------------------------------------------------------- memory of tensors


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number for a tensor's storage, of a fake one too (`data_ptr` is 0 there): views share their base's."""
    return int(tensor.untyped_storage()._cdata)


StorageWeakRef = _reductions.StorageWeakRef
"""A weak reference to a storage: destinations of pulled parameters would else keep their memory for ever."""


def storage_behind(reference: Any) -> torch.UntypedStorage | None:
    """Return the storage of a `StorageWeakRef`, None once it is freed; else a pull would write freed memory."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


# ---------------------------------------------------------------- what the recorder replaces within torch


def module_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where a module keeps parameters and buffers; by setattr a stand-in would be refused as no Parameter."""
    return module._parameters, module._buffers


_overrides: Any = torch.overrides  # it has no types


def enter_bottom(mode: Any) -> None:
    """Enter a function mode below those of this thread; entered on top, it is what the end of another one leaves."""
    above = [_overrides._pop_mode() for _ in _overrides._get_current_function_mode_stack()]
    for one in (mode, *reversed(above)):
        _overrides._push_mode(one)


def leave_bottom(mode: Any) -> bool:
    """Leave a function mode that others may be above of; False within a call that it handles, where it is not left."""
    modes = _overrides._get_current_function_mode_stack()
    if not any(one is mode for one in modes):
        return False
    for _ in modes:
        _overrides._pop_mode()
    for one in modes:
        if one is not mode:
            _overrides._push_mode(one)
    return True


FUNCTIONAL_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""Globals of torch.nn.functional that its bodies ask first; unreplaced, a dropout within attention is not seen."""

CHECKPOINT_FUNCTION = "CheckpointFunction"
"""Global of torch.utils.checkpoint behind use_reentrant=True; unreplaced, a checkpointed block is recorded twice."""

_GENERATOR = "_checkpoint_without_reentrant_generator"
# Since torch 2.15 nothing of torch's calls the one without a suffix.
CHECKPOINT_GENERATOR = f"{_GENERATOR}_impl" if hasattr(_checkpoint, f"{_GENERATOR}_impl") else _GENERATOR
"""Global of torch.utils.checkpoint behind use_reentrant=False; unreplaced, a checkpointed block is recorded twice."""


# ---------------------------------------------------------------- fake tensors and their sizes

SYMBOL_FILES = ("torch/__init__.py", "torch/fx/experimental/sym_node.py")
"""Files of torch.SymInt's own methods; a guard would else name them in place of the line that asked."""

DEVICE_QUERY = torch.ops.prim.device.default
"""The call by which torch asks a fake tensor for its device; without it its device would be the meta device."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a tensor class that has none; calls on fakes would else convert their results."""


def make_subclass(cls: type[torch.Tensor], meta: torch.Tensor, device: torch.device) -> Any:
    """Return a `cls` that shares a meta tensor's storage and dispatches as on `device`; else kernels would run."""
    made = torch.Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def in_kernel() -> bool:
    """Whether calls go to kernels of the meta device in this thread; a fake would else show them its own device."""
    return bool(torch._C._meta_in_tls_dispatch_include())


@contextmanager
def as_kernel(*, meta: bool) -> Iterator[None]:
    """Run a block below all modes, with `meta` on kernels of the meta device: shapes of fakes come from there."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch._C._PreserveDispatchKeyGuard():
        if meta:
            torch._C._set_meta_in_tls_dispatch_include(True)
        yield


_ASKS_DYNAMO: Any = vars(torch)["_disable_dynamo"](lambda: None).__code__  # torch does not export it
_MARK = "__dynamo_disable"


def functions_behind_dynamo() -> list[Any]:
    """List the functions that torch's kernels in Python call by way of torch._dynamo; it would be imported at once."""
    found: dict[int, Any] = {}
    references = (torch._refs, torch._refs.nn.functional, torch._refs.special, torch._refs.linalg)
    for module in (*references, torch._decomp.decompositions):
        for function in list(vars(module).values()):
            while (inner := _decorated(function)) is not None:
                if function.__code__ is _ASKS_DYNAMO:
                    found[id(inner)] = inner
                function = inner
    return list(found.values())


def _decorated(function: Any) -> Any:
    """What a decorator of torch's calls; its __wrapped__ may name another function."""
    code = getattr(function, "__code__", None)
    if code is None or "fn" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("fn")].cell_contents


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Call those functions as they are within the block; torch._dynamo costs a second of processor time."""
    marked = [] if "torch._dynamo" in sys.modules else functions_behind_dynamo()
    for function in marked:
        setattr(function, _MARK, function)
    try:
        yield
    finally:
        for function in marked:
            delattr(function, _MARK)


# ---------------------------------------------------------------- process groups


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set the time after which a process group gives up an exchange; it would keep the short one of the rendezvous."""
    public = getattr(torch.distributed, "set_timeout", None)  # since torch 2.15, which warns of the private one
    (public or torch.distributed.distributed_c10d._set_pg_timeout)(timeout, group)


def abort_group(group: Any, device: torch.device) -> None:
    """End what waits on a device within a process group; ranks would else wait for a lost one until the time-out."""
    group._get_backend(device).abort()


# ---------------------------------------------------------------- operators by name

_KNOWN = "Batch norm of newer exports: its writes, clone(for_test=True) and sync batch norm know it by name."
_COPIED = "The operator by which a device's copy of a temporary enters a graph."
_REFUSED = "Refused in programs: no function of tensors. By a new name a program from elsewhere could call it."
_RESIZED = "F.interpolate is recorded as a call of it with symbolic sizes; torch's own entry fixes the batch."
_PACKED = "The operator behind pack_padded_sequence, refused under record: its sizes depend on data."

_ATTENTION = "Attention as torch records it on CPU, the only device that has it; unreplaced, a GPU refuses the step."

PRIVATE_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _ATTENTION,
    "aten::_native_batch_norm_legit": _KNOWN,
    "aten::_to_copy": _COPIED,
    "aten::_pack_padded_sequence": _PACKED,
    "aten::_upsample_bilinear2d_aa": _RESIZED,
    "aten::_upsample_bicubic2d_aa": _RESIZED,
    "aten::_upsample_nearest_exact1d": _RESIZED,
    "aten::_upsample_nearest_exact2d": _RESIZED,
    "aten::_upsample_nearest_exact3d": _RESIZED,
    "aten::_backward": _REFUSED,
    "aten::_pin_memory": _REFUSED,
    "aten::_print": _REFUSED,
    "aten::_assert_async": _REFUSED,
    "aten::_assert_scalar": _REFUSED,
    "aten::_functional_assert_async": _REFUSED,
    "aten::_functional_assert_scalar": _REFUSED,
    "aten::_cufft_clear_plan_cache": _REFUSED,
    "aten::_cufft_set_plan_cache_max_size": _REFUSED,
    "aten::_resize_output": _REFUSED,
    "aten::_resize_output_": _REFUSED,
    "aten::_local_scalar_dense": _REFUSED,
}
"""Private operators that Penstock's own tables name -> why.

What a program has merely recorded (`aten._softmax.default`, say) passes through and is not listed: it is called with
the operands that torch itself gave it, and `program.kernels.resolve` refuses by name what this torch does not know.
"""


def _names(why: str) -> tuple[str, ...]:
    return tuple(name.removeprefix("aten::") for name, reason in PRIVATE_OPERATORS.items() if reason == why)


FUNCTIONAL_COLLECTIVES = "_c10d_functional"
"""Namespace of torch's functional collectives, which a program may name; it is refused under another name."""

REFUSED_OPERATORS = _names(_REFUSED)
"""Names of the private operators that a program may not call; an unknown one could touch files or other memory."""

RESIZING_OPERATORS = _names(_RESIZED)
"""Names of the private operators behind F.interpolate, which is refused for symbolic sizes without them."""

ATTENTION_ON_CPU = _names(_ATTENTION)
"""Names of the attention that torch records on CPU and of its gradient; on a GPU ours take their place."""

PACK_PADDED_SEQUENCE = _names(_PACKED)[0]
"""Name of the function behind `pack_padded_sequence`; without it the refusal has no advice to keep the padding."""

# ---------------------------------------------------------------- the C++ side

CPP_NAMES = {
    "at::AutoDispatchBelowADInplaceOrView": "Calls torch's kernels below autograd; each call would else build a tape.",
    "at::native::mkldnn_matmul": "oneDNN's matmul without bias, which has no public name; else torch's kernel runs.",
    "at::_assert_async": "Refuses predictions outside [0, 1] in auc; reading them first would wait for the GPU.",
    "at::_foreach_add": "Adds weight decay to the gradients of a group; a loop launches a GPU kernel for each.",
    "at::_foreach_add_": "Adam's update of a group, the sum with epsilon; a loop launches a GPU kernel for each.",
    "at::_foreach_addcmul_": "Adam's second moments of a group; a loop launches a GPU kernel for each.",
    "at::_foreach_div": "Adam's quotients of a group; a loop launches a GPU kernel for each.",
    "at::_foreach_lerp_": "Adam's first moments of a group; a loop launches a GPU kernel for each.",
    "at::_foreach_mul_": "Adam's products of a group; a loop launches a GPU kernel for each.",
    "at::_foreach_sqrt": "Adam's roots of a group; a loop launches a GPU kernel for each.",
    "at::_foreach_sub_": "Adam's update of a group; a loop launches a GPU kernel for each.",
    "at::_fused_adagrad_": "Updates a group of dense parameters in one call; a loop costs a call for each.",
    "at::_fused_sgd_": "Updates a group of dense parameters in one call; a loop costs a call for each.",
    "at::_scaled_dot_product_efficient_attention": "Attention on a GPU; else the scores of all pairs are in memory.",
    "at::_scaled_dot_product_efficient_attention_backward": "Its gradient; else all scores are in memory.",
    "c10::impl::DeviceGuardImplInterface": "Streams and events of any device: one build serves CPU and CUDA wheels.",
    "c10::impl::ForceDispatchKeyGuard": "Gives an engine thread the default dispatch keys; else a mode sees its calls.",
    "c10::impl::getDeviceGuardImpl": "Finds CUDA's interface of the torch that runs; there is no GPU plan without it.",
    "c10::impl::hasDeviceGuardImpl": "Returns whether this torch has CUDA; asking for the interface without it aborts.",
    "mkl_serv_intel_cpu_true": "Asks MKL if it takes the processor for its vendor's; kernel times are cached by that.",
    "mkldnn::_linear_pointwise": "oneDNN's matmul with bias and activation; without it torch's kernels remain.",
    "torch/csrc/autograd/python_variable.h": "Turns tensors of Python into those of C++ and back.",
    "torch/csrc/jit/python/pybind_utils.h": "Turns operands of Python into IValues of a boxed call.",
    "torch/csrc/utils/pybind.h": "pybind11's casters of torch's types, for the engine's binding.",
}
"""Private names that `core/penstock/native/src` uses -> why.

The build fails without a header or a linked name. `at::native::mkldnn_matmul` and `mkl_serv_intel_cpu_true` are weak
symbols and `mkldnn::_linear_pointwise` is found by name: the build passes without them, their contract tests fail.
`tools/private_names.py` compares this table with the sources."""
