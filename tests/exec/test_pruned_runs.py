"""Runs of what the fetches need: `Executor.run(use_prune=True)`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FeedError, SpecError

layers = fluid.layers


class Training:
    """A network with a step counter and a second branch that nothing of the loss needs."""

    def __init__(self) -> None:
        self.main, self.scope = fluid.Program(seed=1), fluid.Scope()
        startup = fluid.Program(seed=1)
        with fluid.program_guard(self.main, startup):
            x, y, other = (layers.data(name, [size]) for name, size in (("x", 3), ("y", 1), ("other", 2)))
            self.counter = layers.create_global_var([1], 0.0, "float32", persistable=True, name="counter")
            layers.increment(self.counter)
            self.doubled = self.counter * 2.0
            self.scores = layers.fc(x, 1, param_attr="w")
            self.loss = layers.mean(layers.square_error_cost(self.scores, y))
            self.beside = layers.mean(other)
            self.updates = fluid.optimizer.SGD(0.5).minimize(self.loss)
        self.executor = fluid.Executor(fluid.CPUPlace())
        self.executor.run(startup, scope=self.scope)
        draw = np.random.default_rng(0)
        sizes = {"x": 3, "y": 1, "other": 2}
        self.feed = {name: draw.normal(size=(4, size)).astype("float32") for name, size in sizes.items()}

    def run(self, fetches: Any, *left_out: str, **given: Any) -> list[np.ndarray]:
        feed = {name: value for name, value in self.feed.items() if name not in left_out}
        return list(self.executor.run(self.main, feed, fetches, scope=self.scope, use_prune=True, **given))

    def state(self, name: str) -> np.ndarray:
        return np.array(self.scope.find_var(name).get_tensor())


def test_updates_that_no_fetch_needs_are_not_run() -> None:
    training = Training()
    before = training.state("w").copy()
    first, second = (training.run([training.loss])[0] for _ in range(2))
    assert first == second
    np.testing.assert_array_equal(training.state("w"), before)
    assert training.state("counter") == 0.0
    assert training.run([training.doubled])[0] == 2.0  # the increment is before it
    assert training.run([training.doubled])[0] == 4.0


def test_inputs_that_no_fetch_needs_need_not_be_fed() -> None:
    training = Training()
    assert training.run(training.scores, "y", "other")[0].shape == (4, 1)
    assert training.run([training.beside], "x", "y")[0].shape == (1,)
    with pytest.raises(FeedError, match=r"input .y. .* is not fed"):
        training.run([training.loss], "y")
    training.feed["unknown"] = np.zeros(1, "float32")
    with pytest.raises(FeedError, match="feed 'unknown'"):
        training.run([training.loss])


def test_what_minimize_returned_keeps_the_updates() -> None:
    training = Training()
    losses = [training.run([training.loss, training.updates])[0] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert len(training.run([training.loss, training.updates])) == 1


def test_a_program_that_grows_is_cut_anew() -> None:
    training = Training()
    training.run([training.scores], "y", "other")
    with fluid.program_guard(training.main):
        more = training.scores + 1.0
    scores, added = training.run([training.scores, more], "y", "other")
    np.testing.assert_array_equal(added, scores + 1.0)


def test_gradients_are_run_as_far_as_they_are_fetched() -> None:
    training = Training()
    before = training.state("w").copy()
    gradient = training.run(["w@GRAD"], "other")[0]
    np.testing.assert_array_equal(training.state("w"), before)
    x, y = training.feed["x"], training.feed["y"]
    wanted = 2 * x.T @ (x @ before - y) / len(x)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 3])
def test_runs_of_every_cut_draw_as_runs_of_the_program(seed: int) -> None:
    with fluid.program_guard(fluid.Program(seed=seed), fluid.Program()):
        kept = layers.dropout(fluid.data("x", [None, 64]), 0.5)
        more, main = kept + 1.0, fluid.default_main_program()
    executor, feed = fluid.Executor(), {"x": np.ones((1, 64), "float32")}

    def masks(scope: fluid.Scope, prunes: bool) -> list[bytes]:
        wanted = [[kept], [more, kept], [kept], [more, kept]]
        runs = [
            executor.run(main, feed, one, scope=scope, use_prune=prunes and at > 0) for at, one in enumerate(wanted)
        ]
        return [found[-1].tobytes() for found in runs]

    cut, scope = masks(fluid.Scope(), prunes=True), fluid.Scope()
    assert cut == masks(scope, prunes=False)
    assert len(set(cut)) == len(cut) == scope.steps(main)


def test_a_compiled_program_is_not_cut() -> None:
    training = Training()
    compiled: Any = fluid.CompiledProgram(training.main).with_data_parallel(training.loss.name)
    with pytest.raises(SpecError, match="use_prune=True is for a plain Program"):
        training.executor.run(compiled, training.feed, [training.loss], scope=training.scope, use_prune=True)
