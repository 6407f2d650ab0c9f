"""One step of a GRU: `gru_unit`. Source: fluid.layers.gru_unit, gru_unit_op.h (Fluid 1.8)."""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter


def gru_unit(
    input: Any,
    hidden: Any,
    size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    activation: str = "tanh",
    gate_activation: str = "sigmoid",
    origin_mode: bool = False,
) -> tuple[Any, Any, Any]:
    """Return (new state [n, h], reset state [n, h], gates [n, 3 h]: update, reset, candidate).

    Shapes: input [n, size], the projected input, size = 3 h; hidden [n, h]. Parameters, as in Fluid's files: w_0
    [h, 3 h], whose values are [h, 2 h] of update and reset and then [h, h] of the candidate; b_0 [1, 3 h].
    `origin_mode`: h' = u h + (1 - u) candidate; else h' = (1 - u) h + u candidate, as in `dynamic_gru`. The
    activations are sigmoid and tanh whatever is given, as in Fluid.
    """
    h = size // 3
    weights, bias = ParamAttr.of(param_attr), ParamAttr.of(bias_attr)
    if size % 3 or hidden.desc.shape[-1] != h or weights is None:
        raise ProgramError(
            f"{user_line()}: gru_unit(size={size}) needs a state [n, {h}], three times that as size, and a weight; got "
            f"{hidden!r} and param_attr={param_attr!r}",
            variable=hidden.name,
        )
    prefix, dtype = default_main_program().unique("gru_unit"), input.desc.dtype
    with name_scope(prefix):
        whole: Any = create_parameter([h, 3 * h], dtype, weights, prefix=prefix, suffix="w_0")
        flat = whole.reshape([-1])
        if bias is not None:
            input = input + create_parameter([1, 3 * h], dtype, bias, Constant(0.0), prefix=prefix, suffix="b_0")
        gates = torch.sigmoid(input[:, : 2 * h] + torch.matmul(hidden, flat[: 2 * h * h].reshape([h, 2 * h])))
        update, reset = gates[:, :h], gates[:, h:]
        kept = reset * hidden
        candidate = torch.tanh(input[:, 2 * h :] + torch.matmul(kept, flat[2 * h * h :].reshape([h, h])))
        old, new = (update, 1.0 - update) if origin_mode else (1.0 - update, update)
        return old * hidden + new * candidate, kept, torch.cat([gates, candidate], 1)
