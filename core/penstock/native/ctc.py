"""Connectionist temporal classification, and distances between sequences of ids.

`ctc(logits [n, t, classes], label int64 [n, l], lengths, label_lengths, blank) -> [n, 1]`: minus the logarithm of the
probability of each label, over all ways to place it among blanks. The softmax is taken here. Lengths int64 [n].
`edit_distance(found, wanted, found_lengths, wanted_lengths, ignored, normalized) -> float32 [n, 1]`: ids int64 [n, l].
Both are computed on CPU.  Source: warpctc_op.h, edit_distance_op.h (Fluid 1.8); Graves et al., 2006.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.compat.torch import autograd_in_kernels

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_OPERANDS = "Tensor logits, Tensor label, Tensor lengths, Tensor label_lengths, int blank"
_LIBRARY.define(f"ctc({_OPERANDS}) -> Tensor")
_LIBRARY.define(f"ctc_backward(Tensor grad, {_OPERANDS}) -> Tensor")
_LIBRARY.define(
    "edit_distance(Tensor found, Tensor wanted, Tensor found_lengths, Tensor wanted_lengths, int[] ignored, "
    "bool normalized) -> Tensor"
)


def _whole(operator: str, what: str, lengths: Tensor, most: int) -> list[int]:
    found: list[int] = lengths.reshape(-1).tolist()
    if found and not 0 <= min(found) <= max(found) <= most:
        raise ValueError(f"penstock.{operator}: {what} are {min(found)} to {max(found)}; expected 0 to {most}")
    return found


def _loss(logits: Tensor, label: Tensor, lengths: Tensor, label_lengths: Tensor, blank: int) -> Tensor:
    steps = _whole("ctc", "lengths", lengths, logits.shape[1])
    sizes = _whole("ctc", "lengths of labels", label_lengths, label.shape[1])
    if label.numel() and not 0 <= int(label.min()) <= int(label.max()) < logits.shape[2]:
        raise ValueError(f"penstock.ctc: labels are {int(label.min())} to {int(label.max())} of {logits.shape[2]}")
    logs = torch.log_softmax(logits, 2).transpose(0, 1)
    return F.ctc_loss(logs, label, steps, sizes, blank, reduction="none")  # type: ignore[arg-type]  # lists are taken


def _ctc(*operands: Any) -> Tensor:
    logits = operands[0]
    if not logits.shape[0] or not logits.shape[1]:
        return logits.new_zeros([logits.shape[0], 1])  # type: ignore[no-any-return]  # a Tensor
    return _loss(*operands).reshape(-1, 1)


def _ctc_backward(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    """The gradient of the logits. The loss is computed anew: torch's tables of it are not kept.

    The engine's threads exclude autograd from kernels, so it is switched on here.
    """
    if not logits.shape[0] or not logits.shape[1]:
        return torch.zeros_like(logits)
    with autograd_in_kernels():
        source = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        (found,) = torch.autograd.grad(_loss(source, *rest), source, grad.reshape(-1))
    return found


def _distance(found: list[int], wanted: list[int]) -> int:
    """Insertions, deletions and substitutions that make one of the other."""
    row = list(range(len(wanted) + 1))
    for i, one in enumerate(found, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def _edit_distance(
    found: Tensor,
    wanted: Tensor,
    found_lengths: Tensor,
    wanted_lengths: Tensor,
    ignored: Sequence[int],
    normalized: bool,
) -> Tensor:
    distances, passed = [], set(ignored)
    each = zip(
        found.tolist(), wanted.tolist(), _whole("edit_distance", "lengths", found_lengths, found.shape[1]),
        _whole("edit_distance", "lengths of labels", wanted_lengths, wanted.shape[1]), strict=True,
    )  # fmt: skip
    for one, other, size, most in each:
        label = [v for v in other[:most] if v not in passed]
        if normalized and not label:
            raise ValueError("penstock.edit_distance: a label has no ids; expected at least one, or normalized=False")
        distance = float(_distance([v for v in one[:size] if v not in passed], label))
        distances.append(distance / len(label) if normalized else distance)
    return torch.tensor(distances, dtype=torch.float32).reshape(-1, 1)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank = inputs
    ctx.save_for_backward(*tensors)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.penstock.ctc_backward(grad, *ctx.saved_tensors, ctx.blank), None, None, None, None


_KERNELS: dict[str, tuple[Any, Any]] = {
    "ctc": (_ctc, lambda logits, *rest: logits.new_empty([logits.shape[0], 1])),
    "ctc_backward": (_ctc_backward, lambda grad, logits, *rest: logits.new_empty(logits.shape)),
    "edit_distance": (
        _edit_distance,
        lambda found, *rest: found.new_empty([found.shape[0], 1], dtype=torch.float32),
    ),
}
for _name, (_kernel, _shape) in _KERNELS.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"penstock::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("penstock::ctc", _derivative, setup_context=_context, lib=_LIBRARY)
