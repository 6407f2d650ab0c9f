"""What a job tells its processes of checkpoints, by their environment.

The agent makes the folder; it outlives an attempt, so that the next one goes on from what the last has committed.
"""

from __future__ import annotations

from dataclasses import dataclass

DIRECTORY = "PENSTOCK_CHECKPOINT_DIR"
EVERY_STEPS = "PENSTOCK_CHECKPOINT_EVERY_STEPS"
KEEP = "PENSTOCK_CHECKPOINT_KEEP"


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    """`checkpoint` of a job's description. `directory`: where this process reaches the job's checkpoints."""

    directory: str
    every_steps: int
    keep: int

    def environ(self) -> dict[str, str]:
        """Return the variables to put into the process's environment."""
        return {DIRECTORY: self.directory, EVERY_STEPS: str(self.every_steps), KEEP: str(self.keep)}
