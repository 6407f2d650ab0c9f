"""Collective training: what `transpile` does to a program that several trainers train without servers.

- mode "nccl2": the startup program gets `gen_nccl_id`, the trainers' meeting; the main program stays as it is, and
  `ParallelExecutor(num_trainers, trainer_id)` or a BuildStrategy's fields say that gradients are exchanged.
- mode "collective": besides, the main program gets a mark, `penstock.collective`, as its first operator. It names the
  algorithm and the trainers, so that `fluid.Executor` runs the program with them: `grad_allreduce` exchanges gradients,
  `local_sgd` lets each trainer update by its own and averages parameters after every step.

The ids that Fluid broadcast through trainer 0 are the meeting itself here: each trainer finds the first one's store.
Source: distribute_transpiler.py, collective.py (Fluid 1.8); spec/fluid.md 3.8.
"""

from __future__ import annotations

from penstock.distributed.collective import COLLECTIVE, GEN_ID
from penstock.errors import ProgramError, SpecError
from penstock.identity import checked_endpoints
from penstock.program.ir import Operator, Role, VarDesc
from penstock.program.program import Program
from penstock.transpile.config import DistributeTranspilerConfig

_ID, _MARK = "NCCLID", "COLLECTIVE"


def make_collective(
    main: Program,
    startup: Program,
    config: DistributeTranspilerConfig,
    trainer_id: object,
    trainers: object,
    current_endpoint: str,
    *,
    sync_mode: object,
) -> None:
    """Rewrite both programs in place for one trainer. Raises SpecError, ProgramError; they are unchanged then."""
    _check_synchronous(config, sync_mode)
    endpoints = _trainers(config, trainers)
    rank = _checked_rank(trainer_id, endpoints, current_endpoint)
    inter = _inter(config, endpoints, current_endpoint)
    if any(op.type == GEN_ID for op in startup.operators) or any(op.type == COLLECTIVE for op in main.operators):
        raise ProgramError("the program is trained by several trainers already: it was transpiled before")
    _check_tables(main, config)
    names = tuple(_ID if number == 0 else f"{_ID}_{number}" for number in range(config.nccl_comm_num))
    for name in names:
        startup.variables[name] = VarDesc(name, (0,), "int64")
    rings = config.nccl_comm_num
    startup.append(Operator("gen_nccl_id", GEN_ID, (rank, endpoints, rings, inter), (names,), role=Role.DIST))
    if config.mode == "collective":
        main.variables[_MARK] = VarDesc(_MARK, (0,), "int64")
        args = (config.collective_mode, rank, endpoints, rings, inter)
        main.operators.insert(0, Operator("collective", COLLECTIVE, args, (_MARK,), role=Role.DIST))
        main.revision += 1


def _check_synchronous(config: DistributeTranspilerConfig, sync_mode: object) -> None:
    given = [n for n in ("half_async", "geo_sgd_mode", "enable_dc_asgd") if getattr(config, n)]
    if sync_mode is not True or not config.sync_mode or given:
        asked = given[0] if given else "sync_mode=False"
        raise SpecError(
            f"{asked} with mode {config.mode!r}: collective training is synchronous. Leave it out, or train with "
            'parameter servers (mode "pserver")',
            got=asked,
        )
    if config.mode == "collective" and config.collective_mode not in ("grad_allreduce", "local_sgd"):
        threads = " (several threads of one process: CompiledProgram.with_data_parallel)"
        raise SpecError(
            f"DistributeTranspilerConfig.collective_mode is {config.collective_mode!r}"
            f"{threads if config.collective_mode else ''}; mode 'collective' takes 'grad_allreduce' or 'local_sgd'",
            got=config.collective_mode,
        )


def _check_tables(main: Program, config: DistributeTranspilerConfig) -> None:
    for var in main.variables.values():
        if var.distributed:
            raise ProgramError(
                f"table {var.name!r} (created at {var.source}) is distributed, so its rows are on parameter servers "
                f"alone, and mode {config.mode!r} has none. Use is_distributed=False, or train with parameter servers "
                '(mode "pserver")',
                variable=var.name,
            )


def _trainers(config: DistributeTranspilerConfig, trainers: object) -> tuple[str, ...]:
    if not isinstance(trainers, str):
        raise SpecError(
            f"transpile: trainers is {trainers!r}; with mode {config.mode!r} it is the endpoints of all trainers, "
            '"ip:port,ip:port"',
            got=str(trainers),
        )
    endpoints = checked_endpoints(trainers, "transpile: trainers")
    if config.mode == "collective" and len(endpoints) == 1:
        raise SpecError(f"transpile: mode 'collective' is for several trainers; trainers is {trainers!r}", got=trainers)
    return endpoints


def _checked_rank(trainer_id: object, endpoints: tuple[str, ...], current: str) -> int:
    if isinstance(trainer_id, bool) or not isinstance(trainer_id, int) or not 0 <= trainer_id < len(endpoints):
        raise SpecError(
            f"transpile: trainer_id is {trainer_id!r}, but trainers names {len(endpoints)}; expected 0 to "
            f"{len(endpoints) - 1}",
            got=str(trainer_id),
        )
    if current not in endpoints:
        raise SpecError(
            f"transpile: current_endpoint is {current!r}, which is none of the trainers: {', '.join(endpoints)}",
            got=current,
        )
    if endpoints[trainer_id] != current:
        raise SpecError(
            f"transpile: trainer_id is {trainer_id}, whose endpoint is {endpoints[trainer_id]}, but current_endpoint "
            f"is {current}, that of trainer {endpoints.index(current)}",
            got=current,
        )
    return trainer_id


def _inter(config: DistributeTranspilerConfig, endpoints: tuple[str, ...], current: str) -> int:
    """Ranks of one group of a hierarchical exchange; without a number, those of one host."""
    if not config.use_hierarchical_allreduce:
        return 0
    host = current.rpartition(":")[0]
    inter = config.hierarchical_allreduce_inter_nranks
    if inter <= 1:
        inter = sum(endpoint.rpartition(":")[0] == host for endpoint in endpoints)
    if inter < 2 or len(endpoints) <= inter or len(endpoints) % inter:
        raise SpecError(
            f"use_hierarchical_allreduce needs several groups of equally many trainers, more than one: there are "
            f"{len(endpoints)} trainers, hierarchical_allreduce_inter_nranks is "
            f"{config.hierarchical_allreduce_inter_nranks} (0: those of one host, {inter} here)",
            got=inter,
        )
    return inter
