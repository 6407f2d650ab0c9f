"""Fluid's names of persistable variables, and Penstock's.

Parameters have the same names (`fc_0.w_0`). What differs: batch-norm's statistics (`batch_norm_0.w_1`, here
`batch_norm_0.mean`), the state of optimizers (`fc_0.w_0_moment1_0`, here `adam_0.moment1.fc_0.w_0`), the learning rates
(`learning_rate_0` of the first optimizer), and how Adam counts: Fluid keeps beta1 ** (t + 1) and beta2 ** (t + 1) for
each parameter, Penstock the number of updates t for all of them. Pure: names in, names out; no files, no tensors but
those numbers.

Source: Optimizer._add_accumulator and layers.batch_norm (Fluid 1.8).
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import UserError

_STATISTICS = {".mean": ".w_1", ".variance": ".w_2"}
_ACCUMULATORS = {
    "moment1": "moment1", "moment2": "moment2", "velocity": "velocity", "moment": "moment", "inf_norm": "inf_norm",
    "avg_squared_grad": "_avg_squared_grad", "avg_squared_update": "_avg_squared_update", "mean_square": "mean_square",
    "mean_grad": "mean_grad", "squared": "squared", "linear": "linear",
}  # fmt: skip
_POWERS = ("beta1_pow_acc", "beta2_pow_acc")
_KIND_OF_KEYS = (
    ({"moment1", "moment2"}, "adam"), ({"moment", "inf_norm"}, "adamax"), ({"mean_square"}, "rmsprop"),
    ({"avg_squared_grad"}, "adadelta"), ({"squared"}, "ftrl"), ({"velocity"}, "momentum"), ({"moment"}, "adagrad"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class State:
    """A variable `<optimizer>.<key>.<parameter>` of Penstock."""

    optimizer: str
    key: str
    parameter: str

    def fluid_keys(self) -> tuple[str, ...]:
        """Return what Fluid calls the key; RMSProp's velocity is a momentum there."""
        renamed = _ACCUMULATORS[self.key]
        return (renamed, "momentum") if self.key == "velocity" else (renamed,)


def state_of(name: str, names: Iterable[str]) -> State | None:
    """Return what a variable is to an optimizer, if one of the other `names` is its parameter."""
    for parameter in names:
        if name.endswith(f".{parameter}"):
            optimizer, _, key = name[: -len(parameter) - 1].rpartition(".")
            if optimizer and key in _ACCUMULATORS:
                return State(optimizer, key, parameter)
    return None


def statistic(name: str, names: Container[str]) -> str | None:
    """Return Fluid's name of a batch-norm's statistic, if it is one by its name.

    Fluid counts a layer's weights: where the scale has a name of its own, the mean is the first one.
    """
    for (end, weight), first in zip(_STATISTICS.items(), (".w_0", ".w_1"), strict=True):
        if name.endswith(end):
            stem = name[: -len(end)]
            return stem + (weight if f"{stem}.w_0" in names else first)
    return None


def accumulator(state: State, stored: Iterable[str]) -> str | None:
    """Return which of Fluid's `stored` names is a state: the one with the lowest number, or of a named optimizer."""
    keys = "|".join(map(re.escape, state.fluid_keys()))
    owner = f"(?:{re.escape(state.optimizer)}_)?"
    pattern = re.compile(rf"{re.escape(state.parameter)}_{owner}(?:{keys})_(\d+)")
    found = sorted((int(match[1]), name) for name in stored if (match := pattern.fullmatch(name)))
    return found[0][1] if found else None


def powers(parameters: Iterable[str], stored: Iterable[str]) -> tuple[str, str | None] | None:
    """Return Fluid's names of beta1's and beta2's power of the first parameter that has them. Adamax has beta1's."""
    listed = list(stored)
    for parameter in parameters:
        pattern = rf"{re.escape(parameter)}_(?:\w+_)?%s_\d+"
        found = [next(iter(sorted(filter(re.compile(pattern % key).fullmatch, listed))), None) for key in _POWERS]
        if found[0] is not None:
            return found[0], found[1]
    return None


