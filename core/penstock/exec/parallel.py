"""ParallelExecutor and CompiledProgram: Fluid's two doors to `DataParallel`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import FeedError, ProgramError, SpecError
from penstock.exec.data_parallel import DataParallel, results
from penstock.exec.memory import ReplicaMemory
from penstock.exec.places import CPUPlace, CUDAPlace, cpu_num, is_compiled_with_cuda
from penstock.exec.scope import Scope, global_scope
from penstock.exec.strategies import BuildStrategy, ExecutionStrategy, GradientScaleStrategy, ReduceStrategy
from penstock.graph.ssa import Mode
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.context import default_main_program


def _say(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr)


def _mode(build: BuildStrategy, num_replicas: int, trains: bool) -> Mode:
    if build.gradient_scale_strategy == GradientScaleStrategy.Customized:
        raise SpecError(
            "gradient_scale_strategy Customized is not supported in this version; use CoeffNumDevice or One"
        )
    if build.reduce_strategy == ReduceStrategy.Reduce:
        if num_replicas == 1 and trains:
            _say("reduce_strategy Reduce has nothing to exchange on one replica; the program runs as in AllReduce mode")
        return "reduce"
    return "all_reduce"


def _refuse_cuda(what: str) -> None:
    why = "the engine runs on CPU in this version" if is_compiled_with_cuda() else "this torch has no CUDA"
    raise SpecError(f"{what}: {why}; pass use_cuda=False, or CPU places")


def _data_parallel(
    program: Program,
    loss_name: str | None,
    build: BuildStrategy,
    execution: ExecutionStrategy,
    memory: ReplicaMemory,
    num_replicas: int,
    *,
    needs_loss: bool = True,
) -> DataParallel:
    if execution.use_cuda:
        _refuse_cuda("ExecutionStrategy.use_cuda=True")
    trains = any(op.role & Role.BACKWARD for op in program.operators)
    if trains and not loss_name and needs_loss:
        raise ProgramError(
            "this program has backward operators, so ParallelExecutor needs to know its loss: pass loss_name=loss.name "
            "(a program without backward, e.g. clone(for_test=True), needs none)"
        )
    if loss_name and loss_name not in program.variables:
        program.var(loss_name)
    return DataParallel(
        program,
        memory,
        mode=_mode(build, num_replicas, trains),
        num_replicas=num_replicas,
        num_threads=execution.num_threads,
        loss_name=loss_name,
        scale_loss=build.gradient_scale_strategy == GradientScaleStrategy.CoeffNumDevice,
        name="train" if trains else "test",
    )


class ParallelExecutor:
    """Runs a Program as an SSA graph on every CPU replica (`CPU_NUM`, else the number of cores).

    `loss_name`: needed when the program has a backward pass. `share_vars_from`: another ParallelExecutor whose
    parameters this one uses; it must have run once. Raises ProgramError, SpecError.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        share_vars_from: ParallelExecutor | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        build_strategy: BuildStrategy | None = None,
        num_trainers: int = 1,
        trainer_id: int = 0,
        scope: Scope | None = None,
    ) -> None:
        if num_trainers != 1 or trainer_id != 0:
            raise SpecError("num_trainers and trainer_id need collective mode, which this version does not have")
        program = main_program or default_main_program()
        if use_cuda:
            _refuse_cuda("use_cuda=True")
        num_replicas = cpu_num()
        memory = self._memory(share_vars_from, scope, num_replicas)
        build, execution = build_strategy or BuildStrategy(), exec_strategy or ExecutionStrategy()
        self._core = _data_parallel(program, loss_name, build, execution, memory, num_replicas)
        self._ran = False

    @staticmethod
    def _memory(share_vars_from: ParallelExecutor | None, scope: Scope | None, num_replicas: int) -> ReplicaMemory:
        if share_vars_from is None:
            return ReplicaMemory(scope or global_scope())
        if not isinstance(share_vars_from, ParallelExecutor):
            raise SpecError(f"share_vars_from is a {type(share_vars_from).__name__}; expected a ParallelExecutor")
        if not share_vars_from._ran:
            raise SpecError("share_vars_from has not run yet, so it has no parameters to share; run it once first")
        if share_vars_from.device_count != num_replicas:
            raise SpecError(
                f"share_vars_from has {share_vars_from.device_count} replicas, but CPU_NUM now asks for "
                f"{num_replicas}; executors that share parameters have the same number"
            )
        if scope is not None:
            _say("scope is ignored because share_vars_from is given")
        return share_vars_from._core.memory

    @property
    def device_count(self) -> int:
        """Number of replicas."""
        return self._core.num_replicas

    @property
    def core(self) -> DataParallel:
        """The replicas, graph and engine behind this executor."""
        return self._core

    def run(
        self,
        fetch_list: Sequence[Any],
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        feed_dict: Mapping[str, Any] | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run one step. `feed`: a dict that is split over the replicas, or one dict for each of them.

        Returns the fetches in order, replicas merged along dimension 0 (a scalar loss: one entry a replica).
        Raises FeedError, FetchError, ProgramError, OperatorError.
        """
        if feed is not None and feed_dict is not None:
            raise FeedError("both feed and feed_dict are given; feed_dict is feed's old name, so give one of them")
        fetched = self._core.run(feed if feed is not None else feed_dict, fetch_list)
        self._ran = True
        return results(self._core.program, fetch_list, fetched, return_numpy, True)

    def drop_local_exe_scopes(self) -> None:
        """Release what lives between steps besides parameters: the plans and their buffers."""
        self._core.drop_plans()

    def _need_create_local_exe_scopes(self) -> bool:
        """Whether the next run has to make its plan and buffers anew (Fluid's name)."""
        return not self._core.has_plans

    def close(self) -> None:
        """Stop the threads."""
        self._core.close()


@dataclass(frozen=True, slots=True)
class _Settings:
    """What `with_data_parallel` was given; `num_replicas` 0: CPU_NUM when it first runs."""

    loss_name: str | None
    execution: ExecutionStrategy
    share: CompiledProgram | None
    num_replicas: int


def _num_places(places: object) -> int:
    if places is None:
        return 0
    given = list(places) if isinstance(places, (list, tuple)) else [places]
    for place in given:
        if isinstance(place, CUDAPlace):
            _refuse_cuda(f"places={given!r}")
        if not isinstance(place, CPUPlace):
            raise SpecError(f"places holds {place!r}; expected fluid.CPUPlace()", got=place)
    if not given:
        raise SpecError("places is empty; give one place for each replica, or None for CPU_NUM of them")
    return len(given)


class CompiledProgram:
    """A Program that `Executor.run` runs as a graph: on one replica, or on several with `with_data_parallel`."""

    def __init__(self, program_or_graph: Program, build_strategy: BuildStrategy | None = None) -> None:
        self._program = program_or_graph
        self._build = build_strategy
        self._settings: _Settings | None = None
        self._cores: dict[int, DataParallel] = {}

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: CompiledProgram | None = None,
        places: object = None,
    ) -> CompiledProgram:
        """Run on one replica for each place (CPU_NUM of them by default). Raises SpecError when called twice."""
        if self._settings is not None:
            raise SpecError("with_data_parallel was called already on this CompiledProgram; make another one")
        self._build = build_strategy or self._build
        execution = exec_strategy or ExecutionStrategy()
        self._settings = _Settings(loss_name, execution, share_vars_from, _num_places(places))
        return self

    def _core_for(self, scope: Scope) -> DataParallel:
        core = self._cores.get(id(scope))
        if core is None:
            core = self._cores[id(scope)] = self._make_core(scope)
        return core

    def _make_core(self, scope: Scope) -> DataParallel:
        settings = self._settings or _Settings(None, ExecutionStrategy(), None, 1)
        shared = settings.share
        if shared is not None and not shared._cores:
            raise SpecError("share_vars_from has not run yet, so it has no parameters to share; run it once first")
        memory = next(iter(shared._cores.values())).memory if shared is not None else ReplicaMemory(scope)
        return _data_parallel(
            self._program,
            settings.loss_name,
            self._build or BuildStrategy(),
            settings.execution,
            memory,
            settings.num_replicas or cpu_num(),
            needs_loss=self._settings is not None,
        )

    def _run_compiled(
        self,
        executor: object,
        feed: Any,
        fetch_list: Sequence[Any] | None,
        scope: Scope | None,
        return_numpy: bool,
        return_merged: bool,
    ) -> list[Any]:
        core = self._core_for(scope or global_scope())
        fetched = core.run(feed, fetch_list)
        return results(self._program, fetch_list, fetched, return_numpy, return_merged)
