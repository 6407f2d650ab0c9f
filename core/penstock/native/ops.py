"""Penstock's own operators, `torch.ops.penstock.*`: their fake kernels and derivatives.

Importing this module loads the native library.  Invariant: the schema of an operator declares every write; what a fake
kernel says of shape and dtype is what the CPU kernel gives, with symbolic sizes too.  The kernels check their arguments
before they write: after an error nothing has changed.  What each operator computes is in `docs/operators.md`.
Raises on import: UserError if the library is not built, or was built for another torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.compat.torch import check_value
from penstock.native import beams as _beams  # noqa: F401 - registers paths through beams
from penstock.native import chunks as _chunks  # noqa: F401 - registers the evaluation of chunks
from penstock.native import crf as _crf  # noqa: F401 - registers conditional random fields
from penstock.native import ctc as _ctc  # noqa: F401 - registers temporal classification
from penstock.native import ctr as _ctr  # noqa: F401 - registers operators of models of clicks
from penstock.native import delays as _delays  # noqa: F401 - registers a view that waits for another tensor
from penstock.native import gru as _gru  # noqa: F401 - registers a GRU over gates
from penstock.native import hashes as _hashes  # noqa: F401 - registers hashes of rows
from penstock.native import load_operators, sequences
from penstock.native import messages as _messages  # noqa: F401 - registers what prints and checks
from penstock.native import random as _random  # noqa: F401 - registers random numbers
from penstock.native import recurrent as _recurrent  # noqa: F401 - registers the recurrent layers
from penstock.native import regions as _regions  # noqa: F401 - registers regions of images

load_operators()
_OPS = torch.ops.penstock

# ---------------------------------------------------------------- fake kernels: shapes and dtypes without values

_FLOATING = (torch.float32, torch.float64)


def _check(holds: Any, message: str) -> None:
    # A comparison of symbols becomes a guard of the recorded program; torch words it as a runtime assertion.
    check_value(holds, lambda: message)


def _expect_floating(operator: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATING:
        raise TypeError(f"penstock.{operator}: {name} has dtype {tensor.dtype}; expected float32 or float64")


def _expect_int64(operator: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise TypeError(f"penstock.{operator}: {name} has dtype {tensor.dtype}; expected int64")


def _expect_dim(operator: str, name: str, tensor: Tensor, *dims: int) -> None:
    if tensor.dim() not in dims:
        expected = " or ".join(str(dim) for dim in dims)
        raise ValueError(
            f"penstock.{operator}: {name} has shape {list(tensor.shape)}; expected a tensor of {expected} dimensions"
        )


def _expect_like(operator: str, param: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != param.dtype:
            raise TypeError(f"penstock.{operator}: {name} has dtype {tensor.dtype}; expected {param.dtype}, as param")
        _expect_dim(operator, name, tensor, param.dim())
        for mine, wanted in zip(tensor.shape, param.shape, strict=True):
            _check(
                mine == wanted,
                f"penstock.{operator}: {name} has shape {list(tensor.shape)}; expected {list(param.shape)}, as param",
            )


def _expect_sparse(operator: str, param: Tensor, rows: Tensor, values: Tensor) -> None:
    _expect_floating(operator, "param", param)
    _expect_dim(operator, "param", param, 2)
    _expect_int64(operator, "rows", rows)
    _expect_dim(operator, "rows", rows, 1)
    if values.dtype != param.dtype:
        raise TypeError(f"penstock.{operator}: values has dtype {values.dtype}; expected {param.dtype}, as param")
    _expect_dim(operator, "values", values, 2)
    message = (
        f"penstock.{operator}: values has shape {list(values.shape)}; expected [{rows.shape[0]}, {param.shape[1]}]"
    )
    _check(values.shape[0] == rows.shape[0], message)
    _check(values.shape[1] == param.shape[1], message)


def _lookup_table(table: Tensor, ids: Tensor, padding_idx: int = -1) -> Tensor:
    _expect_dim("lookup_table", "table", table, 2)
    _expect_int64("lookup_table", "ids", ids)
    return table.new_empty([*ids.shape, table.shape[1]])


def _sparse_sgd(param: Tensor, rows: Tensor, values: Tensor, lr: Tensor) -> None:
    _expect_sparse("sparse_sgd_", param, rows, values)


def _sparse_adam(
    param: Tensor, moment1: Tensor, moment2: Tensor, step: Tensor, rows: Tensor, values: Tensor, *rest: Any
) -> None:
    _expect_sparse("sparse_adam_", param, rows, values)
    _expect_like("sparse_adam_", param, moment1=moment1, moment2=moment2)


def _sparse_adagrad(param: Tensor, moment: Tensor, rows: Tensor, values: Tensor, lr: Tensor, epsilon: float) -> None:
    _expect_sparse("sparse_adagrad_", param, rows, values)
    _expect_like("sparse_adagrad_", param, moment=moment)


def _sgd(param: Tensor, grad: Tensor, lr: Tensor) -> None:
    _expect_floating("sgd_", "param", param)
    _expect_like("sgd_", param, grad=grad)


def _adam(param: Tensor, moment1: Tensor, moment2: Tensor, step: Tensor, grad: Tensor, *rest: Any) -> None:
    _expect_floating("adam_", "param", param)
    _expect_like("adam_", param, moment1=moment1, moment2=moment2, grad=grad)


def _all_reduce(tensors: list[Tensor]) -> None:
    _expect_replicas("all_reduce_", tensors)


def _reduce(tensors: list[Tensor], owner: int) -> None:
    _expect_replicas("reduce_", tensors)


def _expect_replicas(operator: str, tensors: list[Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        _expect_like(operator, tensors[0], **{f"tensor {number}": tensor})


def _broadcast(destinations: list[Tensor], source: Tensor) -> None:
    for number, destination in enumerate(destinations):
        _expect_like("broadcast_", source, **{f"destination {number}": destination})


def _dropout(
    x: Tensor, rng: Tensor, p: float, training: bool, op_seed: int, batch_dim: int, rows_per_sample: int
) -> tuple[Tensor, Tensor]:
    _expect_floating("dropout", "x", x)
    _expect_int64("dropout", "rng", rng)
    if not 0 <= p <= 1:
        raise ValueError(f"penstock.dropout: p is {p}; expected a probability between 0 and 1")
    if not -1 <= batch_dim < x.dim():
        raise IndexError(
            f"penstock.dropout: batch_dim is {batch_dim}; expected -1 (none) or a dimension of x, "
            f"which has shape {list(x.shape)}"
        )
    y = x.new_empty(x.shape)
    return y, x.new_empty(x.shape if training else [0], dtype=torch.bool)


def _dropout_backward(grad: Tensor, mask: Tensor, p: float, training: bool) -> Tensor:
    _expect_floating("dropout_backward", "grad", grad)
    return grad.new_empty(grad.shape)


def _normal(size: Sequence[int], mean: float, std: float, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _scale_loss_grad(like: Tensor, value: float) -> Tensor:
    return like.new_empty(like.shape)


def _auc(predict: Tensor, label: Tensor, stat_pos: Tensor, stat_neg: Tensor) -> Tensor:
    _expect_floating("auc", "predict", predict)
    _expect_int64("auc", "label", label)
    _expect_dim("auc", "predict", predict, 1, 2)
    _expect_dim("auc", "label", label, 1, 2)
    return predict.new_empty([], dtype=torch.float64)


def _accuracy(topk_indices: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _expect_int64("accuracy", "topk_indices", topk_indices)
    _expect_dim("accuracy", "topk_indices", topk_indices, 2)
    _expect_int64("accuracy", "label", label)
    count = topk_indices.new_empty([], dtype=torch.int32)
    return topk_indices.new_empty([], dtype=torch.float32), count, torch.empty_like(count)


# Of operators that passes put into a graph: never recorded, so without a typed call and a derivative.
def _writes_only(*arguments: Any) -> None:
    """An operator that changes its operands and returns nothing."""


def _channel_sums(x: Tensor, *rest: Tensor) -> Tensor:
    return x.new_empty([3, x.shape[1]], dtype=torch.float64)


def _gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    return _channel_sums(x)


def _normalised(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty([x.shape[1]]), x.new_empty([x.shape[1]])


def _normalised_gradients(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _normalised(x)


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty([*query.shape[:-1], value.shape[-1]]), query.new_empty(query.shape[:-1])


def _attention_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sizes = [part.transpose(1, 2).shape for part in (query, key, value)]
    return tuple(grad.new_empty(size).transpose(1, 2) for size in sizes)  # they lie with their positions first


_FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    "lookup_table": _lookup_table,
    "sparse_sgd_": _sparse_sgd,
    "sparse_adam_": _sparse_adam,
    "sparse_adagrad_": _sparse_adagrad,
    "sgd_": _sgd,
    "adam_": _adam,
    "all_reduce_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "dropout": _dropout,
    "dropout_backward": _dropout_backward,
    "normal": _normal,
    "scale_loss_grad": _scale_loss_grad,
    "auc": _auc,
    "accuracy": _accuracy,
    "truncated_normal": _normal,
    "uniform": _normal,
    "fused_all_reduce_": _writes_only,
    "fused_sgd_": _writes_only,
    "fused_momentum_": _writes_only,
    "fused_adagrad_": _writes_only,
    "fused_adam_": _writes_only,
    "batch_norm_stats": _channel_sums,
    "sync_batch_norm": _normalised,
    "batch_norm_grad_stats": _gradient_sums,
    "sync_batch_norm_backward": _normalised_gradients,
    "attention": _attention,
    "attention_backward": _attention_gradients,
}
for _name, _kernel in _FAKE_KERNELS.items():
    torch.library.register_fake(f"penstock::{_name}", _kernel)


# ---------------------------------------------------------------- derivatives


def _dropout_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, ctx.p, ctx.training, *_ = inputs
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else a zeros operator for the mask's gradient would be recorded


def _dropout_derivative(ctx: Any, grad: Tensor | None, _mask_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    return _masked(ctx, grad), None, None, None, None, None, None


def _backward_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.p, ctx.training = inputs
    ctx.save_for_backward(mask)
    ctx.set_materialize_grads(False)


def _backward_derivative(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    # Linear in the gradient: its derivative is the operator itself.
    return _masked(ctx, grad), None, None, None


def _masked(ctx: Any, grad: Tensor | None) -> Tensor | None:
    (mask,) = ctx.saved_tensors
    return None if grad is None else _OPS.dropout_backward(grad, mask, ctx.p, ctx.training)


torch.library.register_autograd("penstock::dropout", _dropout_derivative, setup_context=_dropout_context)
torch.library.register_autograd("penstock::dropout_backward", _backward_derivative, setup_context=_backward_context)

sequences.register()

# ---------------------------------------------------------------- lengths of padded sequences, checked when fed

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define("checked_lengths(Tensor lengths, SymInt steps, str layer) -> Tensor")


def _checked_lengths(lengths: Tensor, steps: int, layer: str) -> Tensor:
    """Raises ValueError for a length below 0 or above the steps."""
    flat = lengths.reshape(-1)
    wrong = ((flat < 0) | (flat > steps)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"penstock.checked_lengths: lengths of {layer} hold {flat[row].item()} at row {row}; "
            f"expected 0 to {steps}, the steps of its input"
        )
    return lengths.clone(memory_format=torch.contiguous_format)


def _lengths_shape(lengths: Tensor, steps: int, layer: str) -> Tensor:
    return lengths.new_empty(lengths.shape)


_LIBRARY.impl("checked_lengths", _checked_lengths, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::checked_lengths", _lengths_shape, lib=_LIBRARY)

# ---------------------------------------------------------------- rows that follow from data, counted in a run

_LIBRARY.define("expect_rows(Tensor x, SymInt rows) -> Tensor")


def _expect_rows(x: Tensor, rows: int) -> Tensor:
    """Raises ValueError for another number of rows."""
    if x.shape[0] != rows:
        raise ValueError(
            f"penstock.expect_rows: x has {x.shape[0]} rows; expected {rows}, those of what it is used with"
        )
    return x.clone(memory_format=torch.contiguous_format)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    return x.new_empty([rows, *x.shape[1:]])


def _rows_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rows = inputs[0].shape[0]


def _rows_derivative(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _OPS.expect_rows(grad, ctx.rows), None


_LIBRARY.impl("expect_rows", _expect_rows, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::expect_rows", _with_rows, lib=_LIBRARY)
torch.library.register_autograd("penstock::expect_rows", _rows_derivative, setup_context=_rows_context, lib=_LIBRARY)
