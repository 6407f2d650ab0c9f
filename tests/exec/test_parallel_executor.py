"""What ParallelExecutor and CompiledProgram promise (rows 7 to 30 of the specification's table)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.networks import Network, ctr_dnn, fit_a_line
from tests.property.oracle import started, value
from tests.support.capabilities import pretend_cores

import penstock as fluid
from penstock.errors import FeedError, FetchError, OperatorError, ProgramError, SpecError
from penstock.graph.build import place_updates
from penstock.program.program import Program
from penstock.scope import Scope

Make = Callable[..., fluid.ParallelExecutor]


@pytest.fixture
def cpu_num(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set CPU_NUM."""
    return lambda number: monkeypatch.setenv("CPU_NUM", str(number))


@pytest.fixture
def make() -> Any:
    """Make ParallelExecutors that are closed at the end."""
    made: list[fluid.ParallelExecutor] = []

    def build(network: Network, scope: Scope, *, mode: str = "AllReduce", **options: Any) -> fluid.ParallelExecutor:
        strategy = fluid.BuildStrategy()
        strategy.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
        options = {"loss_name": network.loss, "main_program": network.main, "build_strategy": strategy} | options
        made.append(fluid.ParallelExecutor(use_cuda=False, scope=scope, **options))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def echo() -> tuple[Network, str]:
    """A program whose output is its input plus nothing, so that fetches show who got which rows."""
    network = fit_a_line()
    with fluid.program_guard(network.main, network.startup):
        x: Any = network.main.handle("x")
        return network, (x[:, :2] + 0.0).name


def rows_of(number: int) -> dict[str, Any]:
    x = np.arange(number * 13, dtype="float32").reshape(number, 13)
    return {"x": x, "y": x[:, :1].copy()}


def test_cpu_num_sets_replicas_and_scalar_fetches_have_one_each(make: Make, cpu_num: Any) -> None:
    cpu_num(3)
    network = fit_a_line()
    executor = make(network, started(network.startup))
    (loss,) = executor.run([network.loss], rows_of(6))
    assert executor.device_count == 3
    assert loss.shape == (3,)


