"""Which passes a graph goes through: plain data, decided from the strategies by `exec`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """When a bucket of gradients is full: at `num_bytes`, or before one layer more than `num_layers`; 0: no limit."""

    num_bytes: int = 0
    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class MatrixKernels:
    """How matrix products choose their kernel. `forced`: 'torch' or 'onednn' for all of them; empty: the fastest.

    `at_once` and `intra_op`: operators that run at a time, and threads of each, which `exec` knows.
    """

    forced: str = ""
    at_once: int = 1
    intra_op: int = 1


@dataclass(frozen=True, slots=True)
class PassChoice:
    """One field a pass. Defaults are those of a ParallelExecutor with default strategies.

    `rings`: names of the exchanges with other processes that may be under way at a time.
    """

    sequential: bool = False
    fuse_all_reduce: bool = True
    split_exchange: bool = True
    fuse_optimizer: bool = False
    fuse_add_act: bool = False
    fuse_broadcast: bool = False
    fuse_remote: bool = True
    fuse_lookups: bool = True
    fuse_sparse: bool = True
    fuse_max_pool: bool = True
    sync_batch_norm: bool = False
    matrix_kernels: bool = True
    reuse_buffers: bool = True
    inplace: bool = True
    graphviz_path: str = ""
    fed_loss_gradient: bool = False
    buckets: Buckets = Buckets()
    rings: tuple[str, ...] = ()
    matrix: MatrixKernels = MatrixKernels()


PLAIN = PassChoice(
    fuse_all_reduce=False,
    split_exchange=False,
    fuse_remote=False,
    fuse_lookups=False,
    fuse_sparse=False,
    fuse_max_pool=False,
    matrix_kernels=False,
    reuse_buffers=False,
    inplace=False,
)
"""No pass at all: the graph as it is built. What passes are tested against."""
