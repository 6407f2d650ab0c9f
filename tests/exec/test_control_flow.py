"""Branches and loops, from layers to a step: against torch in float64, on executors, replicas and after saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError
from penstock.exec.parallel import ParallelExecutor
from penstock.graph.build import build_graph
from penstock.graph.check import check

L = fluid.layers
ROWS = np.linspace(-1.0, 1.0, 12).reshape(4, 3)


def results(build: Callable[[], Any], feed: dict[str, Any] | None = None, runs: int = 1) -> list[Any]:
    """What `build` returns, fetched from the last of some runs; its program's text is read back on the way."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        fetches = build()
    assert fluid.Program.parse(str(main)) == main
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    for _ in range(runs):
        found = exe.run(main, feed or {}, fetches, scope=scope)
    return list(found)


def number(value: float, dtype: str = "float64") -> Any:
    return L.fill_constant([1], dtype, value)


class Model:
    """Branches on its weight, repeats a layer three times within a While, and is trained by SGD."""

    def __init__(self) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            x = L.data("x", [3], dtype="float64")
            init = fluid.initializer.Normal(0.0, 1.0, seed=1)
            weight = L.create_parameter([3, 3], "float64", name="weight", default_initializer=init)
            is_small = L.less_than(L.reduce_sum(weight * weight).reshape([1]), number(7.0))
            h = L.cond(is_small, lambda: L.matmul(x, weight), lambda: L.tanh(L.fc(x, 3, param_attr=attr("other"))))
            i, last = L.zeros([1], "int64"), number(3, "int64")
            going = L.less_than(i, last)
            state = h * 1.0
            with L.While(going).block():
                L.assign(L.tanh(L.matmul(state, weight)) + h, state)
                L.increment(i)
                L.less_than(i, last, cond=going)
            self.state = state
            self.loss = L.mean(state * state)
            fluid.optimizer.SGD(0.5).minimize(self.loss)
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)

    def values(self) -> dict[str, torch.Tensor]:
        return {n: torch.tensor(np.array(self.scope.find_var(n))) for n in ("weight", "other", "fc_0.b_0")}

    def expected(self, rows: np.ndarray) -> tuple[float, dict[str, torch.Tensor], bool]:
        """The loss and the parameters after a step, by torch, and which branch was taken."""
        values = {n: v.requires_grad_(True) for n, v in self.values().items()}
        x, weight = torch.tensor(rows), values["weight"]
        is_small = bool((weight * weight).sum() < 7)
        h = x @ weight if is_small else torch.tanh(x @ values["other"] + values["fc_0.b_0"])
        state = h
        for _ in range(3):
            state = torch.tanh(state @ weight) + h
        loss = (state * state).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        after = {n: (v if v.grad is None else v - 0.5 * v.grad).detach() for n, v in values.items()}
        return loss.item(), after, is_small


def attr(name: str) -> Any:
    return fluid.ParamAttr(name=name, initializer=fluid.initializer.Normal(0.0, 1.0, seed=2))


