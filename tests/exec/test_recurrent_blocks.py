"""Tensor arrays, StaticRNN, DynamicRNN and IfElse: values and gradients against loops of torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.exec.parallel import ParallelExecutor

L = fluid.layers
LENGTHS, INNER = [2, 4, 0, 3], [1, 2, 3, 2]


def results(build: Callable[[], list[Any]], feed: dict[str, Any] | None = None) -> list[Any]:
    """What `build` returns, fetched; its program's text is read back on the way."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        fetches = build()
    assert fluid.Program.parse(str(main)) == main
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    return list(exe.run(main, feed or {}, fetches, scope=scope))


def number(value: float, dtype: str = "int64") -> Any:
    return L.fill_constant([1], dtype, value)


def attr(name: str, seed: int) -> Any:
    return fluid.ParamAttr(name=name, initializer=fluid.initializer.Normal(0.0, 0.5, seed=seed))


def close(found: Any, wanted: torch.Tensor | None) -> None:
    assert wanted is not None
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-10, atol=1e-12)


def random(*sizes: int) -> np.ndarray:
    return np.random.default_rng(sum(sizes)).normal(size=sizes)


def leaves(*arrays: Any) -> list[torch.Tensor]:
    return [torch.tensor(array, requires_grad=True) for array in arrays]


# ---------------------------------------------------------------- arrays


def test_arrays_go_through_nested_loops_with_their_gradients() -> None:
    def build() -> list[Any]:
        data = [L.data(f"d{k}", [5], dtype="float64", stop_gradient=False) for k in range(3)]
        i = L.zeros([1], "int64")
        written, state = L.array_write(data[0], i), L.array_write(data[0] * 0.0, i)
        for one in data[1:]:
            i = L.increment(i)
            L.array_write(one, i, array=written)
        i, j = L.zeros([1], "int64"), number(1)
        outer, inner = L.less_than(i, number(1)), L.less_than(j, number(3))
        with L.While(outer).block():
            first = L.array_read(written, i) * 2.0
            L.increment(i)
            L.array_write(first, i, array=state)
            L.less_than(i, number(1), cond=outer)
            with L.While(inner).block():
                before = L.array_read(state, j)
                now = L.sums([L.array_read(written, j), before * before])
                L.array_write(now, L.increment(j), array=state)
                L.less_than(j, number(3), cond=inner)
        last = L.array_read(state, j)
        return [last, L.array_length(state), *fluid.gradients(L.reduce_sum(last), data)]

    arrays = [random(2, 5), random(2, 5) + 1, random(2, 5) - 1]
    x, y, z = leaves(*arrays)
    wanted = z + (y + (2 * x) ** 2) ** 2
    wanted.sum().backward()  # type: ignore[no-untyped-call]  # torch
    last, length, *grads = results(build, {f"d{k}": array for k, array in enumerate(arrays)})
    assert length.tolist() == [4]
    close(last, wanted)
    for found, leaf in zip(grads, (x, y, z), strict=True):
        close(found, leaf.grad)


def test_an_element_is_a_copy() -> None:
    def build() -> list[Any]:
        x, i, n = number(1.0, "float64"), L.zeros([1], "int64"), number(2)
        array = L.array_write(x, i)
        going = L.less_than(i, n)
        with L.While(going).block():
            y = L.array_read(array, L.zeros([1], "int64"))
            y.add_(5.0)
            L.array_write(y, L.increment(i), array=array)
            y.add_(5.0)
            L.less_than(i, n, cond=going)
        return [L.array_read(array, number(k)) for k in (0, 1, 2)]

    assert [float(v[0]) for v in results(build)] == [1.0, 6.0, 6.0]


def test_while_loop_carries_an_array() -> None:
    def build() -> list[Any]:
        x = L.data("x", [3], dtype="float64", stop_gradient=False)
        start = L.array_write(x, L.zeros([1], "int64"))

        def body(i: Any, array: Any) -> list[Any]:
            last = L.array_read(array, i)
            following = L.increment(i, in_place=False)
            return [following, L.array_write(last * x, following, array)]

        i, array = L.while_loop(lambda i, array: L.less_than(i, number(3)), body, [L.zeros([1], "int64"), start])
        last = L.array_read(array, i)
        return [last, fluid.gradients(L.reduce_sum(last), x)[0]]

    rows = random(2, 3)
    last, grad = results(build, {"x": rows})
    np.testing.assert_allclose(last, rows**4, rtol=1e-12)
    np.testing.assert_allclose(grad, 4 * rows**3, rtol=1e-12)


