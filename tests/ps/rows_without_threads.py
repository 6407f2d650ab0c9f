"""Prefetch of rows where the system grants no thread, then where it does: `python -m tests.ps.rows_without_threads`.

Prints whether the rows will be looked up, of each.
"""

from __future__ import annotations

import resource
import socket
import threading
from pathlib import Path

import torch

from penstock.native.channels import NUM_CHANNELS, Session


def main() -> None:
    """Print it."""
    ends = [socket.socketpair() for _ in range(NUM_CHANNELS)]
    session = Session(0, 1, sync=True, limit_s=1.0, lease_s=20.0, num_servers=1)
    session.arm(0, [ours.detach() for ours, _ in ends], ["t"], 0, shares=False, local=True)
    ended = threading.Event()
    for _ in range(16):  # use the stacks of threads that have ended, which are kept for new ones
        threading.Thread(target=ended.wait, daemon=True).start()
    ids, rows = torch.tensor([1, 2]), torch.empty(2, 4)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, largest = resource.getrlimit(resource.RLIMIT_AS)
    for limit in (size + (1 << 20), largest):  # less than the stack of a thread
        session.begin_next()
        resource.setrlimit(resource.RLIMIT_AS, (limit, largest))
        will = session.look_up_next("t", ids, ["t"], [0], [], rows)
        resource.setrlimit(resource.RLIMIT_AS, (largest, largest))
        print(will, flush=True)


if __name__ == "__main__":
    main()
