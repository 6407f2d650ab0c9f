"""The check of an installation: it trains on one replica and on two, and fails if they disagree."""

from __future__ import annotations

import pytest

import penstock as fluid
from penstock import install_check
from penstock.errors import Bug


def test_the_check_trains_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    fluid.install_check.run_check()
    assert capsys.readouterr().out.startswith("Penstock works: 3 steps on CPUPlace")


def test_replicas_that_disagree_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_check, "_trained", lambda place, num: [1.0, 1.0 / num])
    with pytest.raises(Bug, match=r"has the losses \[1.0, 1.0\], two on the processor \[1.0, 0.5\]"):
        fluid.install_check.run_check()


def test_half_precision_is_one_of_gpus() -> None:
    place = fluid.core.Place()
    place.set_place(fluid.CPUPlace())
    assert not fluid.core.is_float16_supported(place)
    assert not fluid.core.is_float16_supported(fluid.CPUPlace())
    assert fluid.core.is_float16_supported(fluid.CUDAPlace(0)) == fluid.is_compiled_with_cuda()


def test_variables_that_outlive_a_run_are_listed() -> None:
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        fluid.layers.fc(fluid.data("x", [None, 2]), 1, param_attr="w", bias_attr=False)
        fluid.layers.create_global_var([1], 0.0, "float32", persistable=True, name="count")
    assert [one.name for one in fluid.io.get_program_parameter(main)] == ["w"]
    assert {one.name for one in fluid.io.get_program_persistable_vars(main)} == {"w", "count"}
