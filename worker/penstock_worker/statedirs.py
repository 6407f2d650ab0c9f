"""What jobs keep on this node beyond a process: pservers' state and checkpoints.

STATE/pservers/JOB/attempt-A/pserver-I   a pserver's own
STATE/checkpoints/JOB                    of a job that asks for checkpoints; the next attempt goes on from them

A pserver that is started again in its place finds what its former self wrote, and restores it. A new attempt begins in
a folder of its own: its other servers may be on other nodes, and half of a model from before is worse than none. All of
a job's folders go when the job is over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from penstock.errors import PeerError
from penstock.protocol.agent import Desired

FOLDER, CHECKPOINTS = "pservers", "checkpoints"
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


def state_dir(root: Path, desired: Desired) -> Path | None:
    """Return the folder of a replica, None if it is no pserver. Raises PeerError if its job cannot name a folder."""
    if desired.role != "pserver":
        return None
    return root / FOLDER / _checked(desired.job_id) / f"attempt-{desired.attempt}" / f"pserver-{desired.index}"


def checkpoint_dir(root: Path, desired: Desired) -> Path | None:
    """Return the folder of a job's checkpoints, None if it asks for none. Raises PeerError as `state_dir`."""
    return None if desired.checkpoint is None else root / CHECKPOINTS / _checked(desired.job_id)


def _checked(job_id: str) -> str:
    if not _NAME.match(job_id):
        raise PeerError(f"job id {job_id!r} cannot be the name of a folder")
    return job_id


def over(root: Path, keep: Collection[str], alive: Iterable[str]) -> list[Path]:
    """Return the folders of jobs that are over. `keep`: jobs that go on; `alive`: those with a process here."""
    folders = [root / FOLDER, root / CHECKPOINTS]
    here = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    return [path for path in here if path.name not in keep and path.name not in set(alive)]
