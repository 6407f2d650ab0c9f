"""First values of parameters against Fluid's: the same where they are filled, as likely where they are drawn.

The cases are in bench/peers/fluid_fills.py, the numbers in fluid_numbers.json (docs/optimizers.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench.peers import fluid_fills as cases
from bench.peers.fluid_cases import SINGLE, Array
from bench.peers.fluid_numbers import read
from tests.program.fluid_runs import started, value

import penstock as fluid

TABLE = read()


def first_value(make: Any, shape: tuple[int, ...]) -> Array:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        fluid.default_startup_program().random_seed = 1
        fluid.layers.create_parameter(list(shape), "float32", attr=fluid.ParamAttr("p", make))
        _, scope = started()
        return value(scope, "p").numpy()


@pytest.mark.parametrize("name", cases.FILLED)
def test_filled_parameters_equal_fluids(name: str) -> None:
    kind, shape = cases.FILLED[name]
    given = [cases.GIVEN] if kind == "NumpyArrayInitializer" else []
    got = first_value(getattr(fluid.initializer, kind)(*given), shape)
    np.testing.assert_allclose(got.reshape(-1), TABLE["filled"][name]["elements"], rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("name", cases.DRAWS)
def test_drawn_parameters_lie_as_fluids(name: str) -> None:
    case, wanted = cases.DRAWS[name], TABLE["drawn"][name]["shares"]
    shares = case.shares(first_value(getattr(fluid.initializer, case.kind)(**case.arguments), cases.DRAWN))
    np.testing.assert_allclose(shares, wanted, rtol=0, atol=cases.ACROSS)
    # where nothing can lie, nothing does
    assert [share for share, of in zip(shares, wanted, strict=True) if of in (0.0, 1.0)] == [
        of for of in wanted if of in (0.0, 1.0)
    ]
