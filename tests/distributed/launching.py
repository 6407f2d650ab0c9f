"""What tests of launchers share: a script that waits for its siblings, and whether processes are gone."""

from __future__ import annotations

from pathlib import Path

WAITS = """
import os, pathlib, subprocess, sys, time
index, kind = os.environ["PENSTOCK_INDEX"], os.environ["PENSTOCK_ROLE"]
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(f"{kind}.{index}").write_text(f"{os.getpid()} {grandchild.pid}")
pathlib.Path(f"{kind}.{index}").rename(f"{kind}.{index}.pids")
while len(list(pathlib.Path().glob("*.pids"))) < COUNT:
    time.sleep(0.02)
WHAT
time.sleep(600)
"""


def waits(count: int, what: str = "") -> str:
    """Return a script that does `what` once `count` processes of the job run, each with a child; then it waits."""
    return WAITS.replace("COUNT", str(count)).replace("WHAT", what)


def pids(folder: Path, count: int) -> list[int]:
    """Return the processes of `count` waiting scripts, child and all; none while they have not all said so."""
    files = list(folder.glob("*.pids"))
    found = [int(pid) for file in files for pid in file.read_text().split()]
    return found if len(found) == 2 * count else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
