"""What Fluid's scripts do with programs, blocks and variables by hand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.exec.executor import _fetch_var

ROWS = np.arange(6, dtype="float32").reshape(2, 3)

FLAGS = ["FLAGS_fuse_parameter_groups_size", "FLAGS_fuse_parameter_memory_size", "FLAGS_eager_delete_tensor_gb"]


@pytest.fixture(autouse=True)
def programs() -> Iterator[tuple[fluid.Program, fluid.Program]]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(fluid.Scope()):
        yield main, startup


def run(fetches: list[Any], **feed: Any) -> list[np.ndarray]:
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    got: list[np.ndarray] = exe.run(fluid.default_main_program(), feed=feed, fetch_list=fetches)
    return got


def test_an_input_declared_twice_is_one_input() -> None:
    x = fluid.layers.data("x", [3])
    assert fluid.layers.data("x", [3]) is x
    assert fluid.data("x", [None, 3]) is x
    with pytest.raises(ProgramError, match=r"'x' is declared as float32\[-1, 4\], but it exists as float32\[-1, 3\]"):
        fluid.layers.data("x", [4])
    with pytest.raises(ProgramError, match="declared as int64"):
        fluid.layers.data("x", [3], dtype="int64")


def test_a_variable_knows_its_block_level_and_kind() -> None:
    x = fluid.layers.data("x", [3])
    w = fluid.layers.create_parameter([3, 2], "float32", attr=fluid.ParamAttr("w", learning_rate=0.5))
    assert x.block.idx == 0
    assert x.block.program is fluid.default_main_program()
    assert (x.lod_level, x.is_data, w.is_data) == (0, True, False)
    assert isinstance(w, fluid.framework.Parameter)
    assert not isinstance(x, fluid.framework.Parameter)
    assert fluid.io.is_parameter(w)
    assert not fluid.io.is_persistable(x)
    assert w.optimize_attr == {"learning_rate": 0.5}
    assert fluid.default_main_program().all_parameters() == [w]
    (value,) = run([x.astype(np.float64)], x=ROWS)
    assert value.dtype == np.float64


def test_inputs_are_found_among_the_variables_of_a_block() -> None:
    ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
    rows = fluid.layers.embedding(ids, [20, 4], is_sparse=True)
    loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.sequence_pool(rows, "sum"), 1))
    fluid.optimizer.SGD(0.1).minimize(loss)
    main = fluid.default_main_program()
    for program in (main, main.clone(), fluid.Program.parse(str(main))):
        found = program.global_block().vars
        assert [name for name, var in found.items() if var.is_data] == ["ids"]
    assert main.global_block().vars["ids"] is ids


def test_what_an_operator_makes_can_be_kept_in_the_scope() -> None:
    x = fluid.layers.data("x", [3])
    twice = fluid.layers.scale(x, 2.0)
    twice.persistable = True
    run([], x=ROWS)
    np.testing.assert_array_equal(np.array(fluid.global_scope().find_var(twice.name).get_tensor()), 2 * ROWS)
    with pytest.raises(ProgramError, match="cannot become False: it is state"):
        fluid.layers.create_parameter([3], "float32").persistable = False


def test_an_input_with_a_batch_stays_one_when_made_persistable(caplog: pytest.LogCaptureFixture) -> None:
    x = fluid.layers.data("x", [3])
    twice = fluid.layers.scale(x, 2.0)
    x.persistable = x.persistable = True
    assert not x.persistable and [r.message[:25] for r in caplog.records] == ["input 'x' stays an input,"]
    (found,) = run([twice], x=ROWS)
    np.testing.assert_array_equal(found, 2 * ROWS)


def test_attributes_of_parameters_are_set_until_minimize() -> None:
    shared = fluid.ParamAttr(learning_rate=2.0)
    x = fluid.layers.data("x", [3])
    hidden = fluid.layers.fc(x, 2, param_attr=shared, bias_attr=False)
    loss = fluid.layers.mean(fluid.layers.fc(hidden, 1, param_attr=shared, bias_attr=False))
    first, second = fluid.default_main_program().global_block().iter_parameters()
    first.optimize_attr["learning_rate"] *= 0.25
    assert (first.optimize_attr, second.optimize_attr) == ({"learning_rate": 0.5}, {"learning_rate": 2.0})
    second.optimize_attr = {"learning_rate": 1.0}
    second.regularizer, decay = fluid.regularizer.L2Decay(0.1), fluid.regularizer.L2Decay(0.1)
    first.gradient_clip_attr = fluid.clip.GradientClipByValue(0.5)
    first.do_model_average = False
    assert (first.regularizer, second.regularizer.coeff, first.do_model_average) == (None, decay.coeff, False)
    assert (first.gradient_clip_attr.max, second.gradient_clip_attr) == (0.5, None)
    with pytest.raises(ProgramError, match="optimize_attr has no 'rate'; expected 'learning_rate'"):
        first.optimize_attr["rate"] = 1.0
    updates, _ = fluid.optimizer.SGD(0.1).minimize(loss)
    assert [op.type for op in updates] == ["clip", "scale", "sum", "scale", "sgd", "sgd"]


def test_a_block_finds_lists_and_copies_variables() -> None:
    types = fluid.core.VarDesc.VarType
    x = fluid.layers.data("x", [3])
    w = fluid.layers.create_parameter([3, 2], "float32", name="w")
    fluid.layers.mul(x, w)
    block = fluid.default_main_program().global_block()
    assert (x.type, w.type) == (types.LOD_TENSOR, types.LOD_TENSOR)
    assert x.type(torch.float64).dtype == torch.float64
    assert (block._var_recursive("w"), block._find_var_recursive("w"), block._find_var_recursive("v")) == (w, w, None)
    lines = str(block).splitlines()
    assert lines[:2] == ["block 0", "Variable('x', [s0, 3], float32)"]
    assert "mul(aten.mm.default): ['x', 'w'] -> ['mm_0.tmp_0']" in lines
    declared = block.create_var(name="declared", shape=x.shape, dtype=x.dtype)
    assert (tuple(declared.shape), declared.dtype) == ((-1, 3), torch.float32)
    copy = fluid.Program().global_block()._clone_variable(w)
    assert (copy.name, copy.persistable, list(copy.desc.shape), copy.program is w.program) == ("w", True, [3, 2], False)


def test_a_parameter_whose_gradient_stops_is_not_trained() -> None:
    x = fluid.layers.data("x", [3])
    hidden = fluid.layers.fc(x, 2, param_attr="first", bias_attr=False)
    loss = fluid.layers.mean(fluid.layers.fc(hidden, 1, param_attr="second", bias_attr=False))
    fluid.default_main_program().global_block().var("first").stop_gradient = True
    _, pairs = fluid.optimizer.SGD(0.1).minimize(loss)
    assert [param.name for param, _ in pairs] == ["second"]


def test_names_within_a_guard_begin_anew() -> None:
    x = fluid.layers.data("x", [3])
    for _ in range(2):
        with fluid.unique_name.guard():
            fluid.layers.fc(x, 2)
    assert [p.name for p in fluid.default_main_program().all_parameters()] == ["fc_0.w_0", "fc_0.b_0"]
    with fluid.unique_name.guard("other_"):
        fluid.layers.fc(x, 2)
        assert fluid.unique_name.generate("fc") == "other_fc_1"
    assert "other_fc_0.w_0" in fluid.default_main_program().variables


def test_a_switch_of_names_can_be_taken_back() -> None:
    old = fluid.unique_name.switch()
    try:
        assert fluid.unique_name.generate("tmp") == "tmp_0"
        assert fluid.unique_name.generate("tmp") == "tmp_1"
    finally:
        fluid.unique_name.switch(old)


def test_a_declared_variable_needs_an_operator_first() -> None:
    block = fluid.default_main_program().global_block()
    empty = block.create_var(name="empty", dtype="float32")
    assert (block.has_var("empty"), empty.is_made) == (True, False)
    with pytest.raises(ProgramError, match=r"'empty' \(declared at .*\) is used, but no operator has made it"):
        fluid.layers.relu(empty)
    with pytest.raises(ProgramError, match=r"operator 'mul' has no input 'Y'; it is given \['X'\]"):
        block.append_op(type="mul", inputs={"X": fluid.layers.ones([2, 2], "float32")}, outputs={"Out": empty})


def test_a_declared_variable_that_is_read_first_is_fed() -> None:
    main = fluid.default_main_program()
    block = main.global_block()
    rows = block.create_var(name="rows", shape=[-1, 3], dtype="float32")
    factor = block.create_var(name="factor", shape=[3], dtype="float32")
    unread = block.create_var(name="unread", shape=[2, None], dtype="int64")
    assert (tuple(rows.shape), rows.dtype, rows.ndim, rows.stop_gradient) == ((-1, 3), torch.float32, 2, False)
    assert set(block.vars) == {"rows", "factor", "unread"} == {v.name for v in main.list_vars()}
    assert (block.var("rows"), block.create_var(name="rows")) == (rows, rows)
    clone = main.clone()
    factor.stop_gradient = True
    out, loss = block.create_var(name="out"), block.create_var(name="loss", shape=[1])
    block.append_op(type="elementwise_mul", inputs={"X": rows, "Y": "factor"}, outputs={"Out": out})
    block.append_op(type="mean", inputs={"X": "out"}, outputs={"Out": loss})
    fluid.append_backward(loss)
    assert (factor.stop_gradient, block.has_var("factor@GRAD")) == (True, False)
    assert fluid.Program.parse(str(main)) == main
    scale = np.array([1.0, -2.0, 0.5], "float32")
    got, slope = run([out, "rows@GRAD"], rows=ROWS, factor=scale)
    np.testing.assert_array_equal(got, ROWS * scale)
    np.testing.assert_allclose(slope, np.broadcast_to(scale / 6, (2, 3)), rtol=1e-6)
    with pytest.raises(fluid.errors.FeedError, match=r"'factor' .*is not fed"):
        run([out], rows=ROWS)
    assert unread.name not in main.variables
    assert clone.operators == []
    with fluid.program_guard(clone):
        twice = fluid.layers.scale(clone.global_block().var("rows"), 2.0)
    np.testing.assert_array_equal(fluid.Executor().run(clone, {"rows": ROWS}, [twice])[0], 2 * ROWS)


def test_a_variable_is_declared_once_and_may_become_state() -> None:
    block = fluid.default_main_program().global_block()
    block.create_var(name="v", shape=[2, 3], dtype="float64")
    for other in ({"shape": [3, 2]}, {"dtype": "float32"}):
        with pytest.raises(ValueError, match=r"'v' is declared with shape .* exists with shape .2, 3. of float64"):
            block.create_var(name="v", **other)
    with pytest.raises(ValueError, match="'w' is not in the program"):
        block.var("w")
    kept, bare = block.create_var(name="kept", shape=[2], dtype="float32"), block.create_var(name="bare")
    kept.persistable = True
    fluid.global_scope().var("kept").set(ROWS[0, :2])
    with pytest.raises(ProgramError, match=r"'bare' is made persistable, but was declared .* without a shape"):
        bare.persistable = True
    (got,) = run([fluid.layers.scale(kept, 3.0)])
    np.testing.assert_array_equal(got, 3 * ROWS[0, :2])


def test_a_failed_call_leaves_a_declared_variable_usable() -> None:
    x = fluid.default_main_program().global_block().create_var(name="x", shape=[-1, 3], dtype="float32")
    with pytest.raises(ProgramError, match="mat1 and mat2"):
        torch.matmul(x, fluid.layers.ones([2, 2], "float32"))
    np.testing.assert_array_equal(run([fluid.layers.scale(x, 2.0)], x=ROWS)[0], 2 * ROWS)


def test_a_block_with_an_initializer_starts_its_parameter() -> None:
    startup, main = fluid.Program(), fluid.Program()
    block, ones = main.global_block(), fluid.initializer.Constant(1.0)
    w = block.create_parameter(name="w", shape=[2], dtype="float32", initializer=ones)
    assert block.create_parameter(name="w", shape=[2], dtype="float32", initializer=ones) is w
    for program in (startup, main):  # as LayerHelper does it: described twice, started once
        initializer = fluid.initializer.Constant(4.0) if program is startup else None
        with fluid.program_guard(main, startup):
            program.global_block().create_parameter(name="v", shape=[2], dtype="float32", initializer=initializer)
    assert [op.output_arg_names for op in block.ops] == [["w"]]
    assert [op.output_arg_names for op in startup.global_block().ops] == [["v"]]
    exe = fluid.Executor()
    exe.run(startup)
    assert [x.tolist() for x in exe.run(main, fetch_list=[w, "v"])] == [[1.0, 1.0], [4.0, 4.0]]
    with pytest.raises(ProgramError, match=r"shape is \[2, 0\]; expected one positive size or more"):
        block.create_parameter(name="u", shape=[2, 0], dtype="float32")


def test_a_layer_is_written_with_a_layer_helper() -> None:
    def scaled(input: Any, factor: float, act: str) -> Any:
        helper = fluid.LayerHelper("scaled", input=input, act=act, bias_attr=fluid.ParamAttr("shift"))
        out = helper.create_variable_for_type_inference(helper.input_dtype())
        helper.append_op(type="scale", inputs={"X": [helper.input()]}, outputs={"Out": [out]}, attrs={"scale": factor})
        calls = helper.create_global_variable(name="calls", persistable=True, shape=[1], dtype="int64")
        helper.set_variable_initializer(calls, fluid.initializer.Constant(4))
        fluid.layers.increment(calls)
        return helper.append_activation(helper.append_bias_op(out))

    made = scaled(fluid.layers.data("x", [3]), -2.0, "relu")
    got, calls, shift = run([made, "calls", "shift"], x=-ROWS)
    np.testing.assert_array_equal(got, 2 * ROWS)
    assert (calls.tolist(), shift.tolist()) == ([5], [0.0, 0.0, 0.0])


def test_a_declared_tensor_takes_what_a_layer_writes() -> None:
    x = fluid.layers.data("x", [3])
    made = [fluid.layers.create_tensor("float32") for _ in range(3)]
    fluid.layers.assign(x, made[0])
    fluid.layers.sums([x, x], made[1])
    fluid.layers.fill_constant([2], "float32", 7.0, out=made[2])
    got = run([*made, made[0].name], x=ROWS)
    for one, other in zip(got, [ROWS, 2 * ROWS, np.full(2, 7.0), ROWS], strict=True):
        np.testing.assert_array_equal(one, other)
    clone = fluid.default_main_program().clone(for_test=True)
    with fluid.program_guard(clone):
        thrice = fluid.layers.scale(made[0], 3.0)
    (got_of_clone,) = fluid.Executor().run(clone, {"x": ROWS}, [thrice])
    np.testing.assert_array_equal(got_of_clone, 3 * ROWS)
    assert made[0].detach().stop_gradient


def test_a_scope_finds_what_its_parent_has() -> None:
    scope = fluid.Scope()
    scope.var("a").get_tensor().set(ROWS, fluid.CPUPlace())
    kid = scope.new_scope()
    assert kid.find_var("a").shape() == [2, 3]
    kid.var("b").set(ROWS[0])
    assert scope.find_var("b") is None
    scope.var("later")
    assert (scope.find_var("later") is None, kid.find_var("later") is None) == (False, False)
    scope.erase(["later"])
    assert scope.find_var("later") is None
    assert not methodcaller("_is_initialized")(scope.var("c").get_tensor())  # a name of torch's too, where it has CUDA
    with pytest.raises(ProgramError, match="'c' has no value in this scope yet"):
        np.array(scope.var("c"))


def test_gradients_are_variables_that_are_differentiated_again() -> None:
    x = fluid.layers.data("x", [3], stop_gradient=False)
    w = fluid.layers.create_parameter([3, 1], "float32", attr=fluid.ParamAttr("w"))
    cubes = fluid.layers.mul(x * x * x, w)
    (slope,) = fluid.gradients(cubes, x)
    penalty = fluid.layers.reduce_sum(slope * slope)
    _, [(_, gradient)] = fluid.optimizer.SGD(0.0).minimize(penalty)
    weights = np.array([[1.0], [-2.0], [0.5]], "float32")
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    got = exe.run(feed={"x": ROWS, "w": weights}, fetch_list=[slope, gradient])
    p, q = torch.tensor(ROWS, requires_grad=True), torch.tensor(weights, requires_grad=True)
    (first,) = torch.autograd.grad((p**3 @ q).sum(), p, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), q)
    np.testing.assert_allclose(got[0], first.detach(), rtol=1e-6)
    np.testing.assert_allclose(got[1], second, rtol=1e-5)


def test_gradients_take_weights_and_name_what_stops_them() -> None:
    x = fluid.layers.data("x", [3], stop_gradient=False)
    closed = fluid.layers.data("closed", [3])
    twice = fluid.layers.scale(x, 2.0)
    (slope,) = fluid.gradients([twice], [x], target_gradients=[closed])
    assert fluid.gradients([twice], [x], no_grad_set={"x"}) == [None]
    with pytest.raises(ProgramError, match="gradients stop at 'closed'"):
        fluid.gradients([twice], [x, closed])
    (got,) = run([slope], x=ROWS, closed=ROWS + 1)
    np.testing.assert_array_equal(got, 2 * (ROWS + 1))


def test_a_program_is_written_as_bytes_and_read() -> None:
    program = fluid.default_main_program()
    fluid.layers.fc(fluid.layers.data("x", [3]), 2)
    written = program.desc.serialize_to_string()
    assert isinstance(written, bytes)
    assert fluid.Program.parse_from_string(written) == program
    with pytest.raises(
        ProgramError, match=r"given 3 bytes that no desc.serialize_to_string.* Read Fluid's __model__ by"
    ):
        fluid.Program.parse_from_string(b"\x08\x01\xff")
    seed: Any = "seed"
    with pytest.raises(ValueError, match="random_seed is 'seed'; expected a whole number"):
        program.random_seed = seed


def test_arguments_of_another_type_are_type_errors() -> None:
    x: Any = fluid.layers.data("x", [3], stop_gradient=False)
    loss: Any = fluid.layers.mean(fluid.layers.fc(x, 2))
    wrong: Any = 3
    calls: dict[str, Any] = {
        "append_backward needs the variable of the loss": lambda: fluid.append_backward(loss.name),
        "parameter_list is .'fc_0.w_0', 3.": lambda: fluid.append_backward(loss, parameter_list=["fc_0.w_0", 3]),
        "no_grad_set is 'x'": lambda: fluid.append_backward(loss, no_grad_set="x"),
        "callbacks is <function": lambda: fluid.append_backward(loss, callbacks=lambda block, context: None),
        "gradients is given targets .'x'.": lambda: fluid.gradients("x", x),
        "gradients: no_grad_set is Variable": lambda: fluid.gradients(loss, x, no_grad_set=x),
        "the name of an input is 3": lambda: fluid.layers.data(wrong, [1]),
    }
    for said, call in calls.items():
        with pytest.raises(TypeError, match=said):
            call()


def test_values_of_parameters_are_read_from_the_scope() -> None:
    w = fluid.layers.create_parameter([2], "float32", name="w", default_initializer=fluid.initializer.Constant(3.0))
    exe = fluid.Executor()
    with pytest.raises(ProgramError, match=r"'w' .* has no value yet"):
        fluid.io.get_parameter_value(w, exe)
    exe.run(fluid.default_startup_program())
    for value in (fluid.io.get_parameter_value(w, exe), fluid.io.get_parameter_value_by_name("w", exe)):
        assert value.tolist() == [3.0, 3.0]
    assert exe.run(fluid.default_main_program(), fetch_list=[["w"]])[0].tolist() == [3.0, 3.0]
    assert _fetch_var("w").tolist() == [3.0, 3.0]
    assert _fetch_var("w", fluid.global_scope(), return_numpy=False) is fluid.global_scope().find("w")
    with pytest.raises(ProgramError, match="_fetch_var: 'v' has no value in the scope"):
        _fetch_var("v")


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_normed_weight_is_trained_as_direction_and_length(dim: int | None) -> None:
    x = fluid.layers.data("x", [3])
    attr = fluid.WeightNormParamAttr(dim=dim, name="w", initializer=fluid.initializer.Normal(seed=3))
    made = fluid.layers.fc(x, 2, param_attr=attr, bias_attr=False)
    _, pairs = fluid.optimizer.SGD(0.1).minimize(fluid.layers.reduce_sum(made * made))
    assert [param.name for param, _ in pairs] == ["w_v", "w_g"]
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    v, g = (torch.tensor(np.array(fluid.global_scope().find_var(n)), requires_grad=True) for n in ("w_v", "w_g"))
    got = exe.run(feed={"x": ROWS}, fetch_list=[made, *(grad for _, grad in pairs)])
    np.testing.assert_allclose(got[0], ROWS @ v.detach().numpy(), rtol=1e-5)  # it starts as v
    norm = v.norm() if dim is None else v.norm(dim=1 - dim, keepdim=True)
    want = torch.tensor(ROWS) @ (v / norm * g)
    slopes = torch.autograd.grad((want * want).sum(), [v, g])
    for one, other in zip(got[1:], slopes, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-5)


def test_programs_outside_guards_are_switched() -> None:
    mine, start = fluid.Program(), fluid.Program()
    with ThreadPoolExecutor(1) as other:  # guards are of the thread
        old = other.submit(fluid.framework.switch_main_program, mine).result()
        old_start = other.submit(fluid.framework.switch_startup_program, start).result()
        try:
            assert other.submit(fluid.default_main_program).result() is mine
            assert other.submit(fluid.default_startup_program).result() is start
        finally:
            assert other.submit(fluid.framework.switch_main_program, old).result() is mine
            assert other.submit(fluid.framework.switch_startup_program, old_start).result() is start


def test_types_of_the_core_are_dtypes() -> None:
    types = fluid.core.VarDesc.VarType
    x = fluid.layers.data("x", [3], dtype=types.FP32)
    assert (x.dtype, fluid.layers.data("i", [1], dtype=types.INT64).desc.dtype) == (types.FP32, "int64")
    assert [fluid.layers.data(f"d{d}", [1], dtype=d).desc.dtype for d in ("int", "float", "double")] == [
        "int64", "float64", "float64",
    ]  # fmt: skip
    halves = fluid.layers.fill_constant([2], types.FP64, 0.5)
    (got,) = run([halves])
    assert got.dtype == np.float64
    assert got.tolist() == [0.5, 0.5]
    assert fluid.framework.convert_np_dtype_to_dtype_(np.int64) == types.INT64


def test_setters_of_the_core_set_flags() -> None:
    before = fluid.get_flags(FLAGS)
    try:
        fluid.core._set_fuse_parameter_group_size(3)
        fluid.core._set_fuse_parameter_memory_size(0.5)
        fluid.core._set_eager_deletion_mode(-(2**30), -1, False)
        assert fluid.get_flags(FLAGS) == dict(zip(FLAGS, [3, 0.5, -1], strict=True))
    finally:
        fluid.set_flags(before)


def test_gradients_end_at_a_detached_variable_alone() -> None:
    hidden = fluid.layers.fc(fluid.layers.data("x", [3]), 2, param_attr="first", bias_attr=False)
    detached: Any = hidden.detach()
    assert (detached.desc.storage, detached.stop_gradient, hidden.stop_gradient) == (hidden.name, True, False)
    closed = fluid.layers.mean(fluid.layers.fc(detached, 1, param_attr="second", bias_attr=False))
    assert [param.name for param, _ in fluid.append_backward(closed)] == ["second"]
    opened = fluid.layers.mean(fluid.layers.fc(hidden, 1, param_attr="third", bias_attr=False))
    assert [param.name for param, _ in fluid.append_backward(opened)] == ["first", "third"]


def test_programs_with_one_startup_program_share_what_has_a_name() -> None:
    def network() -> tuple[fluid.Program, Any]:
        program = fluid.Program()
        with fluid.program_guard(program, fluid.default_startup_program()):
            hidden = fluid.layers.fc(
                fluid.layers.data("x", [3]), 2, param_attr="shared_w", bias_attr=fluid.ParamAttr("shared_b")
            )
            normed = fluid.layers.batch_norm(
                hidden, param_attr="scale", bias_attr="shift", moving_mean_name="m", moving_variance_name="v"
            )
            return program, fluid.layers.mean(normed * normed)

    optimizer = fluid.optimizer.Adam(0.1)
    (first, loss), (second, other) = network(), network()
    optimizer.minimize(loss)
    optimizer.minimize(other, parameter_list=["shared_w"])
    startup = fluid.default_startup_program()
    made = [name for op in startup.operators for name in op.output_names()]
    assert sorted(made) == sorted(startup.variables)
    states = {kind: [n for n in made if n.endswith(f".{kind}")] for kind in ("learning_rate", "moment1.shared_w")}
    assert [len(names) for names in states.values()] == [2, 2]
    exe = fluid.Executor()
    exe.run(startup)
    before = np.array(fluid.global_scope().find_var("shared_w"))
    exe.run(first, {"x": ROWS}, [])
    between = np.array(fluid.global_scope().find_var("shared_w"))
    exe.run(second, {"x": ROWS}, [])
    after = np.array(fluid.global_scope().find_var("shared_w"))
    assert not np.array_equal(before, between)
    assert not np.array_equal(between, after)


def test_unnamed_parameters_of_two_programs_are_not_shared() -> None:
    fluid.layers.fc(fluid.layers.data("x", [3]), 2)
    with fluid.program_guard(fluid.Program(), fluid.default_startup_program()):
        other = fluid.layers.data("x", [3])
        with pytest.raises(ProgramError, match=r"'fc_0\.w_0' exists already"):
            fluid.layers.fc(other, 2)


def test_a_second_update_of_a_program_has_a_state_of_its_own() -> None:
    x = fluid.layers.data("x", [3])
    for name in ("v", "w"):
        loss = fluid.layers.mean(fluid.layers.fc(x, 1, param_attr=name, bias_attr=False))
        fluid.optimizer.Adam(0.5, name="own").minimize(loss, parameter_list=[name])
    rates = [n for n in fluid.default_startup_program().variables if n.endswith(".learning_rate")]
    assert rates == ["own.learning_rate", "own_0.learning_rate"]
    run([loss], x=ROWS)
