"""The metrics of a job as TensorBoard's event files: a run for each process, so that its charts overlay them."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import SpecError
from penstock.export.recording import Recording

_OF_PROCESS = re.compile(r"(.+)\.((?:trainer|pserver)\d+)")
FIRST = "trainer0"


def run_and_tag(series: str) -> tuple[str, str]:
    """Return the run and the tag of a series: 'loss.trainer1' is 'loss' of 'trainer1', 'loss' is of trainer 0."""
    found = _OF_PROCESS.fullmatch(series)
    return (found[2], found[1]) if found else (FIRST, series)


def write_tensorboard(recording: Recording, folder: Path) -> dict[str, int]:
    """Write event files to `folder`/RUN. Returns how many runs, series and points.

    Raises SpecError if the folder is not empty, cannot be written, or tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise SpecError("--format tensorboard needs tensorboardX: pip install 'penstock[tensorboard]'") from error
    series = recording.series()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise SpecError(f"{folder} is not empty, and TensorBoard would mix the runs: give another --output")
        writers: dict[str, SummaryWriter] = {}
        for name, points in series.items():
            run, tag = run_and_tag(name)
            if run not in writers:
                writers[run] = SummaryWriter(str(folder / run), write_to_disk=True)
            for step, time_ns, value in zip(points["step"], points["time_ns"], points["value"], strict=True):
                writers[run].add_scalar(tag, value, step, walltime=time_ns / 1e9)
        for writer in writers.values():
            writer.close()
    except OSError as error:
        raise SpecError(f"cannot write {folder}: {error.strerror or error}; give another --output") from error
    return {"runs": len(writers), "series": len(series), "points": sum(len(one["value"]) for one in series.values())}
