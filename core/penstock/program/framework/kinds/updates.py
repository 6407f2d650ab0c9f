"""Kinds that update a parameter and its state in place, by the rules of the optimizers.

A rate and the powers of betas are variables of one element. A sparse gradient is refused.
Sources: the operators of paddle/fluid/operators/optimizers (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.framework.kinds.call import REQUIRED, Call, Kind
from penstock.program.optimizers.adaptive import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    DecayedAdagradOptimizer,
    FtrlOptimizer,
    RMSPropOptimizer,
)
from penstock.program.optimizers.base import Optimizer
from penstock.program.optimizers.momentum import LarsMomentumOptimizer, MomentumOptimizer, SGDOptimizer
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, recording_modes

Rule = Callable[[Call, dict[str, torch.Tensor]], None]


def _update(
    rule: Rule, states: Mapping[str, str], attrs: Mapping[str, Any], *, reads: str = "", writes: str = ""
) -> Kind:
    """Return the kind of an update.

    `states`: slots of the inputs that it changes beside Param ("MeanGrad?" may be absent), with those of the outputs,
    which are the same variables; `reads`: further inputs; `writes`: those of them whose next values are outputs.
    """
    changed = {"Param": "ParamOut", **states}

    def make(call: Call) -> Any:
        slots = [slot.rstrip("?") for slot in changed if not slot.endswith("?") or call.optional(slot[:-1]) is not None]
        for slot in slots:
            _expect_in_place(call, slot, changed.get(slot) or changed[f"{slot}?"])
        own = {slot: call.one(slot).fake for slot in (*slots, *reads.split(), "LearningRate")}
        own["Grad"] = _gradient(call)
        with torch.no_grad(), recording_modes(recording_of(call.one("Param").program)):
            rule(call, {**own, "LearningRate": _number(own["LearningRate"])})
        return *(call.optional(slot.rstrip("?")) for slot in changed), *(_moved(call, slot) for slot in writes.split())

    inputs = " ".join(["Param Grad LearningRate", *states, reads]).strip()
    outputs = [out + "?" * slot.endswith("?") for slot, out in changed.items()]
    return Kind(make, inputs, " ".join([*outputs, *(f"{slot}Out?" for slot in writes.split())]), dict(attrs), True)


def _gradient(call: Call) -> torch.Tensor:
    gradient = call.one("Grad")
    if not isinstance(gradient, Variable):
        raise ProgramError(
            f"{user_line()}: operator {call.type!r} is given the sparse gradient of {call.one('Param').name!r}. Use "
            "is_sparse=False, or an optimizer of fluid.optimizer"
        )
    found: torch.Tensor = gradient.fake
    return found


def _number(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 0 else x.reshape(())


def _expect_in_place(call: Call, slot: str, out: str) -> None:
    name, given = call.one(slot).name, call.outputs.get(out) or ()
    if not given or given[0].name != name:
        raise ProgramError(
            f"{user_line()}: operator {call.type!r} updates {slot} in place, so its output {out} is {name!r}, too; got "
            f"{given[0].name if given else None!r}"
        )


def _moved(call: Call, slot: str) -> Any:
    """The next power of a beta; None where the call has no output for it."""
    if not call.outputs.get(f"{slot}Out"):
        return None
    return call.one(slot) * float(call["beta1" if slot == "Beta1Pow" else "beta2"])


def _by(make: Callable[[Call], Optimizer], **states: str) -> Rule:
    """The rule of an optimizer; `states`: its names of the slots."""

    def rule(call: Call, own: dict[str, torch.Tensor]) -> None:
        kept = {name: own[slot] for name, slot in states.items() if slot in own}
        make(call)._rule(own["Param"], own["Grad"], own["LearningRate"], kept)

    return rule


def _lars(call: Call, own: dict[str, torch.Tensor]) -> None:
    decay = call["lars_weight_decay"]
    decay = decay[0] if isinstance(decay, (list, tuple)) else decay
    optimizer = LarsMomentumOptimizer(0.0, call["mu"], call["lars_coeff"], decay)
    p, g = own["Param"], own["Grad"]
    local = optimizer._local(p.square().sum().sqrt(), g.square().sum().sqrt(), own["LearningRate"])
    optimizer._rule(p, g, local, {"velocity": own["Velocity"]})


def _rmsprop(call: Call) -> Optimizer:
    if call["centered"]:
        call.one("MeanGrad")
    return RMSPropOptimizer(0.0, call["decay"], call["epsilon"], call["momentum"], call["centered"])


def _moments(call: Call, own: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second, g = own["Moment1"], own["Moment2"], own["Grad"]
    first.mul_(call["beta1"]).add_(g, alpha=1.0 - call["beta1"])
    second.mul_(call["beta2"]).addcmul_(g, g, value=1.0 - call["beta2"])
    return first, second


def _left(power: torch.Tensor) -> torch.Tensor:
    return 1.0 - _number(power)


def _adam(call: Call, own: dict[str, torch.Tensor]) -> None:
    first, second = _moments(call, own)
    rate = own["LearningRate"] * _left(own["Beta2Pow"]).sqrt() / _left(own["Beta1Pow"])
    own["Param"].sub_(first / (second.sqrt() + call["epsilon"]) * rate)


def _adamax(call: Call, own: dict[str, torch.Tensor]) -> None:
    moment, norm, g = own["Moment"], own["InfNorm"], own["Grad"]
    moment.mul_(call["beta1"]).add_(g, alpha=1.0 - call["beta1"])
    norm.copy_(torch.maximum(g.abs(), norm * call["beta2"] + call["epsilon"]))
    own["Param"].sub_(moment / norm * (own["LearningRate"] / _left(own["Beta1Pow"])))


def _lamb(call: Call, own: dict[str, torch.Tensor]) -> None:
    first, second = _moments(call, own)
    p = own["Param"]
    change = first / (second.sqrt() + call["epsilon"]) + p * call["weight_decay"]
    norm, of_change = p.square().sum().sqrt(), change.square().sum().sqrt()
    ratio = torch.where((norm > 0) & (of_change > 0), norm / of_change, torch.ones_like(norm))
    p.sub_(change * (ratio * own["LearningRate"]))


_BETAS = {"beta1": 0.9, "beta2": 0.999}
_TWO = {"Moment1": "Moment1Out", "Moment2": "Moment2Out"}
_POWERS = "Beta1Pow Beta2Pow"

UPDATES: dict[str, Kind] = {
    "sgd": _update(_by(lambda call: SGDOptimizer(0.0)), {}, {}),
    "momentum": _update(
        _by(lambda call: MomentumOptimizer(0.0, call["mu"], use_nesterov=call["use_nesterov"]), velocity="Velocity"),
        {"Velocity": "VelocityOut"}, {"mu": REQUIRED, "use_nesterov": False},
    ),
    "lars_momentum": _update(_lars, {"Velocity": "VelocityOut"}, {
        "mu": REQUIRED, "lars_coeff": 0.001, "lars_weight_decay": 0.0005,
    }),
    "adagrad": _update(_by(lambda call: AdagradOptimizer(0.0, call["epsilon"]), moment="Moment"),
                       {"Moment": "MomentOut"}, {"epsilon": 1e-6}),
    "decayed_adagrad": _update(
        _by(lambda call: DecayedAdagradOptimizer(0.0, call["decay"], call["epsilon"]), moment="Moment"),
        {"Moment": "MomentOut"}, {"decay": 0.95, "epsilon": 1e-6},
    ),
    "adadelta": _update(
        _by(lambda call: AdadeltaOptimizer(0.0, call["epsilon"], call["rho"]), avg_squared_grad="AvgSquaredGrad",
            avg_squared_update="AvgSquaredUpdate"),
        {"AvgSquaredGrad": "AvgSquaredGradOut", "AvgSquaredUpdate": "AvgSquaredUpdateOut"},
        {"rho": 0.95, "epsilon": 1e-6},
    ),
    "rmsprop": _update(
        _by(
            _rmsprop, mean_square="MeanSquare", velocity="Moment", mean_grad="MeanGrad",
        ),
        {"MeanSquare": "MeanSquareOut", "MeanGrad?": "MeanGradOut", "Moment": "MomentOut"},
        {"decay": 0.9, "epsilon": 1e-10, "momentum": 0.0, "centered": False},
    ),
    "ftrl": _update(
        _by(lambda call: FtrlOptimizer(0.0, call["l1"], call["l2"], call["lr_power"]), squared="SquaredAccumulator",
            linear="LinearAccumulator"),
        {"SquaredAccumulator": "SquaredAccumOut", "LinearAccumulator": "LinearAccumOut"},
        {"l1": 0.0, "l2": 0.0, "lr_power": -0.5},
    ),
    "adam": _update(_adam, _TWO, {**_BETAS, "epsilon": 1e-8}, reads=_POWERS, writes=_POWERS),
    "lamb": _update(_lamb, _TWO, {**_BETAS, "epsilon": 1e-6, "weight_decay": REQUIRED}, reads=_POWERS, writes=_POWERS),
    "adamax": _update(_adamax, {"Moment": "MomentOut", "InfNorm": "InfNormOut"}, {**_BETAS, "epsilon": 1e-8},
                      reads="Beta1Pow"),
}  # fmt: skip
