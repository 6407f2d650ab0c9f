"""Results of layers are fetched by the names that Fluid 1.8 gives them: a layer's temporaries, in its order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FetchError

L: Any = fluid.layers
FEED = {
    "x": np.random.default_rng(0).normal(size=(2, 4)).astype("float32"),
    "y": np.ones((2, 3), "float32"),
    "label": np.array([[0], [2]]),
    "image": np.random.default_rng(1).normal(size=(2, 1, 4, 4)).astype("float32"),
}


def network() -> dict[str, Any]:
    """Two of most layers; return what each is named by LayerHelper's rules: a temporary for each step of the layer."""
    x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 3])
    label, image = fluid.data("label", [None, 1], "int64"), fluid.data("image", [None, 1, 4, 4])
    hidden = L.fc(x, 4, act="tanh")
    plain = L.fc([hidden, x], 3, bias_attr=False)
    scores = L.softmax(L.fc(hidden, 3))
    loss, soft = L.softmax_with_cross_entropy(plain, label, return_softmax=True)
    entropy = L.cross_entropy(scores, label)
    return {
        "fc_0.tmp_2": hidden,
        "fc_1.tmp_2": plain,
        "softmax_0.tmp_0": scores,
        "softmax_with_cross_entropy_0.tmp_0": soft,
        "softmax_with_cross_entropy_0.tmp_1": loss,
        "cross_entropy2_0.tmp_0": entropy,
        "cross_entropy2_1.tmp_0": L.cross_entropy(soft, label),
        "square_error_cost_0.tmp_1": L.square_error_cost(scores, y),
        "accuracy_0.tmp_0": L.accuracy(scores, label),
        "cos_sim_0.tmp_0": L.cos_sim(scores, y),
        "mean_0.tmp_0": L.mean(entropy),
        "conv2d_0.tmp_2": L.conv2d(image, 2, 3, act="relu"),
        "conv2d_1.tmp_0": L.conv2d(image, 2, 3, bias_attr=False),
        "batch_norm_0.tmp_3": L.batch_norm(image, act="relu"),
        "batch_norm_1.tmp_2": L.batch_norm(image),
        "batch_norm_2.tmp_2": L.batch_norm(image, act="relu", in_place=True),
        "layer_norm_0.tmp_2": L.layer_norm(x),
    }


@pytest.mark.parametrize("test_program", [False, True])
def test_layers_results_are_fetched_by_the_names_of_fluid(test_program: bool) -> None:
    exe, scope = fluid.Executor(), fluid.Scope()
    for _ in range(2):  # the second is numbered anew
        main, startup = fluid.Program(), fluid.Program()
        with fluid.unique_name.guard(), fluid.program_guard(main, startup):
            wanted = network()
        exe.run(startup, scope=scope)
        program = main.clone(for_test=True) if test_program else main
        found = exe.run(program, FEED, [*wanted, *(v.name for v in wanted.values())], scope=scope)
        for name, one, other in zip(wanted, found, found[len(wanted) :], strict=False):
            assert np.array_equal(one, other), name


