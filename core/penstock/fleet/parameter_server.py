"""fleet: the same script on servers and trainers. It finds its role, distributes its program, and does its part.

    fleet.init(role)
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        exe.run(fleet.startup_program)
        ...  # exe.run(fleet.main_program, feed, fetch_list)
        fleet.stop_worker()

One object for each process, used by one thread. A call that comes too early, twice or in the wrong role is an
OrderError; a call that fails counts as not made. Source: incubate/fleet (Fluid 1.8), spec 1.9.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import SpecError
from penstock.exec.executor import Executor
from penstock.exec.places import CPUPlace
from penstock.fleet import saving
from penstock.fleet.order import Calls, OrderError
from penstock.fleet.position import Role
from penstock.fleet.process import FleetProcess, check_optimizer, role_maker_of
from penstock.fleet.roles import PaddleCloudRoleMaker, RoleMakerBase
from penstock.fleet.strategy import DistributedStrategy, StrategyTypeError, strategy_of
from penstock.program.program import Program
from penstock.program.record.context import default_startup_program, program_guard
from penstock.program.record.opening import recording_of
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.variable import Variable
from penstock.ps.communicator import Communicator, descriptor_of, remotes
from penstock.scope import global_scope
from penstock.serving.storage import ProgramStorage, prepare, storage_to_serve
from penstock.settings import PS_SAVE_DIRS
from penstock.transpile.transpiler import DistributeTranspiler


class Distributed:
    """What minimize has made. `origin`: the program as it was before it was distributed."""

    def __init__(self, origin: Program, main: Program, startup: Program, strategy: DistributedStrategy) -> None:
        self.origin = origin
        self.main = main
        self.startup = startup
        self.strategy = strategy


class ParameterServerFleet(FleetProcess):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = Calls()
        self._distributed: Distributed | None = None
        self._executor: Executor | None = None
        self._communicator: Communicator | None = None
        self._storage: ProgramStorage | None = None

    # -- role and rank of this process ---------------------------------------------------------------

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Find out which process of the job this is; without a role maker, from the environment.

        May be called again for another program, on a worker after stop_worker. Raises SpecError.
        """
        found = role_maker_of(role_maker, PaddleCloudRoleMaker)
        self._calls.check("init", None)
        found.generate_role()
        self._role_maker, self._distributed = found, None
        self._executor = Executor(CPUPlace())
        self._calls.note("init")

    # -- from a program to a distributed one ---------------------------------------------------------

    def distributed_optimizer(self, optimizer: Any, strategy: object = None) -> DistributedOptimizer:
        """Return an optimizer whose `minimize` distributes the program. `strategy`: one of StrategyFactory's (Sync).

        Raises OrderError before init, StrategyTypeError for another kind of strategy.
        """
        self._expect_servers()
        made = DistributedOptimizer(optimizer, strategy, owner=self)
        self._calls.note("distributed_optimizer")
        return made

    def _expect_servers(self) -> None:
        self._calls.check("distributed_optimizer", None)
        if self._position.collective:
            raise SpecError(
                f"{type(self._role).__name__} describes a collective job, which has no parameter servers, and fleet "
                "trains with those alone. Import fleet from penstock.incubate.fleet.collective, or, with servers, use "
                "PaddleCloudRoleMaker() or UserDefinedRoleMaker(...)"
            )

    def distribute(
        self, loss: Variable, startup: Program, strategy: DistributedStrategy, minimize: Callable[[], Any]
    ) -> Any:
        """Have `minimize` record backward pass and updates, then cut the program. For DistributedOptimizer.

        On failure both programs are as they were, so another strategy may be tried.
        """
        self._expect_servers()
        self._calls.note("distributed_optimizer")  # an optimizer may have been made without this fleet
        self._calls.check("minimize", self._position.role)
        with program_guard(loss.program, startup), undone_on_failure(recording_of(loss.program), renames=True):
            result = minimize()
            self._distributed = self._distribute(loss.program, startup, strategy)
        self._calls.note("minimize")
        return result

    def _distribute(self, program: Program, startup: Program, strategy: DistributedStrategy) -> Distributed:
        origin, config, position = program.clone(), strategy.for_transpiler(), self._position
        servers = ",".join(position.server_endpoints)
        transpiler = DistributeTranspiler(config)
        is_server = position.role == Role.SERVER
        transpiler.transpile(
            0 if is_server else position.index,
            program,
            servers,
            position.num_workers,
            config.sync_mode,
            startup,
            position.server_endpoints[position.index] if is_server else position.server_endpoints[0],
        )
        if is_server:
            programs = transpiler.get_pserver_programs(position.server_endpoints[position.index])
        else:
            programs = transpiler.get_trainer_program(wait_port=config.wait_port), startup
        return Distributed(origin, *programs, strategy)

    @property
    def main_program(self) -> Program:
        """What this process runs: a trainer's program, or a server's. Raises OrderError before minimize."""
        return self._made("main_program").main

    @property
    def startup_program(self) -> Program:
        """What this process runs first. Raises OrderError before minimize."""
        return self._made("startup_program").startup

    def _made(self, call: str) -> Distributed:
        self._calls.check(call, self._position.role if self._role_maker else None)
        if self._distributed is None:
            raise OrderError(f"fleet: {call} comes before minimize")
        return self._distributed

    # -- servers -----------------------------------------------------------------------------------

    def init_server(self, model_dir: str | os.PathLike[str] | None = None) -> None:
        """Initialise this server's parameters, from a folder of `save_persistables` if one is given.

        The save may be of another number of servers. Raises SpecError for a folder that is not there or holds no save.
        """
        made = self._made("init_server")
        folder = None if model_dir is None else saving.checked_folder(model_dir)
        self._ran().run(made.startup)
        storage = prepare(made.main, global_scope())
        if folder is not None:
            saving.load(folder, storage, made.main, made.origin)
        self._storage = storage
        self._calls.note("init_server")

    def run_server(self) -> None:
        """Serve until every trainer has left.

        Trainers may have it save below PENSTOCK_PS_SAVE_DIRS; below the working folder, where that is not set.
        """
        made = self._made("run_server")
        if self._storage is None:
            raise OrderError("fleet: run_server comes before init_server")
        from penstock.serving.server import serve_storage  # loads a server, which trainers do without

        self._calls.note("run_server")
        if PS_SAVE_DIRS.text() is None:
            PS_SAVE_DIRS.export(str(Path.cwd()))
        self._storage = None
        serve_storage(
            storage_to_serve(made.main, global_scope()),
            global_scope(),
            num_threads=made.strategy.get_server_runtime_config().num_updates_at_once(),
        )

    # -- workers -----------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Connect to the servers, as the strategy's TrainerRuntimeConfig says; without `wait_port`, at the first run.

        Raises Unavailable naming the servers that have not arrived.
        """
        made = self._made("init_worker")
        config = made.strategy.for_transpiler()
        every = {"geo_need_push_nums": config.geo_sgd_need_push_nums}
        communicator = Communicator(made.main, kwargs=every, envs=made.strategy.get_trainer_runtime_config())
        communicator.start(connects=config.wait_port)
        self._communicator = communicator
        self._calls.note("init_worker")

    def stop_worker(self) -> None:
        """Push what waits to be pushed, and leave the servers. The worker is stopped even where that fails."""
        self._made("stop_worker")
        self._calls.note("stop_worker")
        try:
            if self._communicator is not None:
                self._communicator.stop()
        finally:
            self._communicator = None
            self._ran().close()

    def barrier_worker(self) -> None:
        """Wait until all workers that are alive have called this, after init_worker; a lost one until its lease ends.

        Raises OrderError, Unavailable naming the unreachable server.
        """
        self._meet("barrier_worker", None)

    def all_reduce_worker(self, input: Any, output: Any) -> None:
        """Write the sum of the workers' `input` arrays into the array `output`, as `barrier_worker` waits.

        Summed in float64, or int64 for whole numbers. Raises StrategyTypeError for what is no numbers, PeerError if
        shapes or kinds differ between workers.
        """
        given, made = np.asarray(input), {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.int64}
        if given.dtype.kind not in made:
            raise StrategyTypeError(f"all_reduce_worker is given {given.dtype}; expected numbers", got=input)
        mine = torch.from_numpy(np.array(given, made[given.dtype.kind]))
        total = self._meet("all_reduce_worker", mine)
        output[...] = (mine if total is None else total).numpy()

    def _meet(self, call: str, part: torch.Tensor | None) -> torch.Tensor | None:
        if self.is_worker() and self.worker_num() == 1:
            return part
        made = self._made(call)
        return remotes.client(str(descriptor_of(made.main))).meet(part)

    def save_persistables(
        self, executor: object, dirname: str | os.PathLike[str], main_program: Program | None = None
    ) -> None:
        """Save everything that a training needs to go on: by worker 0, for the whole job; the others save nothing.

        Worker 0 writes the parameters as the servers have them, and its own variables; each server writes what it
        keeps (updates' state and tables included) into a folder of its own in `dirname`. Raises StrategyTypeError,
        SpecError, Unavailable.
        """
        made = self._made("save_persistables")
        program = saving.checked_arguments("save_persistables", executor, main_program or made.main)
        if saving.saves(self.worker_index(), "save_persistables", self):
            saving.save_persistables(Path(dirname), program, made.startup, made.origin)

    def save_inference_model(
        self,
        executor: object,
        dirname: str | os.PathLike[str],
        feeded_var_names: str | Sequence[str],
        target_vars: Any,
        main_program: Program | None = None,
        export_for_deployment: bool = True,
    ) -> None:
        """Save what `target_vars` need of the local program, with the values that the servers have: by worker 0.

        Tables of `is_sparse` become part of the model. `export_for_deployment` is Fluid's, and has no effect. Raises
        SpecError for a model that needs a table of any ids, which has no end.
        """
        made = self._made("save_inference_model")
        program = saving.checked_arguments("save_inference_model", executor, main_program or made.main)
        if saving.saves(self.worker_index(), "save_inference_model", self):
            saving.save_inference_model(
                Path(dirname), feeded_var_names, target_vars, program, made.startup, made.origin
            )

    def _ran(self) -> Executor:
        if self._executor is None:
            raise OrderError("fleet has no executor; call fleet.init(role) first")
        return self._executor


class DistributedOptimizer:
    """An optimizer with a strategy. `minimize` records backward pass and updates, then distributes the program.

    `strategy`: as of `fleet.distributed_optimizer`. `owner`: by default the process's `fleet`.
    """

    def __init__(self, optimizer: Any, strategy: object = None, *, owner: ParameterServerFleet | None = None) -> None:
        check_optimizer(optimizer)
        self._owner = owner or fleet
        self.optimizer = optimizer
        self.strategy = strategy_of(strategy)

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
    ) -> Any:
        """Return what the optimizer's own minimize returns. Afterwards fleet has main_program and startup_program.

        Raises StrategyTypeError for a list of losses or programs, OrderError when called twice.
        """
        if not isinstance(loss, Variable):
            raise StrategyTypeError(f"minimize is given {loss!r}; expected one loss, a variable", got=loss)
        if startup_program is not None and not isinstance(startup_program, Program):
            raise StrategyTypeError(f"startup_program is {startup_program!r}; expected a Program", got=startup_program)
        startup = startup_program or default_startup_program()

        def minimize() -> Any:
            return self.optimizer.minimize(loss, startup, parameter_list, no_grad_set)

        return self._owner.distribute(loss, startup, self.strategy, minimize)


fleet = ParameterServerFleet()
