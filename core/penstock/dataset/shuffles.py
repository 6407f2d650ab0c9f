"""Which shuffles samples have had since they were loaded, and which a restored position asks for. Pure.

A shuffle is of the order that the ones before it have left, so a pass has the order of all shuffles since the load. A
loop that goes on makes those of the interrupted pass again, and none of the passes before: a position says how many of
its shuffles belong to passes that were over, and these are made behind the loop's back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError

Seed = int | list[int]
"""Of a shuffle of this process; or of a global one, with the rank and the number of trainers."""


@dataclass(frozen=True, slots=True)
class RestoredShuffles:
    """A position. `before`: how many of the shuffles belong to passes before; `samples`: used of this pass."""

    seeds: list[Seed]
    before: int
    samples: int

    @property
    def is_between(self) -> bool:
        """Whether a pass was over, and nothing was done for the next one."""
        return not self.samples and self.before == len(self.seeds)


class Shuffles:
    """Owner: the data set, which does what is returned here, and reports it by `made`."""

    def __init__(self) -> None:
        self.seeds: list[Seed] = []
        self.restored: RestoredShuffles | None = None
        self._own = 0  # where those of the pass that runs, or ran last, begin
        self._next = 0  # of the next one

    def loaded(self) -> None:
        """Samples were loaded, and lie in the order of their files: between two passes, in that of the next one."""
        self.seeds, self._own, self._next = [], 0, 0
        if self.restored is not None and self.restored.is_between:
            self.restored = None

    def made(self, seed: Seed) -> None:
        """Samples were shuffled."""
        self.seeds = [*self.seeds, seed]

    def restore(self, position: Mapping[str, Any]) -> None:
        """Let the next pass go on at a position of `as_position`."""
        seeds: list[Seed] = [list(map(int, s)) if isinstance(s, Sequence) else int(s) for s in position["seeds"]]
        self.restored = RestoredShuffles(seeds, int(position.get("before", 0)), int(position["samples"]))

    def before_next(self) -> list[Seed]:
        """Return the shuffles to make before the next one that is asked for. Raises SpecError.

        None where the interrupted pass began without one: what is asked for then are those that were made once, before
        all passes.
        """
        restored = self.restored
        if restored is None or (restored.samples and restored.before == len(restored.seeds)):
            return []
        return self._missing()[: max(0, restored.before - len(self.seeds))]

    def next_seed(self, given: int | None, trainers: tuple[int, int] | None = None) -> int | None:
        """Return the seed that a shuffle has to have, None for any; those of `before_next` were made.

        `given`: what the caller asks for. `trainers`: rank and number, of a global one. Raises SpecError for one that
        the pass which goes on did not begin with.
        """
        restored, at = self.restored, len(self.seeds)
        if restored is None:
            return given
        if at == len(restored.seeds):
            if not restored.is_between:
                raise SpecError(
                    f"the pass that goes on has begun after {at} shuffles since the load, and this is one more: train "
                    "on what is left of it first. A loop goes on by the calls that the interrupted pass began with"
                )
            self.restored, self._next = None, at
            return given
        expected = restored.seeds[at]
        seed = expected if isinstance(expected, int) else expected[0]
        is_same = expected == (seed if trainers is None else [seed, *trainers])
        if not is_same or given not in (None, seed):
            said = "global_shuffle" if trainers else "local_shuffle"
            raise SpecError(
                f"the pass that goes on began with another shuffle: expected seed {_said(expected)}, got {said} with "
                f"seed {given}. Call what was called then, with the same seed or without one",
                got=given, expected=seed,
            )  # fmt: skip
        return seed

    def missing(self) -> list[Seed]:
        """Return the shuffles to make before a pass begins. Raises SpecError."""
        return [] if self.restored is None else self._missing()

    def begin(self) -> int:
        """Begin a pass; those of `missing` were made. Return at which sample."""
        restored, self.restored = self.restored, None
        self._own, self._next = self._next if restored is None else restored.before, len(self.seeds)
        return 0 if restored is None else restored.samples

    def as_position(self, samples: int | None) -> dict[str, Any]:
        """Return the position in plain types. `samples`: used by the pass that runs or ran last, None without one."""
        restored = self.restored
        if restored is not None:
            return _position(restored.seeds, restored.before, restored.samples)
        return _position(self.seeds, self._next if samples is None else self._own, samples or 0)

    def between(self) -> dict[str, Any] | None:
        """Return the position of a pass that is yet to begin, by shuffles of its own; None: that of a fresh load."""
        return _position(self.seeds, len(self.seeds), 0) if self.seeds else None

    def _missing(self) -> list[Seed]:
        assert self.restored is not None
        if self.restored.seeds[: len(self.seeds)] != self.seeds:
            raise SpecError("the samples were shuffled in another way since they were loaded; load them again first")
        return self.restored.seeds[len(self.seeds) :]


def is_between(position: Any) -> bool:
    """Whether a reader with this position stands at the beginning of a pass."""
    if not isinstance(position, Mapping) or position.get("kind") != "memory":
        return not position
    return not position["samples"] and position.get("before", 0) == len(position["seeds"])


def _position(seeds: list[Seed], before: int, samples: int) -> dict[str, Any]:
    return {"kind": "memory", "seeds": list(seeds), "before": before, "samples": samples}


def _said(seed: Seed) -> str:
    return str(seed) if isinstance(seed, int) else f"{seed[0]} (of a global_shuffle, rank {seed[1]} of {seed[2]})"
