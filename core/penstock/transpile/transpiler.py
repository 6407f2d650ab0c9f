"""DistributeTranspiler: from the program of one process to those of trainers and parameter servers.

`transpile` rewrites the program and its startup program in place into the trainer's; the servers' are made on demand
from copies of what they were. Every process of a job calls it with the same program, endpoints and settings. Nothing is
sent here: a trainer's first run waits for its servers (PENSTOCK_PS_START_S), and names those that it waits for.
Source: DistributeTranspiler (Fluid 1.8), spec 1.8 and 3; where Fluid's documents and code disagree, the documents win.
"""

from __future__ import annotations

import copy
import sys

from penstock.errors import ProgramError, SpecError
from penstock.identity import checked_endpoints
from penstock.program.eager import advice
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, default_startup_program
from penstock.ps.remote import Descriptor, PsMode
from penstock.transpile.collective import make_collective
from penstock.transpile.config import DistributeTranspilerConfig
from penstock.transpile.partition import Partition
from penstock.transpile.placement import Placement, place
from penstock.transpile.pserver import describe, pserver_program, pserver_startup
from penstock.transpile.schedules import copied
from penstock.transpile.tables import check_tables
from penstock.transpile.trainer import (
    check_startup,
    is_transpiled,
    make_geo_program,
    make_trainer_program,
    make_trainer_startup,
)


