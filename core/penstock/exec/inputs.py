"""What is fed to the replicas of one Program: checked, split and measured, with what the Program says looked up once.

Arrays and tensors that fit are taken as they are, in a few microseconds an input; anything else goes the way of
`feeding`, which converts it or says what is wrong. Derived from one revision of the Program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import FeedError
from penstock.exec.feeding import as_tensors, bind_symbols
from penstock.exec.loss_gradient import split_with_loss_gradients
from penstock.exec.splitting import has_batch, split
from penstock.program.expr import Expr
from penstock.program.ir import VarDesc
from penstock.program.program import Program

Feed = Mapping[str, Any] | Sequence[Any] | None
Share = dict[str, torch.Tensor]


class _Input:
    """What a tensor of one input has to be."""

    __slots__ = ("buffer", "dtype", "fixed", "has_batch", "name", "numpy_dtype", "rank", "symbols")

    def __init__(self, program: Program, var: VarDesc) -> None:
        self.name, self.rank, self.buffer = var.name, len(var.shape), var.buffer
        self.dtype: torch.dtype = getattr(torch, var.dtype)
        self.numpy_dtype = np.dtype(var.dtype) if var.dtype != "bfloat16" else None
        self.fixed = [(axis, d) for axis, d in enumerate(var.shape) if isinstance(d, int)]
        self.symbols = [
            (axis, str(d.args[0])) for axis, d in enumerate(var.shape) if isinstance(d, Expr) and d.op == "sym"
        ]
        self.has_batch = has_batch(program, var.name)

    def tensor(self, value: Any) -> torch.Tensor | None:
        """Return the value as it is, or None if it needs converting or an error message."""
        if isinstance(value, np.ndarray):
            if value.dtype != self.numpy_dtype or not value.flags.writeable or not value.flags.c_contiguous:
                return None
            tensor = torch.from_numpy(value)
        elif (
            type(value) is torch.Tensor
            and value.dtype is self.dtype
            and not value.requires_grad
            and value.is_contiguous()
        ):
            tensor = value
        else:
            return None
        shape = tensor.shape
        if len(shape) != self.rank or self.buffer:
            return None
        for axis, size in self.fixed:
            if shape[axis] != size:
                return None
        return tensor


class Inputs:
    """The inputs of `program` on `num_replicas` replicas. `fed_loss_gradient`: the user feeds the loss's gradient."""

    def __init__(self, program: Program, num_replicas: int, *, fed_loss_gradient: bool) -> None:
        self._program, self._num_replicas, self._fed_loss_gradient = program, num_replicas, fed_loss_gradient
        self._inputs = {var.name: _Input(program, var) for var in program.feeds()}

    def shares(self, feed: Feed) -> list[Share]:
        """Return the feed of each active replica. Raises FeedError, TypeError."""
        if self._fed_loss_gradient:
            return split_with_loss_gradients(self._program, feed, self._num_replicas, self._split)
        return self._split(feed)

    def rows(self, share: Share) -> int:
        """Return the rows of a share; 1 if no input has a batch."""
        for name, tensor in share.items():
            known = self._inputs.get(name)
            if known is not None and known.has_batch:
                return tensor.shape[0]
        return 1

    def bindings(self, share: Share) -> dict[str, int]:
        """Return the value of each size symbol. Raises FeedError if two inputs disagree."""
        found: dict[str, int] = {}
        for name, tensor in share.items():
            known = self._inputs.get(name)
            if known is None:
                continue  # the gradient of the loss
            for axis, symbol in known.symbols:
                size = tensor.shape[axis]
                if found.setdefault(symbol, size) != size:
                    return bind_symbols(self._program, share)  # says which two
        return found

    def _split(self, feed: Feed) -> list[Share]:
        if isinstance(feed, (list, tuple)):
            return self._listed(feed)
        return split(self._program, self._tensors(feed), self._num_replicas)

    def _tensors(self, feed: Any) -> Share:
        if isinstance(feed, dict) and len(feed) == len(self._inputs):
            tensors: Share = {}
            for name, value in feed.items():
                known = self._inputs.get(name)
                tensor = None if known is None else known.tensor(value)
                if tensor is None:
                    break
                tensors[name] = tensor
            else:
                return tensors
        return as_tensors(self._program, feed or {})

    def _listed(self, feeds: Sequence[Any]) -> list[Share]:
        for item in feeds:
            if not isinstance(item, Mapping):
                raise TypeError(f"a feed list holds {type(item).__name__}; expected one dict for each replica")
        if len(feeds) != self._num_replicas:
            raise FeedError(
                f"a feed list has {len(feeds)} dicts, but there are {self._num_replicas} replicas (CPU_NUM); "
                "give one dict for each, or a single dict to be split"
            )
        shares = [self._tensors(f) for f in feeds]
        for position, share in enumerate(shares):
            if self.rows(share) == 0:
                raise FeedError(f"dict {position} of the feed list has no rows; feed at least one to each replica")
        return shares
