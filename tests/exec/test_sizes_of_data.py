"""Values whose sizes follow from data: arrays of other rows in each element, all elements together, other sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, OperatorError, ProgramError

L = fluid.layers


class Built:
    def __init__(self, build: Callable[[], list[Any]]) -> None:
        self.main, startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, startup):
            self.fetches = build()
        assert fluid.Program.parse(str(self.main)) == self.main
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(startup, scope=self.scope)

    def run(self, program: Any = None, *, numpy: bool = True, **feed: Any) -> list[Any]:
        return list(self.exe.run(program or self.main, feed, self.fetches, scope=self.scope, return_numpy=numpy))


def ragged(rows: np.ndarray, *levels: list[int]) -> Any:
    return fluid.create_lod_tensor(rows, list(levels))


def random(*sizes: int) -> np.ndarray:
    return np.random.default_rng(sum(sizes)).normal(size=sizes)


def close(found: Any, wanted: torch.Tensor | None) -> None:
    assert wanted is not None
    np.testing.assert_allclose(np.array(found), wanted.numpy(), rtol=1e-10)


def x_input() -> Any:
    return L.data("x", [2], dtype="float64", lod_level=1, stop_gradient=False)


def doubled() -> tuple[Any, Any]:
    """An array of x times 2, 4, … and x: as many elements as the input `n` says."""
    x, n, i = fluid.data("x", [None, 2], "float64"), fluid.data("n", [1], "int64"), L.zeros([1], "int64")
    x.stop_gradient = False
    array, now, going = L.create_array("float64"), L.assign(x), L.less_than(i, n)
    with L.While(going).block():
        L.assign(now * 2.0, now)
        L.array_write(now, i, array)
        L.increment(i)
        L.less_than(i, n, cond=going)
    return array, x


@pytest.mark.parametrize("stacked", [True, False])
def test_all_elements_of_an_array_together(stacked: bool) -> None:
    def build() -> list[Any]:
        array, _ = doubled()
        whole, sizes = L.tensor_array_to_tensor(array, 0, use_stack=stacked)
        turned = L.transpose(whole, [1, 0, 2] if stacked else [1, 0])
        total = L.reduce_sum(turned * turned)
        fluid.append_backward(total)
        return [whole, sizes, turned, total, "x@GRAD"]

    built, x = Built(build), random(3, 2)
    for n in (1, 4):
        whole, sizes, turned, total, grad = built.run(x=x, n=np.array([n]))
        parts = [x * 2.0 ** (k + 1) for k in range(n)]
        np.testing.assert_allclose(whole, np.stack(parts) if stacked else np.concatenate(parts))
        assert sizes.tolist() == [3] * n
        np.testing.assert_array_equal(turned, whole.swapaxes(0, 1))
        np.testing.assert_allclose(total, (whole**2).sum())
        np.testing.assert_allclose(grad, 2 * x * sum(4.0 ** (k + 1) for k in range(n)), rtol=1e-12)


def test_readers_of_one_value_add_their_gradients() -> None:
    def build() -> list[Any]:
        x, n = x_input(), L.data("n", [1], dtype="int64")
        own = L.sequence_slice(x, n * 0, n)
        more = own * own + own
        products = L.matmul(more + own, own, transpose_y=True)
        fluid.append_backward(L.reduce_sum(products * products))
        return [products, "x@GRAD"]

    built, x = Built(build), random(5, 2)
    products, gradient = built.run(x=ragged(x, [2, 3]), n=np.array([[1], [2]]))
    given = torch.tensor(x, requires_grad=True)
    own = given[[0, 2, 3]]
    wanted = (own * own + own + own) @ own.T
    (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
    close(products, wanted.detach())
    close(gradient, given.grad)


def test_replicas_fetch_their_own_sizes() -> None:
    built = Built(lambda: [L.tensor_array_to_tensor(doubled()[0], 0)[0]])
    shared = fluid.CompiledProgram(built.main).with_data_parallel(places=[fluid.CPUPlace()] * 2)
    x = random(4, 2)
    parts = [np.concatenate([own * 2.0, own * 4.0]) for own in (x[:2], x[2:])]
    np.testing.assert_allclose(built.run(shared, x=x, n=np.array([2]))[0], np.concatenate(parts))


def test_an_element_without_a_value_is_an_error_of_the_run() -> None:
    def build() -> list[Any]:
        x = fluid.data("x", [None, 2], "float64")
        array = L.array_write(x, L.fill_constant([1], "int64", 2))
        return [L.tensor_array_to_tensor(array, 0)[0]]

    with pytest.raises(OperatorError, match=r"the array has 3 positions, and no value at \[0, 1\]"):
        Built(build).run(x=random(1, 2))


def test_rows_may_differ_from_element_to_element() -> None:
    def build() -> list[Any]:
        x, i = fluid.data("x", [None, 2], "float64"), L.zeros([1], "int64")
        x.stop_gradient = False
        array, n = L.array_write(x, i), L.fill_constant([1], "int64", 3)
        going = L.less_than(i, n)
        with L.While(going).block():
            now = L.array_read(array, i)
            L.increment(i)
            L.array_write(L.concat([now, now * 2.0]), i, array)  # twice the rows
            L.less_than(i, n, cond=going)
        last = L.array_read(array, i)
        fluid.append_backward(L.reduce_sum(last * last))
        return [last, L.reduce_sum(last, dim=0), "x@GRAD"]

    x = random(2, 2)
    wanted = torch.tensor(x, requires_grad=True)
    rows = wanted
    for _ in range(3):
        rows = torch.cat([rows, rows * 2])
    (rows * rows).sum().backward()  # type: ignore[no-untyped-call]  # torch
    last, total, grad = Built(build).run(x=x)
    np.testing.assert_allclose(last, rows.detach().numpy())
    np.testing.assert_allclose(total, rows.detach().numpy().sum(0))
    close(grad, wanted.grad)


def test_a_branch_returns_a_value_of_a_size_of_data() -> None:
    def build() -> list[Any]:
        array, x = doubled()
        whole, _ = L.tensor_array_to_tensor(array, 0)
        return [L.cond(L.reduce_sum(x) > 0.0, lambda: whole * 3.0, lambda: whole)]

    built, x = Built(build), np.abs(random(3, 2))
    for sign, factor in ((1.0, 3.0), (-1.0, 1.0)):
        for n in (1, 2):
            wanted = np.concatenate([sign * x * 2.0 ** (k + 1) for k in range(n)]) * factor
            close(built.run(x=sign * x, n=np.array([n]))[0], torch.tensor(wanted))


# ---------------------------------------------------------------- other sequences

ROWS = random(6, 2)


def pooled(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.stack([part.sum(0) for part in torch.split(rows, lengths)])


def check_reset(reset: Callable[[Any], Any], lengths: list[int], **feed: Any) -> None:
    """Compare the sums over new sequences, and the gradient of their squares."""

    def build() -> list[Any]:
        x = x_input()
        new = reset(L.assign(x * 3.0))
        sums = L.sequence_pool(new, "sum")
        fluid.append_backward(L.reduce_sum(sums * sums))
        return [sums, new, "x@GRAD"]

    wanted = torch.tensor(ROWS, requires_grad=True)
    sums = pooled(wanted * 3.0, lengths)
    (sums * sums).sum().backward()  # type: ignore[no-untyped-call]  # torch
    found, new, grad = Built(build).run(x=ragged(ROWS, [2, 4]), numpy=False, **feed)
    np.testing.assert_allclose(np.array(found), sums.detach().numpy())
    assert new.recursive_sequence_lengths()[-1] == lengths
    close(grad, wanted.grad)


def test_other_sequences_from_offsets_or_another_variable() -> None:
    check_reset(lambda x: L.lod_reset(x, target_lod=[0, 1, 6]), [1, 5])
    check_reset(lambda x: L.lod_reset(x, fluid.data("o", [4], "int32")), [3, 0, 3], o=np.array([0, 3, 3, 6], np.int32))
    y = ragged(random(6, 1), [1, 5])
    check_reset(lambda x: L.lod_reset(x, L.data("y", [1], dtype="float64", lod_level=1)), [1, 5], y=y)
    check_reset(lambda x: L.lod_reset(L.lod_reset(x, target_lod=[0, 6]), target_lod=[0, 2, 6]), [2, 4])


def test_a_level_within_the_sequences() -> None:
    def build() -> list[Any]:
        new = L.lod_append(x_input(), range(7))
        return [new, L.sequence_pool(new, "sum")]

    new, sums = Built(build).run(x=ragged(ROWS, [2, 4]), numpy=False)
    assert new.recursive_sequence_lengths() == [[2, 4], [1] * 6]
    np.testing.assert_allclose(np.array(sums), ROWS)


def test_offsets_that_do_not_fit_are_errors() -> None:
    with pytest.raises(
        ProgramError, match=r"lod_reset needs .* offsets that begin with 0 and do not fall; got \[1, 6\]"
    ):
        Built(lambda: [L.lod_reset(x_input(), target_lod=[1, 6])])
    short = Built(lambda: [L.lod_reset(x_input(), target_lod=[0, 5])])
    with pytest.raises(OperatorError, match=r"the lengths \[5\] do not add up to the 6 rows"):
        short.run(x=ragged(ROWS, [6]))


def test_a_mask_as_long_as_the_longest_sequence_or_a_value() -> None:
    def build() -> list[Any]:
        n, most = fluid.data("n", [None], "int64"), fluid.data("most", [1], "int64")
        return [L.sequence_mask(n), L.sequence_mask(n, most, "float64"), L.sequence_mask(n, 2)]

    longest, given, fixed = Built(build).run(n=np.array([3, 0, 1]), most=np.array([4]))
    assert longest.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    np.testing.assert_array_equal(given, np.pad(longest, [(0, 0), (0, 1)]))
    np.testing.assert_array_equal(fixed, longest[:, :2])


def test_losses_of_values_of_unknown_sizes() -> None:
    def build() -> list[Any]:
        array, _ = doubled()
        whole = L.transpose(L.tensor_array_to_tensor(array, 0, use_stack=True)[0], [1, 0, 2])
        label = fluid.data("label", [None, None], "int64")
        cost = L.cross_entropy(L.softmax(whole), label)
        weight = L.sequence_mask(L.reduce_sum(label, dim=1), L.shape(whole)[1], "float64")
        total = L.reduce_sum(cost * weight)
        fluid.append_backward(total)
        return [cost, total, "x@GRAD"]

    x, label = random(2, 2), np.array([[1, 0, 0], [0, 1, 1]])
    wanted = torch.tensor(x, requires_grad=True)
    logs = torch.log_softmax(torch.stack([wanted * 2.0 ** (k + 1) for k in range(3)], 1), -1)
    cost = -logs.gather(2, torch.tensor(label)[..., None])[..., 0]
    total = cost[0, :1].sum() + cost[1, :2].sum()
    total.backward()  # type: ignore[no-untyped-call]  # torch
    found = Built(build).run(x=x, n=np.array([3]), label=label)
    np.testing.assert_allclose(found[0], cost.detach().numpy())
    np.testing.assert_allclose(found[1], [float(total.detach())])
    close(found[2], wanted.grad)


def test_a_size_of_data_is_a_size_to_what_a_call_makes() -> None:
    def build() -> list[Any]:
        whole = L.tensor_array_to_tensor(doubled()[0], 0)[0]
        return [L.fill_constant_batch_size_like(whole, [-1, 3], "float64", 2.0)]

    (found,) = Built(build).run(x=random(2, 2), n=np.array([3]))
    np.testing.assert_array_equal(found, np.full((6, 3), 2.0))


def test_rows_that_are_the_first_elements_are_known_sizes() -> None:
    def build() -> list[Any]:
        x, i, n = fluid.data("x", [None, 2], "float64"), L.zeros([1], "int64"), L.fill_constant([1], "int64", 2)
        array, going = L.array_write(x, i), L.less_than(i, n)
        with L.While(going).block():
            now = L.array_read(array, i)
            L.array_write(now * 2.0, L.increment(i), array)
            L.less_than(i, n, cond=going)
        return [L.array_read(array, i)]

    built, x = Built(build), random(2, 2)
    np.testing.assert_allclose(built.run(x=x)[0], x * 4.0)
    assert "d0" not in str(built.main)


def test_what_a_loop_writes_keeps_its_value_for_gradients() -> None:
    def build() -> list[Any]:
        x, i, n = fluid.data("x", [None, 2], "float64"), L.zeros([1], "int64"), L.fill_constant([1], "int64", 2)
        x.stop_gradient = False
        now, going = L.assign(x), L.less_than(i, n)
        before = L.reduce_sum(now * now)
        with L.While(going).block():
            L.assign(now * 3.0, now)
            L.less_than(L.increment(i), n, cond=going)
        fluid.append_backward(before + L.reduce_sum(now))
        return ["x@GRAD"]

    x = random(2, 2)
    np.testing.assert_allclose(Built(build).run(x=x)[0], 2 * x + 9.0)


def test_a_branch_on_a_size_of_data_is_refused_and_cond_takes_it() -> None:
    def sliced() -> Any:
        offset, length = L.data("offset", [1], dtype="int64"), L.data("length", [1], dtype="int64")
        return L.sequence_slice(x_input(), offset, length)

    def python() -> list[Any]:
        rows = sliced()
        return [L.reduce_sum(rows * 2.0 if rows.shape[0] > 4 else rows * 3.0)]

    def recorded() -> list[Any]:
        rows = sliced()
        many = L.shape(rows)[0] > 4
        return [L.cond(many, lambda: L.reduce_sum(rows * 2.0), lambda: L.reduce_sum(rows * 3.0))]

    def number() -> list[Any]:
        rows = sliced()
        return [L.reduce_sum(rows) / int(rows.shape[0])]

    for refused in (python, number):
        with pytest.raises(ProgramError, match=r"test_sizes_of_data\.py:\d+: .* follows from data, .*layers\.cond"):
            Built(refused)
    built = Built(recorded)
    for lengths, wanted in (([1, 2], 3 * 6.0), ([3, 2], 2 * 10.0)):
        feed = {"x": ragged(np.ones((8, 2)), [4, 4]), "offset": np.zeros((2, 1), np.int64)}
        assert built.run(length=np.array(lengths).reshape(2, 1), **feed)[0] == wanted


def test_a_size_of_data_is_taken_as_a_variable() -> None:
    def of(size: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        def build() -> list[Any]:
            offset, length = L.data("offset", [1], dtype="int64"), L.data("length", [1], dtype="int64")
            rows = L.sequence_slice(x_input(), offset, length)
            return [L.zeros([1], "float64") + size(rows)]

        return build

    with pytest.raises(ProgramError, match=r"test_sizes_of_data\.py:\d+: .* takes a size that follows from data, d0"):
        Built(of(lambda rows: rows.shape[0]))
    built = Built(of(lambda rows: L.cast(L.shape(rows)[0], "float64")))
    feed = {"x": ragged(np.ones((8, 2)), [4, 4]), "offset": np.zeros((2, 1), np.int64)}
    assert built.run(length=np.array([[3], [2]]), **feed)[0] == 5.0


@pytest.mark.parametrize("guarded", [True, False])
def test_a_branch_behind_the_last_operator_is_guarded(guarded: bool) -> None:
    main, exe = fluid.Program(), fluid.Executor()

    def build() -> Any:
        x = fluid.data("x", [None, 2], "float64")
        doubled = x * 2.0
        assert x.shape[0] > 3
        return doubled

    before = fluid.framework.switch_main_program(fluid.default_main_program() if guarded else main)
    try:
        if guarded:
            with fluid.program_guard(main, fluid.Program()):
                doubled = build()
        else:
            doubled = build()
        assert exe.run(main, {"x": np.ones((4, 2))}, [doubled])[0].sum() == 16.0
        with pytest.raises(FeedError, match=r"test_sizes_of_data\.py:\d+: .* sizes with s0 > 3"):
            exe.run(main, {"x": np.ones((2, 2))}, [doubled])
    finally:
        fluid.framework.switch_main_program(before)


RANGES = [(0, 5, 1, "int64"), (2, 9, 3, "int64"), (9, 2, -3, "int32"), (0.5, 2.0, 0.25, "float64"), (4, 4, 1, "int64")]


@pytest.mark.parametrize(("start", "end", "step", "dtype"), RANGES)
@pytest.mark.parametrize("of_data", ["end", "all"])
def test_a_range_between_values(start: float, end: float, step: float, dtype: str, of_data: str) -> None:
    def build() -> list[Any]:
        bounds = [fluid.data(name, [1], dtype) for name in ("start", "end", "step")]
        first, last, by = bounds if of_data == "all" else (start, bounds[1], step)
        found = L.range(first, last, by, dtype)
        return [found, L.reduce_sum(found)]

    feed: dict[str, Any] = {n: np.array([v], dtype) for n, v in (("start", start), ("end", end), ("step", step))}
    found, total = Built(build).run(None, **(feed if of_data == "all" else {"end": feed["end"]}))
    wanted = np.arange(start, end, step).astype(dtype)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    assert total.item() == wanted.sum()


def test_a_range_that_never_ends_is_refused() -> None:
    built = Built(lambda: [L.range(0, fluid.data("end", [1], "int64"), 1, "int64")])
    with pytest.raises(OperatorError):
        built.run(end=np.array([-1]))


def test_a_range_to_a_size_of_a_variable() -> None:
    def build() -> list[Any]:
        x = fluid.data("x", [None, None, 2], "float64")
        positions = L.range(0, L.shape(x)[1], 1, "int64")
        return [positions, L.embedding(L.unsqueeze(positions, [1]), [9, 2], dtype="float64", param_attr="table")]

    built = Built(build)
    for steps in (3, 5):
        positions, rows = built.run(x=np.zeros((2, steps, 2)))
        assert positions.tolist() == list(range(steps))
        np.testing.assert_array_equal(rows, np.array(built.scope.find_var("table"))[:steps])
