"""Gradients that layers compute with after their exchange, and two losses for one parameter: replicas equal one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.oracle import value

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers
STEPS, RATE = 3, 0.5
X = np.random.default_rng(0).normal(size=(6, 4))
IDS = np.random.default_rng(1).integers(0, 5, (6, 1))

Changed = Callable[[Sequence[tuple[Any, Any]]], Any]


def _scaled(pairs: Any) -> Any:
    total = L.sqrt(L.sums([L.reduce_sum(g * g) for _, g in pairs]))
    return [(p, g / total) for p, g in pairs]


def _in_place(pairs: Any) -> Any:
    for _, gradient in pairs:
        gradient.mul_(0.25)
    return pairs


CHANGES: dict[str, Changed] = {
    "all by one norm": _scaled,
    "in place": _in_place,
    "by a view": lambda pairs: [(p, (g.reshape([-1]) * 0.5).reshape(list(p.shape))) for p, g in pairs],
    "clipped, and further": lambda pairs: [(p, g * 0.5) for p, g in fluid.clip.GradientClipByGlobalNorm(0.01)(pairs)],
}


def hidden(*, is_sparse: bool = False) -> Any:
    x, ids = L.data("x", [4], dtype="float64"), L.data("ids", [1], dtype="int64")
    return L.fc(x + L.embedding(ids, [5, 4], is_sparse=is_sparse, dtype="float64"), 4, act="tanh")


def recorded(build: Callable[[], Any]) -> tuple[Any, Any, Any]:
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 1
    with fluid.program_guard(main, startup):
        return main, startup, build()


def trained(model: tuple[Any, Any, Any], replicas: int = 0, mode: str = "AllReduce", rows: int = 6) -> dict[str, Any]:
    """The parameters after some steps; of an Executor without replicas."""
    main, startup, loss = model
    scope, exe, strategy = Scope(), fluid.Executor(), fluid.BuildStrategy()
    exe.run(startup, scope=scope)
    strategy.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
    program = main
    if replicas:
        program = fluid.CompiledProgram(main).with_data_parallel(
            loss_name=loss.name, build_strategy=strategy, places=[fluid.CPUPlace()] * replicas
        )
    for _ in range(STEPS):
        exe.run(program, {"x": X[:rows], "ids": IDS[:rows]}, [loss], scope=scope)
    return {p.name: value(scope, p.name).numpy().copy() for p in main.all_parameters()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-13, err_msg=name)


@pytest.mark.parametrize("mode", ["Reduce", "AllReduce"])
@pytest.mark.parametrize("change", CHANGES)
def test_replicas_compute_with_exchanged_gradients(change: str, mode: str) -> None:
    def build() -> Any:
        loss, rule = L.mean(L.fc(hidden(), 1)), fluid.optimizer.Momentum(RATE, 0.9)
        rule.apply_gradients(CHANGES[change](rule.backward(loss)))
        return loss

    model = recorded(build)
    for replicas, rows in ((2, 6), (3, 1)):  # of three replicas two have no row
        same(trained(model, replicas, mode, rows), trained(model, rows=rows))


def test_rows_of_a_sparse_gradient_are_all_replicas() -> None:
    def build() -> Any:
        loss, rule = L.mean(L.fc(hidden(is_sparse=True), 1)), fluid.optimizer.SGD(RATE)
        pairs = rule.backward(loss)
        (table,) = (g for _, g in pairs if hasattr(g, "rows"))
        seen = L.create_global_var([1], 0.0, "float64", persistable=True, name="seen")
        L.assign(L.reduce_sum(table.values * table.values).reshape([1]), seen)
        rule.apply_gradients(pairs)
        return loss

    model = recorded(build)
    for mode in ("Reduce", "AllReduce"):
        same(trained(model, 2, mode), trained(model))


# ---------------------------------------------------------------- two losses


def _two_losses(*, is_sparse: bool = False, rule: Callable[[], Any] = lambda: fluid.optimizer.SGD(RATE)) -> Any:
    shared = hidden(is_sparse=is_sparse)
    first, second = L.mean(L.square(L.fc(shared, 1))), L.mean(L.fc(shared, 2))
    rule().minimize(first)
    rule().minimize(second)
    return first


def step_in_turn(weights: dict[str, torch.Tensor]) -> None:
    """A step as Fluid makes it: the second backward pass has the activations from before, and the new parameters."""
    for weight in weights.values():
        weight.requires_grad_(True)
    ids = torch.from_numpy(IDS[:, 0])
    x = torch.from_numpy(X) + weights["embedding_0.w_0"][ids]
    h = torch.tanh(x @ weights["fc_0.w_0"] + weights["fc_0.b_0"])
    loss = (h @ weights["fc_1.w_0"] + weights["fc_1.b_0"]).square().mean()
    own = {name: weight for name, weight in weights.items() if not name.startswith("fc_2")}
    for weight, gradient in zip(own.values(), torch.autograd.grad(loss, list(own.values())), strict=True):
        weight.data -= RATE * gradient
    with torch.no_grad():
        of_out = torch.full((6, 2), 1 / 12, dtype=torch.float64)
        of_sum = (of_out @ weights["fc_2.w_0"].T) * (1 - h * h)
        of_rows = of_sum @ weights["fc_0.w_0"].T  # by now that of the first loss's update
        for name, gradient in {
            "fc_2.w_0": h.T @ of_out, "fc_2.b_0": of_out.sum(0), "fc_0.w_0": x.T @ of_sum, "fc_0.b_0": of_sum.sum(0),
            "embedding_0.w_0": torch.zeros_like(weights["embedding_0.w_0"]).index_add_(0, ids, of_rows),
        }.items():  # fmt: skip
            weights[name].data -= RATE * gradient


@pytest.mark.parametrize("is_sparse", [False, True])
def test_two_losses_update_one_parameter_in_turn(is_sparse: bool) -> None:
    model = recorded(lambda: _two_losses(is_sparse=is_sparse))
    scope = Scope()
    fluid.Executor().run(model[1], scope=scope)
    weights = {p.name: value(scope, p.name).clone() for p in model[0].all_parameters()}
    for _ in range(STEPS):
        step_in_turn(weights)
    wanted = {name: weight.detach().numpy() for name, weight in weights.items()}
    same(trained(model), wanted)
    for replicas, mode in ((2, "Reduce"), (3, "AllReduce")):
        same(trained(model, replicas, mode), wanted)


def test_a_second_gradient_has_a_name_of_its_own() -> None:
    main, _, _ = recorded(lambda: _two_losses(rule=lambda: fluid.optimizer.Momentum(RATE, 0.9)))
    assert {"fc_0.w_0@GRAD", "fc_0.w_0@GRAD_0"} <= main.variables.keys()
    assert fluid.Program.parse(str(main)) == main


def test_servers_refuse_two_gradients_of_a_parameter() -> None:
    main, startup, _ = recorded(_two_losses)
    transpiler = fluid.DistributeTranspiler()
    with pytest.raises(ProgramError, match=r"updated with 'embedding_0.w_0@GRAD' and with 'embedding_0.w_0@GRAD_0'"):
        transpiler.transpile(0, program=main, pservers="127.0.0.1:6174", trainers=1, startup_program=startup)
