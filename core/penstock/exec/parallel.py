"""ParallelExecutor and CompiledProgram: Fluid's two doors to `DataParallel`, and the checks of their arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.errors import ArgumentError, FeedError, ProgramError, SpecError
from penstock.exec.data_parallel import DataParallel, run_fed
from penstock.exec.devices import Devices, devices_of
from penstock.exec.fed_constants import CoresOfFedConstants
from penstock.exec.memory import ReplicaMemory
from penstock.exec.pass_choice import choice_of, refuse_on_gpus, warn_of_fields_without_effect
from penstock.exec.places import CPUPlace, CUDAPlace, cpu_num, gpus_for
from penstock.exec.strategies import (
    BuildStrategy,
    ExecutionStrategy,
    GradientScaleStrategy,
    ReduceStrategy,
    check_trainers,
)
from penstock.exec.temporaries import retention
from penstock.exec.trainers import Trainers, trainers_of
from penstock.graph.ssa import Mode
from penstock.logger import warn_once
from penstock.program.eager import advice
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, program_runs
from penstock.program.record.variable import Variable
from penstock.ps.remote import REMOTE_TYPES
from penstock.scope import Scope, global_scope
from penstock.settings import NUM_THREADS, REDUCE_STRATEGY

_log = logging.getLogger(__name__)


def _check_arguments(program: object, loss_name: object, build: object, execution: object) -> None:
    """Raise SpecError for an argument of the wrong kind, or a field that the program is not for.

    It names what to pass instead.
    """
    if not isinstance(program, Program):
        raise SpecError(
            f"the program is a {type(program).__name__}; expected a fluid.Program, e.g. fluid.default_main_program()"
            f"{advice(program)}",
            got=program,
        )
    if isinstance(loss_name, Variable):
        raise SpecError(
            f"loss_name is the variable {loss_name.name!r} itself; pass its name: loss_name=loss.name", got=loss_name
        )
    if loss_name is not None and not isinstance(loss_name, str):
        raise SpecError(f"loss_name is {loss_name!r}; expected the name of the loss, loss.name", got=loss_name)
    for name, given, kind in (
        ("build_strategy", build, BuildStrategy),
        ("exec_strategy", execution, ExecutionStrategy),
    ):
        if not isinstance(given, kind):
            raise SpecError(f"{name} is a {type(given).__name__}; expected a fluid.{kind.__name__}", got=given)
    if isinstance(build, BuildStrategy) and isinstance(execution, ExecutionStrategy):
        _check_fields_of_trainers(program, build, execution)


def _check_fields_of_trainers(program: Program, build: BuildStrategy, execution: ExecutionStrategy) -> None:
    """Hold what fleet's strategies set to programs that talk to parameter servers.

    There both fields hold by themselves: replicas of one trainer go in step and push their mean once, and trainers
    wait for each other only at the program's own operators.
    """
    if any(op.type in REMOTE_TYPES for op in program.operators):
        return
    if build.async_mode:
        raise SpecError(
            "BuildStrategy.async_mode is True, but the program talks to no parameter servers: replicas that do not "
            "wait for each other train something else, so it is refused instead of ignored. Leave it False; gradients "
            "are exchanged in every step"
        )
    if execution.use_thread_barrier:
        text = "ExecutionStrategy.use_thread_barrier = True has no effect: this program talks to no parameter servers"
        warn_once(_log, text)


def _built(core: DataParallel) -> list[Any]:
    """Build the graph for all replicas, and run nothing (ExecutionStrategy._dry_run)."""
    core.graph(core.num_replicas)
    return []


def _reduce_strategy(build: BuildStrategy) -> int:
    """Return the strategy's, or what the environment asks for instead."""
    asked = REDUCE_STRATEGY.read()
    if not asked:
        return build.reduce_strategy
    return ReduceStrategy.Reduce if asked == "reduce" else ReduceStrategy.AllReduce


def _num_threads(execution: ExecutionStrategy) -> int:
    """Return the strategy's, or what the environment asks for instead."""
    asked = NUM_THREADS.read()
    return execution.num_threads if asked is None else asked


def _mode(build: BuildStrategy, num_replicas: int, program: Program) -> Mode:
    strategy = _reduce_strategy(build)
    trains = any(op.role & Role.BACKWARD for op in program.operators)
    if num_replicas > 1 and any(op.role & Role.RPC for op in program.operators):
        if strategy != ReduceStrategy.Reduce:
            why = "the program sends to parameter servers, and one replica sends what all have summed"
            warn_once(_log, f"reduce_strategy AllReduce is run as Reduce: {why}")
        return "reduce"
    if strategy == ReduceStrategy.Reduce:
        if num_replicas == 1 and trains:
            _log.warning(
                "reduce_strategy Reduce has nothing to exchange on one replica; the program runs as in AllReduce mode"
            )
        return "reduce"
    return "all_reduce"


