"""Two processes that all-reduce through shared memory on command: what `bench collective` holds against `_gloo`."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench._gloo import NUM_PROCESSES, GlooPair, next_command


def serve(rank: int, store: str, commands: Connection) -> None:
    """Answer (size_bytes, repeats) with the (begin, end) of each all-reduce, as `_gloo.serve` does."""
    from penstock.distributed import collective  # the child's business, as above

    torch.set_num_threads(1)
    group = collective.this_process.meet(rank, tuple(os.environ["PENSTOCK_BENCH_ENDPOINTS"].split(",")))
    assert group is not None
    ops: Any = torch.ops.penstock
    ring, step = group.rings[0], torch.tensor([[1, 0, 0]] * NUM_PROCESSES)
    commands.send("ready")
    while (command := next_command(commands)) is not None:
        size_bytes, repeats = command
        gradient = ops.ring_memory(size_bytes).view(torch.float32)  # where an executor's gradients lie
        gradient.fill_(rank + 1)
        ops.ring_all_reduce_([gradient], 1, step, False, ring)
        right = bool((gradient == NUM_PROCESSES * (NUM_PROCESSES + 1) / 2).all())
        gradient.zero_()
        times = []
        for _ in range(repeats):
            ops.ring_meet(torch.tensor([1]), ring)
            begin = time.monotonic()
            ops.ring_all_reduce_([gradient], 1, step, False, ring)
            times.append((begin, time.monotonic()))
        commands.send((right, times))


class RingPair(GlooPair):
    """Both processes; used as `GlooPair` is."""

    target = staticmethod(serve)