def test_a_step_is_that_of_torch_whichever_branch_it_takes() -> None:
    model, taken = Model(), set()
    for step in range(6):
        wanted, after, is_small = model.expected(ROWS + step)
        (loss,) = model.exe.run(model.main, {"x": ROWS + step}, [model.loss], scope=model.scope)
        assert float(loss[0]) == pytest.approx(wanted, rel=1e-12)
        for name, value in model.values().items():
            torch.testing.assert_close(value, after[name], rtol=1e-10, atol=1e-12)
        taken.add(is_small)
    assert taken == {True, False}


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_train_as_one_process_does(replicas: int, reduce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", str(replicas))
    model, build = Model(), fluid.BuildStrategy()
    if reduce and replicas > 1:
        build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    executor = ParallelExecutor(False, model.loss.name, model.main, build_strategy=build, scope=model.scope)
    for step in range(4):
        _, after, _ = model.expected(ROWS + step)
        executor.run([model.loss.name], {"x": ROWS + step})
        for name, value in model.values().items():
            torch.testing.assert_close(value, after[name], rtol=1e-10, atol=1e-12)
    executor.close()


def test_each_is_one_handle_whose_reads_the_checker_knows() -> None:
    graph = build_graph(Model().main, mode="all_reduce", num_replicas=2, active=2)
    check(graph)
    kinds = [h.op.args[0] for h in graph.handles if h.op.type == "penstock.control.default"]
    assert sorted(map(str, kinds)) == ["conditional_block", "conditional_block", "while", "while"]
    loops = [h for h in graph.handles if "while" in h.op.args]
    assert all({f"weight#{h.replica}", f"control_0.tmp_0#{h.replica}"} <= set(h.reads()) for h in loops)


def test_blocks_have_numbers_parents_and_fluids_types() -> None:
    main = Model().main
    assert [b.parent_idx for b in main.blocks] == [-1, 0, 0, 0, 0, 0, 0]
    types = [op.type for op in main.global_block().ops]
    assert [t for t in types if t.startswith(("while", "cond"))] == [
        "conditional_block", "while", "while_grad", "conditional_block_grad"
    ]  # fmt: skip
    assert [op.type for op in main.block(3).ops][:3] == ["mul", "tanh", "elementwise_add"]
    assert set(main.block(3).vars) >= {"weight", "control_0.tmp_0"}


def test_a_clone_for_test_and_a_saved_model_give_the_same(tmp_path: Path) -> None:
    model = Model()
    with fluid.scope_guard(model.scope):
        test = model.main.clone(for_test=True)
        (wanted,) = model.exe.run(test, {"x": ROWS}, [model.state])
        fluid.io.save_inference_model(str(tmp_path), ["x"], [model.state], model.exe, model.main)
    with fluid.scope_guard(fluid.Scope()):
        program, feeds, fetches = fluid.io.load_inference_model(str(tmp_path), model.exe)
        (found,) = model.exe.run(program, {feeds[0]: ROWS}, fetches)
    np.testing.assert_array_equal(found, wanted)


def test_dropout_in_a_block_rests_in_a_clone_for_test() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = L.data("x", [3], dtype="float64")
        y = L.cond(L.less_than(number(0), number(1)), lambda: L.dropout(x, 0.5), lambda: x)
    exe = fluid.Executor(fluid.CPUPlace())
    ones = np.ones((50, 3))
    assert exe.run(main, {"x": ones}, [y])[0].min() == 0.0
    assert exe.run(main.clone(for_test=True), {"x": ones}, [y])[0].tolist() == (ones * 0.5).tolist()


def test_each_iteration_draws_numbers_of_its_own() -> None:
    def build() -> list[Any]:
        x = L.data("x", [200], dtype="float64", stop_gradient=False)
        total, last = x * 0.0, x * 0.0
        i, end = L.zeros([1], "int64"), number(2, "int64")
        going = L.less_than(i, end)
        with L.While(going).block():
            kept = L.dropout(x, 0.5, dropout_implementation="upscale_in_train")
            L.assign(kept, last)
            L.assign(total + kept, total)
            L.less_than(L.increment(i), end, cond=going)
        return [total, last, fluid.gradients(L.reduce_sum(total), x)[0]]

    total, last, grad = results(build, {"x": np.ones((1, 200))})
    assert set(last.ravel()) == {0.0, 2.0}
    assert set(total.ravel()) == {0.0, 2.0, 4.0}  # 2.0: dropped once
    np.testing.assert_array_equal(grad, total)  # the second run of the block drops the same


def test_what_a_branch_writes_is_written_where_it_is_taken() -> None:
    def build() -> list[Any]:
        x, y = number(1), number(1)

        def write(value: float, variable: Any) -> None:
            L.assign(number(value), variable)

        L.cond(L.less_than(x, number(2)), lambda: write(5, x), lambda: write(6, y))
        return [x, y, x.name]

    assert [float(v[0]) for v in results(build)] == [5.0, 1.0, 5.0]


def test_a_gradient_ends_where_a_block_stops_it() -> None:
    def build() -> list[Any]:
        x = L.data("x", [3], dtype="float64", stop_gradient=False)
        fixed = (x * 3.0).detach()

        def branch() -> Any:
            y = x * 2.0
            y.stop_gradient = True
            return y * x + fixed * x

        out = L.cond(L.less_than(number(0), number(1)), branch, lambda: x)
        return [fluid.gradients(L.reduce_sum(out), x)[0]]

    np.testing.assert_allclose(results(build, {"x": ROWS})[0], ROWS * 5.0, rtol=1e-12)


def test_case_takes_the_first_true_and_switch_case_the_index() -> None:
    def of(value: float) -> Callable[[], Any]:
        return lambda: number(value)

    def build() -> list[Any]:
        yes, no = L.less_than(number(0), number(1)), L.less_than(number(1), number(0))
        return [
            L.case([(no, of(1)), (yes, of(2)), (yes, of(3))], of(4)),
            L.case([(no, of(1)), (no, of(2))], of(4)),
            L.case([(no, of(1)), (no, of(2))]),
            L.switch_case(number(7, "int64"), {1: of(1), 7: of(7)}, of(0)),
            L.switch_case(number(3, "int64"), [(5, of(5)), (1, of(1))]),
        ]

    assert [float(v[0]) for v in results(build)] == [2.0, 4.0, 2.0, 7.0, 5.0]


def test_switch_writes_a_learning_rate_as_the_steps_go() -> None:
    def build() -> list[Any]:
        step = L.autoincreased_step_counter(begin=0)
        rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
        with L.Switch() as switch:
            with switch.case(L.less_than(step, number(2, "int64"))):
                L.assign(number(0.5, "float32"), rate)
            with switch.case(L.less_than(step, number(4, "int64"))):
                L.assign(np.array([0.25], "float32"), rate)
            with switch.default():
                L.fill_constant([1], "float32", 0.125, out=rate)
        return [rate]

    assert [float(results(build, runs=n)[0][0]) for n in (2, 3, 4, 5)] == [0.5, 0.25, 0.25, 0.125]


def test_while_loop_gives_back_its_variables_and_their_gradients() -> None:
    def build() -> list[Any]:
        x = L.data("x", [3], dtype="float64", stop_gradient=False)

        def body(i: Any, nest: list[Any]) -> list[Any]:
            first, second = nest
            return [L.increment(i), [second, first * second]]

        start = [L.zeros([1], "int64"), [x, x * 2.0]]
        _, (first, second) = L.while_loop(lambda i, nest: L.less_than(i, number(3, "int64")), body, start)
        return [first, second, fluid.gradients(L.reduce_sum(second), x)[0]]

    first, second, grad = results(build, {"x": ROWS})
    np.testing.assert_allclose(first, 4 * ROWS**3, rtol=1e-12)
    np.testing.assert_allclose(second, 8 * ROWS**5, rtol=1e-12)
    np.testing.assert_allclose(grad, 40 * ROWS**4, rtol=1e-12, atol=1e-12)


def test_while_loop_changes_the_variables_that_it_began_with() -> None:
    def build() -> list[Any]:
        i, total, limit = L.zeros([1], "int64"), L.zeros([3], "float64"), number(4, "int64")
        x = L.data("x", [3], dtype="float64", stop_gradient=False, append_batch_size=False)
        before = total + 1.0

        def inner(j: Any, sum_: Any) -> list[Any]:
            return [L.increment(j), sum_ + x]

        def outer(i: Any, sum_: Any) -> list[Any]:
            j = L.zeros([1], "int64")
            L.while_loop(lambda j, _: L.less_than(j, i), inner, [j, sum_])
            return [L.increment(i), L.elementwise_add(sum_, j.astype("float64"))]

        L.while_loop(lambda i, _: L.less_than(i, limit), outer, [i, total])
        return [i, total, before, fluid.gradients(L.reduce_sum(total), x)[0]]

    x = np.array([1.0, 2.0, 4.0])
    i, total, before, grad = results(build, {"x": x})
    assert i.tolist() == [4]
    np.testing.assert_allclose(total, 6 * x + 6, rtol=1e-12)  # x and 1 are added 0 + 1 + 2 + 3 times
    np.testing.assert_allclose(before, np.ones(3))
    np.testing.assert_allclose(grad, np.full(3, 6.0))


def test_while_loop_keeps_a_counter_of_the_scope() -> None:
    def build() -> list[Any]:
        count = L.create_global_var([1], 0, "int64", persistable=True, name="count")
        until = count + 3
        L.while_loop(lambda c: L.less_than(c, until), lambda c: [L.increment(c)], [count])
        return [count]

    assert results(build, runs=3)[0].tolist() == [9]


def function() -> Any:
    return number(1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: L.cond(None, function, function),
        lambda: L.cond(number(1) > 0.0, function, {1}),
        lambda: L.cond(number(1) > 0.0, function, function, {1}),
        lambda: L.case(1, function),
        lambda: L.case([1], function),
        lambda: L.case([(1, function, 3)], function),
        lambda: L.case([(1, function)], function),
        lambda: L.case([(number(1) > 0.0, 2)], function),
        lambda: L.case([(number(1) > 0.0, function)], 1),
        lambda: L.switch_case(1, [(1, function)], function),
        lambda: L.switch_case(number(1), [(1, function)], function),
        lambda: L.switch_case(L.zeros([2], "int32"), [(1, function)], function),
        lambda: L.switch_case(number(1, "int32"), 1, function),
        lambda: L.switch_case(number(1, "int32"), [1], function),
        lambda: L.switch_case(number(1, "int32"), [(1, 2, 3)], function),
        lambda: L.switch_case(number(1, "int32"), [(2.3, function)], function),
        lambda: L.switch_case(number(1, "int32"), [(1, 1), (2, function)], function),
        lambda: L.switch_case(number(1, "int32"), [(1, function), (2, function)], 1),
        lambda: L.while_loop(1, lambda i: [i], [number(1)]),
        lambda: L.while_loop(lambda i: i > 0.0, lambda i: [i], number(1)),
        lambda: L.while_loop(lambda i: 1, lambda i: [i], [number(1)]),
        lambda: L.while_loop(lambda i: i, lambda i: [i], [number(1)]),
        lambda: L.While(cond=number(1)),
        lambda: L.increment([1, 2, 3]),
    ],
)
def test_arguments_of_another_type_are_type_errors(call: Callable[[], Any]) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()), pytest.raises(TypeError):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: L.switch_case(number(1, "int32"), [(2, function), (2, function)], function),
        lambda: L.while_loop(lambda: number(1) > 0.0, list, []),
        lambda: L.while_loop(lambda i: i > 0.0, lambda i: [i, i], [number(1)]),
    ],
)
def test_arguments_that_do_not_fit_are_value_errors(call: Callable[[], Any]) -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()), pytest.raises(ProgramError) as raised:
        call()
    assert not isinstance(raised.value, TypeError)  # ProgramError is a ValueError


