"""What a process and an executor report of themselves; here, where nothing watches the process, nothing comes of it.

Loads neither pydantic nor sockets: most processes are not watched, and each pays for what is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.identity import Role

if TYPE_CHECKING:
    from penstock.protocol.graphdoc import GraphDocument, Threads
    from penstock.telemetry.events import TraceSource
    from penstock.telemetry.exchanges import ExchangeSource, TableSource
    from penstock.telemetry.input import InputTrace
    from penstock.telemetry.media import Loggable
    from penstock.telemetry.work import WorkSource

ThreadsOf = Callable[[], "Threads | None"]


class Watch(Protocol):
    """What an executor reports of its runs. Every method returns at once and raises nothing; here they do nothing."""

    is_watched: bool
    """False: not watched; an executor need not build graph documents."""

    def graph(self, document: GraphDocument, from_step: int = 0) -> None:
        """Report that from step `from_step` on, runs use this graph. Call it before the first such run starts."""
        return

    def step(self, *, step: int, start_ns: int, end_ns: int, samples: int, loss: float | None) -> None:
        """Report that a run has ended. Times: Unix; `samples`: rows fed; `loss`: None if it was not fetched."""
        return

    def close(self) -> None:
        """Drain the source a last time; afterwards it is not touched any more. Idempotent."""
        return


class NullWatch(Watch):
    """Reports of a process that is not watched: dropped."""

    is_watched = False


class Session(Protocol):
    """What a process reports of itself. No method waits for a peer (`close`: at most 2 s) or raises because of one.

    Here they do nothing; `Watched` sends.
    """

    def register(self, *, role: Role = "trainer", endpoint: str | None = None, index: int | None = None) -> None:
        """Register what this process is; a pserver gives the host:port that it listens on. Default: the environment's.

        Call it before anything else: an attached process that has already registered sends GOODBYE and registers again.
        """
        return

    def watch(self, source: TraceSource, *, name: str, threads: ThreadsOf | None = None) -> Watch:
        """Start to drain a source, one for each executor. `threads`: tells what runs its graphs, if it is watched."""
        return NullWatch()

    def exchange(
        self, counters: ExchangeSource, *, endpoints: Sequence[str] = (), tables: TableSource | None = None,
        mode: str = "", work: WorkSource | None = None,
    ) -> None:  # fmt: skip
        """Report what is exchanged with parameter servers, twice a second while it changes, from now on.

        `endpoints`: the servers, in the order of the job's; a server leaves it out. `tables`: what a server's tables
        hold; `mode`: of its rounds; `work`: what it does, and when. The same counters again: once.
        """
        return

    def end_exchange(self, counters: ExchangeSource) -> None:
        """Let go of the counters and tables of a client or server that ended; what they had counted is reported on."""
        return

    def input(self) -> InputTrace | None:
        """Return where the data feed records its work; None: unwatched."""
        return None

    def log(self, step: int | None = None, **values: Loggable) -> None:
        """Send scalars, tables and histograms of a step; None: the newest finished one.

        Raises TypeError if the step is no integer or a value no number, ValueError if the step is not in [0, 2**63),
        a name cannot be written as text, or a table is larger than 1 MiB as JSON.
        """
        return

    def progress(self, done: int, total: int, unit: str = "steps") -> None:
        """Report how far the process is. Only the newest is sent, ten times a second at most.

        Raises ValueError if `done` or `total` is not in [0, 2**63).
        """
        return

    def close(self) -> None:
        """Send what is left, then GOODBYE. Idempotent; runs at the exit of the interpreter by itself."""
        return

    def abandon(self) -> None:
        """Let nothing pile up from now on: a forked child is not the process that is watched. Lock-free."""
        return


class Unwatched(Session):
    """The session of a process that is not watched: nothing is stored, started or sent."""
