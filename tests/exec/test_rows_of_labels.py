"""Inputs with several rows a sample: labels of all steps of sequences, declared as Fluid's scripts do, [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import penstock as fluid
from penstock.errors import FeedError, PenstockError

L = fluid.layers
STEPS, WORDS = 3, 7


class Model:
    """Scores of each step of [n, t] words against a label of each; the steps are STEPS or known when fed."""

    def __init__(
        self, steps: int | None, num_replicas: int = 1, given: Callable[[Any, Any, Any], None] | None = None
    ) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            x = fluid.data("x", [None, steps], "int64")
            y, weight = fluid.data("y", [None, 1], "int64"), fluid.data("weight", [None, 1], "float64")
            if given is not None:
                given(x, y, weight)
            rows = L.embedding(x, [WORDS, 4], dtype="float64", param_attr="table")
            scores = L.reshape(rows, [-1, 4]).matmul(L.create_parameter([4, WORDS], "float64", "scores"))
            label = self.label_of(y)
            cost = L.softmax_with_cross_entropy(scores, label, soft_label=label is not y) * weight
            loss = L.reduce_mean(cost)
            fluid.append_backward(loss)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup, scope=self.scope)
        self.fetches = [cost, loss, "table@GRAD"]
        self.table, self.scores = (torch.tensor(np.array(self.scope.find_var(n))) for n in ("table", "scores"))
        self._exe = exe
        self._runs: Any = self.main
        if num_replicas > 1:
            places = [fluid.CPUPlace()] * num_replicas
            self._runs = fluid.CompiledProgram(self.main).with_data_parallel(loss_name=loss.name, places=places)

    def label_of(self, y: Any) -> Any:
        return y

    def run(self, feed: Any, fetches: list[Any]) -> list[Any]:
        return list(self._exe.run(self._runs, feed, fetches, scope=self.scope))


def batch(rows: int, steps: int = STEPS) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, WORDS, (rows, steps)), rng.integers(0, WORDS, (rows * steps, 1))
    return {"x": ids[0], "y": ids[1], "weight": rng.random((rows * steps, 1))}


def expected(model: Model, feed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    table = model.table.clone().requires_grad_(True)
    logits = table[torch.tensor(feed["x"]).reshape(-1)] @ model.scores
    costs = F.cross_entropy(logits, torch.tensor(feed["y"]).reshape(-1), reduction="none")
    costs = costs * torch.tensor(feed["weight"]).reshape(-1)
    costs.mean().backward()  # type: ignore[no-untyped-call]  # torch
    assert table.grad is not None
    return costs.detach(), table.grad


@pytest.mark.parametrize("steps", [STEPS, None])
def test_labels_of_all_steps_are_rows_of_their_own(steps: int | None) -> None:
    model = Model(steps)
    feed = batch(4, 5 if steps is None else STEPS)
    costs, grad = expected(model, feed)
    cost, loss, found = model.run(feed, model.fetches)
    np.testing.assert_allclose(cost[:, 0], costs.numpy(), rtol=1e-12)
    np.testing.assert_allclose(loss, [costs.mean().item()], rtol=1e-12)
    np.testing.assert_allclose(found, grad.numpy(), rtol=1e-10, atol=1e-14)
    parsed = fluid.Program.parse(str(model.main))
    assert parsed == model.main and str(parsed.variables["y"].shape[0]) == ("s0 * 3" if steps else "s0 * s1")


class SmoothedModel(Model):
    """Labels that are smoothed and looked at before they meet the scores of all steps."""

    def __init__(self, steps: int | None, num_replicas: int = 1) -> None:
        super().__init__(steps, num_replicas, self._smooth)

    def _smooth(self, x: Any, y: Any, weight: Any) -> None:
        self.smoothed = L.label_smooth(L.one_hot(y, WORDS), epsilon=0.1)
        self.is_first = L.cast(L.equal(y, L.zeros_like(y)), "int64")

    def label_of(self, y: Any) -> Any:
        return L.cast(self.smoothed, "float64")


@pytest.mark.parametrize("steps", [STEPS, None])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_labels_that_were_smoothed_get_the_rows_of_all_steps(steps: int | None, num_replicas: int) -> None:
    model = SmoothedModel(steps, num_replicas)
    feed = batch(4, 5 if steps is None else STEPS)
    cost, is_first, smoothed = model.run(feed, [model.fetches[0], model.is_first, model.smoothed])
    table, labels = model.table, torch.tensor(feed["y"]).reshape(-1)
    logits = table[torch.tensor(feed["x"]).reshape(-1)] @ model.scores
    wanted = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1).numpy() * feed["weight"][:, 0]
    np.testing.assert_allclose(cost[:, 0], wanted, rtol=1e-6)  # one_hot is float32
    np.testing.assert_array_equal(is_first, feed["y"] == 0)
    np.testing.assert_allclose(smoothed.sum(1), np.ones(len(labels)), rtol=1e-6)


def test_smoothed_labels_that_meet_other_rows_keep_theirs() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, y, z = (fluid.data(name, [None, n], "float32") for name, n in (("x", STEPS), ("y", 1), ("z", 1)))
        doubled = y * 2.0
        doubled + z
        with pytest.raises(PenstockError, match="__sub__"):
            L.reshape(x, [-1, 1]) - doubled
        assert [str(v.desc.shape[0]) for v in (y, z, doubled)] == ["s0"] * 3


def test_smoothed_labels_are_found_by_their_names_again() -> None:
    main, startup, exe = fluid.Program(), fluid.Program(), fluid.Executor(fluid.CPUPlace())
    with fluid.unique_name.guard(), fluid.program_guard(main, startup):
        x, y = fluid.data("x", [None, STEPS], "int64"), fluid.data("y", [None, 1], "int64")
        scores = L.reshape(L.embedding(x, [WORDS, WORDS]), [-1, WORDS])
        smoothed = L.label_smooth(L.one_hot(y, WORDS), epsilon=0.1)
        L.softmax_with_cross_entropy(scores, smoothed, soft_label=True)
    exe.run(startup)
    feed = {name: batch(2)[name] for name in ("x", "y")}
    by_name, by_variable = exe.run(main, feed, ["label_smooth_0.tmp_0", smoothed])
    assert by_name.shape == (2 * STEPS, WORDS)
    assert np.array_equal(by_name, by_variable)


def test_labels_that_a_layer_drew_numbers_for_keep_their_rows() -> None:
    def dropped(x: Any, y: Any, weight: Any) -> None:
        L.dropout(weight, 0.5)

    with pytest.raises(PenstockError, match="rows"):
        Model(STEPS, given=dropped)


def test_replicas_share_samples_with_all_their_labels() -> None:
    model = Model(STEPS, num_replicas=2)
    feed = batch(5)
    costs, _ = expected(model, feed)
    (cost,) = model.run(feed, model.fetches[:1])
    np.testing.assert_allclose(cost[:, 0], costs.numpy(), rtol=1e-12)
    halves = [
        {"x": feed["x"][a:b], **{n: feed[n][a * STEPS : b * STEPS] for n in ("y", "weight")}}
        for a, b in ((0, 2), (2, 5))
    ]
    (listed,) = model.run(halves, model.fetches[:1])
    np.testing.assert_allclose(listed[:, 0], costs.numpy(), rtol=1e-12)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_another_number_of_labels_is_refused(num_replicas: int) -> None:
    model = Model(STEPS, num_replicas)
    feed = batch(4)
    with pytest.raises(FeedError, match=r"feed 'y' has 4 rows; expected 12, which is s0 \* 3 where .* s0 = 4"):
        model.run({**feed, "y": feed["y"][:4]}, model.fetches[:1])


def test_what_was_read_as_one_row_a_sample_keeps_its_rows() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, y = fluid.data("x", [None, STEPS], "float32"), fluid.data("y", [None, 1], "float32")
        L.reduce_sum(y * 2.0)
        with pytest.raises(PenstockError, match="y"):
            L.reshape(x, [-1, 1]) - y
        assert str(y.desc.shape[0]) == "s0"


@pytest.mark.parametrize("rows_of", [lambda y: L.shape(y)[0:1], L.size, lambda y: y.shape[0]])
def test_labels_whose_number_was_read_keep_their_rows(rows_of: Callable[[Any], Any]) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, y = fluid.data("x", [None, STEPS], "float64"), fluid.data("y", [None, 1], "float64")
        total = L.reduce_sum(y) / rows_of(y)
        with pytest.raises(PenstockError, match="y"):
            L.reshape(x, [-1, 1]) - y
        feed = {"x": np.zeros((4, STEPS)), "y": np.arange(4.0).reshape(4, 1)}
        (mean,) = fluid.Executor(fluid.CPUPlace()).run(feed=feed, fetch_list=[total])
        np.testing.assert_allclose(mean, 1.5)


def of_two_replicas(feed: dict[str, Any], fetch: Any) -> np.ndarray:
    compiled: Any = fluid.CompiledProgram(fluid.default_main_program())
    compiled = compiled.with_data_parallel(places=[fluid.CPUPlace()] * 2)
    (found,) = fluid.Executor(fluid.CPUPlace()).run(compiled, feed, [fetch])
    return np.asarray(found)


def test_a_position_computed_of_each_sample_is_shared_with_it() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, y = fluid.data("x", [None, STEPS, 4], "float64"), fluid.data("y", [None, 4], "float64")
        at = L.argmax(L.reduce_sum(x, 2), 1)
        out = L.gather(L.reshape(x, [-1, 4]), at) - y
        feed = {
            name: np.random.default_rng(0).normal(size=(4, *size)) for name, size in (("x", (STEPS, 4)), ("y", (4,)))
        }
        halves = [feed["x"][:2], feed["x"][2:]]
        wanted = [half.reshape(-1, 4)[half.sum(2).argmax(1)] for half in halves]
        np.testing.assert_allclose(of_two_replicas(feed, out), np.concatenate(wanted) - feed["y"])


def test_positions_of_samples_meet_what_is_computed_of_them() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, at = fluid.data("x", [None, None, 4], "float64"), fluid.data("at", [None], "int64")
        rows = L.gather(L.reshape(x, [-1, 4]), at)
        out = L.concat([rows + L.reduce_mean(x, 1), rows], 1)
        feed = {"x": np.random.default_rng(0).normal(size=(4, 5, 4)), "at": np.array([4, 7, 3, 8])}
        parts = [(feed["x"][a : a + 2], feed["at"][a : a + 2]) for a in (0, 2)]
        picked = np.concatenate([half.reshape(-1, 4)[index] for half, index in parts])
        wanted = np.concatenate([picked + feed["x"].mean(1), picked], 1)
        np.testing.assert_allclose(of_two_replicas(feed, out), wanted)


@pytest.mark.parametrize("steps", [STEPS, None])
@pytest.mark.parametrize("built", ["before", "after"])
def test_a_feeder_puts_the_labels_of_samples_one_after_another(steps: int | None, built: str) -> None:
    feeders: list[Any] = []

    def feeder(*inputs: Any) -> None:
        feeders.append(fluid.DataFeeder(list(inputs), fluid.CPUPlace(), fluid.default_main_program()))

    model = Model(steps, given=feeder if built == "before" else None)
    if built == "after":
        feeders.append(fluid.DataFeeder(["x", "y", "weight"], fluid.CPUPlace(), model.main))
    feed = batch(4)
    samples = [
        (ids, labels, weights)
        for ids, labels, weights in zip(
            feed["x"].tolist(), feed["y"].reshape(4, STEPS).tolist(), feed["weight"].reshape(4, STEPS, 1), strict=True
        )
    ]
    made = feeders[0].feed(samples)
    assert [list(np.asarray(made[name]).shape) for name in feed] == [[4, STEPS], [4 * STEPS, 1], [4 * STEPS, 1]]
    np.testing.assert_array_equal(model.run(made, model.fetches[:1])[0], model.run(feed, model.fetches[:1])[0])


@pytest.mark.parametrize("way", ["samples", "lists", "batches"])
def test_a_loader_puts_the_labels_of_samples_one_after_another(way: str) -> None:
    inputs: list[Any] = []
    model = Model(STEPS, given=lambda *given: inputs.extend(given))
    feed = batch(4)
    samples = list(zip(feed["x"], feed["y"].reshape(4, STEPS, 1), feed["weight"].reshape(4, STEPS, 1), strict=True))
    loader: Any = fluid.io.DataLoader.from_generator(inputs, capacity=4, iterable=True)
    places = fluid.cpu_places(1)
    if way == "samples":
        loader.set_sample_generator(lambda: iter(samples), batch_size=4, places=places)
    elif way == "lists":
        loader.set_sample_list_generator(lambda: iter([samples]), places=places)
    else:
        loader.set_batch_generator(lambda: iter([[feed["x"], feed["y"], feed["weight"]]]), places=places)
    (made,) = [feeds[0] for feeds in loader()]
    np.testing.assert_array_equal(model.run(made, model.fetches[:1])[0], model.run(feed, model.fetches[:1])[0])
