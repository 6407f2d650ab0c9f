"""`dynamic_lstm`, `dynamic_gru` and `lstm` beside the same formulas written step by step in torch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.oracle import started, value
from torch import nn

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.program.program import Program

TOLERANCE = 1e-10
ROWS, STEPS, HIDDEN = 4, 5, 3
LENGTHS = torch.tensor([5, 3, 1, 4])
L: Any = fluid.layers


def walk(gates: torch.Tensor, lengths: torch.Tensor, reverse: bool, cell: Callable[..., Any]) -> list[torch.Tensor]:
    """Run `cell(gates [4 h], *states) -> states` over each row's own steps; zeros elsewhere: [n, t, h] a state."""
    rows = []
    for row, steps in enumerate(lengths.tolist()):
        states = [torch.zeros(HIDDEN, dtype=torch.float64)] * 2
        made: list[Any] = [states] * STEPS
        for t in reversed(range(steps)) if reverse else range(steps):
            states = made[t] = cell(gates[row, t], *states)
        padding = [[torch.zeros(HIDDEN, dtype=torch.float64)] * 2] * (STEPS - steps)
        rows.append([torch.stack(one) for one in zip(*made[:steps], *padding, strict=True)])
    return [torch.stack(list(one)) for one in zip(*rows, strict=True)]


