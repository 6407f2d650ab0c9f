"""Passes: each takes a Graph and returns one that the checker accepts and that computes the same.

They run in two rounds, in the order below: those that need no sizes when the graph is built, those
that need them, or have to know what is fetched, when it is lowered for concrete batch sizes. A pass rewrites handles
with `graph.rewrite.Rewriter`; edges are derived again, never carried over.

| round | pass | file | BuildStrategy |
|---|---|---|---|
| graph | gradient of the loss from the feed | here | gradient_scale_strategy Customized |
| graph | batch-norm over all replicas | sync_batch_norm.py | sync_batch_norm |
| graph | buckets of gradients | exchanges.py | fuse_all_reduce_ops |
| graph | parts of large exchanges | exchanges.py | (always, on CPU) |
| graph | order of exchanges with other processes | exchanges.py | num_trainers |
| graph | one broadcast an owner | exchanges.py | fuse_broadcast_ops (GPU, Reduce) |
| graph | one push and one pull a step | fuse_remote.py | (all modes but GEO) |
| graph | gradients of the last layers pushed while the first are computed | send_ahead.py | (all modes but GEO) |
| sizes | one exchange a step in GEO mode | fuse_geo.py | (always) |
| sizes | sparse updates without copies | fuse_sparse.py | (always, on CPU) |
| sizes | exchanges with servers without copies | fuse_remote_copies.py | (always, on CPU) |
| sizes | lookups and their sums over sequences | fuse_bags.py | (always, on CPU) |
| sizes | lookups side by side | fuse_lookups.py | (always, on CPU) |
| sizes | updates of one kind | fuse_optimizer.py | fuse_all_optimizer_ops |
| sizes | max pooling by 2 x 2, with relu | fuse_max_pool.py | (always, on CPU) |
| sizes | sum and activation in one operator | fuse_add_act.py | fuse_elewise_add_act_ops |
| sizes | kernels of matrix products | matrix_kernels.py | (PENSTOCK_MATRIX_KERNELS) |
| sizes | sequential order | exchanges.py | enable_sequential_execution |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from penstock.graph.choice import PLAIN, Buckets, MatrixKernels, PassChoice
from penstock.graph.operands import Shares
from penstock.graph.passes.exchanges import (
    fuse_broadcasts,
    fuse_exchanges,
    order_exchanges,
    run_in_program_order,
    split_exchanges,
)
from penstock.graph.passes.fuse_add_act import fuse_add_act
from penstock.graph.passes.fuse_bags import fuse_bags
from penstock.graph.passes.fuse_geo import fuse_geo
from penstock.graph.passes.fuse_lookups import fuse_lookups
from penstock.graph.passes.fuse_max_pool import fuse_max_pool
from penstock.graph.passes.fuse_optimizer import fuse_updates
from penstock.graph.passes.fuse_remote import fuse_remote
from penstock.graph.passes.fuse_remote_copies import fuse_remote_copies
from penstock.graph.passes.fuse_sparse import fuse_sparse_updates
from penstock.graph.passes.matrix_kernels import choose_matrix_kernels
from penstock.graph.passes.recording import Run
from penstock.graph.passes.send_ahead import send_ahead
from penstock.graph.passes.sync_batch_norm import synchronize_batch_norm
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph
from penstock.program.program import Program

__all__ = ["PLAIN", "Buckets", "MatrixKernels", "PassChoice", "run_graph_passes", "run_sized_passes"]


def run_graph_passes(graph: Graph, program: Program, choice: PassChoice, *, recorded: bool = False) -> Graph:
    """Run the chosen passes that need no sizes. `program`: what `graph` was built from.

    `recorded`: the graph names them, with what each changed, in `applied`.
    """
    run = Run(graph, recorded=recorded)
    if choice.fed_loss_gradient:
        run.apply("gradient of the loss from the feed", feed_loss_gradient)
    if choice.sync_batch_norm:
        run.apply("batch-norm over all replicas", synchronize_batch_norm, program)
    if choice.fuse_all_reduce:
        run.apply("buckets of gradients", fuse_exchanges, program, choice.buckets)
    if choice.split_exchange:
        run.apply("parts of large exchanges", split_exchanges, program, choice.matrix.at_once)
    run.apply("order of exchanges with other processes", order_exchanges, choice.rings)
    if choice.fuse_remote:
        run.apply("one push and one pull a step", fuse_remote)
        run.apply("gradients sent while others are computed", send_ahead, program)
    if choice.fuse_broadcast:
        run.apply("one broadcast an owner", fuse_broadcasts)
    return run.graph


def run_sized_passes(
    graph: Graph,
    program: Program,
    choice: PassChoice,
    shares: Shares,
    kept: Collection[str] = (),
    *,
    recorded: bool = False,
) -> Graph:
    """Run the chosen passes that need the sizes of a step. Cost: part of lowering, so once for each combination.

    `kept`: variables that the graph must still make, because they are fetched. `recorded`: see `run_graph_passes`.
    """
    run = Run(graph, recorded=recorded)
    if choice.fuse_remote:
        run.apply("one exchange a step in GEO mode", fuse_geo, program, kept)
    if choice.fuse_sparse:
        run.apply("sparse updates without copies", fuse_sparse_updates, program, kept)
        run.apply("exchanges with servers without copies", fuse_remote_copies, program, kept)
    if choice.fuse_lookups:
        run.apply("sums over sequences", fuse_bags, program, kept)
        run.apply("lookups side by side", fuse_lookups, program, kept)
    if choice.fuse_max_pool:
        run.apply("max pooling", fuse_max_pool, program, kept)
    if choice.fuse_optimizer:
        run.apply("updates of one kind", fuse_updates, program, kept)
    if choice.fuse_add_act:
        run.apply("sum and activation in one operator", fuse_add_act, program, kept)
    if choice.matrix_kernels:
        run.apply("kernels of matmuls", choose_matrix_kernels, program, choice.matrix, shares, kept)
    if choice.sequential:  # after what takes handles away: an edge to one would be lost
        run.apply("sequential order", run_in_program_order)
    return run.graph


def feed_loss_gradient(graph: Graph) -> Graph:
    """Drop the operators that make a loss's gradient, and declare what they made as inputs, which each replica is fed.

    Source: gradient_scale_strategy Customized, multi_devices_graph_pass.cc (Fluid 1.8): it inserts no scale operator.
    """
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.kind == "scale_loss_grad":
            for name in handle.makes():
                rewriter.declare(replace(graph.variables[name], feed=True))
        else:
            rewriter.keep(handle)
    return rewriter.finish()
