"""Linear-chain conditional random fields: the cost of a sequence of tags, its gradients, and the best sequence.

`transition` [tags + 2, tags]: scores of the first tag, of the last one, then of tag j behind tag i at [i + 2, j].
`emission` are ragged rows [rows, tags], whose sequences have the lengths int64 [n] or [n, 1], or padded [n, t, tags].
A sequence without rows costs nothing. Everything is computed with logarithms, a step of all sequences at a time.
Source: linear_chain_crf_op.h, crf_decoding_op.h (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_OPERANDS = "Tensor emission, Tensor transition, Tensor label, Tensor lengths"
_LIBRARY.define(f"linear_chain_crf({_OPERANDS}) -> (Tensor cost, Tensor saved)")
_LIBRARY.define(f"linear_chain_crf_backward(Tensor grad, {_OPERANDS}, Tensor saved) -> (Tensor, Tensor)")
_LIBRARY.define("crf_decoding(Tensor emission, Tensor transition, Tensor lengths) -> Tensor")


class _Batch(NamedTuple):
    """Sequences side by side: where each step is among the rows [n, t], and whether it is one of them."""

    at: Tensor
    inside: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """[rows, …] as [n, t, …]; beyond the ends some row of the batch."""
        return rows.index_select(0, self.at.reshape(-1)).reshape(*self.at.shape, *rows.shape[1:])

    def back(self, steps: Tensor, like: Tensor) -> Tensor:
        """[n, t, …] as rows; those that belong to no sequence are zero."""
        found = like.new_zeros(like.shape, dtype=steps.dtype)
        found[self.at[self.inside]] = steps[self.inside]
        return found

    def last(self) -> Tensor:
        """The position of each sequence's last step, [n]; 0 if it has none."""
        return (self.inside.sum(1) - 1).clamp(min=0)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1) if x.dim() == 3 else x


def _tags(batch: _Batch, label: Tensor, num_tags: int) -> Tensor:
    """The labels of the steps, int64 [n, t]; 0 beyond the ends. Raises ValueError for one that is no tag."""
    tags = batch.of(label.reshape(-1)).masked_fill(~batch.inside, 0)
    if not (int(tags.min()) >= 0 and int(tags.max()) < num_tags):
        raise ValueError(
            f"penstock.linear_chain_crf: labels are {int(tags.min())} to {int(tags.max())}; expected 0 to "
            f"{num_tags - 1}"
        )
    return tags


def _batch(operator: str, emission: Tensor, lengths: Tensor) -> _Batch:
    own, padded = lengths.reshape(-1), emission.dim() == 3
    longest = int(own.max()) if own.numel() else 0
    if padded:
        fits = own.numel() == emission.shape[0] and longest <= emission.shape[1]
    else:
        fits = int(own.sum()) == emission.shape[0]
    if not fits or (own.numel() and int(own.min()) < 0):
        raise ValueError(
            f"penstock.{operator}: the lengths {own.tolist()[:8]} of {own.numel()} sequences do not fit the emission "
            f"{list(emission.shape)}"
        )
    first = torch.arange(own.numel()) * emission.shape[1] if padded else own.cumsum(0) - own
    steps = torch.arange(max(longest, 1))
    inside = steps < own[:, None]
    return _Batch(torch.where(inside, first[:, None] + steps, 0), inside)


def _forward_scores(scores: Tensor, transition: Tensor, inside: Tensor) -> Tensor:
    """Logarithms [n, t, tags] of the sums over all ways to each tag; beyond an end they stay."""
    alphas = [transition[0] + scores[:, 0]]
    for t in range(1, scores.shape[1]):
        longer = torch.logsumexp(alphas[-1][:, :, None] + transition[2:], 1) + scores[:, t]
        alphas.append(torch.where(inside[:, t, None], longer, alphas[-1]))
    return torch.stack(alphas, 1)


