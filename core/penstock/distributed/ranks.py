"""Ranks of a collective job: the number of this trainer, and where all trainers meet. Pure.

Trainers meet at the first endpoint, or at torchrun's MASTER_ADDR and MASTER_PORT (`penstock.identity`).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.identity import Incarnation, JobIdentity


@dataclass(frozen=True, slots=True)
class Ranks:
    """The participants. `endpoints`: of each trainer where it is known, at least of the first.

    `meeting`: host and port of the store at which they meet. `is_served`: another process serves it (torchrun's agent).
    `attempt`: counts restarts under the same store. `num_rings`: exchanges that may be under way at a time.
    `inter`: ranks of one group of a hierarchical exchange; 0: it is flat.
    """

    rank: int
    num_ranks: int
    meeting: str
    endpoints: tuple[str, ...] = ()
    is_served: bool = False
    attempt: str = "0"
    num_rings: int = 1
    inter: int = 0

    def name(self, rank: int) -> str:
        """Return 'rank 1 (127.0.0.1:6171)' for an error."""
        return f"rank {rank} ({self.endpoints[rank]})" if rank < len(self.endpoints) else f"rank {rank}"


def ranks_of(rank: int, endpoints: tuple[str, ...], *, num_rings: int = 1, inter: int = 0) -> Ranks:
    """Return the ranks of a list of endpoints: they meet at the first one, which the first one serves."""
    attempt = Incarnation.from_environ().attempt
    return Ranks(rank, len(endpoints), endpoints[0], endpoints, attempt=attempt, num_rings=num_rings, inter=inter)


def ranks_in(job: JobIdentity | None) -> Ranks | None:
    """Return the ranks of a job whose trainers meet; None if no launcher has set where."""
    if job is None or not job.meeting:
        return None
    attempt = Incarnation.from_environ().attempt
    return Ranks(job.index, job.num_trainers, job.meeting, job.trainer_endpoints, job.is_served, attempt)