def small_layers() -> dict[str, Any]:
    """Layers of an operator or two behind others that use the same operators; names of 2.6.2 where it has the layer."""
    x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 3])
    label = fluid.data("label", [None, 1], "int64")
    hidden = L.fc(x, 4, act="relu")
    shares = L.fc(hidden, 3, act="softmax")
    return {
        "relu_0.tmp_0": L.relu(hidden),
        "softmax_0.tmp_0": L.softmax(shares),
        "reduce_mean_0.tmp_0": L.reduce_mean(shares),
        "mean_0.tmp_0": L.mean(shares),
        "concat_0.tmp_0": L.concat([x, y], 1),
        "elementwise_add_0.tmp_1": L.elementwise_add(x, hidden, act="tanh"),
        "elementwise_mul_0.tmp_0": L.elementwise_mul(x, hidden),
        "tanh_0.tmp_0": L.tanh(x),
        "reduce_sum_0.tmp_0": L.reduce_sum(x, 1),
        "mul_0.tmp_0": L.mul(shares, L.transpose(y, [1, 0])),
        "matmul_0.tmp_0": L.matmul(shares, y, transpose_y=True),
        "cast_0.tmp_0": L.cast(x, "float64"),
        "top_k_0.tmp_1": L.topk(x, 2)[1],
        "arg_max_0.tmp_0": L.argmax(x, 1),
        "scale_0.tmp_0": L.scale(x, 2.0),
        "reshape2_0.tmp_0": L.reshape(x, [-1, 2]),
        "transpose_1.tmp_0": L.transpose(x, [1, 0]),
        "swish_0.tmp_0": L.swish(x),
        "sigmoid_0.tmp_0": L.sigmoid(x),
        "clip_0.tmp_0": L.clip(x, 0.0, 1.0),
        "slice_0.tmp_0": L.slice(x, [1], [0], [2]),
        "split_0.tmp_1": L.split(x, 2, 1)[1],
        "fill_constant_0.tmp_0": L.fill_constant([1], "float32", 2.0),
        "stack_0.tmp_0": L.stack([x, hidden]),
        "square_0.tmp_0": L.square(x),
        "sqrt_0.tmp_0": L.sqrt(L.abs(x)),
        "one_hot_0.tmp_0": L.one_hot(label, 3),
        "huber_loss_0.tmp_1": L.huber_loss(x, hidden, 1.0),
        "unsqueeze2_0.tmp_0": L.unsqueeze(x, [1]),
        "tower.tmp_0": L.elementwise_sub(x, hidden, name="tower"),
    }


@pytest.mark.parametrize("within_guard", [False, True])
def test_layers_without_parameters_count_their_own_kind_alone(within_guard: bool) -> None:
    exe, scope, main, startup = fluid.Executor(), fluid.Scope(), fluid.Program(), fluid.Program()
    with fluid.unique_name.guard() if within_guard else nullcontext(), fluid.program_guard(main, startup):
        wanted = small_layers()
    exe.run(startup, scope=scope)
    feed = {name: FEED[name] for name in ("x", "y", "label")}
    found = exe.run(main, feed, [*wanted, *wanted.values()], scope=scope)
    for name, one, other in zip(wanted, found, found[len(wanted) :], strict=False):
        assert np.array_equal(one, other), name
        assert main.global_block().var(name) is wanted[name], name


def test_operators_of_python_and_torch_have_no_names_of_layers() -> None:
    main, startup, exe = fluid.Program(), fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, startup):
        x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 3])
        made = [x * x, x**2, x.sum(), x.mean(), x.exp(), torch.relu(x), x.softmax(1), torch.dropout(x, 0.5, train=True)]
        wanted = {
            "mul_0.tmp_0": L.mul(L.transpose(y, [1, 0]), x),
            "pow_0.tmp_0": L.pow(x, 3.0),
            "mean_0.tmp_0": L.mean(y),
            "exp_0.tmp_0": L.exp(y),
            "relu_0.tmp_0": L.relu(y),
            "softmax_0.tmp_0": L.softmax(y),
            "dropout_0.tmp_0": L.dropout(y, 0.5),
            "dropout_1.tmp_0": L.dropout(y, 0.5, dropout_implementation="upscale_in_train"),
        }
    exe.run(startup)
    feed = {"x": FEED["x"][:2], "y": FEED["y"]}
    names = [v.name for v in made]
    assert not set(names) & set(wanted)
    found = exe.run(main, feed, [*wanted, *names, *wanted.values(), *made])
    for name, one, other in zip([*wanted, *names], found, found[len(found) // 2 :], strict=False):
        assert np.array_equal(one, other), name


def test_dropout_has_the_name_of_what_it_returns() -> None:
    main, exe = fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        kept = L.dropout(fluid.data("x", [None, 4]), 0.75)
    by_name, by_variable = exe.run(main, {"x": np.ones((8, 4), "float32")}, ["dropout_0.tmp_0", kept])
    assert np.array_equal(by_name, by_variable)
    assert set(np.unique(by_name)) <= {0.0, 1.0}  # downgrade_in_infer scales at rest alone


@pytest.mark.parametrize("name", ["huber_loss_0.tmp_0", "smooth_l1_loss_0.tmp_0", "elementwise_add_0.tmp_0"])
def test_a_temporary_that_is_no_variable_here_is_refused(name: str) -> None:
    main, exe = fluid.Program(), fluid.Executor()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, 4])
        L.huber_loss(x, x * 2.0, 1.0)
        L.smooth_l1(x, x * 2.0)
        added = L.elementwise_add(x, x, -1, "tanh")  # act by position
    by_name, by_variable = exe.run(main, {"x": FEED["x"]}, ["elementwise_add_0.tmp_1", added])
    assert np.array_equal(by_name, by_variable)
    with pytest.raises(FetchError):
        exe.run(main, {"x": FEED["x"]}, [name])