def _data_parallel(
    program: Program,
    loss_name: str | None,
    build: BuildStrategy,
    execution: ExecutionStrategy,
    memory: ReplicaMemory,
    num_replicas: int,
    *,
    needs_loss: bool = True,
    trainers: Trainers | None = None,
) -> DataParallel:
    if execution.use_cuda and not memory.devices:
        gpus_for("ExecutionStrategy.use_cuda=True")
        raise SpecError("ExecutionStrategy.use_cuda=True: give ParallelExecutor use_cuda=True, or CUDA places")
    if execution.num_iteration_per_run > 1 and program.reader is None:
        field = f"ExecutionStrategy.num_iteration_per_run = {execution.num_iteration_per_run}"
        why = "it needs a reader in the program (fluid.io.DataLoader, iterable=False)"
        text = f"{field} has no effect: {why}; each run is one iteration on what is fed"
        warn_once(_log, text)
    trains = any(op.role & Role.BACKWARD for op in program.operators)
    if trains and not loss_name and needs_loss:
        raise ProgramError(
            "this program has backward operators, so ParallelExecutor needs to know its loss: pass loss_name=loss.name "
            "(a program without backward, e.g. clone(for_test=True), needs none)"
        )
    if loss_name and loss_name not in program.variables:
        program.var(loss_name)
    refuse_on_gpus(build, program, memory.devices)
    if trainers is not None and memory.devices:
        if num_replicas != 1:
            raise SpecError(
                f"use_cuda=True with {num_replicas} GPUs in one of several trainers: each has one GPU. Start a trainer "
                "for each (penstock.distributed.launch --gpus), or set FLAGS_selected_gpus to one",
                got=num_replicas,
            )
        trainers = replace(trainers, on_gpu=True)
    name = "train" if trains else "test"
    build.used_by(f"an executor (of {num_replicas} replicas, program {name!r})")
    core = DataParallel(
        program,
        memory,
        mode=_mode(build, num_replicas, program),
        num_replicas=num_replicas,
        num_threads=_num_threads(execution),
        loss_name=loss_name,
        scale_loss=build.gradient_scale_strategy == GradientScaleStrategy.CoeffNumDevice,
        choice=choice_of(build),
        retention=retention(execution),
        name=name,
        trainers=trainers if trains else None,
        step_graphs=build.allow_cuda_graph_capture,
    )
    warn_of_fields_without_effect(build, program, core.mode, memory.devices)
    return core


def _shared_memory(core: DataParallel | None, num_replicas: int, gpus: Devices) -> ReplicaMemory:
    """Return the memory of what `share_vars_from` runs on; None: it has not run."""
    if core is None:
        raise SpecError("share_vars_from has not run yet, so it has no parameters to share; run it once first")
    if core.num_replicas != num_replicas:
        raise SpecError(
            f"share_vars_from has {core.num_replicas} replicas, but CPU_NUM now asks for {num_replicas}; "
            "executors that share parameters have the same number"
        )
    if core.memory.devices != gpus:
        raise SpecError(
            f"share_vars_from runs on {_names(core.memory.devices)}, but this executor would run on {_names(gpus)}; "
            "executors that share parameters share their devices"
        )
    return core.memory


def _names(gpus: Devices) -> str:
    return ", ".join(str(d) for d in gpus) or "CPU"


