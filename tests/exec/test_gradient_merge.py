"""GradientMergeOptimizer: k runs train as one with the batches of all of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from tests.exec.ps_network import Local, feeds, network, serve

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.precision.decorator import decorate
from penstock.ps.remote import PsMode

K, ROWS, UPDATES = 3, 4, 4
ROUNDING = 1e-9  # of sums in float64 over 12 rows, relative to numbers near 1
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "SGD": lambda: fluid.optimizer.SGD(0.1, regularization=fluid.regularizer.L2Decay(0.1)),
    "Momentum": lambda: fluid.optimizer.Momentum(0.1, 0.9, grad_clip=fluid.clip.GradientClipByGlobalNorm(0.05)),
    "Adam": lambda: fluid.optimizer.Adam(0.05),
    "Adamax": lambda: fluid.optimizer.Adamax(0.05),
    "Lamb": lambda: fluid.optimizer.Lamb(0.05),
    "Ftrl": lambda: fluid.optimizer.Ftrl(0.1, 0.01, 0.01),
    "LarsMomentum": lambda: fluid.optimizer.LarsMomentum(0.1, 0.9),
    "RMSProp": lambda: fluid.optimizer.RMSProp(0.05, momentum=0.5, centered=True),
}


class Model:
    """A network of two layers in float64; programs and a scope of its own."""

    def __init__(self, optimizer: Any, *, replicas: int = 0, reduces: bool = False) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        self.main.random_seed = self.startup.random_seed = 5
        with fluid.program_guard(self.main, self.startup), fluid.unique_name.guard():
            x, y = fluid.data("x", [None, 3], "float64"), fluid.data("y", [None, 1], "float64")
            hidden = fluid.layers.fc(x, 5, act="tanh")
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), y))
            optimizer.minimize(self.loss)
        self.exe = fluid.Executor()
        self.exe.run(self.startup, scope=self.scope)
        self.program: Any = self.main
        if replicas:
            strategy = fluid.BuildStrategy()
            if reduces:
                strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
            self.program = fluid.CompiledProgram(self.main).with_data_parallel(
                self.loss.name, strategy, places=[fluid.CPUPlace()] * replicas
            )

    def run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters after a step."""
        self.exe.run(self.program, feed=feed, fetch_list=[self.loss], scope=self.scope)
        return {v.name: np.array(self.scope.find_var(v.name).get_tensor()) for v in self.main.all_parameters()}


def batches() -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(ROWS, 3)), "y": random.normal(size=(ROWS, 1))} for _ in range(K * UPDATES)]


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same(got: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 0.0) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_k_runs_update_as_one_of_all_their_rows(name: str) -> None:
    whole = Model(OPTIMIZERS[name]())
    merged = Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS[name](), K))
    given, before = batches(), None
    for number, batch in enumerate(given):
        after = merged.run(batch)
        if (number + 1) % K:
            assert before is None or all((after[one] == value).all() for one, value in before.items())
        else:
            assert_same(after, whole.run(together(given[number + 1 - K : number + 1])), ROUNDING)
        before = after


@pytest.mark.parametrize("reduces", [False, True])
def test_replicas_update_as_one_program(reduces: bool) -> None:
    one = Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS["Adam"](), K))
    two = Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS["Adam"](), K), replicas=2, reduces=reduces)
    for batch in batches():
        assert_same(two.run(batch), one.run(batch), ROUNDING)


def merging_adam() -> Any:
    return fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.Adam(0.05), K)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_servers_merge_what_trainers_send(mode: PsMode) -> None:
    net = network(merging_adam, is_sparse=False, dtype="float64")
    local, servers = Local(net), serve(net, 2, mode)
    for feed in feeds(K * UPDATES, net.dtype):
        sent = local.step(feed)
        if mode == "sync":
            servers.begin_round()
        for parameter, gradient in sent.items():
            servers.push(parameter, gradient, 0)
        for parameter in sent:
            np.testing.assert_allclose(servers.value(parameter), local.value(parameter), rtol=ROUNDING, atol=ROUNDING)


def test_without_avg_gradients_are_summed() -> None:
    merged = Model(fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.SGD(0.1), K, avg=False))
    whole = Model(fluid.optimizer.SGD(0.1 * K))
    given = batches()[:K]
    for batch in given:
        after = merged.run(batch)
    assert_same(after, whole.run(together(given)), ROUNDING)


