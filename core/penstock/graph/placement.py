"""Which replica updates which parameter in Reduce mode.

Greedy, as Fluid: in the order in which gradients are made, each goes to the replica with the fewest
elements so far (the first of equals). Source: GetAppropriateDeviceID, multi_devices_graph_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterable


def place_updates(sizes: Iterable[tuple[str, int]], num_replicas: int) -> dict[str, int]:
    """Return the owner of each (parameter, elements), in order. Deterministic."""
    loads = [0] * num_replicas
    owners: dict[str, int] = {}
    for name, elements in sizes:
        owner = loads.index(min(loads))
        loads[owner] += elements
        owners[name] = owner
    return owners
