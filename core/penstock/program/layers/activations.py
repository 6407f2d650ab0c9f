"""Activations, under Fluid 1.8's names and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter


def relu(x: Any, name: str | None = None) -> Any:
    """Return max(x, 0)."""
    return torch.relu(x)


def sigmoid(x: Any, name: str | None = None) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def tanh(x: Any, name: str | None = None) -> Any:
    """Return the hyperbolic tangent."""
    return torch.tanh(x)


def softmax(input: Any, use_cudnn: bool = False, name: str | None = None, axis: int = -1) -> Any:
    """Return the softmax along `axis`."""
    return F.softmax(input, axis)


def leaky_relu(x: Any, alpha: float = 0.02, name: str | None = None) -> Any:
    """Return x where x > 0, else alpha * x."""
    return F.leaky_relu(x, alpha)


def elu(x: Any, alpha: float = 1.0, name: str | None = None) -> Any:
    """Return x where x > 0, else alpha * (exp(x) - 1)."""
    return F.elu(x, alpha)


def gelu(x: Any, approximate: bool = False) -> Any:
    """Return x * P(N(0, 1) <= x); `approximate`: by tanh."""
    return F.gelu(x, approximate="tanh" if approximate else "none")


def swish(x: Any, beta: float = 1.0, name: str | None = None) -> Any:
    """Return x * sigmoid(beta * x)."""
    return F.silu(x) if beta == 1.0 else x * torch.sigmoid(x * beta)


def hard_sigmoid(x: Any, slope: float = 0.2, offset: float = 0.5, name: str | None = None) -> Any:
    """Return min(max(slope * x + offset, 0), 1). The gradient is 0 at the bounds, too."""
    return F.hardtanh(x * slope + offset, 0.0, 1.0)


def prelu(x: Any, mode: str, param_attr: Any = None, name: str | None = None) -> Any:
    """Return x where x > 0, else alpha * x, with a trained alpha that starts at 0.25.

    `mode`: "all" (one alpha), "channel" (one for each channel, dimension 1), "element" (one for each element of a row).
    """
    prefix = name or default_main_program().unique("prelu")
    sizes = _prelu_sizes(x, mode, prefix)
    attr = ParamAttr.of(param_attr) or ParamAttr()
    with name_scope(prefix):
        alpha = create_parameter(sizes, x.desc.dtype, attr, Constant(0.25), prefix=prefix, suffix="w_0")
        return torch.where(x > 0, x, x * alpha)


def _prelu_sizes(x: Any, mode: str, prefix: str) -> list[int]:
    if mode == "all":
        return [1]
    if mode not in ("channel", "element"):
        raise ProgramError(f"{user_line()}: {prefix}: prelu's mode is {mode!r}; expected 'all', 'channel' or 'element'")
    sizes = x.desc.shape[1:2] if mode == "channel" else x.desc.shape[1:]
    if not sizes or not all(isinstance(d, int) for d in sizes):
        raise ProgramError(
            f"{user_line()}: {prefix}: prelu(mode={mode!r}) needs known sizes after the batch; {x.name!r} has {x!r}"
        )
    return [1, *sizes, *([1] * (x.ndim - 2) if mode == "channel" else [])]


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "relu": relu, "sigmoid": sigmoid, "tanh": tanh, "softmax": softmax, "leaky_relu": leaky_relu, "elu": elu,
    "gelu": gelu, "swish": swish, "hard_sigmoid": hard_sigmoid, "exp": torch.exp, "sqrt": torch.sqrt,
    "abs": torch.abs, "square": torch.square,
}  # fmt: skip


def activate(x: Any, act: str | None) -> Any:
    """Return the activation called `act` of x; x itself for None. Raises ProgramError for an unknown name."""
    if act is None:
        return x
    if act not in ACTIVATIONS:
        raise ProgramError(f"{user_line()}: activation {act!r} is unknown; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act](x)
