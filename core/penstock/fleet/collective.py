"""fleet without servers: every worker has the whole model, and gradients are exchanged between workers.

    fleet.init(PaddleCloudRoleMaker(is_collective=True))
    fleet.distributed_optimizer(optimizer, DistributedStrategy()).minimize(loss)
    exe.run(fleet.startup_program)
    ...  # exe.run(fleet.main_program, feed, fetch_list)

`main_program` is a CompiledProgram on this worker's replicas with `mode = "nccl2"`, the default, and the program itself
with "collective". One object for each process, used by one thread. Source: incubate/fleet/collective (Fluid 1.8).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from penstock.errors import SpecError
from penstock.exec.parallel import CompiledProgram
from penstock.exec.strategies import BuildStrategy, ExecutionStrategy
from penstock.fleet.order import OrderError
from penstock.fleet.process import FleetProcess, check_optimizer, role_maker_of
from penstock.fleet.roles import PaddleCloudRoleMaker, RoleMakerBase
from penstock.fleet.strategy import StrategyTypeError
from penstock.io.loads import load_persistables
from penstock.io.saves.files import saving_to
from penstock.io.saves.inference import save_inference_model
from penstock.io.saves.variables import save_persistables
from penstock.logger import warn_once
from penstock.program.optimizers.recomputing import RecomputeOptimizer
from penstock.program.precision.decorator import OptimizerWithMixedPrecision, decorate
from penstock.program.program import Program
from penstock.program.record.context import default_startup_program, program_guard
from penstock.program.record.opening import recording_of
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.variable import Variable
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.transpiler import DistributeTranspiler

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CHECKPOINT = re.compile(r"__paddle_fleet_checkpoint__\.(\d+)")
_PARAMETERS, _STATUS = "_paddle_fleet_param__", "fleet_train_status"


class DistributedStrategy(BuildStrategy):
    """How workers train together: a BuildStrategy, its ExecutionStrategy, and how gradients are exchanged.

    `mode`: "nccl2" or "collective", then with `collective_mode` "grad_allreduce" or "local_sgd". `use_local_sgd` is
    short for that. `forward_recompute` with `recompute_checkpoints`, variables or names: RecomputeOptimizer. `use_amp`:
    mixed precision with a first loss scaling of `amp_loss_scaling`.
    """

    use_local_sgd: bool = False
    use_dist_fc: bool = False
    mode: str = "nccl2"
    collective_mode: str = ""
    forward_recompute: bool = False
    use_amp: bool = False
    amp_loss_scaling: float = 2.0**15
    _ut4grad_allreduce: bool = False
    recompute_checkpoints: list[str]
    exec_strategy: ExecutionStrategy
    _defaults: ClassVar[dict[str, Any]] = {
        **BuildStrategy._defaults,
        "recompute_checkpoints": [],
        "exec_strategy": ExecutionStrategy(),
    }

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["exec_strategy"] = ExecutionStrategy()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recompute_checkpoints" and isinstance(value, (list, tuple)):
            value = [getattr(one, "name", one) for one in value]
        elif name == "collective_mode":
            value = value or ""
        elif name == "amp_loss_scaling" and isinstance(value, int):
            value = float(value)
        super().__setattr__(name, value)

    def for_transpiler(self) -> DistributeTranspilerConfig:
        """Return the settings of the exchange. Raises SpecError for what does not fit together."""
        if self.use_dist_fc:
            raise SpecError("DistributedStrategy.use_dist_fc is not supported: every worker has the whole last layer")
        config = DistributeTranspilerConfig()
        config.mode, exchange = self.mode, self.collective_mode
        if self.use_local_sgd or self._ut4grad_allreduce:
            config.mode, exchange = "collective", "local_sgd" if self.use_local_sgd else "grad_allreduce"
        if exchange and config.mode != "collective":
            raise SpecError(
                f"DistributedStrategy.collective_mode is {exchange!r}, but mode is {config.mode!r}; it needs "
                'mode = "collective"'
            )
        if exchange:
            config.collective_mode = exchange
        config.nccl_comm_num = self.nccl_comm_num
        config.use_hierarchical_allreduce = self.use_hierarchical_allreduce
        config.hierarchical_allreduce_inter_nranks = self.hierarchical_allreduce_inter_nranks
        return config


class TrainStatus:
    """How far a training is. `epoch_no`: the last epoch that ended; -1: none."""

    def __init__(self, epoch_no: int = -1) -> None:
        self._epoch_no = epoch_no

    def next(self) -> int:
        """Return the epoch to begin with."""
        return self._epoch_no + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainStatus) and self._epoch_no == other._epoch_no

    def __hash__(self) -> int:
        return hash(self._epoch_no)


class CollectiveFleet(FleetProcess):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        self._main: Program | CompiledProgram | None = None
        self._startup: Program | None = None
        self._origin_program: Program | None = None  # the name that scripts of Fluid use, as the next one
        self._transpiled_program: Program | None = None

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Find out which worker this is; without a role maker, from the environment. Raises SpecError."""
        found = role_maker_of(role_maker, lambda: PaddleCloudRoleMaker(is_collective=True))
        found.generate_role()
        if not found.position.collective:
            raise SpecError(
                f"{type(found).__name__} describes a job with parameter servers, and this fleet has none; expected "
                "PaddleCloudRoleMaker(is_collective=True) or UserDefinedCollectiveRoleMaker(id, endpoints)"
            )
        self._role_maker = found
        self._forget()

    def distributed_optimizer(self, optimizer: Any, strategy: DistributedStrategy | None = None) -> CollectiveOptimizer:
        """Return an optimizer whose `minimize` distributes the program. Raises StrategyTypeError, OrderError."""
        _ = self._role
        return CollectiveOptimizer(optimizer, strategy, owner=self)

    def distribute(self, loss: Variable, startup: Program, strategy: DistributedStrategy, optimizer: Any) -> Any:
        """Have `optimizer` record backward pass and updates, then the exchange. For CollectiveOptimizer.

        On failure both programs are as they were, so another strategy may be tried.
        """
        endpoints, index = self._position.worker_endpoints, self._position.index
        program = loss.program
        with program_guard(program, startup), undone_on_failure(recording_of(program), renames=True):
            result = optimizer(startup)
            origin, config = program.clone(), strategy.for_transpiler()
            DistributeTranspiler(config).transpile(
                index, program, trainers=",".join(endpoints), startup_program=startup,
                current_endpoint=endpoints[index],
            )  # fmt: skip
            main: Program | CompiledProgram = program
            if config.mode == "nccl2":
                strategy.num_trainers, strategy.trainer_id = len(endpoints), index
                strategy.trainers_endpoints = list(endpoints)
                main = CompiledProgram(program).with_data_parallel(loss.name, strategy, strategy.exec_strategy)
        self._main, self._startup = main, startup
        self._origin_program, self._transpiled_program = origin, program
        return result

    @property
    def main_program(self) -> Any:
        """What this worker runs. Raises OrderError before minimize."""
        return _made(self._main, "main_program")

    @property
    def startup_program(self) -> Program:
        """What this worker runs first: it meets the others. Raises OrderError before minimize."""
        return _made(self._startup, "startup_program")

    def save_persistables(
        self, executor: object, dirname: str | os.PathLike[str], main_program: Program | None = None,
        filename: str | None = None,
    ) -> None:  # fmt: skip
        """Save all persistable variables; every worker that calls it does."""
        save_persistables(executor, dirname, main_program or _made(self._origin_program, "save_persistables"), filename)

    def save_inference_model(
        self, executor: Any, dirname: str | os.PathLike[str], feeded_var_names: Any = None, target_vars: Any = None,
        main_program: Program | None = None, export_for_deployment: bool = True,
    ) -> None:  # fmt: skip
        """Save what `target_vars` need; every worker that calls it does. `export_for_deployment` has no effect."""
        program = main_program or _made(self._origin_program, "save_inference_model")
        save_inference_model(dirname, feeded_var_names, target_vars, executor, program)

    # -- checkpoints -----------------------------------------------------------------------------------

    def save_check_point(
        self, executor: object, path: str | os.PathLike[str], train_status: TrainStatus,
        main_program: Program | None = None, fs: object = None, local_cache_path: str = ".cache",
        remain_all_checkpoint: bool = True,
    ) -> None:  # fmt: skip
        """Save all persistable variables and `train_status` into the next checkpoint of the folder `path`.

        It is there whole or not at all; several workers with one folder save one after another. Without
        `remain_all_checkpoint` only the last stays. `local_cache_path` has no effect. Raises SpecError for an `fs` that
        is not local: mount the file system.
        """
        _check_local(fs)
        root, program = Path(path), main_program or _made(self._transpiled_program, "save_check_point")
        with saving_to(root):
            number = max(_checkpoints(root), default=-1) + 1
            whole = root / f"__paddle_fleet_checkpoint__.{number}"
            part = root / f"{whole.name}.tmp"
            shutil.rmtree(part, ignore_errors=True)
            save_persistables(executor, part, program, _PARAMETERS)
            (part / _STATUS).write_text(json.dumps({"epoch_no": train_status._epoch_no}))
            part.rename(whole)
            if not remain_all_checkpoint:
                _remove_but(root, 1)

    def load_check_point(
        self, executor: object, path: str | os.PathLike[str], trainer_id: int, main_program: Program | None = None,
        fs: object = None, local_cache_path: str = ".cache", ignore_empty: bool = True,
    ) -> TrainStatus | None:  # fmt: skip
        """Load the last checkpoint of the folder `path`; return its status, or None if there is no checkpoint.

        `trainer_id` and `local_cache_path` have no effect. Raises SpecError without `ignore_empty`, or for other files.
        """
        _check_local(fs)
        root, program = Path(path), main_program or _made(self._transpiled_program, "load_check_point")
        number = max(_checkpoints(root), default=-1)
        if number < 0:
            if not ignore_empty:
                raise SpecError(f"{root} holds no checkpoint; expected folders __paddle_fleet_checkpoint__.<number>")
            return None
        folder = root / f"__paddle_fleet_checkpoint__.{number}"
        load_persistables(executor, folder, program, _PARAMETERS)
        try:
            return TrainStatus(int(json.loads((folder / _STATUS).read_text())["epoch_no"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(f"{folder / _STATUS} has no epoch_no: {error}") from error

    def clean_redundant_check_points(
        self, root_path: str | os.PathLike[str], fs: object = None, checkpoint_num: int = 1
    ) -> None:
        """Remove all checkpoints of a folder but the last `checkpoint_num`, at least one."""
        _check_local(fs)
        with saving_to(Path(root_path)):
            _remove_but(Path(root_path), max(checkpoint_num, 1))

    # -- calls of jobs with servers --------------------------------------------------------------------

    def init_worker(self) -> None:
        """Nothing: workers meet when the startup program runs."""
        _nothing("init_worker")

    def stop_worker(self) -> None:
        """Nothing: a worker leaves when its process ends."""
        _nothing("stop_worker")

    def init_server(self, model_dir: object = None) -> None:
        """Nothing: there are no servers."""
        _nothing("init_server")

    def run_server(self) -> None:
        """Nothing: there are no servers."""
        _nothing("run_server")


class CollectiveOptimizer:
    """An optimizer with a strategy. `minimize` records backward pass and updates, then the exchange of gradients.

    `owner`: by default the process's `fleet`.
    """

    def __init__(
        self, optimizer: Any, strategy: DistributedStrategy | None = None, *, owner: CollectiveFleet | None = None
    ) -> None:
        check_optimizer(optimizer)
        if strategy is not None and not isinstance(strategy, DistributedStrategy):
            raise StrategyTypeError(
                f"strategy is {strategy!r}; expected fleet.collective.DistributedStrategy()", got=strategy
            )
        self._owner, self.optimizer = owner or fleet, optimizer
        self.strategy = DistributedStrategy() if strategy is None else strategy

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
    ) -> Any:
        """Return what the optimizer's own minimize returns. Afterwards fleet has main_program and startup_program."""
        if not isinstance(loss, Variable):
            raise StrategyTypeError(f"minimize is given {loss!r}; expected one loss, a variable", got=loss)
        wrapped = self._wrapped()

        def record(startup: Program) -> Any:
            return wrapped.minimize(loss, startup, parameter_list, no_grad_set)

        return self._owner.distribute(loss, startup_program or default_startup_program(), self.strategy, record)

    def _wrapped(self) -> Any:
        wrapped = self._recomputed()
        if not self.strategy.use_amp:
            return wrapped
        if isinstance(wrapped, OptimizerWithMixedPrecision):
            raise SpecError("DistributedStrategy.use_amp decorates the optimizer, which is decorated already")
        return decorate(wrapped, init_loss_scaling=self.strategy.amp_loss_scaling)

    def _recomputed(self) -> Any:
        if not self.strategy.forward_recompute:
            return self.optimizer
        if not self.strategy.recompute_checkpoints:
            raise SpecError("DistributedStrategy.forward_recompute needs recompute_checkpoints: the variables to keep")
        wrapped = RecomputeOptimizer(self.optimizer)
        wrapped._set_checkpoints(self.strategy.recompute_checkpoints)
        return wrapped


def _made(found: _T | None, call: str) -> _T:
    if found is None:
        raise OrderError(f"fleet: {call} comes before minimize")
    return found


def _checkpoints(root: Path) -> list[int]:
    found = (_CHECKPOINT.fullmatch(entry.name) for entry in root.iterdir()) if root.is_dir() else ()
    return [int(match[1]) for match in found if match]


def _remove_but(root: Path, number: int) -> None:
    """Remove all but the last checkpoints, within `saving_to`."""
    for one in sorted(_checkpoints(root))[:-number]:
        shutil.rmtree(root / f"__paddle_fleet_checkpoint__.{one}")


def _check_local(fs: object) -> None:
    if fs is not None and type(fs).__name__ != "LocalFS":
        raise SpecError(f"fs is {fs!r}; checkpoints are in local folders: mount the file system, and leave fs out")


def _nothing(call: str) -> None:
    warn_once(_log, f"fleet.{call}() has no effect: workers of a collective job meet in the startup program")


fleet = CollectiveFleet()
