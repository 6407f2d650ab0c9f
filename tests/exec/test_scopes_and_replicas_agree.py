"""What several replicas, executors and Programs of one process share, and what they must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, ProgramError, SpecError, Unavailable

X = np.arange(24, dtype="float32").reshape(6, 4) / 24


@pytest.fixture(autouse=True)
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two replicas and a scope of its own for each test."""
    monkeypatch.setenv("CPU_NUM", "2")
    with fluid.scope_guard(fluid.Scope()):
        yield


def model(size: int = 1) -> tuple[Any, Any, Any]:
    """A linear model that trains; returns (main, startup, loss)."""
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 3
    with fluid.program_guard(main, startup):
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [4]), size))
        fluid.optimizer.SGD(0.1).minimize(loss)
    fluid.Executor().run(startup)
    return main, startup, loss


def weights(trainer: Any) -> list[np.ndarray]:
    """The weight on each replica."""
    compiled = trainer.core.run({"x": X}, ["fc_0.w_0"])
    return [part.numpy().copy() for part in compiled[0]]


def test_a_result_that_outlives_a_step_has_no_value_before_it() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [4]), 1))
        loss.persistable = True  # as scripts of Fluid 1.5 mark what they fetch
        fluid.optimizer.SGD(0.1).minimize(loss)
    fluid.Executor().run(startup)
    compiled = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name)
    (found,) = fluid.Executor().run(compiled, {"x": X}, [loss])
    assert found.shape == (2,)
    np.testing.assert_array_equal(np.array(fluid.global_scope().find_var(loss.name)).reshape(-1), found[:1])


def test_constants_beside_a_shared_startup_program_keep_values() -> None:
    startup, found = fluid.Program(), []
    mains = [fluid.Program(), fluid.Program()]
    for main, value in zip(mains, (2.0, 3.0), strict=True):
        with fluid.program_guard(main, startup):
            found.append(fluid.layers.data("x", [4]) * torch.full((4,), value))
    exe = fluid.Executor()
    exe.run(startup)
    for main, product, value in zip(mains, found, (2.0, 3.0), strict=True):
        np.testing.assert_array_equal(exe.run(main, {"x": X}, [product])[0], X * value)


def test_copies_follow_a_value_that_is_set_in_the_scope() -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    trainer.run([], feed={"x": X})
    fluid.global_scope().find_var("fc_0.w_0").set(np.zeros((4, 1), "float32"))
    first, second = weights(trainer)
    assert np.array_equal(first, second)


def test_copies_follow_an_executor_that_trains_the_same_scope() -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    trainer.run([], feed={"x": X})
    for _ in range(3):
        fluid.Executor().run(main, feed={"x": X})
    first, second = weights(trainer)
    assert np.array_equal(first, second)


def test_copies_follow_another_parallel_executor() -> None:
    main, _, loss = model()
    one = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    two = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    for trainer in (one, two, one, two):
        trainer.run([], feed={"x": X})
    for trainer in (one, two):
        first, second = weights(trainer)
        assert np.array_equal(first, second)


def test_a_variable_that_a_graph_makes_anew_is_in_the_scope() -> None:
    _, startup, _ = model()
    expected, scope = fluid.global_scope(), fluid.Scope()
    fluid.Executor().run(fluid.CompiledProgram(startup), scope=scope)
    assert set(scope.names()) == set(expected.names())
    assert all(np.array_equal(scope.find_var(n), expected.find_var(n)) for n in expected.names())


def test_own_steps_do_not_copy_parameters_again() -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    trainer.run([], feed={"x": X})
    copies = {k: v[1].data_ptr() for k, v in trainer.core.memory._copies.items()}
    for _ in range(3):
        trainer.run([], feed={"x": X})
    assert {k: v[1].data_ptr() for k, v in trainer.core.memory._copies.items()} == copies


