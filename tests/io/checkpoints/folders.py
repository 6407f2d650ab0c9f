"""Folders of checkpoints, written by this process or by one that is killed. Imported by tests."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from penstock.io.checkpoints.fence import Fence
from penstock.io.checkpoints.fingerprint import fingerprint
from penstock.io.checkpoints.reading import StoredCheckpoint
from penstock.io.checkpoints.record import RankState
from penstock.io.checkpoints.writing import Contents, Retention, Writer, clear_up

TEXT = "program version=1 seed=1 symbols=[]\n"
KEEP_TWO = Retention(keep=2)


def values(step: int) -> dict[str, torch.Tensor]:
    """Return values that differ between steps: two shards, where shards are of at most 450 bytes."""
    return {
        "w": torch.full((10, 11), float(step)), "b": torch.arange(7, dtype=torch.int64) + step,
        "half": torch.full((3,), step, dtype=torch.bfloat16), "flag": torch.tensor([True, False]),
        "rate": torch.tensor(0.5 * step, dtype=torch.float64), "none": torch.empty(0, 4),
    }  # fmt: skip


def contents(step: int, metric: float | None = None) -> Contents:
    """Return a checkpoint of one process."""
    rank = RankState(step, 1, 0, {"batch": step}, {}).text()
    return Contents("local", step, fingerprint(TEXT), TEXT, values(step), [rank], metric)


def writer(folder: Path, retention: Retention = KEEP_TWO, environ: Mapping[str, str] | None = None) -> Writer:
    """Claim a folder, and return what writes into it."""
    fence = Fence(folder, environ or {})
    clear_up(fence)
    return Writer(fence, retention, lambda phase: None, shard_bytes=450)


def kills_itself(work: Callable[[Callable[[str], None]], object], phase: str, turn: int = 0) -> bool:
    """Do `work(at_phase)` in a process that kills itself when it comes to a phase for the `turn`-th time.

    Returns whether it came so far; else it has done its work.
    """
    pid = os.fork()
    if not pid:
        left = turn

        def at_phase(reached: str) -> None:
            nonlocal left
            if reached == phase:
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        status = 1
        try:
            work(at_phase)
            status = 0
        finally:
            os._exit(status)
    descriptor = os.pidfd_open(pid)
    ended = bool(select.select([descriptor], [], [], 120)[0])
    if not ended:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(descriptor)
    assert ended, "it hung"
    assert status in (0, -signal.SIGKILL)
    return status != 0


def is_of_step(found: StoredCheckpoint | None, step: int) -> bool:
    """Whether a checkpoint is that of `contents(step)`, to the bit."""
    assert found is not None
    if found.record.step != step:
        return False
    wanted = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in values(step).items()}
    got = found.values(wanted, lambda name: "")
    assert all(torch.equal(got[name], tensor) for name, tensor in values(step).items())
    assert found.ranks() == [RankState(step, 1, 0, {"batch": step}, {})]
    assert found.program_text() == TEXT
    return True


def names(folder: Path) -> list[str]:
    """Return the names in a folder, but for those of the claim."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("attempt"))
