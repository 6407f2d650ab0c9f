"""What a contender's module has, and the catalogue of contenders: `make(options)` of each gives a `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class MeasuresExchange(Protocol):
    """A trainer that knows how much of its steps is exchange that nothing overlaps."""

    def exposed_share(self) -> float:
        """Return the share of the last turn in which exchanges were under way and nothing was computed."""
        ...


@runtime_checkable
class RecordsExchange(Protocol):
    """A trainer that knows what its last turn exchanged with servers, as `penstock.advice` wants it."""

    def recording(self) -> dict[str, Any]:
        """Return it in a form that JSON has."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a contender is made from. `mode`: which variant of its module; `cores`: how many it may use.

    `rank` counts the processes of one contender; `folder` is where they meet. `cluster`: the file of a contender on
    several hosts (`cluster.py`).
    """

    mode: str
    workload: Path
    folder: Path
    cores: int
    rank: int = 0
    cluster: Path | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A contender: its module, the variant, the environment that it needs, and what it is in a line.

    `served`: it trains with a parameter server, and races in `bench pserver`; `hosts`: in `bench pserver --hosts`.
    `compared`: it starts from the workload's values, so that what it learns can be held against the others. `spins`:
    its threads poll when there is nothing to do, so it is stopped between its turns. `workloads`: the only ones that it
    can train; none are named: all.
    """

    module: str
    mode: str
    environment: str
    about: str
    served: bool = False
    compared: bool = True
    spins: bool = False
    workloads: tuple[str, ...] = ()
    hosts: bool = False

    def trains(self, workload: str) -> bool:
        """Whether it can train a workload."""
        return not self.workloads or workload in self.workloads


DENSE = ("criteo", "slots", "din", "flights", "lenet", "transformer")
"""Workloads whose batches have one number of ids, so that ranks cut them and inductor compiles once."""
BAGS = ("bags", "ragged_slots")

CONTENDERS: Mapping[str, Kind] = {
    "penstock": Kind("penstock_executor", "reduce", PROJECT, "ParallelExecutor, one replica a core, Reduce"),
    "penstock_padded": Kind(
        "penstock_executor",
        "padded",
        PROJECT,
        "the same with padded batches in the place of ragged ones",
        workloads=BAGS,
    ),
    "torch_eager": Kind("torch_single", "eager", PROJECT, "PyTorch as its documents write it, all cores"),
    "torch_compile": Kind(
        "torch_single", "compile", PROJECT, "torch.compile (inductor) of all but sparse lookups", workloads=DENSE
    ),
    "torch_fbgemm": Kind(  # whose tables have rows of 4 n values; those of criteo have 10
        "fbgemm_eager", "", "fbgemm", "PyTorch eager with FBGEMM's fused tables", workloads=("slots", "din", *BAGS)
    ),
    "torch_ddp_gloo": Kind(
        "torch_distributed", "ddp", PROJECT, "DistributedDataParallel, Gloo, a process a core", workloads=DENSE
    ),
    "torch_zero1": Kind(
        "torch_distributed", "zero1", PROJECT, "the same with ZeroRedundancyOptimizer", workloads=DENSE
    ),
    "paddle_pe_all_reduce": Kind("paddle_executor", "all_reduce", "paddle", "original ParallelExecutor, AllReduce"),
    "paddle_pe_reduce": Kind("paddle_executor", "reduce", "paddle", "original ParallelExecutor, Reduce"),
    "penstock_collective": Kind("penstock_collective", "", PROJECT, "collective mode, a trainer a core"),
    "penstock_ps": Kind("penstock_pserver", "sync1", PROJECT, "a parameter server and a trainer, sync", served=True),
    "penstock_ps_async": Kind("penstock_pserver", "async1", PROJECT, "the same, async", served=True),
    "penstock_ps_log": Kind("penstock_pserver", "sync-log1", PROJECT, "sync, and the server has a log", served=True),
    "penstock_ps_async_log": Kind(
        "penstock_pserver", "async-log1", PROJECT, "async, and the server has a log", served=True
    ),
    "penstock_ps_half": Kind(
        "penstock_pserver", "half1", PROJECT, "the same, half-async, with a communicator", served=True, compared=False
    ),
    "penstock_ps_geo": Kind("penstock_pserver", "geo1", PROJECT, "the same, GEO", served=True, compared=False),
    "penstock_ps_two": Kind("penstock_pserver", "sync2", PROJECT, "a server and two trainers, sync", served=True),
    "torch_rpc_ps": Kind(
        "torch_rpc_pserver", "", PROJECT, "a server on torch.distributed.rpc", served=True, spins=True
    ),
    "tensorflow_ps": Kind("tensorflow_pserver", "", "tensorflow", "ParameterServerStrategy", served=True),
    "paddle_brpc_ps": Kind(
        "paddle_brpc", "", "paddle", "the original parameter server (brpc), async", served=True, compared=False
    ),
    "penstock_hosts": Kind("penstock_hosts", "", PROJECT, "servers and trainers on several hosts", hosts=True),
    "recorded": Kind("penstock_recorded", "", PROJECT, "batches for each trainer, recorded", hosts=True),
    "recorded_pauses": Kind("penstock_recorded", "pauses", PROJECT, "the same, which sleeps to compute", hosts=True),
    "torch_rpc_hosts": Kind(
        "torch_rpc_hosts", "", PROJECT, "servers on torch.distributed.rpc, several hosts", spins=True, hosts=True
    ),
    "paddle_brpc_hosts": Kind(
        "paddle_brpc_hosts", "", "paddle", "the original (brpc) on several hosts", compared=False, hosts=True
    ),
    "matrix_roof": Kind("matrix_roof", "", PROJECT, "the workload's main matrix product and nothing else, all cores"),
}
OURS, ROOF = "penstock", "matrix_roof"
COLLECTIVE = "penstock_collective"
"""Races in `bench collective` alone."""
PADDLE_MODES = ("paddle_pe_all_reduce", "paddle_pe_reduce")