def lstm_cell(weight: torch.Tensor, bias: torch.Tensor, peepholes: bool) -> Callable[..., Any]:
    def cell(gates: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        g, i, f, o = (gates + bias[0, : 4 * HIDDEN] + h @ weight).chunk(4)
        p = bias[0, 4 * HIDDEN :].chunk(3) if peepholes else [torch.zeros(())] * 3
        new = torch.sigmoid(f + p[1] * c) * c + torch.sigmoid(i + p[0] * c) * torch.tanh(g)
        return [torch.sigmoid(o + p[2] * new) * torch.tanh(new), new]

    return cell


def gru_cell(
    weight: torch.Tensor, bias: torch.Tensor, origin: bool, gate: Any = torch.sigmoid, act: Any = torch.tanh
) -> Callable[..., Any]:
    split = 2 * HIDDEN * HIDDEN  # values of the gates stand before those of the candidate
    of_gates, of_candidate = weight.reshape(-1)[:split].view(HIDDEN, -1), weight.reshape(-1)[split:].view(HIDDEN, -1)

    def cell(gates: torch.Tensor, h: torch.Tensor, _: torch.Tensor) -> Any:
        x = gates + bias[0]
        u, r = gate(x[: 2 * HIDDEN] + h @ of_gates).chunk(2)
        candidate = act(x[2 * HIDDEN :] + (r * h) @ of_candidate)
        new = u * h + (1 - u) * candidate if origin else (1 - u) * h + u * candidate
        return [new, new]

    return cell


def recorded(write: Callable[[Any, Any], Any], gates: int, feed: dict[str, Any], *, whole: bool) -> tuple[Any, ...]:
    """Record a layer and its gradients for the loss (result * result).sum(); return results and (value, gradient)s."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = L.data("x", [STEPS, gates * HIDDEN], dtype="float64")
        lengths = None if whole else L.data("lengths", [1], dtype="int64")
        results = write(x, lengths)
        results = results if isinstance(results, tuple) else (results,)
        pairs = fluid.append_backward(sum((r * r).sum() for r in results))
    scope = started(startup)
    for position, (param, _) in enumerate(pairs):  # biases start at zero; let them count
        shape = value(scope, param.name).shape
        scope.set(param.name, torch.from_numpy(np.random.default_rng(position).normal(size=shape)))
    names = [*results, *(g for _, g in pairs)]
    found = fluid.Executor().run(main, feed, names, scope=scope)
    values = [value(scope, p.name).clone().requires_grad_(True) for p, _ in pairs]
    return found[: len(results)], values, found[len(results) :]


def assert_same(found: tuple[Any, ...], make: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
    results, values, gradients = found
    wanted = make(values)
    for got, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), atol=TOLERANCE)
    expected_gradients = torch.autograd.grad(sum((r * r).sum() for r in wanted), values)  # type: ignore[arg-type]
    for got, gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, gradient.numpy(), atol=TOLERANCE)


def batch(gates: int, *, whole: bool) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    x = np.random.default_rng(7).normal(size=(ROWS, STEPS, gates * HIDDEN))
    lengths = torch.full((ROWS,), STEPS) if whole else LENGTHS
    feed = {"x": x} if whole else {"x": x, "lengths": lengths.numpy().reshape(-1, 1)}
    return feed, torch.from_numpy(x), lengths


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("peepholes", [True, False])
def test_dynamic_lstm_follows_its_formula(peepholes: bool, reverse: bool, whole: bool) -> None:
    feed, x, lengths = batch(4, whole=whole)

    def write(x: Any, lengths: Any) -> Any:
        return L.dynamic_lstm(
            x, 4 * HIDDEN, use_peepholes=peepholes, is_reverse=reverse, dtype="float64", lengths=lengths
        )

    found = recorded(write, 4, feed, whole=whole)
    assert_same(found, lambda w: walk(x, lengths, reverse, lstm_cell(w[0], w[1], peepholes)))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("origin", [True, False])
def test_dynamic_gru_follows_its_formula(origin: bool, reverse: bool, whole: bool) -> None:
    feed, x, lengths = batch(3, whole=whole)

    def write(x: Any, lengths: Any) -> Any:
        return L.dynamic_gru(x, HIDDEN, is_reverse=reverse, origin_mode=origin, lengths=lengths)

    found = recorded(write, 3, feed, whole=whole)
    assert_same(found, lambda w: walk(x, lengths, reverse, gru_cell(w[0], w[1], origin))[:1])


@pytest.mark.parametrize(("reverse", "whole"), [(False, False), (True, False), (True, True)])
def test_dynamic_gru_takes_other_activations(reverse: bool, whole: bool) -> None:
    feed, x, lengths = batch(3, whole=whole)

    def write(x: Any, lengths: Any) -> Any:
        kinds = {"gate_activation": "tanh", "candidate_activation": "relu"}
        return L.dynamic_gru(x, HIDDEN, is_reverse=reverse, lengths=lengths, origin_mode=whole, **kinds)

    found = recorded(write, 3, feed, whole=whole)
    cell = {"gate": torch.tanh, "act": torch.relu}
    assert_same(found, lambda w: walk(x, lengths, reverse, gru_cell(w[0], w[1], whole, **cell))[:1])


def test_dynamic_gru_steps_as_gru_unit_does() -> None:
    with fluid.program_guard(main := Program(seed=1), startup := Program(seed=1)):
        x = L.data("x", [STEPS, 3 * HIDDEN], dtype="float64")
        whole = L.dynamic_gru(x, HIDDEN, param_attr="w", bias_attr="b")
        h = x.new_zeros(x.shape[0], HIDDEN)
        for t in range(STEPS):
            h, _, _ = L.gru_unit(x[:, t], h, 3 * HIDDEN, param_attr="w", bias_attr="b")
    feed, _, _ = batch(3, whole=True)
    found, last = fluid.Executor().run(main, feed, [whole, h], scope=started(startup))
    np.testing.assert_allclose(found[:, -1], last, atol=TOLERANCE)


def test_stacked_lstm_is_torchs() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.data("x", [STEPS, None, 6], "float64")
        start = x.new_zeros(4, x.shape[1], HIDDEN)
        outputs = L.lstm(x, start, start + 0.5, STEPS, HIDDEN, 2, dropout_prob=0.4, is_bidirec=True, is_test=True)
    scope = started(startup)
    module = nn.LSTM(6, HIDDEN, 2, bidirectional=True).double()
    names = [n.split(".")[-1] for n in scope.names()]
    assert sorted(names) == sorted(n for n, _ in module.named_parameters())
    module.load_state_dict({name.split(".")[-1]: value(scope, name) for name in scope.names()})
    given = np.random.default_rng(1).normal(size=(STEPS, 2, 6))
    got = fluid.Executor().run(main, {"x": given}, outputs, scope=scope)
    zeros = torch.zeros(4, 2, HIDDEN, dtype=torch.float64)
    out, (h, c) = module(torch.from_numpy(given), (zeros, zeros + 0.5))
    for mine, theirs in zip(got, (out, h, c), strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), atol=TOLERANCE)


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another activation": (lambda x: L.dynamic_lstm(x, 12, gate_activation="selu"), "no activation 'selu'"),
    "a flat input": (lambda x: L.dynamic_gru(x[:, 0], 3), r"needs an input \[batch, time, 3 \* hidden\]"),
    "another size": (lambda x: L.dynamic_lstm(x, 16), "num_flatten_dims=2"),
    "no bias for peepholes": (lambda x: L.dynamic_lstm(x, 12, bias_attr=False), "use_peepholes=False"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_told(name: str) -> None:
    write, message = REFUSALS[name]
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x = L.data("x", [STEPS, 12])
        with pytest.raises(ProgramError, match=message):
            write(x)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layer", ["dynamic_lstm", "dynamic_gru"])
@pytest.mark.parametrize("wrong", [6, -1])
def test_lengths_beyond_the_steps_are_an_error_that_names_them(layer: str, wrong: int, reverse: bool) -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x, lengths = L.data("x", [STEPS, 12]), L.data("lengths", [1], dtype="int64")
        size = 12 if layer == "dynamic_lstm" else 4
        out = getattr(L, layer)(x, size, is_reverse=reverse, lengths=lengths)
        loss = L.mean(out[0] if isinstance(out, tuple) else out)
        fluid.optimizer.SGD(0.1).minimize(loss)
    feed = {"x": np.zeros((2, STEPS, 12), np.float32), "lengths": np.array([[STEPS], [wrong]])}
    with pytest.raises(
        OperatorError, match=f"lengths of {layer} hold {wrong} at row 1; expected 0 to {STEPS}"
    ) as caught:
        fluid.Executor().run(main, feed, [loss], scope=started(startup))
    assert "test_recurrent_layers.py:" in caught.value.source
    feed["lengths"] = np.array([[STEPS], [0]])
    fluid.Executor().run(main, feed, [loss], scope=started(startup))
