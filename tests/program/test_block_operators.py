"""The operators of a block as Fluid's scripts see them: types, attributes and slots; operators that scripts append."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

ROWS = np.arange(6, dtype="float32").reshape(2, 3)


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


def test_operators_are_appended_by_fluids_types() -> None:
    x = fluid.layers.data("x", [3])
    block = fluid.default_main_program().global_block()
    weight = np.arange(6, dtype="float32").reshape(3, 2)
    w = block.create_parameter(name="w", shape=[3, 2], dtype="float32")
    product, loss = block.create_var(name="product", dtype="float32"), block.create_var(name="loss")
    block.append_op(type="mul", inputs={"X": x, "Y": [w]}, outputs={"Out": product})
    block.append_op(type="reduce_sum", inputs={"X": ["product"]}, outputs={"Out": loss}, attrs={"reduce_all": True})
    _, pairs = fluid.optimizer.SGD(0.1).minimize(loss)
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    fluid.global_scope().find_var("w").set(weight)
    got = exe.run(feed={"x": ROWS}, fetch_list=["product", "loss", pairs[0][1], "w"])
    want = torch.tensor(weight, requires_grad=True)
    made = torch.tensor(ROWS) @ want
    (slope,) = torch.autograd.grad(made.sum(), [want])
    for one, other in zip(got, [made, made.sum().reshape(1), slope, want - 0.1 * slope], strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-6)


def test_an_update_is_appended_by_hand() -> None:
    block = fluid.default_main_program().global_block()
    w = block.create_parameter(name="w", shape=[2], dtype="float32", initializer=fluid.initializer.Constant(1.0))
    g = fluid.layers.fill_constant([2], "float32", 3.0)
    rate = fluid.layers.fill_constant([1], "float32", 0.5)
    block.append_op(type="sgd", inputs={"Param": w, "Grad": g, "LearningRate": rate}, outputs={"ParamOut": w})
    run([])
    np.testing.assert_allclose(np.array(fluid.global_scope().find_var("w")), [-0.5, -0.5])


def test_operators_have_fluids_types_and_their_kernels() -> None:
    ids, image = fluid.layers.data("ids", [1], dtype="int64"), fluid.layers.data("image", [1, 6, 6])
    label = fluid.layers.data("label", [1], dtype="int64")
    rows = fluid.layers.embedding(ids, [10, 4], is_sparse=True)
    pixels = fluid.layers.flatten(fluid.layers.batch_norm(fluid.layers.conv2d(image, 2, 3, act="relu")))
    predict = fluid.layers.fc(fluid.layers.concat([rows, pixels], 1), 3, act="softmax")
    loss = fluid.layers.mean(fluid.layers.cross_entropy(fluid.layers.dropout(predict, 0.5), label))
    fluid.optimizer.Adam(0.1).minimize(loss)
    ops = fluid.default_main_program().global_block().ops
    types = {op.type for op in ops}
    assert types >= {
        "lookup_table", "conv2d", "relu", "batch_norm", "reshape2", "concat", "mul", "softmax", "dropout",
        "cross_entropy", "mean", "relu_grad", "conv2d_grad", "batch_norm_grad", "softmax_grad", "mul_grad", "adam",
    }  # fmt: skip
    assert [op.type for op in ops].count("adam") == len(fluid.default_main_program().all_parameters())
    (mean,) = [op for op in ops if op.type == "mean"]
    assert (mean.kernel, mean.output_arg_names) == ("aten.mean.default", [loss.name])
    update = ops[-1]
    assert update.attr("op_role_var") == ["fc_0.b_0", "fc_0.b_0@GRAD"]
    assert (update.has_attr("op_namescope"), update.all_attrs()["op_namescope"]) == (True, "/adam_0/")
    startup = {op.type for op in fluid.default_startup_program().global_block().ops}
    assert startup == {"uniform_random", "gaussian_random", "fill_constant"}


def test_operators_have_fluids_attributes() -> None:
    program, init = fluid.Program(), fluid.initializer
    block = program.global_block()
    kinds = {
        "c": init.Constant(2.5), "u": init.Uniform(-2.0, 3.0, seed=7), "n": init.Normal(0.5, 2.0),
        "t": init.TruncatedNormal(1.0, 0.1), "x": init.Xavier(), "m": init.MSRA(uniform=False),
        "a": init.NumpyArrayInitializer(np.zeros((6, 4))),
    }  # fmt: skip
    for name, initializer in kinds.items():
        block.create_parameter(name=name, shape=[6, 4], dtype="float32", initializer=initializer)
    found = [
        (op.type, *(op.attr(key) for key in ("value", "min", "max", "mean", "std", "seed") if op.has_attr(key)))
        for op in block.ops
    ]
    assert found == [
        ("fill_constant", 2.5), ("uniform_random", -2.0, 3.0, 7), ("gaussian_random", 0.5, 2.0, 0),
        ("truncated_gaussian_random", 1.0, 0.1, 0), ("uniform_random", -(0.6**0.5), 0.6**0.5, 0),
        ("gaussian_random", 0.0, (1 / 3) ** 0.5, 0), ("assign_value",),
    ]  # fmt: skip
    assert (list(block.ops[0].attr("shape")), block.ops[0].attr("op_callstack")[0].partition(":")[0]) == (
        [6, 4],
        "test_block_operators.py",
    )
    with pytest.raises(
        ProgramError, match=r"operator 'full_0' \(fill_constant, aten.full.default\) has no attribute 'min'"
    ):
        block.ops[0].attr("min")


def test_operators_have_fluids_slots() -> None:
    x, label = fluid.layers.data("x", [3]), fluid.layers.data("label", [1], dtype="int64")
    hidden = fluid.layers.concat([fluid.layers.fc(x, 4, act="softmax"), fluid.layers.elementwise_add(x, x)], axis=1)
    loss = fluid.layers.mean(fluid.layers.cross_entropy(hidden, label))
    fluid.optimizer.SGD(0.1).minimize(loss)
    ops = fluid.default_main_program().global_block().ops
    of = {op.type: op for op in reversed(ops)}
    assert (of["mul"].input("X"), of["mul"].input("Y")) == (["x"], ["fc_0.w_0"])
    assert (of["elementwise_add"].input_names, of["elementwise_add"].input("Y")) == (["X", "Y"], ["x"])
    assert of["concat"].input("X") == [of["softmax"].output("Out")[0], of["elementwise_add"].output("Out")[0]]
    assert of["softmax"].input("X") == of["mul"].output("Out")
    assert of["mean"].output("Out") == [loss.name]
    desc = of["mul"].desc
    assert (desc.type(), desc.input_names(), desc.output_names()) == ("mul", ["X", "Y"], ["Out"])
    assert (desc.input("Y"), desc.output("Out")) == (["fc_0.w_0"], desc.output_arg_names())
    assert desc.input_arg_names() == ["fc_0.b_0", "x", "fc_0.w_0"]
    assert (desc.has_attr("op_role"), desc.attr("op_role"), desc.attr_names()[0]) == (True, 0, "op_role")
    updates = [(op.input("Param"), op.input("Grad"), op.output("ParamOut")) for op in ops if op.type == "sgd"]
    assert updates == [([f"fc_0.{n}_0"], [f"fc_0.{n}_0@GRAD"], [f"fc_0.{n}_0"]) for n in "wb"]
    assert (of["cross_entropy"].input_names, of["mul_grad"].output_names) == ([], [])
    with pytest.raises(ProgramError, match=r"\(mul, aten.addmm.default\) has no input slot 'Z'; it has \['X', 'Y'\]"):
        of["mul"].input("Z")


def test_updates_are_returned_by_fluids_types() -> None:
    x = fluid.layers.data("x", [3])
    attr = fluid.ParamAttr("w", learning_rate=0.5, regularizer=fluid.regularizer.L2Decay(0.1))
    loss = fluid.layers.mean(fluid.layers.fc(x, 2, param_attr=attr, bias_attr=False))
    updates, _ = fluid.optimizer.LookaheadOptimizer(fluid.optimizer.SGD(0.1)).minimize(loss)
    assert [op.type for op in updates] == ["scale", "sum", "scale", "sgd"]
    assert {op.attr("op_role") for op in updates} == {2}
    ops = fluid.default_main_program().global_block().ops
    assert [op.attr("op_role") for op in ops if op.type in ("mul", "mean", "mul_grad")] == [0, 256, 1]


def test_name_scopes_of_one_name_are_numbered_in_their_program() -> None:
    def paths() -> list[str]:
        with fluid.name_scope("s1"):
            x = fluid.layers.data("x", [1]) + 1
            with fluid.name_scope("s2"):
                x = x * 2
            with fluid.name_scope("s2"):
                x = x / 2
        with fluid.name_scope("s1"):
            fluid.layers.pow(x, 2.0)
        return [op.attr("op_namescope") for op in fluid.default_main_program().global_block().ops]

    assert paths() == ["/s1/", "/s1/s2/", "/s1/s2_1/", "/s1_1/"]
    with fluid.program_guard(fluid.Program()):
        assert paths() == ["/s1/", "/s1/s2/", "/s1/s2_1/", "/s1_1/"]


def test_counts_of_name_scopes_are_cloned_and_taken_back() -> None:
    def fail() -> None:
        with fluid.name_scope("s1"):
            raise ValueError("on purpose")

    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.layers.data("x", [1])
        with fluid.name_scope("s1"):
            x = x + 1
        counted = dict(main.num_scopes)
        some = fluid.layers.reduce_sum(x) > 0.0
        with pytest.raises(ValueError, match="on purpose"):
            fluid.layers.cond(some, fail, fail)
        assert main.num_scopes == counted
    copy = main.clone()
    with fluid.program_guard(copy, fluid.Program()), fluid.name_scope("s1"):
        y = x * 2
    assert [op.attr("op_namescope") for op in copy.global_block().ops if y.name in op.output_arg_names] == ["/s1_1/"]
    assert main.num_scopes == counted
