"""How much of a training step is spent in exchanges that nothing hides: from the engine's trace of rank 0.

`python -m bench._exposed WORKLOAD CORES STEPS FOLDER` trains collectively and prints one JSON line: the share of each
step in which exchanges were under way and no operator ran. Waiting for a slower rank is part of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import ROOT
from bench.peers.contender import Options
from bench.peers.remote import child_environment

LIMIT_S = 600.0


def exposed_shares(events: Mapping[str, Any], exchanges: Collection[int]) -> list[float]:
    """Return, for each step of a drained trace, (time in which only `exchanges` ran) / (first begin to last end).

    `exchanges`: numbers of the operators that wait for other processes. Columns as `Engine.drain` gives them.
    """
    begin = np.asarray(events["start_ns"], dtype=np.int64)
    end = begin + np.asarray(events["duration_ns"], dtype=np.int64)
    step = np.asarray(events["step"])
    waits = np.isin(np.asarray(events["op"]), sorted(exchanges))
    shares = []
    for number in np.unique(step):
        mine = step == number
        span = int(end[mine].max() - begin[mine].min())
        alone = _covered(begin[mine], end[mine]) - _covered(begin[mine & ~waits], end[mine & ~waits])
        shares.append(alone / max(span, 1))
    return shares


def _covered(begin: np.ndarray, end: np.ndarray) -> int:
    """Return the length of the union of intervals."""
    order = np.argsort(begin, kind="stable")
    total, reached = 0, -1
    for low, high in zip(begin[order].tolist(), end[order].tolist(), strict=True):
        total += max(0, high - max(low, reached))
        reached = max(reached, high)
    return total


def measured(workload: Path, cores: int, steps: int, folder: Path) -> list[float]:
    """Train in processes of their own and return the share of each step. Raises SystemExit with what they said."""
    command = [sys.executable, "-m", "bench._exposed", str(workload), str(cores), str(steps), str(folder)]
    environ = child_environment(os.environ, "installed") | {"PENSTOCK_CACHE": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"bench collective: the traced training failed\n{done.stderr[-2000:]}")
    shares: list[float] = json.loads(done.stdout.splitlines()[-1])
    return shares


def main(workload: Path, cores: int, steps: int, folder: Path) -> None:
    """Train, and print the shares. The trainers that rank 0 starts end with it."""
    from bench.peers.penstock_collective import CollectiveTrainer  # loads torch, which the parent does without
    from penstock.graph.across import WAITS

    trainer = CollectiveTrainer(Options("", workload, folder, cores))
    trainer.run(steps)
    core = trainer.executor.core
    core.engine.drain()
    trainer.run(steps)
    graph = core.newest_graph
    assert graph is not None
    exchanges = {handle.index for handle in graph.handles if handle.op.type in WAITS}
    events = core.engine.drain()
    assert not events["lost"], "steps of the trace are not whole"
    print(json.dumps(exposed_shares(events, exchanges)), flush=True)
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
