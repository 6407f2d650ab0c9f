"""What a contender's module has, and the catalogue of contenders: `make(options)` of each gives a `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers import PROJECT
from bench.workloads.fingerprint import Movement

FETCH_EVERY = 50
"""The loss is fetched after each so many steps of a turn, and after its last one."""


def fetches(step: int, num_steps: int) -> bool:
    """Whether the loss of this step of a turn (from 0) is fetched."""
    return (step + 1) % FETCH_EVERY == 0 or step + 1 == num_steps


class Trainer(Protocol):
    """One contender, in its own process. It keeps its model and its place in the batches between turns."""

    def run(self, num_steps: int) -> float:
        """Train `num_steps` steps, fetch the loss as `fetches` says; return the last loss."""
        ...

    def check(self) -> None:
        """Raise if what was trained is not what it claims to be (replicas that differ)."""
        ...

    def movements(self) -> Mapping[str, Movement]:
        """Return how far each weight of the workload has moved; none, if it trains nothing."""
        ...

    def close(self) -> None:
        """End threads and processes."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a contender is made from. `mode`: which variant of its module; `cores`: how many it may use.

    `rank` counts the processes of one contender; `folder` is where they meet.
    """

    mode: str
    workload: Path
    folder: Path
    cores: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """A contender: its module, the variant, the environment that it needs, and what it is in a line.

    `served`: it trains with a parameter server, and races in `bench pserver`. `compared`: it starts from the workload's
    values, so that what it learns can be held against the others. `spins`: its threads poll when there is nothing to
    do, so it is stopped between its turns.
    """

    module: str
    mode: str
    environment: str
    about: str
    served: bool = False
    compared: bool = True
    spins: bool = False


CONTENDERS: Mapping[str, Kind] = {
    "penstock": Kind("penstock_executor", "reduce", PROJECT, "ParallelExecutor, one replica a core, Reduce"),
    "torch_eager": Kind("torch_single", "eager", PROJECT, "PyTorch as its documents write it, all cores"),
    "torch_compile": Kind("torch_single", "compile", PROJECT, "torch.compile (inductor) of all but sparse lookups"),
    "torch_ddp_gloo": Kind("torch_distributed", "ddp", PROJECT, "DistributedDataParallel, Gloo, a process a core"),
    "torch_zero1": Kind("torch_distributed", "zero1", PROJECT, "the same with ZeroRedundancyOptimizer"),
    "paddle_pe_all_reduce": Kind("paddle_executor", "all_reduce", "paddle", "original ParallelExecutor, AllReduce"),
    "paddle_pe_reduce": Kind("paddle_executor", "reduce", "paddle", "original ParallelExecutor, Reduce"),
    "penstock_collective": Kind("penstock_collective", "", PROJECT, "collective mode, a trainer a core"),
    "penstock_ps": Kind("penstock_pserver", "sync1", PROJECT, "a parameter server and a trainer, sync", served=True),
    "penstock_ps_async": Kind("penstock_pserver", "async1", PROJECT, "the same, async", served=True),
    "penstock_ps_two": Kind("penstock_pserver", "sync2", PROJECT, "a server and two trainers, sync", served=True),
    "torch_rpc_ps": Kind(
        "torch_rpc_pserver", "", PROJECT, "a server on torch.distributed.rpc", served=True, spins=True
    ),
    "tensorflow_ps": Kind("tensorflow_pserver", "", "tensorflow", "ParameterServerStrategy", served=True),
    "paddle_brpc_ps": Kind(
        "paddle_brpc", "", "paddle", "the original parameter server (brpc), async", served=True, compared=False
    ),
    "matrix_roof": Kind("matrix_roof", "", PROJECT, "the workload's main matrix product and nothing else, all cores"),
}
OURS, ROOF = "penstock", "matrix_roof"
COLLECTIVE = "penstock_collective"
"""Races in `bench collective` alone."""
PADDLE_MODES = ("paddle_pe_all_reduce", "paddle_pe_reduce")
