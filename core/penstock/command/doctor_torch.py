"""What `penstock doctor` reads from torch: `python -m penstock.command.doctor_torch` prints it as one JSON object.

A process of its own: a library that does not fit the processor, or another torch than the native libraries were built
for, ends that process and not the report.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

LIBRARIES = ("_engine", "_ops", "_ps", "_table", "_feed")


def read() -> dict[str, Any]:
    """Return what torch is, whether the native libraries load with it, what was probed with them, and the GPUs."""
    import torch  # this module's whole purpose; the parent process has none

    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }
    return {**found, **_native()}


def _native() -> dict[str, Any]:
    from penstock.errors import UserError  # see read()
    from penstock.native import check_built, load_operators

    try:
        for name in LIBRARIES:
            check_built(name)
        load_operators()
        from penstock.machine.capability import capability
        from penstock.native import engine, matrix_probe, openssl  # loads the engine, and what servers and trainers use

        probed = [asdict(one) for one in (*matrix_probe.report(), capability(openssl.CHANNELS_TLS))]
        return {"native": "", "engine": engine.__name__, "probed": probed, "measured": _measured()}
    except (UserError, ImportError, OSError, RuntimeError) as error:
        return {"native": str(error).partition("\n")[0] or type(error).__name__, "probed": []}


def _measured() -> dict[str, int]:
    """Count the products that this machine's section of the cache has, by the kernel that runs each here."""
    from penstock.native import matrix_cache, matrix_kernels, matrix_probe  # see read()

    available = matrix_probe.available()
    entries = matrix_cache.store_of_machine().load().values()
    usable = [{kernel: times[kernel] for kernel in times if kernel in available} for times in entries]
    chosen = Counter(matrix_kernels.decide(times) for times in usable)
    return {kernel: chosen[kernel] for kernel in matrix_kernels.KERNELS if chosen[kernel]}


def main() -> None:
    """Print what was read. An error of torch's import is the process's."""
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no part of the answer
    text = json.dumps(read())
    with os.fdopen(out, "w", encoding="utf-8") as answer:
        answer.write(text)


if __name__ == "__main__":
    main()
