"""Tracing can be switched off for whole runs: what `bench tracing` compares with."""

from __future__ import annotations

import torch

from penstock.native.engine import Engine, TorchPlan


def test_only_runs_that_started_with_tracing_on_are_in_the_trace() -> None:
    plan = TorchPlan(2)
    plan.add("aten::relu", "", [("slot", 0)], [1], 5)
    plan.keep(0)
    plan.keep(1)
    plan.seal()
    plan.set(0, torch.tensor([-1.0, 2.0]))
    engine = Engine(2, max_running=2, intra_op_threads=1)
    for step, on in ((1, True), (2, False), (3, True)):
        engine.set_tracing(on=on)
        plan.clear(1)
        engine.run(plan, step)
        assert torch.equal(plan.get(1), torch.tensor([0.0, 2.0]))  # type: ignore[arg-type]  # it was just made
    assert engine.drain()["step"].tolist() == [1, 3]
    engine.close()
