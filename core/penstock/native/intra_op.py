"""How many threads an operator uses on a thread that is no engine's: those that answer requests, say.

torch's threads spin for milliseconds after an operator, each thread that calls operators has its own, and nobody else
gets those cores meanwhile. The setting is the calling thread's alone (`torch.set_num_threads` is not: its value reaches
every thread started later), and is lost with it. Cost: less than a microsecond.
"""

from __future__ import annotations

from penstock.native import check_built

check_built("_engine")

from penstock.native._engine import (  # noqa: E402 - a library built for another torch must not be loaded
    intra_op_runtimes,
    intra_op_threads_here,
    use_intra_op_threads_here,
)

__all__ = ["intra_op_runtimes", "intra_op_threads_here", "use_intra_op_threads_here"]
