"""A process of a job under test: prints numbered lines, and writes to a witness file what it does, as it does it.

    python counting.py WITNESS LINES PAUSE_S EXIT_CODE [MORE]

prints 0 to LINES - 1, one each PAUSE_S seconds, logs each as a point of the series `count/REPLICA`, and exits with
EXIT_CODE. MORE: `deaf` ignores SIGTERM; `crash` exits with 3 after half of the lines in the first attempt. The witness
file WITNESS/REPLICA.PID is outside of all that Penstock knows: each line is `TIME WORD NUMBER`, written after what it
is about. `closed` stands for telemetry that was closed at the end, as by a script that returns.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from penstock import telemetry

TICK_S = 0.2
SERIES = "count/"
"""Before the replica's id, the name of its series."""


def main(argv: list[str]) -> int:
    """Count. Returns the exit status."""
    folder, lines, pause_s, code = Path(argv[0]), int(argv[1]), float(argv[2]), int(argv[3])
    more = argv[4:]
    if "deaf" in more:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    replica_id = os.environ["PENSTOCK_REPLICA_ID"]
    witness = os.open(folder / f"{replica_id}.{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    note(witness, "began", 0)
    first = folder / f"{os.environ['PENSTOCK_JOB_ID']}.crashed"
    for number in range(lines):
        print(number, flush=True)
        note(witness, "wrote", number + 1)
        telemetry.log({SERIES + replica_id: number}, step=number)
        note(witness, "logged", number)
        if "crash" in more and number >= lines // 2 and not first.exists():
            first.touch()
            code = 3
            break
        wait(witness, pause_s)
    telemetry.close()
    note(witness, "closed", 0)
    return code


def note(witness: int, word: str, number: int) -> None:
    """Append one line to the witness file."""
    os.write(witness, f"{time.time():.3f} {word} {number}\n".encode())


def wait(witness: int, seconds: float) -> None:
    """Sleep, and show signs of life meanwhile."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, TICK_S))
        note(witness, "alive", 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