def test_what_was_not_written_cannot_be_read() -> None:
    def build() -> list[Any]:
        array = L.array_write(number(1.0, "float64"), number(2))
        return [L.array_read(array, number(1))]

    with pytest.raises(OperatorError, match="no value at 1; it has 3 positions"):
        results(build)


# ---------------------------------------------------------------- StaticRNN


def test_static_rnn_is_a_loop_over_time() -> None:
    def build() -> list[Any]:
        x = L.data("x", [5, -1, 4], append_batch_size=False, dtype="float64", stop_gradient=False)
        rnn = L.StaticRNN()
        with rnn.step():
            step = rnn.step_input(x)
            before = rnn.memory(shape=[-1, 3], batch_ref=step)
            inner = L.fc(step, 3, param_attr=attr("w", 1), bias_attr=False)
            hidden = L.tanh(inner + L.fc(before, 3, param_attr=attr("u", 2), bias_attr=False))
            rnn.update_memory(before, hidden)
            rnn.step_output(hidden)
            rnn.output(before)
        now, old = rnn()
        loss = L.reduce_sum(now * now + old)
        params = fluid.default_main_program().all_parameters()
        return [now, old, *params, *fluid.gradients(loss, [x, *params])]

    now, old, *rest = results(build, {"x": random(5, 2, 4)})
    x, w, u = leaves(random(5, 2, 4), *rest[:2])
    states = [torch.zeros(2, 3, dtype=torch.float64)]
    for t in range(5):
        states.append(torch.tanh(x[t] @ w + states[-1] @ u))
    close(now, torch.stack(states[1:]))
    close(old, torch.stack(states[:-1]))
    (torch.stack(states[1:]) ** 2 + torch.stack(states[:-1])).sum().backward()  # type: ignore[no-untyped-call]  # torch
    for found, leaf in zip(rest[2:], (x, w, u), strict=True):
        close(found, leaf.grad)


# ---------------------------------------------------------------- DynamicRNN