class ParallelExecutor:
    """Runs a Program as an SSA graph on every replica: one for each GPU with `use_cuda`, else `CPU_NUM` on CPU.

    `loss_name`: needed when the program has a backward pass. `share_vars_from`: another ParallelExecutor whose
    parameters this one uses. Raises ProgramError, SpecError.
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
        build, execution = build_strategy or BuildStrategy(), exec_strategy or ExecutionStrategy()
        program = main_program or default_main_program()
        _check_arguments(program, loss_name, build, execution)
        check_trainers(build, num_trainers, trainer_id)
        gpus = devices_of(gpus_for("use_cuda=True")) if use_cuda else ()
        num_replicas = len(gpus) or cpu_num()
        memory = self._memory(share_vars_from, scope, num_replicas, gpus)
        trainers = trainers_of(program, build, num_trainers, trainer_id)
        self._core = _data_parallel(program, loss_name, build, execution, memory, num_replicas, trainers=trainers)
        self._iterations, self._is_dry = execution.num_iteration_per_run, execution._dry_run

    @staticmethod
    def _memory(
        share_vars_from: ParallelExecutor | None, scope: Scope | None, num_replicas: int, gpus: Devices
    ) -> ReplicaMemory:
        if share_vars_from is None:
            return ReplicaMemory(scope or global_scope(), gpus)
        if not isinstance(share_vars_from, ParallelExecutor):
            raise SpecError(f"share_vars_from is a {type(share_vars_from).__name__}; expected a ParallelExecutor")
        memory = _shared_memory(share_vars_from._core, num_replicas, gpus)
        if scope is not None:
            _log.warning("scope is ignored because share_vars_from is given")
        return memory

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

        A program with a reader takes its batches from it, and runs ExecutionStrategy.num_iteration_per_run iterations.
        Returns the fetches of the last in order, replicas merged along dimension 0 (a scalar loss: one entry each).
        Raises FeedError, FetchError, ProgramError, OperatorError, EOFException.
        """
        if feed is not None and feed_dict is not None:
            raise FeedError("both feed and feed_dict are given; feed_dict is feed's old name, so give one of them")
        given = feed if feed is not None else feed_dict
        if self._is_dry:
            return _built(self._core)
        return run_fed(self._core, given, fetch_list, self._iterations, return_numpy=return_numpy, merged=True)

    def drop_local_exe_scopes(self) -> None:
        """Release what lives between steps besides parameters: the plans and their buffers."""
        self._core.drop_plans()

    def _need_create_local_exe_scopes(self) -> bool:
        """Whether the next run has to make its plan and buffers anew (Fluid's name)."""
        return not self._core.has_plans

    def statistics(self) -> dict[str, Any]:
        """Return what the executor holds and has done, in plain types; the fields are those of `exec.temporaries`."""
        return self._core.statistics().as_dict()

    def close(self) -> None:
        """Stop the threads."""
        self._core.close()


@dataclass(frozen=True, slots=True)
class _Settings:
    """What `with_data_parallel` was given; `num_replicas` 0: all that the Executor's kind of place has."""

    loss_name: str | None
    execution: ExecutionStrategy
    share: CompiledProgram | None
    num_replicas: int
    gpus: Devices = ()


def _placed(places: object) -> tuple[int, Devices]:
    """Return how many replicas there are (0: not given), and their GPUs (none: CPU)."""
    if places is None:
        return 0, ()
    given = list(places) if isinstance(places, (list, tuple)) else [places]
    for place in given:
        if not isinstance(place, CPUPlace | CUDAPlace):
            raise SpecError(f"places holds {place!r}; expected fluid.CPUPlace() or fluid.CUDAPlace(i)", got=place)
    if not given:
        raise SpecError("places is empty; give one place for each replica, or None for all")
    cards = [place for place in given if isinstance(place, CUDAPlace)]
    if cards and len(cards) != len(given):
        raise SpecError(f"places={given!r} mixes CPU and GPU; give places of one kind")
    return len(given), devices_of(gpus_for(f"places={given!r}", cards)) if cards else ()


def _check_shared(share_vars_from: object) -> None:
    if not isinstance(share_vars_from, CompiledProgram):
        raise SpecError(f"share_vars_from is a {type(share_vars_from).__name__}; expected a CompiledProgram")
    if share_vars_from._settings is None:
        raise SpecError("share_vars_from is not data parallel; call its with_data_parallel first, and run it once")


class Predictor(Protocol):
    """A saved model that was read (`io.predictor`)."""

    def run(self, inputs: Any) -> list[Any]: ...


class ModelConfig(Protocol):
    """Where a saved model is."""

    def predictor(self) -> Predictor: ...


