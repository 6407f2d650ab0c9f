"""A program for an emulated processor: load the four native libraries, probe the matrix kernels, print one JSON object.

`python load_natives.py`; the last line has `capability` (what torch's kernels use of the processor), `libraries` (their
modules) and `kernels` (name to whether it is used, and why).
"""

from __future__ import annotations

import json

import torch

from penstock.native import _feed, _table, engine, matrix_probe, ops


def main() -> None:
    """Load and print. Raises whatever a library raises."""
    libraries = [_feed.__name__, _table.__name__, engine.TorchPlan.__module__, ops.__name__]
    kernels = {found.name: [found.present, found.detail] for found in matrix_probe.report()}
    found = {"capability": torch.backends.cpu.get_cpu_capability(), "libraries": libraries, "kernels": kernels}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
