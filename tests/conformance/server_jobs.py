"""Jobs with parameter servers for the row tests: roles on threads of this process, or each in a process of its own.

    python -m tests.conformance.server_jobs PSERVER|TRAINER NUMBER ENDPOINTS TRAINERS MODEL

runs one role of a synchronous job and prints what it has seen as one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.nursery import Forked, Nursery

import penstock as fluid
from penstock.distributed.ports import free_ports
from penstock.protocol.exchange import Sums
from penstock.ps.communicator import remotes

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100.0
_RECORDING = threading.Lock()  # programs are recorded by one thread at a time
Feed = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A minimised program. `loss`: a variable's name."""

    main: Any
    startup: Any
    loss: str


Make = Callable[[], Model]


def table_model(dict_size: int, width: int, *, distributed: bool) -> Model:
    """A table that is summed over four ids and goes through a dense layer."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 5
    with fluid.program_guard(main, startup):
        L: Any = fluid.layers
        ids, label = fluid.data("ids", [-1, 4], "int64"), fluid.data("label", [-1, 1])
        rows = fluid.embedding(ids, [dict_size, width], True, distributed, param_attr="table")
        loss = L.mean(L.square_error_cost(L.fc(L.reduce_sum(rows, 1), 1, param_attr="w"), label))
        fluid.optimizer.SGD(0.05).minimize(loss)
    return Model(main, startup, loss.name)


def table_feeds(num: int, rows: int, *, highest: int, part: int = 0, parts: int = 1) -> list[Feed]:
    """Batches of different ids below `highest`, each cut into parts of every `parts`-th row."""
    draw, feeds = np.random.default_rng(3), []
    for _ in range(num):
        ids = np.unique(draw.integers(0, highest, rows * 8))
        ids = draw.permutation(ids)[: rows * 4].reshape(rows, 4)
        label = np.cos(ids.astype("float64")).sum(1, keepdims=True).astype("float32")
        feeds.append({"ids": ids[part::parts].copy(), "label": label[part::parts].copy()})
    return feeds


MODELS: dict[str, tuple[Make, int]] = {  # and the highest id that is fed
    "16 GB of any ids": (lambda: table_model(10**9, 4, distributed=True), 2**60),
    "128 MB by rows": (lambda: table_model(2**19, 64, distributed=False), 2**19),
    "small": (lambda: table_model(500, 8, distributed=False), 500),
}


def free_endpoints(hosts: Sequence[str]) -> str:
    """Return endpoints of these names of this host at which nobody listens."""
    ports = free_ports("127.0.0.1", len(hosts))
    return ",".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True))


def transpiled(make: Make, trainer: int, endpoints: str, trainers: int) -> tuple[Any, Model]:
    """Distribute a model anew, as each process of a job does."""
    with _RECORDING:
        model, transpiler = make(), fluid.DistributeTranspiler()
        transpiler.transpile(
            trainer, program=model.main, pservers=endpoints, trainers=trainers, startup_program=model.startup
        )
    return transpiler, model


def serve(make: Make, endpoint: str, endpoints: str, trainers: int, place: Any = None) -> fluid.Scope:
    """Be a server until all trainers have left; return its scope."""
    transpiler, _ = transpiled(make, 0, endpoints, trainers)
    program, startup = transpiler.get_pserver_programs(endpoint)
    scope, exe = fluid.Scope(), fluid.Executor(place)
    exe.run(startup, scope=scope)
    exe.run(program, scope=scope)
    return scope


@dataclass
class Trained:
    """What a trainer has seen. `rows`: the exchange by (endpoint, variable). `more`: what `after` returned."""

    losses: list[float]
    scope: fluid.Scope
    rows: dict[tuple[str, str], Sums]
    more: Any = None


After = Callable[[fluid.Executor, Model, fluid.Scope], Any]


def train(
    make: Make, trainer: int, endpoints: str, trainers: int, feeds: Sequence[Feed], after: After | None = None
) -> Trained:
    """Be a trainer."""
    transpiler, model = transpiled(make, trainer, endpoints, trainers)
    scope, exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(model.startup, scope=scope)
    losses = [float(exe.run(model.main, feed, [model.loss], scope=scope)[0].item()) for feed in feeds]
    rows = remotes.client(str(transpiler.descriptor)).counters.rows()
    more = after(exe, model, scope) if after else None
    exe.close()
    return Trained(losses, scope, rows, more)


def locally(make: Make, feeds: Sequence[Feed], after: After | None = None) -> Trained:
    """Train on one machine, without servers."""
    model, scope, exe = make(), fluid.Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(model.startup, scope=scope)
    losses = [float(exe.run(model.main, feed, [model.loss], scope=scope)[0].item()) for feed in feeds]
    return Trained(losses, scope, {}, after(exe, model, scope) if after else None)


def together(make: Make, feeds: Sequence[Sequence[Feed]], *, servers: int, after: After | None = None) -> list[Trained]:
    """Run a job on threads: a trainer for each list of feeds; `after` is trainer 0's."""
    endpoints = free_endpoints(["127.0.0.1"] * servers)
    with ThreadPoolExecutor(servers + len(feeds)) as pool:
        serving = [pool.submit(serve, make, e, endpoints, len(feeds)) for e in endpoints.split(",")]
        training: list[Future[Trained]] = [
            pool.submit(train, make, i, endpoints, len(feeds), mine, None if i else after)
            for i, mine in enumerate(feeds)
        ]
        found = [one.result(WAIT_S) for one in training]
        for one in serving:
            one.result(WAIT_S)
    return found


@contextmanager
def process(
    nursery: Nursery, name: Path, role: str, number: int, endpoints: str, trainers: int, model: str
) -> Iterator[Forked]:
    """Start one role in a process of its own, with files of that name; it is ended with the block."""
    argv = ["-m", "tests.conformance.server_jobs", role, str(number), endpoints, str(trainers), model]
    started = Forked(nursery, name, argv, {})
    try:
        yield started
    finally:
        started.close()


def told(started: Forked) -> dict[str, Any]:
    """Wait for a process and return what it has seen."""
    assert started.end() == 0, started.errors
    found: dict[str, Any] = json.loads(started.output.splitlines()[-1])
    return found


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main(role: str, number: int, endpoints: str, trainers: int, model: str) -> None:
    """Run one role."""
    make, highest = MODELS[model]
    if role == "PSERVER":
        serve(make, endpoints.split(",")[number], endpoints, trainers)
        print(json.dumps({}))
        return
    feeds = table_feeds(6, 16, highest=highest, part=number, parts=trainers)
    # What torch takes for threads and code at its first steps has nothing to do with the table.
    locally(lambda: table_model(500, 8, distributed=False), table_feeds(1, 16, highest=500))
    before = peak_bytes()
    seen = train(make, number, endpoints, trainers, feeds)
    weight = seen.scope.find("w")
    assert weight is not None
    has_table = seen.scope.find("table") is not None
    grown = peak_bytes() - before
    print(json.dumps({"losses": seen.losses, "w": weight.tolist(), "has_table": has_table, "grown_bytes": grown}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
