"""Interface between a trainer program's remote operators and its parameter servers: descriptors and protocols.

A descriptor is text in the program, `sync 0/2 host:port,host:port`: mode, trainer, number of trainers, endpoints of the
servers; in GEO mode also ` every=100`, with narrowed pushes ` wire=float16`. Job and token are no part of it (a program
travels); they come from the environment. Pure data: nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

from penstock.errors import ProgramError

SEND = "penstock.send.default"
SEND_ROWS = "penstock.send_rows.default"
SEND_BARRIER = "penstock.send_barrier.default"
SEND_STEP = "penstock.send_step.default"  # of graphs only, as RECV_STEP: `graph/passes/fuse_remote.py`
RECV_STEP = "penstock.recv_step.default"
SEND_AHEAD = "penstock.send_ahead.default"  # of graphs only: `graph/passes/send_ahead.py`
RECV = "penstock.recv.default"
FETCH_BARRIER = "penstock.fetch_barrier.default"
PREFETCH = "penstock.prefetch.default"
GEO = "penstock.geo.default"
GEO_STEP = "penstock.geo_step.default"  # of graphs only: `graph/passes/fuse_geo.py`
LISTEN_AND_SERV = "penstock.listen_and_serv.default"
SPARSE_TABLE = "penstock.sparse_table.default"
REMOTE_TYPES = frozenset({SEND, SEND_ROWS, SEND_BARRIER, RECV, FETCH_BARRIER, PREFETCH, GEO})

WIRE_DTYPES = ("float32", "float16", "bfloat16")
"""Values of `wire_dtype`; float32: nothing is narrowed."""

PsMode = Literal["sync", "half_async", "async", "geo"]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Which trainer of how many talks to which servers, and how.

    `push_every`: steps between two exchanges of GEO. `wire_dtype`: of pushed gradients over a network (`ps/narrow.py`).
    """

    mode: PsMode
    trainer: int
    num_trainers: int
    endpoints: tuple[str, ...]
    push_every: int = 100
    wire_dtype: str = "float32"

    def __str__(self) -> str:
        every = f" every={self.push_every}" if self.mode == "geo" else ""
        wire = f" wire={self.wire_dtype}" if self.wire_dtype != "float32" else ""
        return f"{self.mode} {self.trainer}/{self.num_trainers} {','.join(self.endpoints)}{every}{wire}"

    @staticmethod
    def parse(text: str) -> Descriptor:
        """Read the text form. Raises ProgramError."""
        parts = text.split(" ")
        wire_dtype = parts.pop().removeprefix("wire=") if parts[-1].startswith("wire=") else "float32"
        every = parts.pop().removeprefix("every=") if parts[-1].startswith("every=") else "100"
        trainer, slash, trainers = parts[1].partition("/") if len(parts) == 3 else ("", "", "")
        numbers = (trainer, trainers, every)
        if (
            not slash
            or wire_dtype not in WIRE_DTYPES
            or parts[0] not in get_args(PsMode)
            or not all(n.isdecimal() for n in numbers)
        ):
            raise ProgramError(
                f"{text!r} does not name the parameter servers to use; expected 'sync 0/2 host:port,host:port'"
            )
        endpoints = tuple(parts[2].split(","))
        return Descriptor(cast(PsMode, parts[0]), int(trainer), int(trainers), endpoints, int(every), wire_dtype)


@dataclass(frozen=True, slots=True)
class SendCall:
    """Arguments of one `send` or, with `rows`, `send_rows`. `values`: of each block, or of the rows."""

    variable: str
    blocks: Sequence[str]
    at: Sequence[int]
    values: Sequence[Any]
    heights: Sequence[int] = ()
    rows: Any = None


@dataclass(frozen=True, slots=True)
class GeoCall:
    """Arguments of one `geo`. `rows`: int64 tensors of any shape, None for a dense parameter."""

    variable: str
    blocks: Sequence[str]
    at: Sequence[int]
    heights: Sequence[int]
    parameter: Any
    rows: Sequence[Any] | None


class Remote(Protocol):
    """Parameter servers, as a trainer's operators see them. Tensors are torch's, on the CPU and contiguous.

    `blocks` are names of parameter blocks, `at[i]` is the index of the endpoint that has `blocks[i]`, `heights[i]` its
    number of rows. `heights == []`: a table whose ids are spread over the servers `at` by value. Every call is bounded
    by a deadline and raises Unavailable naming the endpoint, or PeerError. Thread-safe: operators run at the same time.
    """

    def send(self, variable: str, blocks: Sequence[str], at: Sequence[int], values: Sequence[Any]) -> None:
        """Push the gradient of each block. The tensors are the caller's again when it returns."""

    def send_rows(
        self, variable: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], rows: Any, values: Any
    ) -> None:
        """Push a sparse gradient: `rows` int64[n] (may repeat), `values` [n, d]. Equal rows add up, here or there."""

    def send_barrier(self) -> None:
        """All of this step is sent. Sync: wait until every server has applied the round."""

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Pull each block into `out[i]`."""

    def fetch_barrier(self) -> None:
        """All of this step is pulled."""

    def prefetch(
        self, table: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], ids: Any, out: Any
    ) -> None:
        """Pull the rows of `ids` int64[n] into `out` [n, d]."""

    def geo(
        self,
        variable: str,
        blocks: Sequence[str],
        at: Sequence[int],
        heights: Sequence[int],
        parameter: Any,
        rows: Any | None,
    ) -> None:
        """GEO: this step has updated `parameter` [h, d] (only its `rows` int64[n], if given); now and then exchange."""

    def close(self) -> None:
        """Push what waits to be pushed, leave every server, and end."""


@runtime_checkable
class StepRemote(Remote, Protocol):
    """One that takes all of a step at once."""

    def send_step(self, pushes: Sequence[SendCall]) -> None:
        """Sync: all pushes and the send barrier at once. The tensors do not change before it returns: no copies."""

    def recv_step(self, variables: Sequence[str], blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """`recv` of all that a step pulls, and the fetch barrier. `variables`: of each block."""

    def geo_step(self, calls: Sequence[GeoCall]) -> None:
        """GEO: `geo` of all parameters of a step."""


@runtime_checkable
class ThreadedRemote(StepRemote, Protocol):
    """One whose steps several threads of the process make together."""

    def push_for_all(self, pushes: Sequence[SendCall]) -> None:
        """Push the means of the gradients of all threads. As `send_step`."""

    def check_threads(self, num_came: int, waited_s: float) -> None:
        """Raise if the exchange has ended, or not all threads have come: `num_came` in `waited_s`. -1: not known."""


Opener = Callable[[Descriptor], Remote]
