"""Positions among the words of a batch, as many as are fed: the masked words of a language model, declared [-1, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import penstock as fluid
from penstock.errors import FeedError

L: Any = fluid.layers
STEPS, WORDS = 3, 7


class Model:
    """Scores of some words of [n, STEPS], taken by their positions, against a label of each."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            x = fluid.data("x", [None, STEPS], "int64")
            label, position = fluid.data("label", [None, 1], "int64"), fluid.data("position", [None, 1], "int64")
            rows = L.reshape(L.embedding(x, [WORDS, 4], dtype="float64", param_attr="table"), [-1, 4])
            masked = L.gather(rows, L.cast(position, "int32"))
            scores = masked.matmul(L.create_parameter([4, WORDS], "float64", "scores"))
            cost = L.softmax_with_cross_entropy(scores, label)
            loss = L.mean(cost)
            fluid.append_backward(loss)
        self._exe = fluid.Executor(fluid.CPUPlace())
        self._exe.run(startup, scope=self.scope)
        self.fetches = [cost, loss, "table@GRAD"]
        self.table, self.scores = (torch.tensor(np.array(self.scope.find_var(n))) for n in ("table", "scores"))
        self._runs: Any = self.main
        if num_replicas > 1:
            places = [fluid.CPUPlace()] * num_replicas
            self._runs = fluid.CompiledProgram(self.main).with_data_parallel(loss_name=loss.name, places=places)

    def run(self, feed: Any) -> list[Any]:
        return list(self._exe.run(self._runs, feed, self.fetches, scope=self.scope))

    def wanted(self, feed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Costs of the masked words, and the gradient of the table, of one batch."""
        table = self.table.clone().requires_grad_(True)
        words = torch.tensor(feed["x"]).reshape(-1)[torch.tensor(feed["position"]).reshape(-1)]
        costs = F.cross_entropy(table[words] @ self.scores, torch.tensor(feed["label"]).reshape(-1), reduction="none")
        costs.mean().backward()  # type: ignore[no-untyped-call]  # torch
        assert table.grad is not None
        return costs.detach(), table.grad


def batch(rows: int, masked: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows + masked)
    position = rng.choice(rows * STEPS, (masked, 1), replace=False)
    return {
        "x": rng.integers(0, WORDS, (rows, STEPS)),
        "position": position,
        "label": rng.integers(0, WORDS, (masked, 1)),
    }


def test_any_number_of_positions_is_fed_beside_a_batch() -> None:
    model = Model()
    for feed in (batch(4, 7), batch(4, 2), batch(4, 4), batch(2, 5)):
        costs, grad = model.wanted(feed)
        cost, loss, found = model.run(feed)
        np.testing.assert_allclose(cost[:, 0], costs.numpy(), rtol=1e-12)
        np.testing.assert_allclose(loss, [costs.mean().item()], rtol=1e-12)
        np.testing.assert_allclose(found, grad.numpy(), rtol=1e-10, atol=1e-14)
    assert fluid.Program.parse(str(model.main)) == model.main
    assert [str(model.main.variables[n].shape[0]) for n in ("x", "position", "label")] == ["s0", "r1", "r1"]


def test_labels_of_other_positions_are_refused() -> None:
    with pytest.raises(FeedError, match=r"label.*position|position.*label"):
        Model().run({**batch(4, 7), "label": np.zeros((4, 1), np.int64)})


def test_replicas_have_positions_of_their_own_or_are_refused() -> None:
    model = Model(num_replicas=2)
    feeds = [batch(3, 5), batch(3, 2)]
    parts = [model.wanted(feed) for feed in feeds]
    cost, _, grad = model.run(feeds)
    np.testing.assert_allclose(cost[:, 0], torch.cat([costs for costs, _ in parts]).numpy(), rtol=1e-12)
    np.testing.assert_allclose(grad[:WORDS], (parts[0][1] + parts[1][1]).numpy() / 2, rtol=1e-10, atol=1e-14)
    with pytest.raises(FeedError, match="positions among all rows of the feed"):
        model.run(batch(4, 4))


def test_labels_that_cannot_change_keep_their_rows() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x, last = fluid.data("x", [None, STEPS, WORDS], "float64"), fluid.data("last", [None, 1], "int64")
        label = fluid.data("label", [None, 1], "int64")
        L.reduce_sum(label)
        found = L.gather(L.reshape(x, [-1, WORDS]), last)
        L.softmax_with_cross_entropy(found, label)
    assert main.symbols == ["s0"]


def test_a_branch_of_its_own_changes_no_rows() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, at = fluid.data("x", [None, STEPS, 2], "float64"), fluid.data("at", [None, 1], "int64")
        found = L.gather(L.reshape(x, [-1, 2]), at)
        rate = L.fill_constant([1], "float64", 1.0)
        yes = L.less_than(rate, L.fill_constant([1], "float64", 2.0))
        both = L.cond(yes, lambda: found * rate, lambda: found)
        assert [str(v.desc.shape[0]) for v in (found, both)] == ["r1", "r1"]
        rnn, steps = L.StaticRNN(), L.transpose(x, [1, 0, 2])
        with rnn.step():
            rnn.output(rnn.step_input(steps) + found)
        assert [str(v.desc.shape[0]) for v in (x, found, both)] == ["s0"] * 3


@pytest.mark.parametrize("in_block", [False, True])
def test_one_position_a_sample_has_the_rows_of_the_batch(in_block: bool) -> None:
    main, exe = fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        x, last = fluid.data("x", [None, STEPS, 2], "float64"), fluid.data("last", [None, 1], "int64")
        found = L.gather(L.reshape(x, [-1, 2]), last)
        means = L.reduce_mean(x, 1)
        if in_block:
            yes = L.fill_constant([1], "bool", True)
            both = L.cond(yes, lambda: found + means, lambda: found - means)
        else:
            both = found + means
    assert main.symbols == ["s0"]
    value, at = np.random.default_rng(0).random((4, STEPS, 2)), np.array([[2], [5], [6], [9]])
    (one,) = exe.run(main, {"x": value, "last": at}, [both])
    np.testing.assert_allclose(one, value.reshape(-1, 2)[at[:, 0]] + value.mean(1), rtol=1e-14)
    with pytest.raises(FeedError):
        exe.run(main, {"x": value, "last": at[:3]}, [both])
