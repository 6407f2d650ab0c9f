"""Penstock with one parameter server on the same host.

`mode`: "sync1", "async1", "half1" (half-async), "geo1" with one trainer, "sync2" with two; "sync-log1" and "async-log1"
with a server that keeps its state, as those of submitted jobs do.

One trainer has a replica a core, as the local job; two have one each, half of each batch, and a core of their own.
Rank 0 is the process that the parent talks to: it starts the server and the other trainer, and passes every command on.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as fluid
from bench.models import programs
from bench.peers.cluster import losses, pass_on, share
from bench.peers.contender import CONTENDERS, Options, fetches
from bench.peers.serve import end_with_parent
from bench.workloads.fingerprint import Movement, looked_up, movements
from bench.workloads.workload import Array, Workload
from penstock.program.ir import Operator
from penstock.ps.communicator import Communicator, remotes
from penstock.ps.remote import PREFETCH
from penstock.scope import Scope


class PserverTrainer:
    """One trainer. Rank 0 owns the processes of the server and of the other trainer."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self._trainers, self._rank = int(options.mode[-1]), options.rank
        os.environ["CPU_NUM"] = str(max(1, options.cores // self._trainers))
        meet = options.folder / "endpoint"
        self._children = _children(options, meet, self._trainers) if options.rank == 0 else []
        if self._trainers > 1:  # not the server, which has been started
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[self._rank :: self._trainers])
        recorded = programs.record_ctr(workload)
        transpiler = transpiled(recorded, meet.read_text(), options.rank, options.mode)
        program = transpiler.get_trainer_program()
        scope = Scope()
        self._starter = fluid.Executor(fluid.CPUPlace())
        self._starter.run(recorded.startup, scope=scope)
        self._communicator = Communicator(program) if options.mode.startswith(("half", "geo")) else None
        if self._communicator is not None:
            self._communicator.start()
        self._executor = fluid.ParallelExecutor(
            False, recorded.loss, program, scope=scope, build_strategy=programs.strategy()
        )
        self._workload, self._scope, self._loss = workload, scope, recorded.loss
        self._lookup = next((op for op in program.operators if op.type == PREFETCH), None)
        self._feeds = [share(feed, self._rank, self._trainers) for feed in recorded.feeds]
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train on every trainer; return the last loss, of the whole batch."""
        pass_on(self._children[1:], {"run": num_steps})
        loss = 0.0
        for step in range(num_steps):
            wanted = [self._loss] if fetches(step, num_steps) else []
            fetched = self._executor.run(fetch_list=wanted, feed=self._feeds[self._next % len(self._feeds)])
            self._next += 1
            if wanted:
                loss = float(fetched[0].mean())
        found = [loss, *losses(self._children[1:])]  # of equal shares
        return sum(found) / len(found)

    def check(self) -> None:
        """The server has one copy of everything."""
        pass_on(self._children[1:], {"check": True})

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved: those of the trainer as it pulled them, the table's from the server."""
        return movements_of(self._workload, self._scope, self._lookup)

    def close(self) -> None:
        """Leave the server, which then ends."""
        for child in self._children:
            if child.stdin is not None:
                child.stdin.close()
        if self._communicator is not None:
            self._communicator.stop()
        self._executor.close()
        self._starter.close()
        for descriptor in remotes.opened():
            remotes.close(descriptor)
        for child in self._children:
            child.wait()


def transpiled(recorded: programs.Recorded, endpoint: str, trainer: int, mode: str) -> Any:
    """Cut the workload's program for one server. `mode` as `make` takes it."""
    config = fluid.DistributeTranspilerConfig()
    config.sync_mode = mode.startswith("sync")
    config.half_async, config.geo_sgd_mode = mode.startswith("half"), mode.startswith("geo")
    transpiler = fluid.DistributeTranspiler(config)
    transpiler.transpile(
        trainer,
        program=recorded.main,
        pservers=endpoint,
        trainers=int(mode[-1]),
        sync_mode=mode.startswith("sync"),
        startup_program=recorded.startup,
    )
    return transpiler


def serve(workload: Path, endpoint: str, mode: str) -> None:
    """Serve the workload's weights until every trainer has left."""
    loaded = Workload.load(workload)
    transpiler = transpiled(programs.record_ctr(loaded), endpoint, 0, mode)
    program, startup = transpiler.get_pserver_programs(endpoint)
    executor, scope = fluid.Executor(fluid.CPUPlace()), Scope()
    executor.run(startup, scope=scope)
    for name, value in loaded.weights.items():
        scope.set(name, torch.tensor(value))  # one server: nothing is cut
    executor.run(program, scope=scope)


def _children(options: Options, meet: Path, trainers: int) -> list[subprocess.Popen[bytes]]:
    """Start the server, and the trainers but this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    meet.write_text(endpoint)
    command = [sys.executable, "-m", "bench.peers.penstock_pserver", str(options.workload), endpoint, options.mode]
    state = {"PENSTOCK_PS_STATE_DIR": str(options.folder / "state")} if "-log" in options.mode else {}
    null = subprocess.DEVNULL
    started = [subprocess.Popen(command, stdin=null, stdout=null, env=os.environ | state)]
    key = next(k for k, kind in CONTENDERS.items() if kind.mode == options.mode and __name__.endswith(kind.module))
    for rank in range(1, trainers):
        command = [sys.executable, "-m", "bench.peers.serve", key, "--workload", str(options.workload)]
        command += ["--folder", str(options.folder), "--cores", str(options.cores), "--rank", str(rank)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    return started


def movements_of(workload: Workload, scope: Scope, lookup: Operator | None) -> dict[str, Movement]:
    """Return how far each weight has moved: those of the trainer as it pulled them, the table's from the servers.

    `lookup`: the operator that prefetches the table's rows; None with GEO, where each trainer has the table.
    """
    values = {name: _found(scope, name) for name in workload.weights if name != "table"}
    table = _found(scope, "table") if lookup is None else _served_table(workload, lookup)
    return movements(workload, {**values, "table": table})


def _served_table(workload: Workload, lookup: Operator) -> Array:
    rows = looked_up(workload, "table")
    table: Array = np.array(workload.weights["table"])
    out = torch.empty(len(rows), table.shape[1])
    _, descriptor, name, blocks, at, heights, *_ = lookup.args
    found: Any = remotes.get(str(descriptor))
    found.prefetch(name, list(blocks), list(at), list(heights), torch.tensor(rows), out)  # type: ignore[arg-type]  # tuples of numbers
    table[rows] = out.numpy()
    return table


def _found(scope: Scope, name: str) -> Array:
    tensor = scope.find(name)
    if tensor is None:
        raise KeyError(name)
    found: Array = tensor.detach().numpy()
    return found


def make(options: Options) -> PserverTrainer:
    """Build one trainer; rank 0 starts the others and the server."""
    return PserverTrainer(Workload.load(options.workload), options)


def main() -> None:
    """Run the server: `python -m bench.peers.penstock_pserver WORKLOAD ENDPOINT MODE`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("workload", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("mode")
    given = parser.parse_args()
    end_with_parent()
    serve(given.workload, given.endpoint, given.mode)


if __name__ == "__main__":
    main()