class Attention:
    """A DynamicRNN over x from a context, with attention over other sequences; trained by SGD at rate 1."""

    def __init__(self) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            x = L.data("x", [4], dtype="float64", lod_level=1)
            context = L.data("c", [3], dtype="float64")
            encoded = L.fc(L.data("e", [3], dtype="float64", lod_level=1), 3, param_attr=attr("v", 3), bias_attr=False)
            start = L.fc(context, 3, param_attr=attr("s", 4), bias_attr=False)
            rnn = L.DynamicRNN()
            with rnn.block():
                step, before = rnn.step_input(x), rnn.memory(init=start, need_reorder=True)
                count = rnn.memory(shape=[3], value=1.0, dtype="float64")
                seen = rnn.static_input(encoded)
                scores = L.reduce_sum(seen * L.sequence_expand(before, seen), dim=1, keep_dim=True)
                found = L.sequence_pool(L.sequence_softmax(scores) * seen, "sum")
                inner = L.fc(step, 3, param_attr=attr("w", 1), bias_attr=False)
                hidden = L.tanh(inner + L.fc(before, 3, param_attr=attr("u", 2), bias_attr=False) + found) * context
                rnn.update_memory(before, hidden)
                rnn.update_memory(count, count * 2.0)
                rnn.output(hidden, count)
            self.hidden, self.count = rnn()
            self.loss = L.mean(L.sequence_pool(self.hidden * self.hidden * self.count, "sum"))
            fluid.optimizer.SGD(1.0).minimize(self.loss)
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)

    def values(self) -> dict[str, torch.Tensor]:
        return {n: torch.tensor(np.array(self.scope.find_var(n))) for n in "vswu"}

    def expected(self, x: Any, c: Any, e: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The hidden rows and the parameters after a step, by loops over the sequences and their steps."""
        p = {n: v.requires_grad_(True) for n, v in self.values().items()}
        x, c, e = torch.tensor(x), torch.tensor(c), torch.tensor(e) @ p["v"]
        rows, loss = [], torch.zeros((), dtype=torch.float64)
        for k, (xs, es) in enumerate(zip(x.split(LENGTHS), e.split(INNER), strict=True)):
            state, count = c[k] @ p["s"], 1.0
            for row in xs:
                found = (torch.softmax(es @ state, 0)[:, None] * es).sum(0)
                state = torch.tanh(row @ p["w"] + state @ p["u"] + found) * c[k]
                loss = loss + (state * state).sum() * count
                count *= 2.0
                rows.append(state)
        (loss / (3 * len(LENGTHS))).backward()  # type: ignore[no-untyped-call]  # torch
        return torch.stack(rows), {n: (v - v.grad).detach() for n, v in p.items() if v.grad is not None}


def batch() -> tuple[dict[str, Any], list[np.ndarray]]:
    x, c, e = random(sum(LENGTHS), 4), random(len(LENGTHS), 3), random(sum(INNER), 3)
    lods = [fluid.create_lod_tensor(a, [n], fluid.CPUPlace()) for a, n in ((x, LENGTHS), (e, INNER))]
    return {"x": lods[0], "c": c, "e": lods[1]}, [x, c, e]


def test_dynamic_rnn_is_a_loop_over_each_sequence() -> None:
    model, (feed, arrays) = Attention(), batch()
    assert fluid.Program.parse(str(model.main)) == model.main
    rows, after = model.expected(*arrays)
    fetched = model.exe.run(model.main, feed, [model.hidden, model.count], scope=model.scope, return_numpy=False)
    assert fetched[0].recursive_sequence_lengths() == [LENGTHS]
    close(np.array(fetched[0]), rows)
    assert np.array(fetched[1])[:, 0].tolist() == [1.0, 2.0, 1.0, 2.0, 4.0, 8.0, 1.0, 2.0, 4.0]
    for name, value in model.values().items():
        close(value.numpy(), after[name])


@pytest.mark.parametrize("reduce", [False, True])
def test_replicas_share_the_sequences_of_a_dynamic_rnn(reduce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    model, (feed, arrays), build = Attention(), batch(), fluid.BuildStrategy()
    if reduce:
        build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    executor = ParallelExecutor(False, model.loss.name, model.main, build_strategy=build, scope=model.scope)
    for _ in range(3):
        _, after = model.expected(*arrays)
        executor.run([model.loss.name], feed)
        for name, value in model.values().items():
            close(value.numpy(), after[name])
    executor.close()


def test_sequences_without_a_row_give_no_row() -> None:
    model, (feed, _) = Attention(), batch()
    empty = fluid.create_lod_tensor(np.zeros((0, 4)), [[0] * 4], fluid.CPUPlace())
    test = model.main.clone(for_test=True)
    (rows,) = model.exe.run(test, {**feed, "x": empty}, [model.hidden], scope=model.scope)
    assert rows.shape == (0, 3)


# ---------------------------------------------------------------- IfElse


@pytest.mark.parametrize("num_rows", [-1, 3])
def test_if_else_runs_each_block_on_its_rows(num_rows: int) -> None:
    def build() -> list[Any]:
        x = L.data("x", [num_rows, 2], dtype="float64", stop_gradient=False, append_batch_size=False)
        choice = L.IfElse(L.less_than(L.reduce_sum(x, dim=1, keep_dim=True), number(0.0, "float64")))
        with choice.true_block():
            rows = choice.input(x)
            choice.output(rows * rows)
        with choice.false_block():
            rows = choice.input(x)
            choice.output(L.reduce_sum(rows) - rows)
        (out,) = choice()
        return [out, fluid.gradients(L.reduce_sum(out * out), x)[0]]

    batches = [np.array([[1.0, 2.0], [-1.0, -2.0], [3.0, 4.0]]), np.array([[-1.0, -2.0]] * max(num_rows, 1))]
    for rows in batches:
        (x,) = leaves(rows)
        mask = (x.sum(1) < 0)[:, None]
        wanted = torch.where(mask, x * x, torch.where(mask, 0.0, x).sum() - x)
        (wanted * wanted).sum().backward()  # type: ignore[no-untyped-call]  # torch
        out, grad = results(build, {"x": rows})
        close(out, wanted)
        close(grad, x.grad)


def test_if_else_on_fixed_rows_divides_its_inputs_alone() -> None:
    def build() -> list[Any]:
        x, square = (fluid.data(name, [3, 3], "float64") for name in ("x", "square"))
        choice = L.IfElse(L.greater_than(L.reduce_sum(x, dim=1, keep_dim=True), number(0.0, "float64")))
        with choice.true_block():
            choice.output(L.matmul(choice.input(x), square))  # a matrix that happens to have as many rows
        with choice.false_block():
            choice.output(choice.input(x) * 0.0)
        other = L.IfElse(L.greater_than(L.reduce_sum(x, dim=1, keep_dim=True), number(0.0, "float64")))
        with pytest.raises(ProgramError, match="has other rows than the condition"), other.true_block():
            other.input(fluid.data("y", [4, 3], "float64"))
        return choice()  # type: ignore[no-any-return]  # a list of variables

    x, square = random(3, 3), random(3, 3)[::-1]
    (out,) = results(build, {"x": x, "square": square})
    close(out, torch.from_numpy(np.where(x.sum(1, keepdims=True) > 0, x @ square, 0.0)))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda rnn, x, dense: rnn.step_input(dense), "needs rows of sequences"),
        (lambda rnn, x, dense: rnn.memory(shape=[2]), "before the first step_input"),
        (lambda rnn, x, dense: [rnn.step_input(x), rnn.output(rnn.memory(shape=[2]))], "never updated"),
        (
            lambda rnn, x, dense: [rnn.output(rnn.step_input(x)), L.assign(dense * 2.0, dense)],
            "writes 'dense', which has a row for each sequence",
        ),
        (lambda rnn, x, dense: rnn.step_input(x), "a step_input and an output"),
    ],
)
def test_refusals_of_recurrent_blocks(use: Callable[..., Any], message: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, dense = L.data("x", [4], dtype="float64", lod_level=1), L.data("dense", [4], dtype="float64")
        rnn = L.DynamicRNN()
        with pytest.raises(ProgramError, match=message), rnn.block():
            use(rnn, x, dense)


def one_array() -> Any:
    return L.array_write(L.fill_constant([2], "float64", 3.0), L.zeros([1], "int64"))


def test_an_assigned_array_has_the_elements() -> None:
    def build() -> list[Any]:
        first, i = one_array(), L.zeros([1], "int64")
        second, third = L.assign(first), L.create_array("float64")
        L.assign(second, third)
        L.array_write(L.fill_constant([2], "float64", 5.0), i, array=first)
        return [L.array_read(array, i) for array in (first, second, third)] + [L.array_length(third)]

    assert [v.tolist() for v in results(build, {})] == [[5.0, 5.0], [3.0, 3.0], [3.0, 3.0], [1]]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda array: array * 2.0, r"given the array .*layers\.array_read"),
        (L.reduce_sum, r"given the array .*layers\.array_read"),
        (lambda array: L.assign(array, L.zeros([2], "float64")), "cannot be assigned to"),
        (lambda array: L.cond(L.less_than(L.zeros([1], "int64"), L.ones([1], "int64")),
                              lambda: array, lambda: array), "a branch returns the array"),
    ],
)  # fmt: skip
def test_an_array_is_no_operand(use: Callable[[Any], Any], message: str) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        array = one_array()
        with pytest.raises(ProgramError, match=message):
            use(array)


def test_a_static_input_of_laid_out_rows_is_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, y = (L.data(name, [4], dtype="float64", lod_level=1) for name in "xy")
        rnn = L.DynamicRNN()
        with rnn.block():
            rnn.output(rnn.step_input(x))
            with pytest.raises(ProgramError, match=r"make it .* within the block"):
                rnn.static_input(L.sequence_reshape(y, 2))


def test_a_dynamic_rnn_counts_its_steps() -> None:
    def build() -> list[Any]:
        x = L.data("x", [4], dtype="float64", lod_level=1)
        rnn: Any = L.DynamicRNN()
        uncounted: Any = L.DynamicRNN()
        before = rnn.step_idx
        assert before is None
        with rnn.block():
            row = rnn.step_input(x)
            rnn.output(row * L.cast(rnn.step_idx, "float64") + L.cast(rnn.step_idx * 2, "float64"))
        with uncounted.block():
            uncounted.output(uncounted.step_input(x))
        return [rnn(), rnn.step_idx, uncounted.step_idx]

    rows = random(sum(LENGTHS), 4)
    found, number_of_steps, of_uncounted = results(build, {"x": fluid.create_lod_tensor(rows, [LENGTHS])})
    steps = np.concatenate([np.arange(length) for length in LENGTHS])[:, None]
    np.testing.assert_allclose(found, rows * steps + 2 * steps, rtol=1e-14)
    assert number_of_steps.tolist() == of_uncounted.tolist() == [max(LENGTHS)]
