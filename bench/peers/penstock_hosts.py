"""Penstock on several hosts: each trainer has one replica and an equal share of each batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import penstock as fluid
from bench._exposed import exposed_shares
from bench.models import programs
from bench.peers.cluster import Cluster, OtherRanks, Served, mean_loss, of, share
from bench.peers.contender import Options, fetches
from bench.peers.penstock_pserver import movements_of
from bench.workloads.fingerprint import Movement
from bench.workloads.workload import Workload
from penstock.ps.communicator import remotes
from penstock.ps.remote import PREFETCH, RECV_STEP, REMOTE_TYPES, SEND_AHEAD, SEND_STEP
from penstock.scope import Scope

TRACED_STEPS = 10
"""The engine's trace is emptied after so many steps; it holds many more."""


class HostsTrainer:
    """One trainer. Rank 0 owns the other processes."""

    def __init__(self, workload: Workload, options: Options, cluster: Cluster) -> None:
        os.environ["CPU_NUM"] = "1"
        self._others = OtherRanks(options, cluster) if options.rank == 0 else None
        recorded = self.record(workload, options)
        program = transpiled(recorded, cluster, options.rank).get_trainer_program()
        self._scope = scope = Scope()
        self._starter = fluid.Executor(fluid.CPUPlace())
        self._starter.run(recorded.startup, scope=scope)
        self._executor = fluid.ParallelExecutor(
            False, recorded.loss, program, scope=scope, build_strategy=programs.strategy()
        )
        self._workload, self._loss = workload, recorded.loss
        self._lookup = next(op for op in program.operators if op.type == PREFETCH)
        self._feeds = [self.own(feed, options.rank, len(cluster.trainers)) for feed in recorded.feeds]
        self._next = 0
        self._traces: list[dict[str, Any]] = []

    @staticmethod
    def record(workload: Workload, options: Options) -> programs.Recorded:
        """Return the program to train."""
        return programs.record_ctr(workload)

    @staticmethod
    def own(feed: Mapping[str, Any], rank: int, trainers: int) -> dict[str, Any]:
        """Return a trainer's rows of a batch."""
        return share(feed, rank, trainers)

    def run(self, num_steps: int) -> float:
        """Train on every trainer; return the last loss, of the whole batch."""
        if self._others is not None:
            self._others.pass_on({"run": num_steps})
        self._traces.clear()
        loss = 0.0
        for step in range(num_steps):
            wanted = [self._loss] if fetches(step, num_steps) else []
            fetched = self._executor.run(fetch_list=wanted, feed=self._feeds[self._next % len(self._feeds)])
            self._next += 1
            if wanted:
                loss = float(fetched[0].mean())
            if step % TRACED_STEPS == TRACED_STEPS - 1 or step + 1 == num_steps:
                self._traces.append(self._executor.core.engine.drain())
        return mean_loss(loss, self._others)

    def exposed_share(self) -> float:
        """Return the share of the last turn's steps in which exchanges were under way and no operator ran."""
        graph = self._executor.core.newest_graph
        assert graph is not None
        remote = {*REMOTE_TYPES, SEND_AHEAD, SEND_STEP, RECV_STEP}
        exchanges = {handle.index for handle in graph.handles if handle.op.type in remote}
        shares = [share for trace in self._traces if not trace["lost"] for share in exposed_shares(trace, exchanges)]
        return float(np.mean(shares)) if shares else float("nan")

    def check(self) -> None:
        """The servers have one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved: those of the trainer as it pulled them, the table's from servers."""
        return movements_of(self._workload, self._scope, self._lookup)

    def close(self) -> None:
        """Leave the servers, which then end."""
        if self._others is not None:
            self._others.end_trainers()
        self._executor.close()
        self._starter.close()
        for descriptor in remotes.opened():
            remotes.close(descriptor)
        if self._others is not None:
            self._others.wait()


def transpiled(recorded: programs.Recorded, cluster: Cluster, trainer: int) -> Any:
    """Cut the workload's program for the cluster's servers."""
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(
        trainer,
        program=recorded.main,
        pservers=",".join(cluster.server_endpoints),
        trainers=len(cluster.trainers),
        sync_mode=cluster.sync,
        startup_program=recorded.startup,
    )
    return transpiler


def serve(workload: Workload, cluster: Cluster, server: int) -> None:
    """Serve one server's blocks of the workload's weights until every trainer has left."""
    endpoint = cluster.server_endpoints[server]
    transpiler = transpiled(programs.record_ctr(workload), cluster, 0)
    program, startup = transpiler.get_pserver_programs(endpoint)
    executor, scope = fluid.Executor(fluid.CPUPlace()), Scope()
    executor.run(startup, scope=scope)
    for placed in transpiler.placement.on(endpoint):
        first = placed.block.first_row
        scope.set(placed.name, torch.tensor(workload.weights[placed.parameter][first : first + placed.block.num_rows]))
    executor.run(program, scope=scope)


def make(options: Options) -> HostsTrainer | Served:
    """Build one trainer, or serve; rank 0 starts the others."""
    cluster, workload = of(options), Workload.load(options.workload)
    if options.rank < len(cluster.trainers):
        return HostsTrainer(workload, options, cluster)
    serve(workload, cluster, options.rank - len(cluster.trainers))
    return Served()
