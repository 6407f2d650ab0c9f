"""A contender's process: `python -m bench.peers.serve KEY …` reads commands from stdin and answers on stdout.

One JSON object a line. First comes {"ready": versions}. {"run": N} answers {"seconds", "loss"} after N steps, and
{"exposed"}, {"recorded"} of contenders that measure it; {"check": true} answers {"checked": true, "movements"}; the end
of stdin ends the process. Whatever fails is answered as {"error": text} and ends it. Idle means waiting in a read: no
thread polls, and a parent that dies takes its children with it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from bench.peers.cluster import stay_on_core
from bench.peers.contender import CONTENDERS, MeasuresExchange, Options, RecordsExchange, Trainer

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies in the middle of a turn. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def private_stdout() -> TextIO:
    """Return a stream to the real stdout, and lead fd 1 to stderr: libraries print what they like."""
    stream = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return stream


def answer(trainer: Trainer, command: dict[str, Any]) -> dict[str, Any]:
    """Carry one command out."""
    if "run" in command:
        start = time.perf_counter()
        loss = trainer.run(int(command["run"]))
        seconds = time.perf_counter() - start
        exposed = {"exposed": trainer.exposed_share()} if isinstance(trainer, MeasuresExchange) else {}
        recorded = {"recorded": trainer.recording()} if isinstance(trainer, RecordsExchange) else {}
        return {"seconds": seconds, "loss": loss, **exposed, **recorded}
    trainer.check()
    return {"checked": True, "movements": {name: asdict(moved) for name, moved in trainer.movements().items()}}


def make(key: str, options: Options) -> Trainer:
    """Build the contender that the catalogue has under `key`."""
    made: Trainer = importlib.import_module(f"bench.peers.{CONTENDERS[key].module}").make(options)
    return made


def versions() -> dict[str, str]:
    """Return the version of every framework that is loaded."""
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "paddle", "numpy")}
    return {"python": platform.python_version(), **{name: str(v) for name, v in loaded.items() if v is not None}}


def main() -> int:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("key", choices=CONTENDERS)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--cluster", type=Path)
    given = parser.parse_args()
    end_with_parent()
    if given.cluster is not None:
        stay_on_core(given.cluster, given.rank)
    replies = private_stdout()
    mode = CONTENDERS[given.key].mode
    options = Options(mode, given.workload, given.folder, given.cores, given.rank, given.cluster)
    try:
        trainer = make(given.key, options)
        print(json.dumps({"ready": versions()}), file=replies)
        for line in sys.stdin:
            print(json.dumps(answer(trainer, json.loads(line))), file=replies)
        trainer.close()
    except Exception as error:  # noqa: BLE001 - the boundary of this process: recorded here, raised by the parent
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
