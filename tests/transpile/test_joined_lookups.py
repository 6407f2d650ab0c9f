"""Lookups of one table are asked for with one call where that can be, and the training is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.remotes import remotes_of_a_test
from tests.transpile.fake_servers import FakeServers, first_values
from tests.transpile.recorded import Recorded, sgd, transpiled

import penstock as fluid
from penstock.ps.communicator import remotes
from penstock.ps.remote import PREFETCH

SLOTS = [("a", 1), ("b", 1), ("c", 1), ("d", 3), ("e", 2)]


@pytest.fixture(autouse=True)
def _own_remotes() -> Iterator[None]:
    """Remotes of this test alone."""
    with remotes_of_a_test():
        yield


def slots(*, padding: int | None = None, shifted: bool = False) -> Recorded:
    """A lookup for each slot. `padding`: of slot b alone. `shifted`: the ids of c are made from a row of a."""
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 7
    with fluid.program_guard(main, startup):
        parts: list[Any] = []
        for name, num in SLOTS:
            ids = fluid.layers.data(name, [num], dtype="int64")
            if shifted and name == "c":
                ids = ids + (parts[0] * 0).sum().long()
            rows = fluid.layers.embedding(
                ids, [300, 16], is_sparse=True, param_attr="table", padding_idx=padding if name == "b" else None
            )
            parts.append(fluid.layers.reshape(rows, [-1, num * 16]))
        loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(fluid.layers.concat(parts, axis=1), 4)))
        sgd().minimize(loss)
    return Recorded(main, startup, loss.name)


def batch(seed: int) -> dict[str, Any]:
    """Ids of the slots, with repetitions."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 30, (6, num)) for name, num in SLOTS}


def train(recorded: Recorded, *, replicas: int = 0) -> list[float]:
    """Return the losses of three steps."""
    scope, exe = fluid.Scope(), fluid.Executor()
    exe.run(recorded.startup, scope=scope)
    if not replicas:
        return [float(exe.run(recorded.main, batch(i), [recorded.loss], scope=scope)[0].item()) for i in range(3)]
    pe = fluid.ParallelExecutor(False, recorded.loss, recorded.main, scope=scope)
    losses = [float(np.mean(pe.run([recorded.loss], batch(i))[0])) for i in range(3)]
    pe.close()
    return losses


def with_servers(recorded: Recorded, startup: fluid.Program, *, replicas: int = 0) -> tuple[list[float], FakeServers]:
    """Train with servers within the process."""
    made = transpiled(recorded)
    servers = FakeServers(made.descriptor, made.placement, first_values(startup, made.placement))
    remotes.opener = lambda descriptor: servers
    return train(recorded, replicas=replicas), servers


def num_prefetches(recorded: Recorded) -> int:
    """How many times a step asks for rows."""
    return [op.type for op in recorded.main.operators].count(PREFETCH)


@pytest.mark.parametrize("replicas", [0, 2])
def test_lookups_of_one_table_are_one_call_with_equal_results(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    expected = train(slots())
    recorded = slots()
    losses, servers = with_servers(recorded, slots().startup, replicas=replicas)
    assert losses == pytest.approx(expected, rel=1e-5)  # float32; rows are added up in another order
    assert num_prefetches(recorded) == 2, "one for slots of one id, one for slots of several"
    assert servers.calls.count(("prefetch", "table")) == 3 * 2 * max(replicas, 1)


def test_lookups_with_another_padding_are_asked_for_apart() -> None:
    expected = train(slots(padding=3))
    recorded = slots(padding=3)
    assert with_servers(recorded, slots().startup)[0] == pytest.approx(expected, rel=1e-5)
    assert num_prefetches(recorded) == 3


def test_ids_made_after_the_first_lookup_are_looked_up_apart() -> None:
    expected = train(slots(shifted=True))
    recorded = slots(shifted=True)
    assert with_servers(recorded, slots().startup)[0] == pytest.approx(expected, rel=1e-5)
    assert num_prefetches(recorded) == 3
