"""Which trainer of how many this process is, in Fluid's words or torchrun's. Pure: it reads a mapping.

Fluid's launchers set PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM (PADDLE_NUM_TRAINERS in the manual) and
PADDLE_TRAINER_ENDPOINTS, or PADDLE_CURRENT_ENDPOINT; torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Trainers meet at the first endpoint. Source: spec/fluid.md 3.8 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import SpecError
from penstock.program.endpoints import checked_endpoints

TIMES_STARTED = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who takes part. `endpoints`: of each trainer where it is known, at least of the first.

    `meeting`: host and port of the store at which they meet. `is_served`: somebody else serves it (torchrun's agent).
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


def ranks_of(
    rank: int, endpoints: tuple[str, ...], environ: Mapping[str, str], *, num_rings: int = 1, inter: int = 0
) -> Ranks:
    """Return the ranks of a list of endpoints: they meet at the first one, which the first one serves."""
    attempt = environ.get(TIMES_STARTED, "0")
    return Ranks(rank, len(endpoints), endpoints[0], endpoints, attempt=attempt, num_rings=num_rings, inter=inter)


def from_environ(environ: Mapping[str, str]) -> Ranks | None:
    """Return what a launcher has said; None if no launcher has. Raises SpecError for what cannot be."""
    listed = environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    if listed:
        endpoints = checked_endpoints(listed, "PADDLE_TRAINER_ENDPOINTS")
        rank = _number(environ, "PADDLE_TRAINER_ID", default=_position(endpoints, environ))
        told = _number(environ, "PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS", default=len(endpoints))
        if told != len(endpoints):
            raise SpecError(
                f"PADDLE_TRAINERS_NUM is {told}, but PADDLE_TRAINER_ENDPOINTS has {len(endpoints)}", got=told
            )
        _check(rank, len(endpoints), "PADDLE_TRAINER_ID")
        return ranks_of(rank, endpoints, environ)
    if environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        _check(rank, size, "RANK")
        return Ranks(
            rank,
            size,
            f"{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT')}",
            is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=environ.get(TIMES_STARTED, "0"),
        )
    return None


def _position(endpoints: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    mine = environ.get("PADDLE_CURRENT_ENDPOINT", "")
    if mine and mine not in endpoints:
        raise SpecError(f"PADDLE_CURRENT_ENDPOINT is {mine!r}; expected one of {', '.join(endpoints)}", got=mine)
    return endpoints.index(mine) if mine else None


def _number(environ: Mapping[str, str], *names: str, default: int | None = None) -> int:
    for name in names:
        text = environ.get(name, "")
        if text:
            if not text.isdecimal():
                raise SpecError(f"{name} is {text!r}; expected a number", got=text)
            return int(text)
    if default is None:
        raise SpecError(f"{' or '.join(names)} is not set; a launcher of several trainers sets it")
    return default


def _check(rank: int, size: int, name: str) -> None:
    if not 0 <= rank < size:
        raise SpecError(f"{name} is {rank}, but there are {size} trainers; expected 0 to {size - 1}", got=rank)