def learning_rates(stored: Iterable[str]) -> list[str]:
    """Return Fluid's names of learning rates that are numbers, in the order in which optimizers made them."""
    found = [(int(match[1]), name) for name in stored if (match := re.fullmatch(r"learning_rate_(\d+)", name))]
    return [name for _, name in sorted(found)]


def powers_kept(optimizer: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return which powers Fluid keeps for an optimizer that counts its updates: of Adamax, beta1's alone."""
    is_adamax = any(name.startswith(f"{optimizer}.inf_norm.") for name in names)
    return _POWERS[:1] if is_adamax else _POWERS


def updates_of(power1: float, power2: float | None, betas: Sequence[float]) -> int:
    """Return t of beta ** (t + 1), from the power that has not reached 0 in float32.

    A beta of 0 says nothing; where both powers are 0, no bias is left to correct, and so for any t so large.
    """
    for beta, power in ((betas[0], power1), (betas[1], power2)):
        if power is not None and 0.0 < beta < 1.0 and power > 1e-30:
            return max(round(math.log(power) / math.log(beta)) - 1, 0)
    return 10**6


def to_fluid(names: Sequence[str]) -> dict[str, str]:
    """Return Fluid's name of each variable of Penstock; of counters of updates (`adam_0.step`) none is given."""
    found, rates = {}, 0
    for name in names:
        state = state_of(name, (n for n in names if n != name))
        if state is not None:
            key = state.fluid_keys()[-1] if state.optimizer.startswith("rmsprop") else state.fluid_keys()[0]
            found[name] = f"{state.parameter}_{key}_0"
        elif name.endswith(".learning_rate"):
            found[name], rates = f"learning_rate_{rates}", rates + 1
        elif (renamed := statistic(name, names)) is not None:
            found[name] = renamed
        elif not name.endswith(".step"):
            found[name] = name
    return found


def from_fluid(names: Sequence[str], optimizer: str | None = None) -> dict[str, str]:
    """Return Penstock's name of each variable of Fluid; of powers of betas none is given.

    `optimizer`: the name that Penstock's optimizer has in its program; else that of the first of its kind.
    Raises UserError for state of several optimizers.
    """
    keys, rates = _keys(names), learning_rates(names)
    if len(rates) > 1 and (keys or optimizer):
        raise UserError(
            f"the save has the learning rates {rates}, so it is of several optimizers, and their state does not say "
            "whose it is. Load it into its program with fluid.io.load_persistables, and save that"
        )
    prefix = optimizer or f"{kind_of({key for _, key in keys.values()})}_0"
    found = {}
    for name in names:
        if name in keys:
            found[name] = f"{prefix}.{keys[name][1]}.{keys[name][0]}"
        elif name in rates:
            found[name] = f"{prefix if len(rates) == 1 else f'sgd_{rates.index(name)}'}.learning_rate"
        elif (ours := _statistic_here(name, names)) is not None:
            found[name] = ours
        elif not re.search(r"_beta[12]_pow_acc_\d+\Z", name):
            found[name] = name
    return found


def _keys(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Fluid's names of optimizer state with (parameter, Penstock's key)."""
    here: Mapping[str, str] = {**{theirs: ours for ours, theirs in _ACCUMULATORS.items()}, "momentum": "velocity"}
    longest = "|".join(sorted(map(re.escape, here), key=len, reverse=True))
    found = {}
    for name in names:
        match = re.fullmatch(rf"(.+?)_({longest})_\d+", name)
        if match and match[1] in names:
            found[name] = (match[1], here[match[2]])
    return found


def _statistic_here(name: str, names: Sequence[str]) -> str | None:
    """A batch-norm's statistic by Penstock's name: the second and third weight, where there is exactly one bias."""
    for ours, theirs in _STATISTICS.items():
        stem = name.removesuffix(theirs)
        if (
            stem != name
            and all(stem + end in names for end in (".w_0", ".b_0", ".w_1", ".w_2"))
            and "batch_norm" in stem
        ):
            return stem + ours
    return None


def kind_of(keys: set[str]) -> str:
    """Return the optimizer that keeps such state."""
    return next((kind for wanted, kind in _KIND_OF_KEYS if wanted <= keys), "sgd")
