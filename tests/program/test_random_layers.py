"""Random layers: what they draw, in which run, on which replica. Bounds of means are five standard deviations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import ProgramError

L: Any = fluid.layers
ROWS = 6
Made = list[np.ndarray]


def runs(build: Callable[[Any], Any], num: int = 1, *, seed: int = 3, rows: int = ROWS) -> list[Made]:
    """What `num` runs of a Program fetch of the layers that `build` makes with an input [rows, 4]."""
    main = program(build, seed)[0]
    exe, scope = fluid.Executor(), fluid.Scope()
    feed = {"x": np.ones((rows, 4), np.float32)}
    return [exe.run(main, feed, program_fetches(main), scope=scope) for _ in range(num)]


def program(build: Callable[[Any], Any], seed: int = 3) -> tuple[fluid.Program, Any]:
    main = fluid.Program()
    main.random_seed = seed
    with fluid.program_guard(main, fluid.Program()):
        made = build(L.data("x", [4]))
        for i, one in enumerate(made if isinstance(made, list) else [made]):
            L.assign(one, main.global_block().create_var(name=f"out_{i}"))
    return main, made


def program_fetches(main: fluid.Program) -> list[str]:
    return sorted(name for name in main.variables if name.startswith("out_"))


def test_uniform_numbers_fill_their_range() -> None:
    ((found,),) = runs(lambda x: L.uniform_random([200, 100], "float64", min=-2.0, max=4.0))
    assert found.dtype == np.float64
    assert found.min() >= -2.0
    assert found.max() < 4.0
    assert abs(found.mean() - 1.0) < 5 * (6.0 / 12**0.5) / 20000**0.5
    assert abs(found.var() - 3.0) < 0.1


def test_normal_numbers_have_their_mean_and_deviation() -> None:
    ((found, other),) = runs(lambda x: [L.gaussian_random([200, 100], mean=2.0, std=0.5), L.randn([200, 100])])
    assert abs(found.mean() - 2.0) < 5 * 0.5 / 20000**0.5
    assert abs(found.std() - 0.5) < 0.02
    assert abs(other.mean()) < 5 / 20000**0.5
    assert abs(np.corrcoef(found.reshape(-1), other.reshape(-1))[0, 1]) < 5 / 20000**0.5


def test_whole_numbers_are_drawn_as_often_as_each_other() -> None:
    ((found, positive),) = runs(lambda x: [L.randint(-2, 3, [50, 100]), L.randint(4, shape=[10], dtype="int32")])
    assert found.dtype == np.int64
    assert positive.dtype == np.int32
    np.testing.assert_array_equal(np.unique(found), [-2, -1, 0, 1, 2])
    assert np.bincount(found.reshape(-1) + 2).min() > 5000 / 5 - 5 * (5000 * 0.16) ** 0.5
    assert 0 <= positive.min() <= positive.max() < 4


def test_columns_are_drawn_as_their_probabilities_say() -> None:
    def build(x: Any) -> Any:
        likely = x * L.assign(np.array([[0.5, 0.0, 0.2, 0.3]], np.float32))
        return [L.sampling_id(likely), L.sampling_id(likely, min=2.0, max=3.0)]

    ((found, beyond),) = runs(build, rows=4000)
    assert found.shape == (4000,)
    assert found.dtype == np.int64
    counts = np.bincount(found, minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.0, 0.2, 0.3], atol=5 * 0.5 / 4000**0.5)
    np.testing.assert_array_equal(beyond, 3)  # more than all of them together: the last


def test_sizes_follow_the_batch() -> None:
    def build(x: Any) -> Any:
        return [
            L.uniform_random_batch_size_like(x, [-1, 2]),
            L.gaussian_random_batch_size_like(x, [3, -1], input_dim_idx=0, output_dim_idx=1),
            L.uniform_random([L.shape(x)[0], 1]),
        ]

    ((uniform, normal, given),) = runs(build, rows=5)
    assert (uniform.shape, normal.shape, given.shape) == ((5, 2), (3, 5), (5, 1))


def test_each_run_draws_others_and_a_program_the_same_again() -> None:
    def build(x: Any) -> Any:
        return [L.uniform_random([8]), L.uniform_random([8]), L.uniform_random([8], seed=5)]

    first, second = runs(build, 2)
    again, _ = runs(build, 2)
    other, _ = runs(build, 2, seed=4)
    assert not np.array_equal(first[0], second[0])
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[2], second[2])
    np.testing.assert_array_equal(first[2], other[2])
    for one, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, same)
    assert not np.array_equal(first[0], other[0])


def test_replicas_draw_what_one_batch_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(x: Any) -> Any:
        return [
            L.gaussian_random_batch_size_like(x, [-1, 3]),
            L.transpose(L.uniform_random_batch_size_like(x, [2, -1], output_dim_idx=1), [1, 0]),
        ]

    monkeypatch.setenv("CPU_NUM", "3")
    (alone,) = runs(build)
    main = program(build)[0]
    compiled = fluid.CompiledProgram(main).with_data_parallel()
    feed = {"x": np.ones((ROWS, 4), np.float32)}
    shared = fluid.Executor().run(compiled, feed, program_fetches(main), scope=fluid.Scope())
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one, other)


def test_iterations_draw_others() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 4)
        array, going = L.create_array("float32"), L.less_than(i, n)
        with L.While(going).block():
            L.array_write(L.uniform_random([5]), i, array)
            L.increment(i)
            L.less_than(i, n, cond=going)
        last, first = L.array_read(array, n - 1), L.array_read(array, n - n)
    one, other = fluid.Executor().run(main, {}, [first, last], scope=fluid.Scope())
    assert not np.array_equal(one, other)


def test_what_is_recorded_into_a_parsed_program_draws_others() -> None:
    main, _ = program(lambda x: L.uniform_random([8]))
    parsed = fluid.Program.parse(str(main))
    with fluid.program_guard(parsed, fluid.Program()):
        more = L.uniform_random([8])
    feed = {"x": np.ones((ROWS, 4), np.float32)}
    old, new = fluid.Executor().run(parsed, feed, ["out_0", more], scope=fluid.Scope())
    assert not np.array_equal(old, new)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: L.uniform_random([2], dtype="int64"), "uniform_random draws floating numbers"),
        (lambda x: L.randint(3, 3), "from 3 to 3 exclusive, which is nothing"),
        (lambda x: L.sampling_id(L.reduce_sum(x)), r"needs probabilities \[n, k\]"),
    ],
)
def test_what_cannot_be_drawn_is_refused(build: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        program(build)


def test_accuracy_writes_its_counts() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        label, total = L.data("label", [1], dtype="int64"), L.create_tensor("int64")
        correct = L.fill_constant([1], "int64", 0)
        share = L.accuracy(L.data("x", [3]), label, correct=correct, total=total)
    feed = {"x": np.eye(3, dtype=np.float32)[[0, 1, 2, 0]], "label": np.array([[0], [1], [0], [0]])}
    found = fluid.Executor().run(main, feed, [share, correct, total], scope=fluid.Scope())
    assert [np.asarray(one).item() for one in found] == [0.75, 3, 4]
