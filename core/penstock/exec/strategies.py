"""ExecutionStrategy and BuildStrategy: Fluid's fields with their documented defaults.

A field that has no effect here is stored, with one warning that gives the reason when it is set to something else than
its default. Unknown fields, values of the wrong type and relations that cannot hold are refused by name. A
BuildStrategy that an executor has used does not change any more: a change would be ignored. Pure data.
Source: spec rows 1.3 and 1.4; where Fluid's documents and code disagree, the documents win.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

from penstock.errors import SpecError
from penstock.program.strict_fields import StrictFields


class ExecutionStrategy(StrictFields):
    """How a graph runs. `num_threads`: size of the thread pool; 0 takes 4 for each replica.

    `_dry_run`: a run builds the graph, computes nothing, and returns nothing.

    It is read when an executor is made; what is changed later is for the next one.
    """

    num_threads: int = 0
    use_cuda: bool = False
    allow_op_delay: bool = False
    num_iteration_per_drop_scope: int = 1
    num_iteration_per_run: int = 1
    use_thread_barrier: bool = False
    use_experimental_executor: bool = True
    _dry_run: bool = False
    _least: ClassVar[dict[str, int]] = {"num_iteration_per_drop_scope": 1, "num_iteration_per_run": 1}
    _without_effect: ClassVar[Mapping[str, str]] = {
        "allow_op_delay": "operators start as soon as their inputs are there",
        "use_experimental_executor": "the engine has one executor",
    }


class _Reduce(IntEnum):
    """How gradients are exchanged."""

    AllReduce = 0
    Reduce = 1


class _Scale(IntEnum):
    """What the gradient of the loss starts from on each replica."""

    CoeffNumDevice = 0
    One = 1
    Customized = 2


_NO_KERNEL = "there is no fused kernel for it"


class BuildStrategy(StrictFields):
    """How a graph is built from a Program.

    `allow_cuda_graph_capture`: steps on one GPU are captured as CUDA graphs, where they can be (`exec/step_graphs.py`).
    The name is Paddle 2's, where it is False by default.
    """

    ReduceStrategy: ClassVar[type[_Reduce]] = _Reduce
    GradientScaleStrategy: ClassVar[type[_Scale]] = _Scale

    reduce_strategy: _Reduce = _Reduce.AllReduce
    gradient_scale_strategy: _Scale = _Scale.CoeffNumDevice
    debug_graphviz_path: str = ""
    enable_sequential_execution: bool = False
    remove_unnecessary_lock: bool = True
    enable_backward_optimizer_op_deps: bool = True
    cache_runtime_context: bool = False
    fuse_elewise_add_act_ops: bool = False
    fuse_bn_act_ops: bool = False
    fuse_relu_depthwise_conv: bool = False
    enable_auto_fusion: bool = False
    fuse_all_optimizer_ops: bool = False
    fuse_broadcast_ops: bool = False
    sync_batch_norm: bool = False
    memory_optimize: bool | None = None
    enable_inplace: bool = True
    allow_cuda_graph_capture: bool = True
    is_distribution: bool = False
    async_mode: bool = False
    num_trainers: int = 1
    trainer_id: int = 0
    trainers_endpoints: list[str]
    nccl_comm_num: int = 1
    use_hierarchical_allreduce: bool = False
    hierarchical_allreduce_inter_nranks: int = 0
    _defaults: ClassVar[dict[str, Any]] = {
        "fuse_all_reduce_ops": None, "trainers_endpoints": [], "mkldnn_enabled_op_types": [],
    }  # fmt: skip
    _least: ClassVar[dict[str, int]] = {"num_trainers": 1, "nccl_comm_num": 1}
    _without_effect: ClassVar[Mapping[str, str]] = {
        "remove_unnecessary_lock": "the engine takes no lock for an operator",
        "enable_backward_optimizer_op_deps": "an update waits for its own gradient only, and for nothing else",
        "cache_runtime_context": "a plan is lowered once for its sizes and is that cache",
        "fuse_bn_act_ops": _NO_KERNEL,
        "fuse_relu_depthwise_conv": _NO_KERNEL,
        "enable_auto_fusion": _NO_KERNEL,
        "is_distribution": "an executor sees from a program's operators whether it sends and receives",
        "mkldnn_enabled_op_types": "torch chooses among oneDNN's kernels itself",
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "trainer_id" and isinstance(value, int) and value < 0:
            raise SpecError(_wrong_trainer(value, self.num_trainers, self.trainers_endpoints), got=value)
        super().__setattr__(name, value)

    @property
    def fuse_all_reduce_ops(self) -> bool:
        """Whether gradients travel in buckets; None, the default, means True (and reads so, as Fluid's getter)."""
        return self.__dict__["fuse_all_reduce_ops"] is not False

    @fuse_all_reduce_ops.setter
    def fuse_all_reduce_ops(self, value: bool | None) -> None:
        self.__setattr__("fuse_all_reduce_ops", value)  # for type checkers: an assignment goes there by itself

    def used_by(self, executor: str) -> None:
        """Note that `executor` (words for an error) was made with this strategy; from now on it does not change."""
        self.__dict__.setdefault("_user", executor)


def _wrong_trainer(trainer_id: int, num_trainers: int, endpoints: list[str]) -> str:
    known = f"trainers_endpoints has {len(endpoints)}" if endpoints else f"num_trainers is {num_trainers}"
    count = len(endpoints) or num_trainers
    return f"BuildStrategy.trainer_id is {trainer_id}, but {known}; expected a number from 0 to {count - 1}"


def check_trainers(build: BuildStrategy, num_trainers: int = 1, trainer_id: int = 0) -> None:
    """Raise SpecError unless the fields about several trainers fit each other.

    `num_trainers`, `trainer_id`: ParallelExecutor's arguments; unless they are 1 and 0 they stand above the strategy's.
    """
    trainers = num_trainers if num_trainers != 1 else build.num_trainers
    mine = trainer_id if trainer_id != 0 else build.trainer_id
    endpoints, inter = build.trainers_endpoints, build.hierarchical_allreduce_inter_nranks
    if not 0 <= mine < (len(endpoints) or trainers):
        raise SpecError(_wrong_trainer(mine, trainers, endpoints), got=mine)
    if trainers > 1 and endpoints and len(endpoints) != trainers:
        raise SpecError(f"num_trainers is {trainers}, but trainers_endpoints has {len(endpoints)}: {endpoints}")
    if build.use_hierarchical_allreduce and (trainers == 1 or inter < 2 or trainers % inter):
        raise SpecError(
            f"use_hierarchical_allreduce needs several trainers in equal groups of more than one: num_trainers is "
            f"{trainers}, hierarchical_allreduce_inter_nranks is {inter}"
        )


ReduceStrategy, GradientScaleStrategy = BuildStrategy.ReduceStrategy, BuildStrategy.GradientScaleStrategy
