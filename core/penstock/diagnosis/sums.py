"""What a diagnosis is made from, and what it consists of: plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpSum:
    """What one operator did. `index`: in the graph document; `role`: forward, backward, …, communication or input.

    `split`: share of its time that intra-op threads divide. `type`, `sizes`: by which operators are alike; `flops`: of
    one run, 0 if unknown.
    """

    index: int
    name: str
    role: str
    module: str
    count: int
    total_ns: int
    split: float = 0.0
    type: str = ""
    sizes: str = ""
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer of late. `step_ns`, `between_ns`: medians; `idle`: share of its workers' time, None if no step was
    sampled.

    `silent_s`: since its last step ended; `last_step`: its number. `workers`: operators that run at once, each on up to
    `intra_op_threads` (0 if unknown). `node`: its machine, '' if unknown; `num_cores`: of that, those that the job may
    use, 0 if unknown. `path_ns`: of a step's longest chain of operators that wait for one another, 0 if unknown.
    `evaluates`: it runs a graph that does not train, so no step is expected of it. `sampled_step`: the newest
    one that was recorded operator by operator. `matrix_gflops`: that one of its threads multiplies, 0 if unknown.
    `unfinished`: operators that had not ended when it last reported, though all that they wait for had.
    """

    index: int
    step_ns: float
    between_ns: float = 0.0
    silent_s: float = 0.0
    last_step: int = 0
    workers: int = 1
    intra_op_threads: int = 0
    node: str = ""
    num_cores: int = 0
    idle: float | None = None
    graph: str | None = None
    ops: tuple[OpSum, ...] = ()
    path_ns: float = 0.0
    evaluates: bool = False
    sampled_step: int | None = None
    matrix_gflops: float = 0.0
    unfinished: tuple[int, ...] = ()

    @property
    def turn_ns(self) -> float:
        """From the beginning of a step to that of the next."""
        return self.step_ns + self.between_ns

    @property
    def num_steps(self) -> int:
        """Steps that `ops` are of, at least 1."""
        return max((op.count for op in self.ops), default=1) or 1

    def role_ns(self, role: str) -> float:
        """Nanoseconds of a step in operators of a role, on the workers that run them in turn."""
        return sum(op.total_ns for op in self.ops if op.role == role) / (self.num_steps * self.workers)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nanoseconds of each step in which a trainer waited for a pserver, of one block. Block '': of none."""

    trainer: int
    pserver: int
    block: str
    wait_ns: float


@dataclass(frozen=True, slots=True)
class Link:
    """What passed between a trainer and a pserver, of each of the trainer's steps. `node`: its machine, '' if unknown.

    By the pserver's clock: `receive_ns` from the first byte of a request until all of it was there, `round_ns` while
    the step waited for those of others and for the update, `answer_ns` while an answer was sent. `work_ns`: of the
    pserver's own work for all trainers (merge, log, update, look up).
    """

    trainer: int
    pserver: int
    sent_bytes: float
    receive_ns: float
    received_bytes: float = 0.0
    answer_ns: float = 0.0
    round_ns: float = 0.0
    work_ns: float = 0.0
    node: str = ""

    @property
    def ns(self) -> float:
        """In which bytes were seen on the way, in either direction."""
        return self.receive_ns + self.answer_ns

    @property
    def served_ns(self) -> float:
        """Between a request and its answer. A round is waited for while its update is made."""
        return max(self.round_ns, self.work_ns)

    @property
    def bytes_per_s(self) -> float:
        """Rate of the direction that took longer; infinite if neither took any time."""
        ns, size = max((self.receive_ns, self.sent_bytes), (self.answer_ns, self.received_bytes))
        return size / ns * 1e9 if ns > 0 else math.inf


@dataclass(frozen=True, slots=True)
class TableLoad:
    """A sparse table. `ids`: pulled and pushed, by pserver; `hot_id`: pushed most, in `hot_share` of pushes."""

    name: str
    ids: Mapping[int, int]
    hot_id: str = ""
    hot_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Disk:
    """Where the agent of a node of the job has logs, checkpoints and spooled telemetry. `node`: its name."""

    node: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Sums:
    """All that is known. `running`: steps are expected."""

    trainers: tuple[Trainer, ...]
    waits: tuple[Wait, ...] = ()
    running: bool = True
    tables: tuple[TableLoad, ...] = ()
    disks: tuple[Disk, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause. `share`: of a turn; `tab`, `op` and the fields of the address `query`: where the evidence is."""

    cause: str
    sentence: str
    share: float
    ms: float
    place: str
    tab: str
    op: int | None = None
    graph: str | None = None
    query: Mapping[str, str] = field(default_factory=dict)
