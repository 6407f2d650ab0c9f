"""From an optimizer of torch to Penstock's: SGD, Adam and AdamW with the settings that both have.

A setting that has no counterpart is an error that names it, never ignored. Settings that choose between
implementations of the same arithmetic (foreach, fused, capturable, differentiable) have none to choose here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import SpecError
from penstock.program.optimizers import SGD, Adam, AdamW, Momentum, Optimizer
from penstock.program.training.regularizers import L2Decay

_CHOICES = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_Settings = Mapping[str, Any]


def _sgd(settings: _Settings) -> Optimizer:
    rate, decay = float(settings["lr"]), _decay(settings)
    if settings["momentum"] == 0:
        return SGD(rate, regularization=decay)
    return Momentum(rate, float(settings["momentum"]), bool(settings["nesterov"]), regularization=decay)


def _adam(settings: _Settings) -> Optimizer:
    beta1, beta2 = (float(b) for b in settings["betas"])
    return Adam(float(settings["lr"]), beta1, beta2, float(settings["eps"]), regularization=_decay(settings))


def _adamw(settings: _Settings) -> Optimizer:
    beta1, beta2 = (float(b) for b in settings["betas"])
    return AdamW(float(settings["lr"]), beta1, beta2, float(settings["eps"]), float(settings["weight_decay"]))


def _decay(settings: _Settings) -> L2Decay | None:
    return L2Decay(float(settings["weight_decay"])) if settings["weight_decay"] else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an optimizer of torch is made here. `taken`: settings that `make` takes over; all others must be off."""

    make: Callable[[_Settings], Optimizer]
    taken: frozenset[str]


_ADAM = frozenset({"lr", "betas", "eps", "weight_decay"})
_KINDS: dict[type[torch.optim.Optimizer], _Kind] = {
    torch.optim.SGD: _Kind(_sgd, frozenset({"lr", "momentum", "nesterov", "weight_decay"})),
    torch.optim.Adam: _Kind(_adam, _ADAM),
    torch.optim.AdamW: _Kind(_adamw, _ADAM | {"decoupled_weight_decay"}),
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
    if not (inspect.isclass(kind) and kind in _KINDS):
        raise SpecError(
            f"optimizer is {optimizer!r}; expected an optimizer of penstock.optimizer, or SGD, Adam or AdamW of "
            "torch.optim (an instance, the class, or its name)",
            got=str(optimizer),
        )
    settings = {n: p.default for n, p in inspect.signature(kind).parameters.items() if p.default is not p.empty}
    return _make(kind, settings), None


def _of_instance(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[Optimizer, list[str]]:
    kind = type(optimizer)
    if kind not in _KINDS:
        raise SpecError(
            f"torch.optim.{kind.__name__} has no counterpart here; expected SGD, Adam or AdamW", got=kind.__name__
        )
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


def _make(kind: type[torch.optim.Optimizer], settings: _Settings) -> Optimizer:
    known = _KINDS[kind]
    wrong = {n: v for n, v in settings.items() if n not in _CHOICES | known.taken and v}
    if wrong:
        listed = ", ".join(f"{n}={v!r}" for n, v in wrong.items())
        raise SpecError(
            f"torch's {kind.__name__} has {listed}, which has no counterpart here; "
            "use an optimizer of penstock.optimizer",
            got=listed,
        )
    return known.make(settings)
