"""Gradient clipping, after the exchange and before regularisation. Source: python/paddle/fluid/clip.py (Fluid 1.8).

The optimizer's `grad_clip` replaces what `set_gradient_clip` or `ParamAttr.gradient_clip` say of single parameters.
Norms are those of the exchanged gradient, so they do not depend on the number of replicas. The global norm is
gathered in one persistable number: each parameter's owner adds its part, in the order of the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from penstock.errors import ArgumentError, ProgramError
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.backward import Gradient
from penstock.program.training.changed_gradients import Pair, changed
from penstock.program.training.gradients import PendingGradient
from penstock.program.training.parameters import ParamAttr, constant_state

NeedClip = Callable[[Variable], bool]
"""Of a clip for all parameters: whether the gradient of this one is clipped."""


class GradientClipBase:
    """What clips share: called with (parameter, gradient) pairs, one returns them with clipped gradients."""

    def __init__(self, need_clip: NeedClip | None = None) -> None:
        if need_clip is not None and not callable(need_clip):
            raise ArgumentError(
                f"{user_line()}: {type(self).__name__}: need_clip is {need_clip!r}; expected a function of a parameter "
                "that returns whether its gradient is clipped"
            )
        self.need_clip = need_clip

    def __call__(self, params_grads: Iterable[tuple[Variable, Gradient | None]]) -> list[Pair]:
        """Record the clip. What it returns is for `apply_gradients` and to fetch."""
        own: Any = self
        return changed(params_grads, "gradient_clip", lambda pending, prefix: prepare_clips(pending, own, prefix))


class GradientClipByValue(GradientClipBase):
    """Every element is put between `min` (default -max) and `max`."""

    def __init__(self, max: float, min: float | None = None, need_clip: NeedClip | None = None) -> None:
        super().__init__(need_clip)
        self.max = float(max)
        self.min = -self.max if min is None else float(min)

    def clip(self, one: PendingGradient) -> None:
        """Record the clip of one gradient."""
        one.value = one.value.clamp(self.min, self.max)

    def __str__(self) -> str:
        return f"Gradient Clip By Value, min = {self.min:f}, max={self.max:f}"


class GradientClipByNorm(GradientClipBase):
    """A gradient whose own norm is above `clip_norm` is scaled down to it."""

    def __init__(self, clip_norm: float, need_clip: NeedClip | None = None) -> None:
        super().__init__(need_clip)
        self.clip_norm = _positive(clip_norm)

    def clip(self, one: PendingGradient) -> None:
        """Record the clip of one gradient."""
        factor = self.clip_norm / one.square_sum().sqrt().clamp_min(self.clip_norm)
        one.change(_scaled_by(factor))

    def __str__(self) -> str:
        return f"Gradient Clip By Norm, clip_norm={self.clip_norm:f}"


class GradientClipByGlobalNorm(GradientClipBase):
    """All gradients of a group are scaled by clip_norm / max(norm of all together, clip_norm)."""

    def __init__(self, clip_norm: float, group_name: str = "default_group", need_clip: NeedClip | None = None) -> None:
        super().__init__(need_clip)
        self.clip_norm = _positive(clip_norm)
        self.group_name = group_name

    def __str__(self) -> str:
        return f"Gradient Clip By GlobalNorm, global_norm={self.clip_norm:f}"


class ErrorClipByValue:
    """Puts every element of the gradient of one variable between `min` (default -max) and `max`, on its way back.

    `variable._set_error_clip(ErrorClipByValue(…))`, before the backward pass is recorded.
    """

    def __init__(self, max: float, min: float | None = None) -> None:
        self.max = float(max)
        self.min = -self.max if min is None else float(min)

    def __str__(self) -> str:
        return f"ByValue, min={self.min:f}, max={self.max:f}"

    def clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the clipped gradient."""
        return gradient.clamp(self.min, self.max)


Clip = GradientClipByValue | GradientClipByNorm | GradientClipByGlobalNorm


def _positive(clip_norm: float) -> float:
    if not float(clip_norm) > 0.0:
        raise ProgramError(f"{user_line()}: clip_norm is {clip_norm}; expected a positive number")
    return float(clip_norm)


