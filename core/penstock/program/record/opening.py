"""The Recording of a Program: an empty one, or one that takes up what was read from text."""

from __future__ import annotations

from penstock.program.program import Program
from penstock.program.record import variable as _handles  # noqa: F401 - the class of handles of a Recording
from penstock.program.record.recording import Recording
from penstock.program.record.replay import replay


def recording_of(program: Program) -> Recording:
    """Return the Recording of a Program, made at the first use; of one that was read from text, by replaying it."""
    if program.recording is None:
        program.recording = replay(program) if program.variables else Recording(program)
    return program.recording  # type: ignore[no-any-return]  # set just above


Program._open_recording = recording_of
