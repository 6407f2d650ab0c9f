"""CompositeMode: calls that are recorded whole, or with a form of their own.

dropout                         -> penstock.dropout, whose `training` attribute `clone(for_test=True)` flips
embedding(sparse=True)          -> penstock.lookup_table, with the tape cut at the rows (no sparse autograd)
attention with dropout          -> products, softmax and penstock.dropout
LSTM, GRU, RNN, cells           -> recurrent.py
interpolate                     -> the operator behind it: torch's entry reads sizes as numbers
Other random calls are refused with a word on what to use.

While a call is recorded, `torch.nn.functional`'s own override checks are off (`plain_functional`), so
that its Python bodies run and only their C++ calls arrive here: the mode then sees every inner dropout.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch.overrides import TorchFunctionMode

from penstock.compat.torch import (
    CHECKPOINT_FUNCTION,
    CHECKPOINT_GENERATOR,
    FUNCTIONAL_CHECKS,
    RESIZING_OPERATORS,
    qualified_name,
    tree_map,
)
from penstock.errors import ProgramError
from penstock.logger import warn_once
from penstock.program.expr import Expr
from penstock.program.record.patches import Patch, patched
from penstock.program.record.recording import Recording, SparseLookup
from penstock.program.record.recurrent import rewrites
from penstock.program.record.source import user_line

_log = logging.getLogger(__name__)
_SAMPLE_STEP = 0x9E3779B1
"""Between the seeds of two samples: odd and large, so that seeds beside each other share none."""
_BY_ROWS, _DIRECT = "use_mm_for_euclid_dist_if_necessary", "donot_use_mm_for_euclid_dist"


def _unchecked_in(thread: int, check: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *operands: threading.get_ident() != thread and check(*operands)


@contextmanager
def plain_functional() -> Iterator[None]:
    """Let the Python bodies of torch.nn.functional run in this thread although a function mode is active, and those of
    checkpointed functions be recorded once: a plan has its own way with memory, and nothing is computed twice.

    Within `recording_lock`; the calls of other threads are checked, and checkpointed, as ever.
    """
    thread = threading.get_ident()
    checks: list[Patch] = [(F, name, partial(_unchecked_in, thread)) for name in FUNCTIONAL_CHECKS]
    calls: list[Patch] = [(checkpoints, name, partial(make, thread)) for name, make in _CHECKPOINTS.items()]
    with patched([*checks, *calls]):
        yield


class _CalledOnce:
    """Stands for torch's CheckpointFunction: in the thread that records, the function is called and that is all."""

    def __init__(self, thread: int, original: Any) -> None:
        self.thread, self.original = thread, original

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """As torch.autograd.Function.apply."""
        if threading.get_ident() == self.thread:
            return function(*args)
        return self.original.apply(function, preserve, *args)