def _crf(emission: Tensor, transition: Tensor, label: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    batch = _batch("linear_chain_crf", emission, lengths)
    if not emission.numel() or not batch.at.numel():
        return emission.new_zeros(batch.at.shape[0], 1), torch.zeros_like(emission)
    scores, own = batch.of(_rows(emission)), _tags(batch, label, emission.shape[-1])
    alphas = _forward_scores(scores, transition, batch.inside)
    total = torch.logsumexp(alphas[:, -1] + transition[1], 1)
    taken = torch.gather(scores, 2, own[:, :, None]).squeeze(2).masked_fill(~batch.inside, 0.0).sum(1)
    moves = transition[own[:, :-1] + 2, own[:, 1:]].masked_fill(~batch.inside[:, 1:], 0.0).sum(1)
    ends = transition[0, own[:, 0]] + transition[1, own.gather(1, batch.last()[:, None]).squeeze(1)]
    cost = (total - taken - moves - ends).masked_fill(~batch.inside[:, 0], 0.0)
    return cost[:, None], batch.back(alphas, _rows(emission)).reshape(emission.shape)


def _crf_backward(
    grad: Tensor, emission: Tensor, transition: Tensor, label: Tensor, lengths: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients: how probable a tag, and a pair of tags, is, less whether it was taken."""
    batch, of_transition = _batch("linear_chain_crf_backward", emission, lengths), torch.zeros_like(transition)
    if not emission.numel() or not batch.at.numel():
        return torch.zeros_like(emission), of_transition
    scores, own = batch.of(_rows(emission)), _tags(batch, label, emission.shape[-1])
    alphas, each = batch.of(_rows(saved)), torch.arange(scores.shape[0])
    total = torch.logsumexp(alphas[each, batch.last()] + transition[1], 1)[:, None]
    weight = grad.reshape(-1, 1)
    last, beta = batch.last(), transition[1].expand(scores.shape[0], -1)
    of_scores = torch.empty_like(scores)
    for t in range(scores.shape[1] - 1, -1, -1):
        taken = torch.nn.functional.one_hot(own[:, t], scores.shape[2]).to(scores.dtype)
        probable = (alphas[:, t] + beta - total).exp() - taken
        of_scores[:, t] = (probable * weight).masked_fill(~batch.inside[:, t, None], 0.0)
        of_transition[1] += of_scores[:, t].masked_fill((last != t)[:, None], 0.0).sum(0)
        if t:
            ahead, inside = scores[:, t] + beta, batch.inside[:, t, None]
            pairs = (alphas[:, t - 1, :, None] + transition[2:] + ahead[:, None] - total[:, None]).exp()
            pairs[each, own[:, t - 1], own[:, t]] -= 1.0
            of_transition[2:] += (pairs * weight[:, None]).masked_fill(~inside[:, None], 0.0).sum(0)
            beta = torch.where(inside, torch.logsumexp(transition[2:] + ahead[:, None], 2), beta)
    of_transition[0] = of_scores[:, 0].sum(0)
    return batch.back(of_scores, _rows(emission)).reshape(emission.shape), of_transition


def _decoding(emission: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    batch, shape = _batch("crf_decoding", emission, lengths), [*emission.shape[:-1], 1]
    if not emission.numel() or not batch.at.numel():
        return torch.zeros(shape, dtype=torch.int64)
    scores = batch.of(_rows(emission))
    best, moves = transition[0] + scores[:, 0], []
    for t in range(1, scores.shape[1]):
        value, move = (best[:, :, None] + transition[2:]).max(1)
        inside = batch.inside[:, t, None]
        best = torch.where(inside, value + scores[:, t], best)
        moves.append(torch.where(inside, move, torch.arange(scores.shape[2])))
    path = [(best + transition[1]).argmax(1)]
    for move in reversed(moves):
        path.insert(0, move.gather(1, path[0][:, None]).squeeze(1))
    rows = batch.back(torch.stack(path, 1), _rows(emission)[:, 0])
    return rows.reshape(shape)


# ---------------------------------------------------------------- shapes and derivatives


def _expect(operator: str, emission: Tensor, transition: Tensor) -> None:
    tags = emission.shape[-1]
    if emission.dim() not in (2, 3) or list(transition.shape) != [tags + 2, tags]:
        raise ValueError(
            f"penstock.{operator}: transition has shape {list(transition.shape)} for an emission "
            f"{list(emission.shape)}; expected [tags + 2, tags], and an emission [rows, tags] or [n, t, tags]"
        )


def _crf_shape(emission: Tensor, transition: Tensor, label: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    _expect("linear_chain_crf", emission, transition)
    return emission.new_empty([lengths.numel(), 1]), emission.new_empty(emission.shape)


def _decoding_shape(emission: Tensor, transition: Tensor, lengths: Tensor) -> Tensor:
    _expect("crf_decoding", emission, transition)
    return emission.new_empty([*emission.shape[:-1], 1], dtype=torch.int64)


def _backward_shape(grad: Tensor, emission: Tensor, transition: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return emission.new_empty(emission.shape), transition.new_empty(transition.shape)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, grad: Tensor | None, _saved: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    return (*torch.ops.penstock.linear_chain_crf_backward(grad, *ctx.saved_tensors), None, None)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear_chain_crf": (_crf, _crf_shape),
    "linear_chain_crf_backward": (_crf_backward, _backward_shape),
    "crf_decoding": (_decoding, _decoding_shape),
}
for _name, (_kernel, _shape) in _KERNELS.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"penstock::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("penstock::linear_chain_crf", _derivative, setup_context=_context, lib=_LIBRARY)