class DistributeTranspiler:
    """Distributes one program. `config`: a DistributeTranspilerConfig; it is copied, so later changes do nothing."""

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        if config is not None and not isinstance(config, DistributeTranspilerConfig):
            raise SpecError(
                f"DistributeTranspiler is given a {type(config).__name__}; expected a DistributeTranspilerConfig",
                got=type(config).__name__,
            )
        self._config = copy.copy(config) if config is not None else DistributeTranspilerConfig()
        self._done: _Transpiled | None = None
        self._collective: Program | None = None

    def transpile(
        self,
        trainer_id: int,
        program: Program | None = None,
        pservers: str = "127.0.0.1:6174",
        trainers: int | str = 1,
        sync_mode: bool = True,
        startup_program: Program | None = None,
        current_endpoint: str = "127.0.0.1:6174",
        slice_var_up: bool | None = None,
    ) -> None:
        """Rewrite `program` and `startup_program` (the default ones, if None) into the trainer's, in place.

        `pservers`: "ip:port,ip:port". `sync_mode=False` alone gives asynchronous training, whatever the config says of
        `sync_mode`. `slice_var_up`: above the config's, if given. Collective training (mode "nccl2", "collective"):
        `trainers` is "ip:port,ip:port", the endpoints of all trainers, `current_endpoint` that of this one.
        Raises SpecError, ProgramError; the programs are unchanged then.
        """
        main = default_main_program() if program is None else program
        startup = default_startup_program() if startup_program is None else startup_program
        _check_programs(main, startup)
        config = copy.copy(self._config)
        if slice_var_up is not None:
            config.slice_var_up = slice_var_up
        if config.mode != "pserver":
            self._refuse_second(main)
            make_collective(main, startup, config, trainer_id, trainers, current_endpoint, sync_mode=sync_mode)
            self._collective = main
            return
        mode = _mode(config, sync_mode)
        endpoints = _endpoints(pservers)
        number = _checked_trainers(trainer_id, trainers)
        self._refuse_second(main)
        _check_wire_dtype(config, mode)
        descriptor = Descriptor(mode, trainer_id, number, endpoints, config.geo_sgd_need_push_nums, config.wire_dtype)
        origin, origin_startup = copied(main), copied(startup)
        partition = Partition(origin, by_trainers=mode == "geo")
        _check_frozen_tables(origin, partition)
        check_startup(startup, partition.updates)
        if mode != "geo":
            check_tables(partition, startup)
        placement = place(partition, endpoints, config)
        if mode == "geo":
            make_geo_program(main, partition, placement, descriptor)
            gone: set[str] = set()
        else:
            gone = make_trainer_program(main, partition, placement, descriptor)
        make_trainer_startup(startup, gone, partition, placement, descriptor)
        self._done = _Transpiled(main, startup, origin_startup, partition, placement, descriptor, config)
        if config.print_log:
            _print_placement(placement)

    # -- what came of it ---------------------------------------------------------------------------

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """Return the trainer's program, the one that `transpile` was given.

        `wait_port` is Fluid's: there this call waited for the servers' ports; here a trainer's first run does.
        """
        return self._collective or self._transpiled().trainer

    def get_pserver_program(self, endpoint: str) -> Program:
        """Return the program of the server at `endpoint`. Raises SpecError for one that is no server of the job."""
        done = self._transpiled()
        self._check_endpoint(endpoint)
        return pserver_program(
            done.partition,
            done.placement,
            endpoint,
            startup=done.origin_startup,
            mode=done.descriptor.mode,
            num_trainers=done.descriptor.num_trainers,
            dc_asgd=done.config.enable_dc_asgd,
        )

    def get_pserver_programs(self, endpoint: str) -> tuple[Program, Program]:
        """Return (program, startup program) of the server at `endpoint`."""
        program = self.get_pserver_program(endpoint)
        return program, self.get_startup_program(endpoint, program)

    def get_startup_program(
        self, endpoint: str, pserver_program: Program | None = None, startup_program: Program | None = None
    ) -> Program:
        """Return the startup program of the server at `endpoint`.

        `pserver_program`: what `get_pserver_program(endpoint)` gave. `startup_program`: the one that it is made from;
        default: what `transpile` was given, as it was before. Raises SpecError for another server's `pserver_program`.
        """
        done = self._transpiled()
        self._check_endpoint(endpoint)
        said = None if pserver_program is None else describe(pserver_program)
        if said is not None and said.endpoint != endpoint:
            raise SpecError(
                f"get_startup_program({endpoint!r}) is given the program of the server at {said.endpoint!r}; expected "
                "what get_pserver_program gave for the same endpoint",
                got=said.endpoint,
            )
        origin = done.origin_startup if startup_program is None or startup_program is done.startup else startup_program
        return pserver_startup(pserver_program or self.get_pserver_program(endpoint), origin)

    @property
    def placement(self) -> Placement:
        """Which server has which block of which parameter."""
        return self._transpiled().placement

    @property
    def descriptor(self) -> Descriptor:
        """Which trainer of how many this is, and how it talks to which servers."""
        return self._transpiled().descriptor

    # -- checks ------------------------------------------------------------------------------------

    def _transpiled(self) -> _Transpiled:
        if self._collective is not None:
            raise SpecError(f"collective training (mode {self._config.mode!r}) has no parameter servers")
        if self._done is None:
            raise SpecError("nothing was distributed yet; call transpile(trainer_id, program=…, pservers=…) first")
        return self._done

    def _check_endpoint(self, endpoint: str) -> None:
        known = self._transpiled().placement.endpoints
        if endpoint not in known:
            raise SpecError(
                f"{endpoint!r} is no parameter server of this job; transpile was given {', '.join(known)}", got=endpoint
            )

    def _refuse_second(self, program: Program) -> None:
        if self._done is not None or self._collective is not None:
            raise SpecError("this DistributeTranspiler has distributed a program already; make another one")
        if is_transpiled(program):
            raise ProgramError("the program talks to parameter servers already: it was transpiled before")


class _Transpiled:
    """What `transpile` has made. `origin_startup`: the startup program as it was; `partition` has the program so."""

    def __init__(
        self,
        trainer: Program,
        startup: Program,
        origin_startup: Program,
        partition: Partition,
        placement: Placement,
        descriptor: Descriptor,
        config: DistributeTranspilerConfig,
    ) -> None:
        self.trainer, self.startup, self.origin_startup = trainer, startup, origin_startup
        self.partition, self.placement, self.descriptor, self.config = partition, placement, descriptor, config


