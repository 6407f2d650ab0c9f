"""The numbers of paddlepaddle 2.6.2 for `fluid_fills`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import static
from paddle.nn import initializer

from bench.peers.fluid_fills import DRAWN, GIVEN, DrawnCase
from bench.peers.paddle_losses import Numbers, listed, started

_FILLS: Mapping[str, Callable[[], Any]] = {
    "Bilinear": initializer.Bilinear,
    "NumpyArrayInitializer": lambda: initializer.Assign(GIVEN),
}


def _started_with(make: Any, shape: tuple[int, ...]) -> Any:
    static.default_startup_program().random_seed = 1
    static.create_parameter(list(shape), "float32", attr=paddle.ParamAttr("p", initializer=make))
    started()
    return np.array(static.global_scope().find_var("p").get_tensor())


def filled(case: tuple[str, tuple[int, ...]]) -> Numbers:
    """The elements of the parameter."""
    return {"elements": listed(_started_with(_FILLS[case[0]](), case[1]))}


def drawn(case: DrawnCase) -> Numbers:
    """The shares of its elements that are less than each edge."""
    make = getattr(initializer, f"{case.kind}Initializer")(**case.arguments)
    return {"shares": case.shares(_started_with(make, DRAWN))}
