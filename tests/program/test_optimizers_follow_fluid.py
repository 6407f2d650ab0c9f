"""Ten steps of every optimizer, dense and sparse, against Fluid's formulas in numpy (float64).

The network looks up rows of a table, with repetitions, and multiplies their sum; its gradients come from torch. Run by
Executor, and by ParallelExecutor on 2 replicas in both modes: the exchanged gradient is the whole batch's, so all
three meet the same reference. Sums in another order, ten steps: 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.program.optimizer_network import HOWS, UNUSED, Array, batches, network, numpy_of, trained

import penstock as fluid

RATE = 0.05


@dataclass
class Kept:
    """What a reference keeps beside one parameter, and the number of this step (from 1)."""

    arrays: dict[str, Array] = field(default_factory=dict)
    step: int = 0

    def get(self, name: str, like: Array) -> Array:
        return self.arrays.setdefault(name, np.zeros_like(like))


Rule = Callable[[Array, Array, Kept, Any], Array]


def sgd(p: Array, g: Array, kept: Kept, used: Any) -> Array:
    return p - RATE * g


def momentum(nesterov: bool) -> Rule:
    def rule(p: Array, g: Array, kept: Kept, used: Any) -> Array:
        v = kept.get("v", p)
        v[used] = 0.9 * v[used] + g[used]
        return p - RATE * (g + 0.9 * v if nesterov else v)

    return rule


def lars(p: Array, g: Array, kept: Kept, used: Any) -> Array:
    v, norm, of_g = kept.get("v", p), np.linalg.norm(p), np.linalg.norm(g)
    local = RATE * 0.02 * norm / (of_g + 0.1 * norm) if norm > 0 and of_g > 0 else RATE
    v[used] = 0.9 * v[used] + local * (g[used] + 0.1 * p[used])
    return p - v


def adagrad(p: Array, g: Array, kept: Kept, used: Any) -> Array:
    m = kept.get("m", p)
    m += g * g
    return np.asarray(p - RATE * g / (np.sqrt(m) + 1e-6))


def decayed_adagrad(p: Array, g: Array, kept: Kept, used: Any) -> Array:
    m = kept.get("m", p)
    m[used] = 0.8 * m[used] + 0.2 * g[used] ** 2
    return np.asarray(p - RATE * g / (np.sqrt(m) + 1e-6))


def adam(decay: float = 0.0, *, is_corrected: bool = False) -> Rule:
    """`is_corrected`: epsilon is beside the corrected root, as torch has it, not beside the other as Fluid."""

    def rule(p: Array, g: Array, kept: Kept, used: Any) -> Array:
        m, s, t = kept.get("m", p), kept.get("s", p), kept.step
        m[used] = 0.9 * m[used] + 0.1 * g[used]
        s[used] = 0.99 * s[used] + 0.01 * g[used] ** 2
        epsilon = 1e-8 * (np.sqrt(1 - 0.99**t) if is_corrected else 1.0)
        step = RATE * np.sqrt(1 - 0.99**t) / (1 - 0.9**t) * m / (np.sqrt(s) + epsilon)
        return np.asarray(p * (1 - RATE * decay) - step)

    return rule


def adamax(p: Array, g: Array, kept: Kept, used: Any) -> Array:
    m, u = kept.get("m", p), kept.get("u", p)
    m[used] = 0.9 * m[used] + 0.1 * g[used]
    u[used] = np.maximum(np.abs(g[used]), 0.99 * u[used] + 1e-8)
    return np.asarray(p - RATE / (1 - 0.9**kept.step) * m / np.maximum(u, 1e-300))


def adadelta(p: Array, g: Array, kept: Kept, used: Any) -> Array:
    s, u = kept.get("s", p), kept.get("u", p)
    s[used] = 0.9 * s[used] + 0.1 * g[used] ** 2
    change = np.sqrt((u + 1e-6) / (s + 1e-6)) * g
    u[used] = 0.9 * u[used] + 0.1 * change[used] ** 2
    return np.asarray(p - change)


def rmsprop(centered: bool) -> Rule:
    def rule(p: Array, g: Array, kept: Kept, used: Any) -> Array:
        s, a, v = kept.get("s", p), kept.get("a", p), kept.get("v", p)
        s[used] = 0.9 * s[used] + 0.1 * g[used] ** 2
        a[used] = 0.9 * a[used] + 0.1 * g[used]
        spread = s - a * a if centered else s
        v[used] = 0.5 * v[used] + (RATE * g / np.sqrt(spread + 1e-6))[used]
        return p - v

    return rule


def ftrl(power: float) -> Rule:
    def rule(p: Array, g: Array, kept: Kept, used: Any) -> Array:
        n, z = kept.get("n", p), kept.get("z", p)
        before = n**-power
        n += g * g
        z[used] += (g - (n**-power - before) / RATE * p)[used]
        new = (np.sign(z) * 0.01 - z) / np.maximum(n**-power / RATE + 0.2, 1e-300)
        return np.where(np.abs(z) > 0.01, new, 0.0)

    return rule


optimizers: Any = fluid.optimizer
CASES: dict[str, tuple[Callable[[], Any], Rule]] = {
    "sgd": (lambda: optimizers.SGD(RATE), sgd),
    "momentum": (lambda: optimizers.Momentum(RATE, 0.9), momentum(False)),
    "nesterov": (lambda: optimizers.Momentum(RATE, 0.9, use_nesterov=True), momentum(True)),
    "lars": (lambda: optimizers.LarsMomentum(RATE, 0.9, 0.02, 0.1), lars),
    "adagrad": (lambda: optimizers.Adagrad(RATE), adagrad),
    "decayed adagrad": (lambda: optimizers.DecayedAdagrad(RATE, 0.8), decayed_adagrad),
    "adam": (lambda: optimizers.Adam(RATE, 0.9, 0.99), adam()),
    "adamw": (lambda: optimizers.AdamW(RATE, 0.9, 0.99, weight_decay=0.1), adam(0.1, is_corrected=True)),
    "adamax": (lambda: optimizers.Adamax(RATE, 0.9, 0.99), adamax),
    "adadelta": (lambda: optimizers.Adadelta(RATE, rho=0.9), adadelta),
    "rmsprop": (lambda: optimizers.RMSProp(RATE, 0.9, momentum=0.5), rmsprop(False)),
    "rmsprop centered": (lambda: optimizers.RMSProp(RATE, 0.9, momentum=0.5, centered=True), rmsprop(True)),
    "ftrl": (lambda: optimizers.Ftrl(RATE, 0.01, 0.1), ftrl(-0.5)),
    "ftrl of another power": (lambda: optimizers.Ftrl(RATE, 0.01, 0.1, lr_power=-0.7), ftrl(-0.7)),
}


def reference(rule: Rule, before: dict[str, Array], *, is_sparse: bool) -> dict[str, Array]:
    """Train by the rule; a sparse table is updated in the rows of each batch alone."""
    values = {n: torch.from_numpy(v.copy()) for n, v in before.items()}
    kept = {n: Kept() for n in values}
    for feed in batches():
        leaves = {n: v.requires_grad_() for n, v in values.items()}
        out = leaves["table"][torch.from_numpy(feed["ids"])].sum(1) @ leaves["weight"]
        ((out - torch.from_numpy(feed["label"])) ** 2).mean().backward()  # type: ignore[no-untyped-call]  # torch
        for name, leaf in leaves.items():
            used: Any = np.unique(feed["ids"]) if is_sparse and name == "table" else slice(None)
            kept[name].step += 1
            assert leaf.grad is not None
            old = leaf.detach().numpy().copy()
            new = rule(old, leaf.grad.numpy(), kept[name], used)
            old[used] = new[used]
            values[name] = torch.from_numpy(old)
    return {n: v.numpy() for n, v in values.items()}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", CASES)
def test_optimizer_follows_its_formula(monkeypatch: pytest.MonkeyPatch, name: str, is_sparse: bool, how: str) -> None:
    make, rule = CASES[name]
    scope, before = trained(monkeypatch, network(make, is_sparse=is_sparse), how)
    for parameter, wanted in reference(rule, before, is_sparse=is_sparse).items():
        got = numpy_of(scope, parameter)
        assert np.abs(got - before[parameter]).max() > 1e-4, "nothing was learnt"
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9, err_msg=parameter)
        if is_sparse and parameter == "table":
            assert (got[UNUSED] == before[parameter][UNUSED]).all(), "a row that no batch used has moved"