def test_is_empty_asks_for_elements_when_it_runs() -> None:
    def build() -> list[Any]:
        x = L.data("x", [3], dtype="float64")
        return [L.is_empty(x), L.is_empty(x[2:])]

    assert [v.tolist() for v in results(build, {"x": ROWS})] == [[False], [False]]
    assert [v.tolist() for v in results(build, {"x": ROWS[:2]})] == [[False], [True]]


def test_append_backward_names_the_gradients_of_opened_variables() -> None:
    def build() -> list[Any]:
        a, b = number(1.25), number(1.5)
        a.stop_gradient = b.stop_gradient = False
        out = L.cond(L.less_than(a - b, number(-1.0)), lambda: a * 2.0, lambda: b * 3.0)
        assert fluid.append_backward(out) == []
        return [a.grad_name, b.grad_name]

    assert [float(v[0]) for v in results(build)] == [0.0, 3.0]


def test_loops_nest() -> None:
    def build() -> list[Any]:
        i, total = L.zeros([1], "int64"), L.zeros([1], "int64")
        three = number(3, "int64")
        outer = L.less_than(i, three)
        with L.While(outer).block():
            j = L.zeros([1], "int64")
            inner = L.less_than(j, i)
            with L.While(inner).block():
                L.increment(total)
                L.less_than(L.increment(j), i, cond=inner)
            L.less_than(L.increment(i), three, cond=outer)
        return [i, total]

    assert [int(v[0]) for v in results(build)] == [3, 3]


