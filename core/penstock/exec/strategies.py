"""ExecutionStrategy and BuildStrategy: Fluid's fields with their documented defaults.

A field that has no effect yet is stored, and says so once when it is set. Unknown fields are refused by name.
Source: spec rows 1.3 and 1.4; where Fluid's documents and code disagree, the documents win.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any, ClassVar

from penstock.errors import SpecError

_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(f"penstock: {text}", file=sys.stderr)


class _Strategy:
    _defaults: ClassVar[dict[str, Any]]
    _without_effect: ClassVar[frozenset[str]]

    def __init__(self) -> None:
        self.__dict__.update(self._defaults)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        if name not in self._defaults:
            raise SpecError(f"{kind} has no field {name!r}; it has {', '.join(sorted(self._defaults))}", got=name)
        default = self._defaults[name]
        if not _fits(value, default):
            expected = _expected(default)
            raise SpecError(f"{kind}.{name} is {value!r}; expected {expected}", got=value, expected=expected)
        if name in self._without_effect and value != default:
            _say_once(f"{kind}.{name} = {value!r} is stored but has no effect in this version")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        changed = {k: v for k, v in self.__dict__.items() if v != self._defaults[k]}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def _expected(default: Any) -> str:
    if isinstance(default, IntEnum):
        return f"one of {', '.join(m.name for m in type(default))}"
    return "True, False or None" if default is None else type(default).__name__


def _fits(value: Any, default: Any) -> bool:
    if default is None:
        return value is None or isinstance(value, bool)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, IntEnum):
        return isinstance(value, type(default))
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, type(default))


class ExecutionStrategy(_Strategy):
    """How a graph runs. `num_threads`: size of the thread pool; 0 takes 4 for each replica."""

    num_threads: int
    use_cuda: bool

    _defaults: ClassVar[dict[str, Any]] = {
        "num_threads": 0,
        "use_cuda": False,
        "allow_op_delay": False,
        "num_iteration_per_drop_scope": 1,
        "num_iteration_per_run": 1,
        "use_thread_barrier": False,
        "use_experimental_executor": True,
    }
    _without_effect = frozenset(
        {
            "allow_op_delay",
            "num_iteration_per_drop_scope",
            "num_iteration_per_run",
            "use_thread_barrier",
            "use_experimental_executor",
        }
    )


class _Reduce(IntEnum):
    """How gradients are exchanged."""

    AllReduce = 0
    Reduce = 1


class _Scale(IntEnum):
    """What the gradient of the loss starts from on each replica."""

    CoeffNumDevice = 0
    One = 1
    Customized = 2


class BuildStrategy(_Strategy):
    """How a graph is built from a Program."""

    ReduceStrategy: ClassVar[type[_Reduce]] = _Reduce
    GradientScaleStrategy: ClassVar[type[_Scale]] = _Scale
    reduce_strategy: _Reduce
    gradient_scale_strategy: _Scale

    _defaults: ClassVar[dict[str, Any]] = {
        "reduce_strategy": _Reduce.AllReduce,
        "gradient_scale_strategy": _Scale.CoeffNumDevice,
        "debug_graphviz_path": "",
        "enable_sequential_execution": False,
        "remove_unnecessary_lock": True,
        "enable_backward_optimizer_op_deps": True,
        "cache_runtime_context": False,
        "fuse_elewise_add_act_ops": False,
        "fuse_bn_act_ops": False,
        "fuse_relu_depthwise_conv": False,
        "enable_auto_fusion": False,
        "fuse_all_optimizer_ops": False,
        "fuse_all_reduce_ops": None,
        "fuse_broadcast_ops": False,
        "sync_batch_norm": False,
        "memory_optimize": None,
        "enable_inplace": True,
        "is_distribution": False,
        "async_mode": False,
        "num_trainers": 1,
        "trainer_id": 0,
        "trainers_endpoints": [],
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
    }
    _without_effect = frozenset(_defaults) - {"reduce_strategy", "gradient_scale_strategy"}

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["trainers_endpoints"] = []


ReduceStrategy, GradientScaleStrategy = BuildStrategy.ReduceStrategy, BuildStrategy.GradientScaleStrategy