def _once_in(thread: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for the generator around a checkpointed call."""
    return lambda *args, **kwargs: _nothing_around() if threading.get_ident() == thread else original(*args, **kwargs)


def _nothing_around() -> Iterator[None]:
    """A generator and not an iterator: torch 2.15 throws into it what the call raises."""
    yield


_CHECKPOINTS: dict[str, Callable[[int, Any], Any]] = {
    CHECKPOINT_FUNCTION: _CalledOnce,
    CHECKPOINT_GENERATOR: _once_in,
}


_TENSOR_PROPERTIES = {"T", "mT", "H", "mH", "data", "real", "imag"}


def _asks_only(func: Any) -> bool:
    """Whether a call only asks a tensor about itself (its shape, its dtype), so that it is no operand."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _TENSOR_PROPERTIES
    return name in {"__set__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__"}


class CompositeMode(TorchFunctionMode):
    """Rewrites the calls in `_REWRITES`; passes the rest on.

    A parameter from outside becomes its stand-in here, above autograd, so that the gradient goes to the stand-in.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _asks_only(func):
            args, kwargs = tree_map(self._stand_in, (args, kwargs))
        rewrite = _REWRITES.get(getattr(func, "__name__", ""))
        own = qualified_name(func).startswith("penstock::")  # penstock.gru is no torch.gru
        if rewrite is not None and not own:
            result = rewrite(self.recording, *args, **kwargs)
            if result is not NotImplemented:
                return result
        self.recording.calling = getattr(func, "__name__", "")
        return func(*args, **kwargs)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and not self.recording.is_known(value):
            return self.recording.capture(value)
        return value


def dropout(rec: Recording, input: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """Record penstock.dropout; nothing for p == 0, where torch too returns its input."""
    if not isinstance(input, torch.Tensor):
        return NotImplemented
    if p == 0:
        return input
    shape = rec.shape_of(input)
    batch_dim, rows = rec.batch_of(shape)
    rec.num_seeds += 1
    state = rec.rng()
    if batch_dim < 0 and any(isinstance(dim, Expr) for dim in shape):
        # Rows of sequences: where a replica's first row lies in the batch follows from data, its first sample is known.
        state = torch.cat([state[:1] + state[2:] * _SAMPLE_STEP, state[1:]])
    call = torch.ops.penstock.dropout
    return call(input, state, float(p), bool(train), rec.num_seeds, batch_dim, rows)[0]


def dropout_(rec: Recording, input: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """In place, as nn.Dropout(inplace=True) asks."""
    return input if p == 0 else input.copy_(dropout(rec, input, p, train))


def dropout_of_channels(rec: Recording, input: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """As F.dropout2d and its like ask: one draw for each row and channel."""
    if p == 0:
        return input
    kept = dropout(rec, input.new_ones([*input.shape[:2], *[1] * (input.dim() - 2)]), p, train)
    return input * kept


def squeeze(rec: Recording, input: torch.Tensor, *dims: Any, **named: Any) -> Any:
    """Without dimensions it takes away those of one element, but no size that is 1 in some batches alone."""
    if dims or named:
        return NotImplemented
    return input.squeeze(tuple(at for at, size in enumerate(input.shape) if type(size) is int and size == 1))


def distances(rec: Recording, x1: Any, x2: Any, p: float = 2.0, compute_mode: str = _BY_ROWS) -> Any:
    """torch chooses a form of cdist by the number of rows, which would be a guard; here it is always the direct one."""
    return torch.cdist(x1, x2, p, _DIRECT) if compute_mode == _BY_ROWS else NotImplemented


def embedding(
    rec: Recording,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Record torch's sparse embedding; the padding row is looked up like others, but never trained."""
    if not sparse:
        return NotImplemented
    return sparse_lookup(rec, weight, indices, int(padding_idx), scale_grad_by_freq, zero_padding=False)


def sparse_lookup(
    rec: Recording,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding: int,
    scale_grad_by_freq: bool = False,
    *,
    zero_padding: bool,
) -> torch.Tensor:
    """Record a lookup: the rows are a fresh leaf, the gradient is (ids, rows' gradient).

    In a block of control flow, which runs several times or not at all, the table has a dense gradient.
    `zero_padding`: the padding row reads as zeros, as in Fluid.
    """
    weight = weight if rec.is_named(weight) else rec.capture(weight)
    indices = indices if rec.is_named(indices) else rec.capture(indices)
    if rec.open_blocks:
        _warn_of_dense_gradient(rec.name_of(weight), weight)
        found = torch.embedding(weight, indices, padding, scale_grad_by_freq)
        hidden = zero_padding and padding >= 0
        return found.masked_fill((indices == padding).unsqueeze(-1), 0.0) if hidden else found
    if not weight.is_leaf or scale_grad_by_freq:
        raise ProgramError(
            f"{user_line()}: embedding(sparse=True) needs a parameter as its table and scale_grad_by_freq=False; "
            "use sparse=False for a computed table"
        )
    with torch.no_grad():
        rows = torch.ops.penstock.lookup_table(weight, indices, padding if zero_padding else -1)
    leaf: torch.Tensor = rows.detach()
    if weight.requires_grad and torch.is_grad_enabled():
        leaf.requires_grad_(True)
        rec.lookups.append(SparseLookup(rec.name_of(weight), indices, leaf, rec.module_path(), padding))
    return leaf


def _warn_of_dense_gradient(table: str, weight: torch.Tensor) -> None:
    if weight.requires_grad:
        text = (
            f"{user_line()}: table {table!r} is looked up with a sparse gradient in a block of control flow, where its "
            f"gradient is dense: each step makes, exchanges and applies all of its {list(weight.shape)}. Look the ids "
            "up before the block, and read their rows in it"
        )
        warn_once(_log, text, about=f"dense gradient of {table}")


def attention(
    rec: Recording,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Record attention with dropout as products and softmax; without dropout torch's fused kernel is recorded."""
    if dropout_p == 0.0:
        return NotImplemented
    if enable_gqa:
        raise ProgramError(f"{user_line()}: attention with dropout and enable_gqa cannot be recorded; repeat the keys")
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * factor
    if is_causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(ones.triu(1), -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf) if masked else scores + attn_mask
    return dropout(rec, scores.softmax(-1), dropout_p, True) @ value


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def refuse(rec: Recording, *args: Any, **kwargs: Any) -> Any:
        raise ProgramError(f"{user_line()}: {name} cannot be recorded yet; {instead}", operator=name)

    return refuse


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


_RESIZED: dict[str, Callable[..., Any]] = {
    **{name: _resize(name, aligned=True) for name in _ALIGNED},
    **{name: _resize(name, aligned=False) for name in _NEAREST},
}


_REWRITES: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "dropout_": dropout_,
    "embedding": embedding,
    "scaled_dot_product_attention": attention,
    "alpha_dropout": _refuse("alpha_dropout", "use dropout"),
    "feature_dropout": dropout_of_channels,
    "cdist": distances,
    "squeeze": squeeze,
    "embedding_renorm_": _refuse(
        "embedding with max_norm, which writes its table while it reads it,",
        "scale the rows after the lookup: rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)",
    ),
    "rrelu": _refuse("rrelu in training", "use leaky_relu"),
    **rewrites(dropout),
    **_RESIZED,
}