def test_scaled_gradients_are_divided_before_they_are_merged() -> None:
    def scaled(optimizer: Any) -> Any:
        return decorate(optimizer, init_loss_scaling=64.0, dtype="bfloat16")

    whole = Model(scaled(fluid.optimizer.SGD(0.1)))
    merged = Model(scaled(fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.SGD(0.1), K)))
    batch = batches()[0]  # one batch K times: the same gradient, whatever half precision makes of it
    before = merged.run(batch)
    for _ in range(K - 1):
        after = merged.run(batch)
    assert any((after[name] != value).any() for name, value in before.items())
    assert_same(after, whole.run(batch), ROUNDING)


def test_slow_parameters_are_put_around_merging() -> None:
    sgd, slow = fluid.optimizer.SGD, fluid.optimizer.LookaheadOptimizer
    whole = Model(slow(sgd(0.1), k=2))
    merged = Model(slow(fluid.optimizer.GradientMergeOptimizer(sgd(0.1), K), k=2 * K))
    given = batches()
    for number, batch in enumerate(given):
        after = merged.run(batch)
        if (number + 1) % K == 0:
            assert_same(after, whole.run(together(given[number + 1 - K : number + 1])), ROUNDING)


def test_one_step_is_the_optimizer_itself() -> None:
    merged = Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS["Adam"](), 1))
    assert str(merged.main) == str(Model(OPTIMIZERS["Adam"]()).main)


def test_k_steps_may_be_a_number_of_numpy() -> None:
    merged = Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS["Adam"](), np.int64(K)))
    assert str(merged.main) == str(Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS["Adam"](), K)).main)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - of this test


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda inner: fluid.optimizer.GradientMergeOptimizer(inner, K),
        lambda inner: decorate(inner, dtype="bfloat16"),
        fluid.optimizer.RecomputeOptimizer,
    ],
)
def test_a_wrapper_can_be_copied_and_pickled(wrapped: Callable[[Any], Any], copied: Callable[[Any], Any]) -> None:
    made = copied(wrapped(fluid.optimizer.Momentum(0.1, 0.75)))
    assert (type(made), made._momentum) == (type(wrapped(fluid.optimizer.SGD(0.1))), 0.75)
    with pytest.raises(AttributeError, match="no attribute '__of_no_class__'"):
        made.__of_no_class__  # noqa: B018 - it is asked for


def test_a_saved_training_goes_on_between_two_updates(tmp_path: Any) -> None:
    first, second = (Model(fluid.optimizer.GradientMergeOptimizer(OPTIMIZERS["Adam"](), K)) for _ in range(2))
    given = batches()
    for batch in given[: K + 1]:
        first.run(batch)
    with fluid.scope_guard(first.scope):
        fluid.io.save_persistables(first.exe, str(tmp_path), first.main)
    with fluid.scope_guard(second.scope):
        fluid.io.load_persistables(second.exe, str(tmp_path), second.main)
    for batch in given[K + 1 : 2 * K]:
        assert_same(second.run(batch), first.run(batch))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.SGD(0.1), 0), "k_steps is 0"),
        (lambda: fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.SGD(0.1), True), "k_steps is True"),
        (lambda: fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.SGD(0.1), 2.0), "k_steps is 2.0"),
        (lambda: fluid.optimizer.GradientMergeOptimizer(None), "is given None"),
        (
            lambda: fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.DGCMomentumOptimizer(0.1, 0.9, 1)),
            "cannot merge for DGCMomentumOptimizer",
        ),
        (
            lambda: fluid.optimizer.GradientMergeOptimizer(
                fluid.optimizer.LookaheadOptimizer(fluid.optimizer.SGD(0.1))
            ),
            r"merge inside it: LookaheadOptimizer\(GradientMergeOptimizer\(inner, k_steps\), alpha, k\)",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        make()


def test_sparse_gradients_are_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        ids = fluid.data("ids", [None, 1], "int64")
        loss = fluid.layers.mean(fluid.embedding(ids, (10, 2), is_sparse=True))
        with pytest.raises(ProgramError, match="is_sparse=False"):
            fluid.optimizer.GradientMergeOptimizer(fluid.optimizer.SGD(0.1), K).minimize(loss)
