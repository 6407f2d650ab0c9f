"""Eager deletion: which temporaries are released with their last use, and which stay when a run is over.

The engine releases every slot that is not kept with its last reader; this names the ones that it keeps.

Source: eager_deletion_pass.cc, FLAGS_eager_delete_tensor_gb (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Set

from penstock.graph.ssa import Graph


def staying(graph: Graph, *, eager: bool, kept: Set[str] = frozenset()) -> frozenset[str]:
    """Return the physical variables that hold their memory until temporaries are cleared.

    `eager`: release with the last use; only those called `kept` (names in the Program) stay. Otherwise all do.
    """
    made = {n for handle in graph.handles for n in handle.makes()}
    stay = set()
    for key in made:
        variable = graph.variables[key]
        root = graph.variables[variable.storage]
        lasts = variable.persistable or variable.feed or root.persistable or root.feed
        if not lasts and (not eager or variable.name in kept or root.name in kept):
            stay.add(key)
    return frozenset(stay)
