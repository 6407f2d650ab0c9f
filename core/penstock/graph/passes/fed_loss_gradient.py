"""The gradient of the loss comes from the user: no operator makes it, each replica is fed its own.

Source: gradient_scale_strategy Customized, multi_devices_graph_pass.cc (Fluid 1.8), which inserts no scale operator.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph


def feed_loss_gradient(graph: Graph) -> Graph:
    """Drop the operators that make a loss's gradient, and declare what they made as inputs."""
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.kind == "scale_loss_grad":
            for name in handle.makes():
                rewriter.declare(replace(graph.variables[name], feed=True))
        else:
            rewriter.keep(handle)
    return rewriter.finish()