class CompiledProgram:
    """A Program that `Executor.run` runs as a graph: on one replica, or on several with `with_data_parallel`.

    It is compiled at its first run, for that run's scope; in another one it is refused, as Fluid does.
    """

    def __init__(self, program_or_graph: Program, build_strategy: BuildStrategy | None = None) -> None:
        if not isinstance(program_or_graph, Program):
            raise ArgumentError(
                f"CompiledProgram is given a {type(program_or_graph).__name__}; expected a fluid.Program"
                f"{advice(program_or_graph)}",
                variable=program_or_graph,
            )
        self._program = program_or_graph
        self._build = build_strategy
        self._settings: _Settings | None = None
        self._core: DataParallel | None = None
        self._fed = CoresOfFedConstants()
        self._places: Any = None
        self._predictor: Predictor | None = None

    def _with_inference_optimize(self, config: ModelConfig) -> CompiledProgram:
        """Run the saved model of a configuration (`AnalysisConfig`, `NativeConfig`) on lists of PaddleTensors."""
        self._predictor = config.predictor()
        return self

    @property
    def _is_inference(self) -> bool:
        """Whether `_with_inference_optimize` was called."""
        return self._predictor is not None

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: CompiledProgram | None = None,
        places: object = None,
    ) -> CompiledProgram:
        """Run on one replica for each place (CPU_NUM of them by default).

        `share_vars_from`: another data-parallel CompiledProgram that has run. Raises SpecError when called twice, or
        after a run.
        """
        if self._settings is not None or self._core is not None:
            what = "has run" if self._settings is None else "is data parallel"
            raise SpecError(
                f"this CompiledProgram {what} already (with_data_parallel was called already, or comes too late); "
                "make another one"
            )
        self._build = build_strategy or self._build
        self._places, execution = places, exec_strategy or ExecutionStrategy()
        self._settings = _Settings(loss_name, execution, share_vars_from, *_placed(places))
        return self

    @property
    def _is_data_parallel(self) -> bool:
        """Whether `with_data_parallel` was called (Fluid's name, of scripts that make a feed for each place)."""
        return self._settings is not None

    def _core_for(self, scope: Scope, place: object) -> DataParallel:
        program_runs(self._program)
        if self._core is None:
            self._core = self._make_core(scope, place)
        elif self._core.memory.scope is not scope and (self._settings is None or self._settings.share is None):
            raise SpecError(
                "this CompiledProgram was compiled for another scope at its first run. Run it with that scope, or make "
                "another CompiledProgram of the same program"
            )
        return self._core

    def _compile(self, scope: Scope, place: object) -> CompiledProgram:
        """Make the graph for a scope and a place, as the first run does (Fluid's name). Raises SpecError."""
        self._core_for(scope, place)
        return self

    def _ran_core(self) -> DataParallel | None:
        return self._core if self._core is not None and (self._core.last_step >= 0 or self._fed.have_run) else None

    def _make_core(self, scope: Scope, place: object) -> DataParallel:
        settings = self._settings or _Settings(None, ExecutionStrategy(), None, 1)
        build = self._build or BuildStrategy()
        _check_arguments(self._program, settings.loss_name, build, settings.execution)
        check_trainers(build)
        gpus, share = settings.gpus, settings.share
        if share is not None:
            _check_shared(share)
        if isinstance(place, CUDAPlace) and (self._settings is None or not settings.num_replicas):
            gpus = devices_of(gpus_for(f"Executor({place!r})", [place] if self._settings is None else None))
        elif bool(gpus) != isinstance(place, CUDAPlace):
            raise SpecError(f"places are {_names(gpus)}, but the Executor runs on {place!r}; give places of its kind")
        num_replicas = len(gpus) or settings.num_replicas or cpu_num()
        memory = ReplicaMemory(scope, gpus) if share is None else _shared_memory(share._ran_core(), num_replicas, gpus)
        return self._core_of(self._program, memory, num_replicas, trainers_of(self._program, build))

    def _core_of(
        self, program: Program, memory: ReplicaMemory, num_replicas: int, trainers: Trainers | None = None
    ) -> DataParallel:
        settings, build = (
            self._settings or _Settings(None, ExecutionStrategy(), None, 1),
            self._build or BuildStrategy(),
        )
        needs_loss = self._settings is not None
        return _data_parallel(
            program, settings.loss_name, build, settings.execution, memory, num_replicas, needs_loss=needs_loss,
            trainers=trainers,
        )  # fmt: skip

    def _run_compiled(
        self,
        executor: object,
        feed: Any,
        fetch_list: Sequence[Any] | None,
        scope: Scope | None,
        return_numpy: bool,
        return_merged: bool,
    ) -> list[Any]:
        if self._predictor is not None:
            return self._predictor.run(feed)
        core = self._core_for(scope or global_scope(), getattr(executor, "place", None))
        execution = ExecutionStrategy() if self._settings is None else self._settings.execution
        if execution._dry_run:
            return _built(core)
        core, iterations = self._fed.core_for(core, feed, self._core_of), execution.num_iteration_per_run
        return run_fed(core, feed, fetch_list, iterations, return_numpy=return_numpy, merged=return_merged)
