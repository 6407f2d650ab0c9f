"""Updates of a server's step, in parts for its cores: the bits of one core, whatever the number of parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.exec.ps_network import Network, serve

import penstock as fluid
from penstock.ps.storage import Gradient
from penstock.serving import plans, storage

HEIGHT, WIDTH, OUT = 600, 4, 50


@functools.cache
def net_of(optimizer: str) -> Network:
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 4
    with fluid.program_guard(main, startup):
        L: Any = fluid.layers
        ids, label = fluid.data("ids", [-1, 2], "int64"), fluid.data("label", [-1, OUT], "float32")
        rows = fluid.embedding(ids, [HEIGHT, WIDTH], is_sparse=True, param_attr="table")
        out = L.fc(L.reshape(rows, [-1, 2 * WIDTH]), OUT, param_attr="weight", bias_attr=False)
        loss = L.mean(L.square_error_cost(out, label))
        getattr(fluid.optimizer, optimizer)(0.05).minimize(loss)
    return Network(main, startup, loss, "float32")


def state_after(net: Network, steps: int) -> dict[str, torch.Tensor]:
    """All that the only server of a job keeps, after steps of gradients that are the same at every call."""
    only = serve(net, 1).all[0].storage
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        rows = torch.randint(0, HEIGHT, (5000,), generator=generator)  # each several times
        gradients = {
            "table": Gradient(torch.randn(len(rows), WIDTH, generator=generator), rows),
            "weight": Gradient(torch.randn(2 * WIDTH, OUT, generator=generator)),
        }
        only.begin_round()
        only.update_all(gradients)
    return {f"{name} {key}": t for name, items in only.state() for key, t in items.items()}


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
def test_parts_on_several_cores_update_as_one_core_does(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PART_BYTES", 300)
    states = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(storage, "usable_cores", lambda cores=cores: cores)
        states.append(state_after(net_of(optimizer), 3))
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(other[name], one) for name, one in states[0].items())
