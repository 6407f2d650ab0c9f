"""`penstock.gru_sequence`: Fluid's GRU over gates that are projected already, time first, one layer in one direction.

Gates are in the order update u, reset r, candidate c. The reset gate acts before the candidate's product:
c = act(x + (r h) W_c), where torch.nn.GRU has act(x + r (h W_c)). `origin`: h' = u h + (1 - u) c; else
h' = (1 - u) h + u c. `weight` [h, 3 h] holds the values [h, 2 h] of update and reset, and then [h, h] of the candidate,
as Fluid's files do. `saved` [t, b, 4 h]: the gates, and r h; so that the backward pass computes nothing again.
Source: gru_op.h, gru_kernel.h (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torch import check_value
from penstock.native.activations import ACTIVATIONS, Activation

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_DEFAULTS = ("sigmoid", "tanh")
_ACTIVATIONS = 'str gate="sigmoid", str candidate="tanh"'
_LIBRARY.define(
    f"gru_sequence(Tensor gates, Tensor h0, Tensor weight, bool reverse, bool origin, bool keep, {_ACTIVATIONS}) -> "
    "(Tensor out, Tensor saved)"
)
_LIBRARY.define(
    "gru_sequence_backward(Tensor grad_out, Tensor h0, Tensor weight, bool reverse, bool origin, Tensor out, "
    f"Tensor saved, {_ACTIVATIONS}) -> (Tensor, Tensor, Tensor)"
)


def _order(num_steps: int, reverse: bool) -> range:
    return range(num_steps - 1, -1, -1) if reverse else range(num_steps)


def _parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Views of update and reset [h, 2 h], and of the candidate [h, h]; of a weight with gaps, of a copy."""
    size, flat = weight.shape[0], weight.reshape(-1)
    return flat[: 2 * size * size].view(size, 2 * size), flat[2 * size * size :].view(size, size)


def _activations(kinds: tuple[str, ...]) -> list[Activation]:
    """Those of the gates and of the candidate; defaults for what is left out."""
    return [ACTIVATIONS[kind] for kind in (*kinds, *_DEFAULTS[len(kinds) :])]


def _gru(
    gates: Tensor, h0: Tensor, weight: Tensor, reverse: bool, origin: bool, keep: bool, *kinds: str
) -> tuple[Tensor, Tensor]:
    gate, act = _activations(kinds)
    (steps, batch, _), size = gates.shape, weight.shape[0]
    of_gates, of_candidate = _parts(weight)
    saved = gates.new_empty(steps, batch, 4 * size)
    saved[..., : 3 * size].copy_(gates)
    out, h = gates.new_empty(steps, batch, size), h0
    for t in _order(steps, reverse):
        now = saved[t]
        gate.over(now[:, : 2 * size].addmm_(h, of_gates))
        update, reset, candidate, kept = now.chunk(4, 1)
        torch.mul(reset, h, out=kept)
        act.over(candidate.addmm_(kept, of_candidate))
        first, last = (candidate, h) if origin else (h, candidate)
        h = torch.lerp(first, last, update, out=out[t])
    return out, saved if keep else gates.new_empty(0)


def _gru_backward(
    grad_out: Tensor,
    h0: Tensor,
    weight: Tensor,
    reverse: bool,
    origin: bool,
    out: Tensor,
    saved: Tensor,
    *kinds: str,
) -> tuple[Tensor, ...]:
    gate, act = _activations(kinds)
    size, order = weight.shape[0], _order(out.shape[0], reverse)
    of_gates, of_candidate = _parts(weight)
    made, dh = saved.new_empty(*saved.shape[:2], 3 * size), torch.zeros_like(h0)
    for position in range(len(order) - 1, -1, -1):
        t = order[position]
        before = out[order[position - 1]] if position else h0
        update, reset, candidate, _ = saved[t].chunk(4, 1)
        du, dr, dc = made[t].chunk(3, 1)
        dh = dh + grad_out[t]
        share = dh * update
        other = dh - share
        of_new, carried = (other, share) if origin else (share, other)
        moved = before - candidate if origin else candidate - before
        dc.copy_(act.back(of_new, candidate))
        of_kept = dc @ of_candidate.t()
        du.copy_(gate.back(dh * moved, update))
        dr.copy_(gate.back(of_kept * before, reset))
        dh = carried.addcmul_(of_kept, reset).addmm_(made[t, :, : 2 * size], of_gates.t())
    return made, dh.contiguous(), _weight_gradient(made, h0, out, saved, reverse)


def _weight_gradient(made: Tensor, h0: Tensor, out: Tensor, saved: Tensor, reverse: bool) -> Tensor:
    size = h0.shape[1]
    read = torch.cat([out[1:], h0[None]]) if reverse else torch.cat([h0[None], out[:-1]])
    flat, kept = made.view(-1, 3 * size), saved[..., 3 * size :].reshape(-1, size)
    of_gates = torch.mm(read.view(-1, size).t(), flat[:, : 2 * size])
    return torch.cat([of_gates.reshape(-1), torch.mm(kept.t(), flat[:, 2 * size :]).reshape(-1)]).view(size, 3 * size)


def _shape(
    gates: Tensor, h0: Tensor, weight: Tensor, reverse: bool, origin: bool, keep: bool, *kinds: str
) -> tuple[Tensor, Tensor]:
    size = weight.shape[0]
    known = all(kind in ACTIVATIONS for kind in kinds)
    check_value(
        known, lambda: f"penstock.gru_sequence: activations are {kinds}; expected some of {', '.join(ACTIVATIONS)}"
    )
    fits = gates.dim() == 3 and gates.shape[2] == 3 * size and list(weight.shape) == [size, 3 * size]
    check_value(
        fits and h0.dim() == 2 and h0.shape[1] == size,
        lambda: (
            f"penstock.gru_sequence: gates have shape {list(gates.shape)}, h0 {list(h0.shape)}, weight "
            f"{list(weight.shape)}; expected [time, batch, 3 h], [batch, h] and [h, 3 h]"
        ),
    )
    made = [*gates.shape[:2], size]
    return gates.new_empty(made), gates.new_empty([*gates.shape[:2], 4 * size] if keep else [0])


def _backward_shape(grad_out: Tensor, h0: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    saved, size = rest[3], weight.shape[0]
    return saved.new_empty([*saved.shape[:2], 3 * size]), h0.new_empty(h0.shape), weight.new_empty(weight.shape)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, h0, weight, ctx.reverse, ctx.origin, _, *ctx.kinds = inputs
    ctx.save_for_backward(h0, weight, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, grad_out: Tensor | None, _saved_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    h0, weight, out, saved = ctx.saved_tensors
    call = torch.ops.penstock.gru_sequence_backward
    found = call(grad_out, h0, weight, ctx.reverse, ctx.origin, out, saved, *ctx.kinds)
    return (*found, None, None, None, None, None)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gru_sequence": (_gru, _shape),
    "gru_sequence_backward": (_gru_backward, _backward_shape),
}
for _name, (_kernel, _fake) in _KERNELS.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"penstock::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("penstock::gru_sequence", _derivative, setup_context=_context, lib=_LIBRARY)
