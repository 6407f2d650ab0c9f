"""The engine beside the interpreter: the same graph, the same start, the same feeds. Imported by tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from tests.property.networks import Feed, Network

import penstock as fluid
from penstock.exec.data_parallel import DataParallel
from penstock.exec.feeding import as_tensors, has_batch, resolved_seed, split
from penstock.exec.memory import ReplicaMemory
from penstock.graph.check import check
from penstock.graph.interpret import interpret
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.ssa import Mode
from penstock.program.kernels import bind_symbols
from penstock.program.legality import RNG
from penstock.program.program import Program
from penstock.scope import Scope


def started(startup: Program) -> Scope:
    """Return a scope in which the startup program has run."""
    scope = Scope()
    fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
    return scope


def copy_of(scope: Scope) -> Scope:
    """Return a scope with copies of all tensors."""
    copy = Scope()
    for name in scope.names():
        copy.set(name, value(scope, name).clone())
    return copy


def value(scope: Scope, name: str) -> torch.Tensor:
    """Return a tensor that the scope must have."""
    found = scope.find(name)
    assert found is not None, name
    return found


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Run torch with this many intra-op threads in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Interpreted:
    """Runs the graphs of a DataParallel by `graph.interpret`, with a memory of its own."""

    def __init__(self, core: DataParallel, scope: Scope) -> None:
        self.core, self.memory, self.step = core, ReplicaMemory(scope), 0

    def run(self, feed: Feed) -> dict[str, torch.Tensor]:
        """Run one step; return every physical variable."""
        core, program = self.core, self.core.program
        shares_of_feed = split(program, as_tensors(program, feed), core.num_replicas)
        bindings = [bind_symbols(program, s) for s in shares_of_feed]
        rows = [next((t.shape[0] for n, t in s.items() if has_batch(program, n)), 1) for s in shares_of_feed]
        shares = core.shares(bindings, rows)
        graph = core.sized_graph(shares)
        check(graph)
        tensors = {f"{n}#{r}": t for r, share in enumerate(shares_of_feed) for n, t in share.items()}
        first = 0
        for replica, count in enumerate(rows):
            tensors[f"{RNG}#{replica}"] = torch.tensor([resolved_seed(program), self.step, first])
            first += count
        for key, variable in graph.variables.items():
            if variable.persistable and variable.storage == key:
                tensors[key] = self.memory.tensor(program, variable)
        with intra_op_threads(core.intra_op_threads):
            values = interpret(graph, shares, tensors)
        self.step += 1
        return values


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (so NaN equals itself, and 0.0 is not -0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    a, b = left.detach().contiguous().numpy(), right.detach().contiguous().numpy()
    return a.tobytes() == b.tobytes()


def assert_engine_equals_interpreter(
    network: Network,
    *,
    mode: Mode,
    num_replicas: int,
    batches: Sequence[int],
    schedule_seeds: Sequence[int] = (0,),
    num_threads: int = 0,
    choice: PassChoice = PassChoice(),  # noqa: B008 - frozen
) -> int:
    """Run the batches both ways, once for each schedule; compare fetches and every persistable. Returns the runs."""
    start = started(network.startup)
    scope = copy_of(start)
    core = DataParallel(
        network.main, ReplicaMemory(scope), mode=mode, num_replicas=num_replicas, num_threads=num_threads,
        loss_name=network.loss, choice=choice,
    )  # fmt: skip
    runs = 0
    try:
        expected_scope = copy_of(start)
        expected = Interpreted(core, expected_scope)
        fetches = network.all_fetches
        for number, rows in enumerate(batches):
            feed = network.feed(rows, number)
            wanted = expected.run(feed)
            seed = schedule_seeds[number % len(schedule_seeds)]
            where = f"{network.name} {mode} x{num_replicas}, batch {number} of {rows} rows, schedule {seed}"
            got = core.run(feed, fetches, schedule_seed=seed)
            runs += 1
            for name, parts in zip(core._expand(list(fetches)), got, strict=True):
                for replica, part in enumerate(parts):
                    known = wanted.get(f"{name}#{replica}", wanted.get(name))
                    assert known is not None and same_bits(part, known), f"{where}: {name} on replica {replica}"
            _assert_same_memory(core, expected, where)
    finally:
        core.close()
    return runs


def _assert_same_memory(core: DataParallel, expected: Interpreted, where: str) -> None:
    seen = {
        v.key: v for g in core._graphs.values() for v in g.variables.values() if v.persistable and v.storage == v.key
    }
    for key, variable in seen.items():
        mine, theirs = core.memory.tensor(core.program, variable), expected.memory.tensor(core.program, variable)
        assert same_bits(mine, theirs), f"{where}: {key}, differs by {np.abs((mine - theirs).numpy()).max()}"


def assert_passes_keep_results(
    network: Network,
    choice: PassChoice,
    *,
    mode: Mode,
    num_replicas: int,
    batches: Sequence[int] = (6, 7, 2, 1, 6),
    rtol: float | None = None,
) -> DataParallel:
    """Train with the passes of `choice` and with none, from the same start; compare the loss and every persistable.

    To the bit, or with `rtol` (relative to the largest value of a tensor). Both sides are interpreted, and the first
    is run by the engine too, to the bit. Returns the (closed) executor with the passes, for a look at its graphs.
    """
    assert_engine_equals_interpreter(
        network, mode=mode, num_replicas=num_replicas, batches=batches, choice=choice, num_threads=3
    )
    start = started(network.startup)
    sides = []
    for passes in (choice, PLAIN):
        core = DataParallel(
            network.main, ReplicaMemory(Scope()), mode=mode, num_replicas=num_replicas, loss_name=network.loss,
            choice=passes, num_threads=1,
        )  # fmt: skip
        core.close()
        sides.append(Interpreted(core, copy_of(start)))
    for number, rows in enumerate(batches):
        feed = network.feed(rows, number)
        got, wanted = (side.run(feed) for side in sides)
        kept = [k for k in wanted if k in got and (k.startswith(f"{network.loss}#") or _persists(sides[1].core, k))]
        assert f"{network.loss}#0" in kept
        for key in kept:
            where = f"{network.name} {mode} x{num_replicas}, batch {number} of {rows} rows, {choice}: {key}"
            assert _agree(got[key], wanted[key], rtol), where
    return sides[0].core


def _persists(core: DataParallel, key: str) -> bool:
    return any(key in g.variables and g.variables[key].persistable for g in core._graphs.values())


def _agree(left: torch.Tensor, right: torch.Tensor, rtol: float | None) -> bool:
    if rtol is None or not right.dtype.is_floating_point:
        return same_bits(left, right)
    scale = max(float(right.abs().max()), 1e-30) if right.numel() else 1.0
    return bool(torch.allclose(left, right, rtol=0.0, atol=rtol * scale))
