"""The metrics of a job as TensorBoard's event files: a run for each process, so that its charts overlay them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SpecError
from penstock.export.files import whole_folder
from penstock.export.recording import Recording

if TYPE_CHECKING:
    from penstock.protocol.rest import Series

_OF_PROCESS = re.compile(r"(.+)\.((?:trainer|pserver)\d+)")
FIRST = "trainer0"
_FILE_VERSION = "brain.Event:2"
"""What the first record of an event file says (TensorFlow's event.proto)."""


def run_and_tag(series: str) -> tuple[str, str]:
    """Return the run and the tag of a series: 'loss.trainer1' is 'loss' of 'trainer1', 'loss' is of trainer 0."""
    found = _OF_PROCESS.fullmatch(series)
    return (found[2], found[1]) if found else (FIRST, series)


def write_tensorboard(recording: Recording, folder: Path) -> dict[str, int]:
    """Write event files to `folder`/RUN, which is whole when it appears. Returns how many runs, series and points.

    Files are written as points come, without the thread of tensorboardX's SummaryWriter: once the disk is full it ends,
    and its queue blocks. Raises SpecError if the folder is not empty, cannot be written, or tensorboardX is not
    installed; nothing is left then.
    """
    _check_installed()
    series = recording.series()
    try:
        with whole_folder(Path(os.path.realpath(folder)), "TensorBoard would mix the runs") as part:
            runs = _write_runs(series, part)
    except OSError as error:
        raise SpecError(f"cannot write {folder}: {error.strerror or error}; give another --output") from error
    return {"runs": runs, "series": len(series), "points": sum(len(one["value"]) for one in series.values())}


def _check_installed() -> None:
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise SpecError("--format tensorboard needs tensorboardX: pip install 'penstock[tensorboard]'") from error


def _write_runs(series: Mapping[str, Series], folder: Path) -> int:
    """Write a file of records for each run; return how many runs."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter
    from tensorboardX.summary import scalar

    records: dict[str, RecordWriter] = {}
    with ExitStack() as opened:
        for name, points in series.items():
            run, tag = run_and_tag(name)
            if run not in records:
                (folder / run).mkdir()
                now_s = time.time()
                records[run] = RecordWriter(str(folder / run / f"events.out.tfevents.{now_s:.0f}.penstock"))
                opened.callback(records[run].close)
                records[run].write(Event(wall_time=now_s, file_version=_FILE_VERSION).SerializeToString())
            for step, time_ns, value in zip(points["step"], points["time_ns"], points["value"], strict=True):
                event = Event(wall_time=time_ns / 1e9, step=step, summary=scalar(tag, value))
                records[run].write(event.SerializeToString())
    return len(records)