def test_without_cpu_num_there_is_a_replica_for_each_core(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPU_NUM", raising=False)
    pretend_cores(monkeypatch, 5)
    network = fit_a_line()
    executor = make(network, started(network.startup))
    assert executor.device_count == 5


def test_num_threads_is_four_for_each_replica_unless_it_is_set(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = fit_a_line()
    assert make(network, started(network.startup)).core.num_threads == 8
    execution = fluid.ExecutionStrategy()
    execution.num_threads = 3
    assert make(network, started(network.startup), exec_strategy=execution).core.num_threads == 3


@pytest.mark.parametrize(
    ("rows", "replicas", "shares"),
    [(10, 2, [5, 5]), (3, 2, [1, 2]), (9, 8, [1] * 7 + [2]), (5, 3, [1, 2, 2]), (1, 4, [1]), (2, 3, [1, 1])],
)
def test_a_batch_is_split_in_order_with_the_larger_shares_last(
    rows: int, replicas: int, shares: list[int], cpu_num: Any
) -> None:
    cpu_num(replicas)
    network, out = echo()
    compiled = fluid.CompiledProgram(network.main).with_data_parallel(loss_name=network.loss)
    feed = rows_of(rows)
    (parts,) = fluid.Executor().run(compiled, feed, [out], scope=started(network.startup), return_merged=False)
    assert [len(p) for p in parts] == shares
    np.testing.assert_array_equal(np.concatenate(parts), feed["x"][:, :2])


def test_fetches_are_merged_along_rows_or_listed_by_replica(cpu_num: Any) -> None:
    cpu_num(2)
    network, out = echo()
    compiled = fluid.CompiledProgram(network.main).with_data_parallel(loss_name=network.loss)
    exe, scope = fluid.Executor(), started(network.startup)
    merged = exe.run(compiled, rows_of(6), [out, network.loss], scope=scope)
    listed = exe.run(compiled, rows_of(6), [out, network.loss], scope=scope, return_merged=False)
    assert [m.shape for m in merged] == [(6, 2), (2,)]
    assert [[p.shape for p in parts] for parts in listed] == [[(3, 2), (3, 2)], [(1,), (1,)]]
    tensors = exe.run(compiled, rows_of(6), [out], scope=scope, return_numpy=False)
    assert (tensors[0].recursive_sequence_lengths(), tensors[0].shape()) == ([], [6, 2])
    np.testing.assert_array_equal(np.array(tensors[0]), merged[0])
    parts = exe.run(compiled, rows_of(6), [out], scope=scope, return_numpy=False, return_merged=False)[0]
    assert [p.shape() for p in parts] == [[3, 2], [3, 2]]


def test_a_feed_list_gives_each_replica_its_rows_of_any_number(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network, out = echo()
    executor = make(network, started(network.startup))
    (got,) = executor.run([out], [rows_of(4), rows_of(3)])
    np.testing.assert_array_equal(got, np.concatenate([rows_of(4)["x"][:, :2], rows_of(3)["x"][:, :2]]))
    with pytest.raises(FeedError, match=r"has 3 dicts, but there are 2 replicas \(CPU_NUM\)"):
        executor.run([out], [rows_of(1)] * 3)
    with pytest.raises(TypeError, match="holds list; expected one dict for each replica"):
        executor.run([out], [[1], [2]])


def test_a_test_program_needs_no_loss_and_may_have_few_rows(make: Make, cpu_num: Any) -> None:
    cpu_num(4)
    network = fit_a_line()
    scope = started(network.startup)
    clone = network.main.clone(for_test=True)
    executor = make(network, scope, main_program=clone, loss_name=None)
    for rows in (5, 1, 3):
        (got,) = executor.run(list(network.fetches), rows_of(rows))
        assert got.shape == (rows, 1)
        (alone,) = fluid.Executor().run(clone, rows_of(rows), network.fetches, scope=scope)
        np.testing.assert_allclose(got, alone, rtol=1e-5)


def test_a_training_program_without_loss_name_is_refused(make: Make) -> None:
    network = fit_a_line()
    with pytest.raises(ProgramError, match=r"has backward operators, .* pass loss_name=loss\.name"):
        make(network, Scope(), loss_name=None)
    with pytest.raises(
        ProgramError, match=r"variable 'mean_0\.tmp_1' is not in the program\. Did you mean 'mean_0.tmp_0'"
    ):
        make(network, Scope(), loss_name="mean_0.tmp_1")


def test_all_replicas_start_from_the_startup_programs_values(make: Make, cpu_num: Any) -> None:
    cpu_num(3)
    network = fit_a_line()
    scope = started(network.startup)
    before = value(scope, "fc_0.w_0").clone()
    executor = make(network, scope, main_program=network.main.clone(for_test=True), loss_name=None)
    (weights,) = executor.run(["fc_0.w_0"], rows_of(6))
    np.testing.assert_array_equal(weights, np.concatenate([before.numpy()] * 3))


@pytest.mark.parametrize(("mode", "shared"), [("Reduce", True), ("AllReduce", False)])
def test_reduce_shares_parameters_and_all_reduce_copies_them(mode: str, shared: bool, make: Make, cpu_num: Any) -> None:
    cpu_num(3)
    network = fit_a_line()
    executor = make(network, started(network.startup), mode=mode)
    executor.run([], rows_of(6))
    graph = executor.core.graph(3)
    copies = [v for v in graph.variables.values() if v.name == "fc_0.w_0"]
    addresses = {executor.core.memory.tensor(network.main, v).data_ptr() for v in copies}
    assert len(addresses) == (1 if shared else 3)
    updates = [h for h in graph.handles if h.op.type == "penstock.sgd_.default"]
    assert len(updates) == (2 if shared else 6)


def test_gradients_are_equal_on_every_replica_in_all_reduce_mode(cpu_num: Any) -> None:
    cpu_num(3)
    network = fit_a_line()
    compiled = fluid.CompiledProgram(network.main).with_data_parallel(loss_name=network.loss)
    (parts,) = fluid.Executor().run(
        compiled, rows_of(7), ["fc_0.w_0@GRAD"], scope=started(network.startup), return_merged=False
    )
    assert len(parts) == 3
    np.testing.assert_array_equal(parts[0], parts[1])
    np.testing.assert_array_equal(parts[0], parts[2])
    (alone,) = fluid.Executor().run(network.main, rows_of(7), ["fc_0.w_0@GRAD"], scope=started(network.startup))
    np.testing.assert_allclose(parts[0], alone, rtol=1e-5)


@pytest.mark.parametrize("mode", ["AllReduce", "Reduce"])
def test_a_fetched_sparse_gradient_has_rows_of_all_replicas(mode: str, make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = ctr_dnn(metrics=False)
    feed = network.feed(5, 0)
    (got,) = make(network, started(network.startup), mode=mode).run(["shared_table@GRAD"], feed)
    (alone,) = fluid.Executor().run(network.main, feed, ["shared_table@GRAD"], scope=started(network.startup))
    assert got.height == 50
    assert sorted(got.rows.tolist()) == sorted(alone.rows.tolist())
    assert got.values.shape == (10, 4)
    dense = [
        torch.zeros(50, 4).index_add(0, torch.from_numpy(g.rows), torch.from_numpy(g.values)) for g in (got, alone)
    ]
    torch.testing.assert_close(dense[0], dense[1])


def test_updates_are_placed_greedily_in_gradient_order() -> None:
    owners = place_updates([("a", 10), ("b", 9), ("c", 1), ("d", 1)], 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0}
    sizes = {"a": 10, "b": 9, "c": 1, "d": 1}
    assert sorted(sum(sizes[n] for n, o in owners.items() if o == owner) for owner in (0, 1)) == [10, 11]


def test_owners_are_assigned_in_the_order_of_the_gradients(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    main, startup = Program(), Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [4])
        for name, size in (("first", 8), ("middle", 2), ("last", 1)):  # 32, 16 and 2 elements
            x = fluid.layers.fc(x, size, param_attr=name, bias_attr=False)
        loss = fluid.layers.mean(x)
        fluid.optimizer.SGD(0.1).minimize(loss)
    executor = make(Network("tower", main, startup, loss.name, lambda rows, seed: {}), Scope(), mode="Reduce")
    # The backward pass makes the last layer's gradient first; from the first layer on, "last" would be on replica 1.
    assert executor.core.graph(2).owners == {"last": 0, "middle": 1, "first": 0}


def test_reduce_updates_each_parameter_once_on_its_owner(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = ctr_dnn(metrics=False)
    graph = make(network, started(network.startup), mode="Reduce").core.graph(2)
    updated = [(h.op.role_vars[0][0], h.replica) for h in graph.handles if "adam_" in h.op.type]
    assert sorted(updated) == sorted(graph.owners.items())
    assert {owner for _, owner in updated} == {0, 1}


def test_reduce_on_one_replica_warns_of_nothing_to_exchange(
    make: Make, cpu_num: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cpu_num(1)
    network = fit_a_line()
    executor = make(network, started(network.startup), mode="Reduce")
    assert executor.run([network.loss], rows_of(2))[0].shape == (1,)
    assert "runs as in AllReduce mode" in caplog.text


def test_gradient_scale_one_adds_the_replicas_gradients_up(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = fit_a_line()
    strategy = fluid.BuildStrategy()
    strategy.gradient_scale_strategy = fluid.BuildStrategy.GradientScaleStrategy.One
    gradients = []
    for options in ({}, {"build_strategy": strategy}):
        executor = make(network, started(network.startup), **options)
        gradients.append(executor.run(["fc_0.w_0@GRAD"], rows_of(4))[0])
    np.testing.assert_allclose(gradients[1], 2 * gradients[0], rtol=1e-6)


@pytest.mark.parametrize("mode", ["AllReduce", "Reduce"])
def test_a_test_executor_sharing_variables_follows_the_training(mode: str, make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = fit_a_line()
    scope = started(network.startup)
    train = make(network, scope, mode=mode)
    clone = network.main.clone(for_test=True)
    test = make(network, None, main_program=clone, loss_name=None, share_vars_from=train)
    losses = []
    for step in range(3):
        losses.append(float(test.run([network.loss], network.feed(8, 99))[0].mean()))
        train.run([], network.feed(4, step))
    assert len(set(losses)) == 3
    (alone,) = fluid.Executor().run(clone, network.feed(8, 99), [network.loss], scope=scope)
    np.testing.assert_allclose(test.run([network.loss], network.feed(8, 99))[0].mean(), alone[0], rtol=1e-5)
    with pytest.raises(SpecError, match="expected a ParallelExecutor"):
        make(network, None, share_vars_from="train")


def test_what_the_test_executor_leaves_alone_stays_as_it_was(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = ctr_dnn()
    scope = started(network.startup)
    test = make(network, scope, main_program=network.main.clone(for_test=True), loss_name=None)
    before = {n: value(scope, n).clone() for n in scope.names() if not n.startswith("auc")}
    test.run(list(network.fetches), network.feed(9, 0))
    assert all(torch.equal(value(scope, n), t) for n, t in before.items())


def test_executor_runs_operators_in_the_order_of_the_program() -> None:
    network = ctr_dnn()
    ran: list[str] = []

    def hook(op: Any, operands: list[Any], call: Callable[[], Any]) -> Any:
        ran.append(op.name)
        return call()

    fluid.Executor().run_program(network.main, network.feed(3, 0), None, started(network.startup), hook=hook)
    assert ran == [op.name for op in network.main.operators]


def test_one_thread_gives_what_many_give(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = fit_a_line()
    results = []
    for number in (1, 4):
        execution = fluid.ExecutionStrategy()
        execution.num_threads = number
        scope = started(network.startup)
        executor = make(network, scope, exec_strategy=execution)
        for step in range(3):
            executor.run([], network.feed(5, step))
        results.append(value(scope, "fc_0.w_0").clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_a_failed_operator_is_named_and_the_engine_runs_on(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = ctr_dnn(metrics=False)
    executor = make(network, started(network.startup), mode="Reduce")
    bad = network.feed(4, 0)
    bad["slot3"][3] = 7
    for _ in range(2):
        with pytest.raises(OperatorError) as caught:
            executor.run([network.loss], bad)
        text = str(caught.value)
        assert "aten.embedding.default" in text
        assert "recorded at networks.py:" in text
        assert "on replica 1" in text
        assert "embedding_3.w_0 float32[7, 4]" in text
        assert np.isfinite(executor.run([network.loss], network.feed(4, 1))[0]).all()


def test_a_sparse_lookup_out_of_range_says_which_id(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = ctr_dnn(metrics=False)
    bad = network.feed(4, 0)
    bad["slot0"][0] = 50
    with pytest.raises(
        OperatorError, match=r"(?s)penstock\.lookup_table.*networks\.py:\d+.*50.*shared_table float32\[50, 4\]"
    ):
        make(network, started(network.startup)).run([network.loss], bad)


def test_a_fetch_of_what_no_operator_makes_is_refused(make: Make) -> None:
    network = fit_a_line()
    executor = make(network, started(network.startup))
    with pytest.raises(
        FetchError, match=r"'mean_0\.tmp_9': variable 'mean_0\.tmp_9' is not in the program\. Did you mean"
    ):
        executor.run(["mean_0.tmp_9"], rows_of(2))


def test_dropping_the_scopes_between_runs_changes_nothing(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = fit_a_line()
    executor = make(network, started(network.startup))
    executor.run([], network.feed(4, 0))
    executor.drop_local_exe_scopes()
    assert executor.run([network.loss], network.feed(4, 1))[0].shape == (2,)


def test_with_data_parallel_twice_is_refused() -> None:
    compiled = fluid.CompiledProgram(fit_a_line().main).with_data_parallel(loss_name="mean_0.tmp_0")
    with pytest.raises(SpecError, match="was called already"):
        compiled.with_data_parallel(loss_name="mean_0.tmp_0")


def test_a_second_startup_run_resets_training_on_all_replicas(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = fit_a_line()
    scope = started(network.startup)
    executor = make(network, scope)
    first = [executor.run([network.loss], network.feed(4, 0))[0] for _ in range(2)]
    fluid.Executor().run(network.startup, scope=scope)
    again = [executor.run([network.loss], network.feed(4, 0))[0] for _ in range(2)]
    np.testing.assert_array_equal(first, again)


def test_a_program_is_plain_data_and_runs_after_text_round_trip(make: Make, cpu_num: Any) -> None:
    cpu_num(2)
    network = ctr_dnn(metrics=False)
    again = Program.parse(str(network.main))
    losses = [
        make(network, started(network.startup), main_program=program).run([network.loss], network.feed(6, 0))[0]
        for program in (network.main, again)
    ]
    np.testing.assert_array_equal(*losses)
