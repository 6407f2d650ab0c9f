"""What Python and numpy do with numbers works on Variables too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.scope import Scope

FORMS: list[Callable[[Any], Any]] = [
    lambda x: 7 // x,
    lambda x: 7 % x,
    lambda x: +x,
    lambda x: np.float32(2) * x,
    lambda x: x * np.float32(2),
    lambda x: np.int64(3) - x,
    lambda x: torch.clamp(x, max=np.float64(1.5)),
]


@pytest.mark.parametrize("form", FORMS)
def test_an_operator_of_python_gives_what_torch_gives(form: Callable[[Any], Any]) -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        out = form(fluid.layers.data("x", [4]))
    rows = torch.rand(3, 4) + 0.5
    (got,) = fluid.Executor().run(main, {"x": rows}, [out], scope=Scope())
    np.testing.assert_array_equal(got, np.asarray(form(rows)))
    assert Program.parse(str(main)) == main


def test_backward_of_a_variable_points_to_append_backward() -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        loss: Any = fluid.layers.fc(fluid.layers.data("x", [4]), 1).mean()
        with pytest.raises(ProgramError, match=r"test_recorder_python\.py:\d+: .*append_backward"):
            loss.backward()