def test_a_step_within_a_layer_has_its_name_and_another_has_none() -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        out = L.fc(fluid.data("x", [None, 4]), 4, act="relu")
    exe.run(startup, scope=scope)
    both_signs = np.concatenate([FEED["x"], -FEED["x"]])  # else all may be positive, by chance
    before, after = exe.run(main, {"x": both_signs}, ["fc_0.tmp_1", out], scope=scope)
    assert before.min() < 0
    assert np.array_equal(np.maximum(before, 0), after)
    with pytest.raises(FetchError, match=r"'fc_0\.tmp_3' is not in the program"):
        exe.run(main, {"x": FEED["x"]}, ["fc_0.tmp_3"], scope=scope)


def test_a_result_of_two_layers_of_one_name_is_refused() -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 3])
        towers = [L.fc(one, 2, name="tower", param_attr=name) for one, name in ((x, "of_x"), (y, "of_y"))]
    feed = {name: FEED[name] for name in ("x", "y")}
    exe.run(startup, scope=scope)
    with pytest.raises(FetchError, match=r"'tower\.tmp_1': several layers were given one name="):
        exe.run(main, feed, ["tower.tmp_1"], scope=scope)
    assert len(exe.run(main, feed, towers, scope=scope)) == 2


def test_a_layer_that_shares_a_name_takes_none_of_the_others() -> None:
    main, startup, exe = fluid.Program(), fluid.Program(), fluid.Executor()
    with fluid.unique_name.guard(), fluid.program_guard(main, startup):
        x = fluid.data("x", [None, 4])
        hidden = L.fc(x, 3, bias_attr=False, name="f")
        L.dropout(hidden, 0.5, name="f")
        image = fluid.data("image", [None, 1, 4, 4])
        L.pool2d(L.conv2d(image, 2, 3, name="c"), 2, name="c")
    exe.run(startup)
    feed = {"x": FEED["x"], "image": FEED["image"]}
    by_name, by_variable = exe.run(main, feed, ["f.tmp_0", hidden])
    assert np.array_equal(by_name, by_variable)
    with pytest.raises(FetchError):
        exe.run(main, feed, ["c.tmp_0"])  # in Fluid the product, which is no variable here; never the pooling


def test_blocks_know_results_by_the_names_of_fluid() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        hidden = L.fc(fluid.data("x", [None, 4]), 4, act="tanh")
        block = main.global_block()
        assert block.has_var("fc_0.tmp_2")
        assert block.var("fc_0.tmp_2") is hidden
        assert not block.has_var("fc_0.tmp_3")
        made = block.create_var(name="fc_0.tmp_2", shape=[1], dtype="float32")
        assert made is not hidden
        assert block.var("fc_0.tmp_2") is made
