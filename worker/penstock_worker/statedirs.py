"""Where pservers of this node keep their state: STATE/pservers/JOB/attempt-A/pserver-I.

A pserver that is started again in its place finds what its former self wrote, and restores it. A new attempt begins in
a folder of its own: its other servers may be on other nodes, and half of a model from before is worse than none. All of
a job's folders go when the job is over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from penstock.errors import PeerError
from penstock_worker.messages import Desired

FOLDER = "pservers"
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


def state_dir(root: Path, desired: Desired) -> Path | None:
    """Return the folder of a replica, None if it is no pserver. Raises PeerError if its job cannot name a folder."""
    if desired.role != "pserver":
        return None
    if not _NAME.match(desired.job_id):
        raise PeerError(f"job id {desired.job_id!r} cannot be the name of a folder")
    return root / FOLDER / desired.job_id / f"attempt-{desired.attempt}" / f"pserver-{desired.index}"


def over(root: Path, keep: Collection[str], alive: Iterable[str]) -> list[Path]:
    """Return the folders of jobs that are over. `keep`: jobs that go on; `alive`: those with a process here."""
    folder = root / FOLDER
    here = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in here if path.name not in keep and path.name not in set(alive)]
