"""`F.interpolate` and `nn.Upsample` under record.

torch's own entry reads the sizes of its input as numbers, the batch among them; here the sizes of the result are found
first, and the operator behind it is called with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.compat.torch import RESIZING_OPERATORS
from penstock.errors import ProgramError
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line

_ALIGNED = (
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    *(name for name in RESIZING_OPERATORS if "nearest" not in name),
)  # fmt: skip
_NEAREST = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    *(name for name in RESIZING_OPERATORS if "nearest" in name),
)  # fmt: skip


def _sizes(x: torch.Tensor, sizes: Sequence[Any] | None, scales: Sequence[float] | None) -> list[Any]:
    if sizes is not None:
        return list(sizes)
    return [_scaled(size, scale) for size, scale in zip(x.shape[2:], scales or (), strict=True)]


def _scaled(size: Any, scale: float) -> Any:
    if not isinstance(size, torch.SymInt):
        return math.floor(size * scale)
    if scale != int(scale):
        raise ProgramError(
            f"{user_line()}: interpolate scales a size that is known only when it is fed by {scale}; use a whole "
            "number, or give the size of the result"
        )
    return size * int(scale)


def _resize(name: str, *, aligned: bool) -> Callable[..., Any]:
    overload = getattr(torch.ops.aten, name).default

    def resize(rec: Recording, x: torch.Tensor, sizes: Any, *rest: Any) -> Any:
        scales = rest[-1]
        if isinstance(scales, float) or len(rest) != (2 if aligned else 1):
            return NotImplemented  # the operator itself
        each = scales if scales is not None else [None] * (x.dim() - 2)
        return overload(x, _sizes(x, sizes, scales), *rest[:-1], *each)

    return resize


REWRITES: dict[str, Callable[..., Any]] = {
    **{name: _resize(name, aligned=True) for name in _ALIGNED},
    **{name: _resize(name, aligned=False) for name in _NEAREST},
}