def test_batch_norm_in_a_branch_keeps_its_statistics() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        x = L.data("x", [3], dtype="float32")
        take = L.data("take", [1], append_batch_size=False, dtype="float32")
        y = L.cond(L.less_than(number(0, "float32"), take), lambda: L.batch_norm(x), lambda: x * 1.0)
        fluid.optimizer.SGD(0.1).minimize(L.reduce_sum(y * y * y))
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    mean = next(n for n, v in main.variables.items() if v.buffer and v.shape == (3,))
    rows = ROWS.astype("float32")
    seen = []
    for take_it in (0.0, 1.0):
        exe.run(main, {"x": rows, "take": np.array([take_it], "float32")}, [y], scope=scope)
        seen.append(np.array(scope.find_var(mean)).copy())
    assert seen[0].tolist() == [0.0] * 3
    np.testing.assert_allclose(seen[1], rows.mean(0) * 0.1, rtol=1e-5, atol=1e-7)


def test_a_tensor_declared_outside_begins_before_the_block() -> None:
    def build() -> list[Any]:
        x = L.data("x", [1], dtype="float64", append_batch_size=False)
        out, inner = L.create_tensor("float64"), L.create_tensor("float64")
        with L.Switch() as switch:
            with switch.case(L.less_than(x, number(1.0))):
                L.assign(x * 2.0, out)
                L.cond(L.less_than(x, number(0.0)), lambda: ignored(L.assign(x * 5.0, inner)))
            with switch.default():
                L.assign(x * 3.0, out)
        return [out * 1.0, inner]

    def ignored(_: Any) -> None:
        return None

    for x, wanted in ((-1.0, [-2.0, -5.0]), (0.5, [1.0, 0.0]), (2.0, [6.0, 0.0])):
        assert [float(v[0]) for v in results(build, {"x": np.array([x])})] == wanted


