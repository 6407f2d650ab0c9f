"""Optimizers that are made with parameter_list train these parameters alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import penstock as fluid
from penstock.errors import ProgramError

O = fluid.optimizer  # noqa: E741 - the letter, of which many lines are
MAKERS: Mapping[str, Callable[..., Any]] = {
    "SGD": lambda **given: O.SGD(0.1, **given),
    "Momentum": lambda **given: O.Momentum(0.1, 0.9, **given),
    "LarsMomentum": lambda **given: O.LarsMomentum(0.1, 0.9, **given),
    "Dpsgd": lambda **given: O.Dpsgd(0.1, **given),
    "DGC": lambda **given: O.DGCMomentumOptimizer(0.1, 0.9, 1, **given),
    "Adagrad": lambda **given: O.Adagrad(0.1, **given),
    "DecayedAdagrad": lambda **given: O.DecayedAdagrad(0.1, **given),
    "Adadelta": lambda **given: O.Adadelta(0.1, **given),
    "RMSProp": lambda **given: O.RMSProp(0.1, **given),
    "Ftrl": lambda **given: O.Ftrl(0.1, **given),
    "Adam": lambda **given: O.Adam(0.1, **given),
    "AdamW": lambda **given: O.AdamW(0.1, **given),
    "Adamax": lambda **given: O.Adamax(0.1, **given),
    "Lamb": lambda **given: O.Lamb(0.1, **given),
    "Recompute": lambda **given: recompute(O.SGD(0.1, **given)),
    "GradientMerge": lambda **given: O.GradientMergeOptimizer(O.SGD(0.1, **given), 2),
}


def recompute(optimizer: Any) -> Any:
    found = O.RecomputeOptimizer(optimizer)
    found._set_checkpoints([])
    return found


def trained(make: Callable[[Sequence[Any]], Any], **given: Any) -> list[str]:
    """Return what minimize trains of a network with the weights a, b and c."""
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 3])
        for name in ("a", "b", "c"):
            x = fluid.layers.fc(x, 3, param_attr=name, bias_attr=False)
        weights = fluid.default_main_program().all_parameters()
        _, pairs = make(weights).minimize(fluid.layers.mean(x), **given)
        return sorted(param.name for param, _ in pairs)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_parameters_of_an_optimizer_are_trained_alone(kind: str) -> None:
    assert trained(lambda weights: MAKERS[kind](parameter_list=[weights[0], "c"])) == ["a", "c"]


def test_minimize_s_own_list_comes_first() -> None:
    def make(_: Sequence[Any]) -> Any:
        return O.SGD(0.1, parameter_list=iter(["a"]))

    assert trained(make) == ["a"]
    assert trained(make, parameter_list=["b"]) == ["b"]
    assert trained(lambda weights: O.SGD(0.1), no_grad_set={"b"}) == ["a", "c"]


def test_a_name_that_the_program_lacks_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"parameter_list: variable 'bb' is not .* Did you mean 'b'"):
        trained(lambda weights: O.SGD(0.1, parameter_list=["a", "bb"]))
