"""Names of results that scripts fetch, and devices that they ask for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ArgumentError


def test_cosines_have_the_names_of_fluid() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x, y = (fluid.layers.data(name, [3], dtype="float64") for name in "xy")
        first, second = fluid.layers.cos_sim(x, y), fluid.layers.cos_sim(y, y)
        fluid.layers.reduce_sum(first * second)
    assert [first.name, second.name] == ["cos_sim_0.tmp_0", "cos_sim_1.tmp_0"]
    assert main.global_block().var("cos_sim_0.tmp_0") is first
    values = np.array([[1.0, 2.0, 2.0]]), np.array([[2.0, 1.0, -2.0]])
    fetches = ["cos_sim_0.tmp_0", "cos_sim_1.tmp_0"]
    found = fluid.Executor().run(main, dict(zip("xy", values, strict=True)), fetches)
    assert [one.tolist() for one in found] == [[[0.0]], [[1.0]]]


def test_cosines_of_tensors_and_under_names_that_begin_anew() -> None:
    one = torch.tensor([[1.0, 0.0]])
    assert fluid.layers.cos_sim(one, one).tolist() == [[1.0]]
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.layers.data("x", [3])
        made = []
        for _ in range(2):
            with fluid.unique_name.guard():
                made.append(fluid.layers.cos_sim(x, x).name)
    assert made == ["cos_sim_0.tmp_0", "cos_sim_1.tmp_0"]


def test_a_device_that_is_asked_for_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()), caplog.at_level(logging.WARNING):
        x = fluid.layers.data("x", [1])
        with fluid.device_guard("gpu:0"):
            y = x * 2.0
        with fluid.device_guard():
            y = y + 1.0
        with pytest.raises(ArgumentError, match="device is 'tpu'"), fluid.device_guard("tpu"):
            pass
    assert [record.getMessage() for record in caplog.records if "device_guard" in record.getMessage()] == [
        "device_guard('gpu:0') has no effect: every replica runs whole on the device of its place"
    ]
    assert fluid.Executor().run(main, {"x": np.ones((2, 1), "float32")}, [y])[0].tolist() == [[3.0], [3.0]]
