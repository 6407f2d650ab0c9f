"""What `while_loop` does to the variables that it begins with: those that others see through them keep their values."""

from __future__ import annotations

import numpy as np

import penstock as fluid
from penstock import layers as L


def test_while_loop_leaves_parameters_and_bases_of_views_alone() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = L.data("x", [2])
        start = L.create_parameter([2], "float32", name="start")
        row = L.reshape(L.scale(x, 1.0), [-1, 2])
        base = L.scale(x, 3.0)
        view = L.reshape(base, [-1, 1, 2])
        i = L.fill_constant([1], "int64", 0)
        _, learned, moved = L.while_loop(
            lambda i, a, b: L.less_than(i, L.fill_constant([1], "int64", 2)),
            lambda i, a, b: [i + 1, a * 2.0, b + 1.0],
            [i, start, view],
        )
        loss = L.mean(row * learned) + L.mean(moved)
        fluid.optimizer.SGD(0.0).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup)
    feed = {"x": np.ones((3, 2), "float32")}
    before, kept, last = exe.run(main, feed=feed, fetch_list=[start, base, moved])
    assert np.array_equal(kept, np.full((3, 2), 3.0, "float32"))
    assert np.array_equal(last.reshape(3, 2), np.full((3, 2), 5.0, "float32"))
    assert np.array_equal(exe.run(main, feed=feed, fetch_list=[start])[0], before)