def test_branches_return_slices_of_the_batch() -> None:
    def build() -> Any:
        x = L.data("x", [3], dtype="float64")
        first = L.less_than(L.reduce_sum(x).reshape([1]), number(0.0))
        return [L.cond(first, lambda: x[:3] * 1.0, lambda: x[:3] * 2.0), L.cond(first, lambda: x[-3:], lambda: -x[-3:])]

    for rows in (1, 2, 3, 7):
        x = np.arange(3.0 * rows).reshape(rows, 3)
        head, tail = results(build, {"x": x})
        np.testing.assert_array_equal(head, x[:3] * 2.0)
        np.testing.assert_array_equal(tail, -x[-3:])


def test_a_detached_value_keeps_the_value_that_it_had() -> None:
    def build() -> list[Any]:
        x = L.data("x", [3], dtype="float64")
        h = x * 1.0
        before = h.detach()
        L.cond(L.less_than(number(0.0), number(1.0)), lambda: ignored(L.assign(h * 2.0, h)))
        return [before * 1.0, h]

    def ignored(_: Any) -> None:
        return None

    before, after = results(build, {"x": ROWS})
    np.testing.assert_array_equal(before, ROWS)
    np.testing.assert_array_equal(after, ROWS * 2.0)


def written_beside_its_detached_self() -> None:
    h = number(1.0)
    before, i = h.detach(), L.zeros([1], "int64")
    going = L.less_than(i, number(3, "int64"))
    with L.While(going).block():
        L.assign(h + before, h)
        L.increment(i)
        L.less_than(i, number(3, "int64"), cond=going)


def no_end() -> None:
    with L.While(L.less_than(number(0), number(1))).block():
        number(3)


def outlived() -> Any:
    made = []
    L.cond(L.less_than(number(0), number(1)), lambda: made.append(number(1)), lambda: None)
    return made[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: L.cond(number(1), lambda: None, lambda: None), "one bool"),
        (lambda: L.cond(L.less_than(number(0), number(1)), lambda: number(1), lambda: None), "branches of cond return"),
        (written_beside_its_detached_self, "writes the memory of 'full_0.*Copy one of them before the block"),
        (no_end, "does not write its condition"),
        (lambda: outlived() + 1.0, "was made within a block"),
        (lambda: L.switch_case(number(1, "int64"), [(1, lambda: None), (1, lambda: None)]), "an index of its own"),
    ],
)
def test_refusals_name_what_is_wrong(build: Callable[[], Any], message: str) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()), pytest.raises(ProgramError, match=message) as refused:
        build()
    assert isinstance(refused.value, TypeError) == ("one bool" in message)  # a script that catches Fluid's still does
    assert fluid.Program.parse(str(main)) == main


def test_an_error_in_a_block_names_its_operator() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        ids = L.data("ids", [1], dtype="int64")
        table = L.create_global_var([3, 2], 0.0, "float32", persistable=True)
        out = L.cond(L.less_than(number(0), number(1)), lambda: L.gather(table, ids), lambda: L.gather(table, ids))
    exe = fluid.Executor(fluid.CPUPlace())
    with fluid.scope_guard(fluid.Scope()):
        fluid.global_scope().set(table.name, torch.zeros(3, 2))
        with pytest.raises(OperatorError, match=r"'index_select_0' .*test_control_flow\.py"):
            exe.run(main, {"ids": np.array([[7]])}, [out])
