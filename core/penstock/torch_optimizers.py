"""From an optimizer of torch to Penstock's: SGD and Adam with the settings that both have.

A setting that has no counterpart is an error that names it, never ignored. Settings that choose between
implementations of the same arithmetic (foreach, fused, capturable, differentiable) have none to choose here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import SpecError
from penstock.program.optimizers import SGD, Adam, Optimizer

_ARITHMETIC_ALIKE = {"params", "foreach", "fused", "capturable", "differentiable", "param_names"}
_MUST_BE_OFF = {"momentum", "dampening", "weight_decay", "nesterov", "amsgrad", "maximize", "decoupled_weight_decay"}
_USED: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.SGD: {"lr"},
    torch.optim.Adam: {"lr", "betas", "eps"},
}


def mapped(optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[Optimizer, list[str] | None]:
    """Return (Penstock optimizer, paths of the parameters that it trains; None for all).

    `optimizer`: Penstock's own, or torch's as an instance, a class or a name. Raises SpecError naming what has no
    counterpart.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer, None
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_instance(optimizer, parameters)
    kind = getattr(torch.optim, optimizer, None) if isinstance(optimizer, str) else optimizer
    if not (inspect.isclass(kind) and kind in _USED):
        raise SpecError(
            f"optimizer is {optimizer!r}; expected an optimizer of penstock.optimizer, or SGD or Adam of torch.optim "
            "(an instance, the class, or its name)",
            got=str(optimizer),
        )
    settings = {n: p.default for n, p in inspect.signature(kind).parameters.items() if p.default is not p.empty}
    return _make(kind, settings), None


def _of_instance(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[Optimizer, list[str]]:
    kind = type(optimizer)
    if kind not in _USED:
        raise SpecError(f"torch.optim.{kind.__name__} has no counterpart here; expected SGD or Adam", got=kind.__name__)
    if optimizer.state:
        raise SpecError(
            f"the {kind.__name__} of torch has trained already, and its state is not taken over; pass one that has not"
        )
    first, *rest = optimizer.param_groups
    for number, group in enumerate(rest, 1):
        other = sorted(k for k in first if k not in ("params", "param_names") and group.get(k) != first[k])
        if other:
            raise SpecError(
                f"parameter group {number} of torch's {kind.__name__} differs from group 0 in {other}; expected "
                "the same settings for all parameters"
            )
    paths = {id(p): path for path, p in parameters.items()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in paths for p in trained):
        raise SpecError(f"torch's {kind.__name__} trains a parameter that is none of the module's")
    return _make(kind, first), [paths[id(p)] for p in trained]


def _make(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> Optimizer:
    on = {n: v for n, v in settings.items() if n in _MUST_BE_OFF and v}
    unknown = {n: v for n, v in settings.items() if n not in _MUST_BE_OFF | _ARITHMETIC_ALIKE | _USED[kind] and v}
    wrong = {**on, **unknown}
    if wrong:
        listed = ", ".join(f"{n}={v!r}" for n, v in wrong.items())
        raise SpecError(
            f"torch's {kind.__name__} has {listed}, which has no counterpart here; "
            "use an optimizer of penstock.optimizer",
            got=listed,
        )
    if kind is torch.optim.SGD:
        return SGD(learning_rate=float(settings["lr"]))
    beta1, beta2 = (float(b) for b in settings["betas"])
    return Adam(learning_rate=float(settings["lr"]), beta1=beta1, beta2=beta2, epsilon=float(settings["eps"]))