def _check_programs(program: object, startup: object) -> None:
    for name, given in (("program", program), ("startup_program", startup)):
        if not isinstance(given, Program):
            raise SpecError(
                f"transpile: {name} is given a {type(given).__name__}; expected a fluid.Program{advice(given)}",
                got=type(given).__name__,
            )


def _check_wire_dtype(config: DistributeTranspilerConfig, mode: PsMode) -> None:
    if mode == "geo" and config.wire_dtype != "float32":
        raise SpecError(
            f"DistributeTranspilerConfig.wire_dtype is {config.wire_dtype!r} in GEO mode, whose pushes are differences "
            "of parameters: rounding them would move parameters. Expected 'float32'",
            got=config.wire_dtype,
        )


def _mode(config: DistributeTranspilerConfig, sync_mode: object) -> PsMode:
    """The mode that settings and argument ask for. Raises SpecError where they contradict each other."""
    if not isinstance(sync_mode, bool):
        raise SpecError(f"transpile: sync_mode is {sync_mode!r}; expected True or False", got=str(sync_mode))
    synchronous = (sync_mode and config.sync_mode) or config.completely_not_async
    asynchronous = [n for n in ("geo_sgd_mode", "half_async", "enable_dc_asgd") if getattr(config, n)]
    if config.completely_not_async:  # Fluid's sync strategy is half_async with a server in sync mode
        asynchronous = [n for n in asynchronous if n != "half_async"]
    if synchronous and asynchronous:
        raise SpecError(
            f"DistributeTranspilerConfig.{asynchronous[0]} is True, but training is synchronous; use "
            "transpile(…, sync_mode=False)"
        )
    if config.enable_dc_asgd and len(asynchronous) > 1:
        raise SpecError(
            f"DistributeTranspilerConfig.enable_dc_asgd is for plain asynchronous training; {asynchronous[0]} is True"
        )
    if synchronous:
        return "sync"
    if config.geo_sgd_mode:
        return "geo"
    return "half_async" if config.half_async else "async"


def _endpoints(pservers: object) -> tuple[str, ...]:
    if not isinstance(pservers, str):
        raise SpecError(f'transpile: pservers is {pservers!r}; expected text, "ip:port,ip:port"', got=str(pservers))
    return checked_endpoints(pservers, "transpile: pservers")


def _checked_trainers(trainer_id: object, trainers: object) -> int:
    if isinstance(trainers, str):
        raise SpecError(
            f"transpile: trainers is {trainers!r}; with parameter servers it is the number of trainers (a list of "
            "endpoints is for collective training)",
            got=trainers,
        )
    if isinstance(trainers, bool) or not isinstance(trainers, int) or trainers < 1:
        raise SpecError(f"transpile: trainers is {trainers!r}; expected a number from 1 on", got=str(trainers))
    if isinstance(trainer_id, bool) or not isinstance(trainer_id, int) or not 0 <= trainer_id < trainers:
        raise SpecError(
            f"transpile: trainer_id is {trainer_id!r}, but there are {trainers} trainers; expected a number from 0 to "
            f"{trainers - 1}",
            got=str(trainer_id),
        )
    return trainers


def _check_frozen_tables(program: Program, partition: Partition) -> None:
    updated = {u.parameter for u in partition.updates}
    for var in program.variables.values():
        if var.distributed and var.name not in updated:
            raise ProgramError(
                f"table {var.name!r} (created at {var.source}) is distributed, but the program does not train it, so "
                "no server would have it. Let it be trainable, or use is_distributed=False",
                variable=var.name,
            )


def _print_placement(placement: Placement) -> None:
    for endpoint in placement.endpoints:
        names = ", ".join(f"{p.name} ({p.block.numel})" for p in placement.on(endpoint)) or "nothing"
        print(f"penstock: server {endpoint} has {names}", file=sys.stderr)
