"""Modules of every kind train as eager torch does, in float64, on one replica and on two."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.program.any_modules import CLASSES, MODULES, NORMALISED

import penstock
import penstock as fluid

TOLERANCE = 1e-9  # the same kernels; what differs is the order of a few sums


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_eager_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    make, inputs = MODULES[name]
    module = make().double()
    batches = [(inputs(rows), torch.randint(CLASSES, (rows,))) for rows in (4, 1 if name not in NORMALISED else 3, 6)]
    eager, losses = copy.deepcopy(module), []
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    for x, label in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(x.clone()), label)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        losses.append(loss.item())
    captured = penstock.capture(module, F.cross_entropy, fluid.optimizer.SGD(0.1), (inputs(3), torch.zeros(3).long()))
    for num_replicas in (1,) if name in NORMALISED else (1, 2):
        monkeypatch.setenv("CPU_NUM", str(num_replicas))
        captured.load_state_dict(module.state_dict())
        assert [captured.step(*batch) for batch in batches] == pytest.approx(losses, abs=TOLERANCE, rel=TOLERANCE)
        captured.close()  # the next step starts an engine for the next number of replicas
        state = captured.state_dict()
        for path, wanted in eager.state_dict().items():
            torch.testing.assert_close(state[path], wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{path} differs")
