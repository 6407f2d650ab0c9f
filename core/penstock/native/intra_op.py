"""Number of threads that an operator uses, set for one thread alone.

torch's threads spin for milliseconds after an operator, and each thread that calls operators has its own, which other
threads of the process then wait for. The setting is the calling thread's alone (`torch.set_num_threads` is not: its
value reaches every thread started later), and ends with it. Cost: less than a microsecond. Where a runtime does not
have the setting or ignores it, the engine leaves it alone, and operators use torch's number of threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.machine.capability import Absent, capability, probe
from penstock.native import check_built

check_built("_engine")

from penstock.native._engine import (  # noqa: E402 - a library built for another torch must not be loaded
    intra_op_runtimes,
    intra_op_threads_here,
    use_intra_op_runtimes,
    use_intra_op_threads_here,
)

__all__ = ["intra_op_runtimes", "intra_op_threads_here", "use_intra_op_threads_here", "use_probed_runtimes"]


@probe("threads.openmp", fallback="torch's number of threads for every operator")
def _openmp() -> str:
    if not intra_op_runtimes()[0]:
        raise Absent("torch's libraries do not export omp_set_num_threads")
    with ThreadPoolExecutor(1) as other:  # the setting is a thread's own, and goes with it
        other.submit(use_intra_op_threads_here, 1).result()
        there, _ = other.submit(intra_op_threads_here).result()
    if there != 1:
        raise Absent(f"a thread that asked for 1 thread an operator gets {there}")
    return "set for each thread of the engine"


@probe("threads.mkl", fallback="as many threads in MKL as OpenMP allows")
def _mkl() -> str:
    if not intra_op_runtimes()[1]:
        raise Absent("torch's libraries do not export MKL_Set_Num_Threads_Local")
    return "set for each thread of the engine"


def use_probed_runtimes() -> None:
    """Have the engine use the runtimes whose probes succeeded. Runs at import; not while an engine runs a step."""
    use_intra_op_runtimes(openmp=True, mkl=True)  # as found, for the probes
    openmp, mkl = (capability(f"threads.{name}").present for name in ("openmp", "mkl"))
    use_intra_op_runtimes(openmp=openmp, mkl=mkl)


use_probed_runtimes()
