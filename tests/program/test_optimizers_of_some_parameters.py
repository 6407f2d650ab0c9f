"""Optimizers that are made with parameter_list train these parameters alone."""

from __future__ import annotations

import inspect
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


# How many arguments Fluid 1.8 has before parameter_list (python/paddle/fluid/optimizer.py).
PLACES = {
    "SGD": 1, "Momentum": 2, "LarsMomentum": 4, "Dpsgd": 4, "DGCMomentumOptimizer": 5, "Adagrad": 2, "Adadelta": 3,
    "DecayedAdagrad": 3, "RMSProp": 5, "Ftrl": 4, "Adam": 4, "Adamax": 4, "Lamb": 5,
}  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
def test_a_list_stands_where_fluid_has_it(kind: str) -> None:
    required = {"learning_rate": 0.1, "momentum": 0.9, "rampup_begin_step": 1}
    names = list(inspect.signature(getattr(O, kind)).parameters.values())[: PLACES[kind]]
    before = [required.get(one.name, one.default) for one in names]
    assert trained(lambda weights: getattr(O, kind)(*before, [weights[1]])) == ["b"]


def test_arguments_of_older_releases_are_taken_in_their_places() -> None:
    decayed, sped = O.SGD(0.1, fluid.regularizer.L2Decay(0.5)), O.Momentum(0.1, 0.9, True)
    assert isinstance(decayed._regularization, type(fluid.regularizer.L2Decay(0.5)))
    assert sped._nesterov
    assert decayed._parameter_list is sped._parameter_list is None
    both = O.Momentum(0.1, 0.9, True, fluid.regularizer.L2Decay(0.5))
    assert both._nesterov and isinstance(both._regularization, fluid.regularizer.L2Decay)


@pytest.mark.parametrize("given", ["a", 3, True])
def test_what_is_no_list_of_parameters_is_refused(given: Any) -> None:
    with pytest.raises(
        ProgramError, match=rf"SGDOptimizer: parameter_list is {given!r}; expected a list of parameters"
    ):
        O.SGD(0.1, given)
