"""What `penstock doctor` reads from torch: `python -m penstock.command.doctor_torch` prints it as one JSON object.

A process of its own: a library that does not fit the processor, or another torch than the native libraries were built
for, ends that process and not the report.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

LIBRARIES = ("_engine", "_ops", "_table", "_feed")


def read() -> dict[str, Any]:
    """Return what torch is, whether the native libraries load with it, which kernels work, and the GPUs."""
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
        from penstock.native import engine, matrix_probe  # loads the engine

        return {"native": "", "engine": engine.__name__, "kernels": [asdict(one) for one in matrix_probe.report()]}
    except (UserError, ImportError, OSError, RuntimeError) as error:
        return {"native": str(error).partition("\n")[0] or type(error).__name__, "kernels": []}


def main() -> None:
    """Print what was read. An error of torch's import is the process's."""
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no part of the answer
    text = json.dumps(read())
    with os.fdopen(out, "w", encoding="utf-8") as answer:
        answer.write(text)


if __name__ == "__main__":
    main()