def set_gradient_clip(
    clip: Clip, param_list: Sequence[str | Variable] | None = None, program: Program | None = None
) -> None:
    """Clip the gradients of the given parameters, or of all that exist now, in optimizers that have no `grad_clip`."""
    check_clip(clip)
    program = program or default_main_program()
    chosen: Sequence[str | Variable] = [v.name for v in program.parameters()] if param_list is None else param_list
    names = [p.name if isinstance(p, Variable) else p for p in chosen]
    attributes = recording_of(program).attributes
    for name in names:
        if not program.var(name).parameter:
            raise ProgramError(f"{user_line()}: set_gradient_clip: {name!r} is no parameter", variable=name)
        attributes[name] = copy.copy(attributes.get(name, ParamAttr()))
        attributes[name].gradient_clip = clip


def append_gradient_clip_ops(param_grads: Iterable[tuple[Variable, Gradient | None]]) -> list[Pair]:
    """Record the parameters' own clips (`set_gradient_clip`); return the pairs with clipped gradients.

    `apply_gradients` does so itself: what is within the bounds already stays as it is.
    """
    return changed(param_grads, "gradient_clip", lambda pending, prefix: prepare_clips(pending, None, prefix))


def check_clip(clip: Any) -> None:
    """Raise ArgumentError for what is no clip."""
    if clip is not None and not isinstance(clip, Clip):
        raise ArgumentError(
            f"{user_line()}: a gradient clip is {clip!r}; expected GradientClipByValue, GradientClipByNorm or "
            "GradientClipByGlobalNorm"
        )


def clip_of(one: PendingGradient, default: Clip | None) -> Clip | None:
    """Return the clip that was called, or the optimizer's, else the parameter's own, unless a script has recorded it;
    None if it leaves this parameter out."""
    own: Clip | None = one.attribute.gradient_clip
    check_clip(own)
    clip = default if default is not None else None if own is one.clipped_by else own
    return None if clip is None or (clip.need_clip and not clip.need_clip(one.param)) else clip


Record = Callable[[], None]


def prepare_clips(pending: Sequence[PendingGradient], default: Clip | None, prefix: str) -> Record:
    """Create the state that clipping needs; return what records it."""
    single: list[tuple[PendingGradient, GradientClipByValue | GradientClipByNorm]] = []
    groups: dict[str, list[PendingGradient]] = {}
    norms: dict[str, float] = {}
    for one in pending:
        clip = clip_of(one, default)
        if clip is not None:
            one.clipped_by = clip
            one.reserve()
        if isinstance(clip, GradientClipByGlobalNorm):
            groups.setdefault(clip.group_name, []).append(one)
            if norms.setdefault(clip.group_name, clip.clip_norm) != clip.clip_norm:
                raise ProgramError(
                    f"{user_line()}: group {clip.group_name!r} is clipped to {norms[clip.group_name]} and to "
                    f"{clip.clip_norm}; "
                    "parameters of one group need one clip_norm",
                    variable=one.param.name,
                )
        elif clip is not None:
            single.append((one, clip))
    totals = {group: _total(f"{prefix}.gradient_clip.{group}", parts) for group, parts in groups.items()}

    def record() -> None:
        with name_scope("gradient_clip"):
            for one, clip in single:
                with one.role():
                    clip.clip(one)
            for group, parts in groups.items():
                _clip_group(parts, norms[group], totals[group])

    return record


def _total(name: str, parts: Sequence[PendingGradient]) -> torch.Tensor:
    kinds = {one.param.desc.dtype for one in parts}
    return constant_state(name, 0.0, "float64" if "float64" in kinds else "float32").fake


def _clip_group(parts: Sequence[PendingGradient], clip_norm: float, total: torch.Tensor) -> None:
    total.zero_()
    for one in parts:
        with one.role():
            total.add_(one.square_sum())
    for one in parts:
        with one.role():
            factor = clip_norm / total.sqrt().clamp_min(clip_norm)
            one.change(_scaled_by(factor))


def _scaled_by(factor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient * factor