def test_a_program_that_grew_is_run_as_it_is_now() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [4]), 1))
    fluid.Executor().run(startup)
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    trainer.run([loss.name], feed={"x": X})
    with fluid.program_guard(main, startup):
        fluid.optimizer.SGD(0.1).minimize(loss)
    fluid.Executor().run(startup)
    before = np.array(fluid.global_scope().find_var("fc_0.w_0"))
    trainer.run([loss.name], feed={"x": X})
    assert not np.array_equal(before, np.array(fluid.global_scope().find_var("fc_0.w_0")))


def test_a_second_model_in_one_scope_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first, _, loss = model(1)
    model(2)
    assert caplog.text.count("give each its own fluid.Scope()") == 1
    with pytest.raises(ProgramError, match="another program's startup"):
        fluid.Executor().run(first, feed={"x": X}, fetch_list=[loss])


def test_places_decide_how_many_replicas_a_compiled_program_has() -> None:
    main, _, loss = model()
    compiled = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name, places=[fluid.CPUPlace()] * 3)
    assert fluid.Executor().run(compiled, feed={"x": X}, fetch_list=[loss])[0].shape == (3,)
    plain = fluid.CompiledProgram(main)
    assert fluid.Executor().run(plain, feed={"x": X}, fetch_list=[loss])[0].shape == (1,)
    with pytest.raises(SpecError, match="CUDAPlace"):
        fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name, places=[fluid.CUDAPlace(0)])


def test_sharing_needs_the_same_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    trainer.run([], feed={"x": X})
    monkeypatch.setenv("CPU_NUM", "3")
    with pytest.raises(SpecError, match="2 replicas, but CPU_NUM now asks for 3"):
        fluid.ParallelExecutor(False, main_program=main.clone(for_test=True), share_vars_from=trainer)


@pytest.mark.parametrize(
    ("value", "words"),
    [([[1.9], [2.0]], "int64"), ([[1], [2, 3]], "no array of numbers"), ([["a"]], "expects int64"), (None, "no array")],
)
def test_lists_that_would_change_their_meaning_are_refused(value: Any, words: str) -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        out = fluid.layers.data("ids", [1], dtype="int64") + 1
    with pytest.raises(FeedError, match=words):
        fluid.Executor().run(main, feed={"ids": value}, fetch_list=[out])


def test_arrays_of_any_layout_are_fed_as_their_values() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        out = fluid.layers.data("x", [4]) * 2.0
    swapped = X.astype(">f4")
    for given in (X[::-1], swapped, np.asfortranarray(X)):
        (got,) = fluid.Executor().run(main, feed={"x": given}, fetch_list=[out])
        assert np.array_equal(got, np.asarray(given, "float32") * 2)


def test_a_closed_executor_says_what_to_do() -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    trainer.run([], feed={"x": X})
    trainer.close()
    with pytest.raises(Unavailable, match="Make another ParallelExecutor"):
        trainer.run([], feed={"x": X})


def test_a_value_of_another_shape_is_not_broadcast_into_a_weight() -> None:
    model()
    with pytest.raises(FeedError, match="does not fit"):
        fluid.global_scope().find_var("fc_0.w_0").set(np.ones((1,), "float32"))


def test_of_many_plans_the_one_unused_longest_is_dropped() -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    for rows in (*range(1, 33), 1, 33):
        trainer.run([], feed={"x": np.ones((rows, 4), "float32")})
    shares = [plan["rows"] for plan in trainer.statistics()["plans"]]
    kept = [sum(int(share.partition("=")[2]) for share in plan) for plan in shares]
    assert kept == [*range(3, 33), 1, 33]


def test_plans_are_dropped_when_asked() -> None:
    main, _, loss = model()
    trainer = fluid.ParallelExecutor(False, loss_name=loss.name, main_program=main)
    assert trainer._need_create_local_exe_scopes()
    trainer.run([], feed={"x": X})
    assert not trainer._need_create_local_exe_scopes()
    trainer.drop_local_exe_scopes()
    assert trainer._need_create_local_exe_scopes()
