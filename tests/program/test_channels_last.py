"""Layers of images whose channels come last give what they give where these come first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import FetchError

L: Any = fluid.layers
IMAGE, VOLUME = ("NCHW", "NHWC", (2, 4, 6, 5)), ("NCDHW", "NDHWC", (2, 4, 3, 6, 5))
CASES: dict[str, tuple[tuple[str, str, tuple[int, ...]], Callable[[Any, str], Any]]] = {
    "conv2d": (IMAGE, lambda x, f: L.conv2d(x, 6, 3, 2, 1, groups=2, act="relu", data_format=f)),
    "conv3d": (VOLUME, lambda x, f: L.conv3d(x, 3, 2, padding="SAME", data_format=f)),
    "conv2d_transpose": (IMAGE, lambda x, f: L.conv2d_transpose(x, 3, filter_size=3, stride=2, data_format=f)),
    "conv3d_transpose": (VOLUME, lambda x, f: L.conv3d_transpose(x, 3, filter_size=2, data_format=f)),
    "pool2d": (IMAGE, lambda x, f: L.pool2d(x, 3, "avg", 2, 1, data_format=f)),
    "pool3d": (VOLUME, lambda x, f: L.pool3d(x, 2, "max", data_format=f)),
    "pool2d of all": (IMAGE, lambda x, f: L.pool2d(x, pool_type="avg", global_pooling=True, data_format=f)),
    "batch_norm": (IMAGE, lambda x, f: L.batch_norm(x, "relu", data_layout=f)),
    "group_norm": (IMAGE, lambda x, f: L.group_norm(x, 2, data_layout=f)),
}


def ran(case: str, layout: str, values: np.ndarray) -> list[np.ndarray]:
    """The layer's result, and the gradients of its input and parameters for the sum of squares."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 5
    with fluid.program_guard(main, startup), fluid.unique_name.guard(), fluid.scope_guard(fluid.Scope()):
        x = fluid.data("x", [None, *values.shape[1:]], "float64")
        x.stop_gradient = False
        made = CASES[case][1](x, layout)
        loss = L.reduce_sum(made * made)
        gradients = fluid.gradients(loss, [x, *main.all_parameters()])
        exe = fluid.Executor()
        exe.run(startup)
        found: list[np.ndarray] = exe.run(main, {"x": values}, [made, *gradients])
    return found


@pytest.mark.parametrize("case", CASES)
def test_channels_may_come_last(case: str) -> None:
    first, last, sizes = CASES[case][0]
    values = np.random.default_rng(len(case)).normal(size=sizes)
    expected, slope, *wanted = ran(case, first, values)
    found, own_slope, *gradients = ran(case, last, np.moveaxis(values, 1, -1))
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(np.moveaxis(own_slope, -1, 1), slope, rtol=1e-9, atol=1e-11)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def test_softmax_with_channels_last_is_over_the_channels() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(fluid.Scope()):
        x = fluid.data("x", [None, 4, 5, 3])
        scores = L.conv2d(x, 2, 1, act="softmax", data_format="NHWC")
        normal = L.batch_norm(x, act="softmax", data_layout="NHWC")
        exe = fluid.Executor()
        exe.run(startup)
        feed = {"x": np.random.default_rng(0).normal(size=[2, 4, 5, 3]).astype("float32")}
        by_name, found, other = exe.run(main, feed, ["conv2d_0.tmp_2", scores, normal])
    np.testing.assert_array_equal(by_name, found)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(other.sum(-1), 1, rtol=1e-5)


def test_a_result_with_channels_last_has_fluid_s_name() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(fluid.Scope()):
        made = L.conv2d(fluid.data("x", [None, 4, 4, 3]), 2, 3, act="relu", data_format="NHWC")
        exe = fluid.Executor()
        exe.run(startup)
        feed = {"x": np.ones([1, 4, 4, 3], "float32")}
        by_name, found = exe.run(main, feed, ["conv2d_0.tmp_2", made])
        np.testing.assert_array_equal(by_name, found)
        with pytest.raises(FetchError):
            exe.run(main, feed, ["conv2d_0.tmp_1"])
