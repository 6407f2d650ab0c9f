"""Small models for the transpiler's tests, and their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import penstock as fluid

SERVERS = "10.0.0.1:6170,10.0.0.2:6170"
ENDPOINTS = SERVERS.split(",")
ROWS = 2000  # of the table: 2000 x 16 elements are cut in two


@dataclass
class Recorded:
    """A minimised program. `table`: its parameter with sparse gradients."""

    main: fluid.Program
    startup: fluid.Program
    loss: str
    table: str = "table"


def sgd() -> Any:
    """Plain SGD."""
    return fluid.optimizer.SGD(0.01)


def tower(
    optimizer: Callable[[], Any] = sgd,
    *,
    is_sparse: bool = True,
    is_distributed: bool = False,
    clip: Any = None,
    width: int = 200,
    ragged: bool = False,
    **ids_said: Any,
) -> Recorded:
    """Rows of a table and a dense layer of 128 x `width`, added up to one output; the mean square error is minimised.

    `clip`: of the dense layer's weight. `ragged`: as many ids a row as there are, their rows added up. `ids_said`: more
    settings of the embedding.
    """
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 7
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=int(ragged))
        x = fluid.layers.data("x", [128])
        y = fluid.layers.data("y", [1])
        rows = fluid.layers.embedding(
            ids, [ROWS, 16], is_sparse=is_sparse, is_distributed=is_distributed, param_attr="table", **ids_said
        )
        rows = fluid.layers.sequence_pool(rows, "sum") if ragged else rows
        hidden = fluid.layers.fc(x, width, act="tanh", param_attr=fluid.ParamAttr("w", gradient_clip=clip))
        total = fluid.layers.fc(hidden, 16, param_attr="out") + rows
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(total, 1), y))
        optimizer().minimize(loss)
    return Recorded(main, startup, loss.name)


def batch(size: int = 8, seed: int = 0) -> dict[str, Any]:
    """A feed of `tower`. Ids repeat."""
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, ROWS // 50, (size, 1)) * 50,
        "x": rng.standard_normal((size, 128)).astype("float32"),
        "y": rng.standard_normal((size, 1)).astype("float32"),
    }


def transpiled(recorded: Recorded, trainer: int = 0, trainers: int = 1, **settings: Any) -> fluid.DistributeTranspiler:
    """Distribute over two servers. `settings`: fields of the config, but `sync_mode` and `slice_var_up`."""
    arguments = {k: settings.pop(k) for k in ("sync_mode", "slice_var_up") if k in settings}
    config = fluid.DistributeTranspilerConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    made = fluid.DistributeTranspiler(config)
    made.transpile(trainer, recorded.main, SERVERS, trainers, startup_program=recorded.startup, **arguments)
    return made


def text_of(program: fluid.Program) -> str:
    """The text form without the lines of this file."""
    return re.sub(r' at="[^"]*"', "", str(program))


def types(program: fluid.Program) -> list[str]:
    """The operators' types, without namespace and overload."""
    return [op.type.split(".")[1] for op in program.operators]
