"""Runs that feed constants: a copy of the Program, in which they are inputs, takes its place in them.

Such runs are counted as the Program's own (`Program.run_as`), and use its scope and its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.exec.data_parallel import DataParallel
from penstock.exec.feeding import fitting
from penstock.exec.memory import ReplicaMemory
from penstock.program.program import Program
from penstock.program.pruning import constants_among, with_fed_constants


def fed_constants(program: Program, feed: Any) -> tuple[str, ...]:
    """Return the constants among the names of a feed, or of a list of feeds, in the Program's order."""
    variables = program.variables
    items = feed if isinstance(feed, (list, tuple)) else (feed,)
    given = {n for one in items if isinstance(one, Mapping) for n in one if n in variables and not variables[n].feed}
    return constants_among(program, [name for name in variables if name in given]) if given else ()


class ProgramCopies:
    """Copies that take Programs' places in some runs, each made once for a revision of its Program."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, tuple[str, ...]], tuple[Program, int, Program]] = {}

    def copy(self, program: Program, key: tuple[str, ...], make: Callable[[], Program]) -> Program:
        """Return what `make` has made of a Program's revision under this key."""
        known = self._made.get((id(program), key))
        if known is None or known[0] is not program or known[1] != program.revision:
            known = self._made[id(program), key] = (program, program.revision, make())
        return known[2]

    def for_feed(self, program: Program, feed: Any) -> Program:
        """Return the Program, or a copy where constants that are fed are inputs, with the same reader."""
        names = fed_constants(program, feed)
        if not names:
            return program
        copy = self.copy(program, ("fed", *names), lambda: with_fed_constants(program, names))
        copy.reader = program.reader
        return copy


class CoresOfFedConstants:
    """What runs a CompiledProgram with fed constants: a core for each set of them, on the memory of its own core.

    Each core has threads and plans of its own.
    """

    def __init__(self) -> None:
        self._copies = ProgramCopies()
        self._cores: dict[tuple[str, ...], DataParallel] = {}

    @property
    def have_run(self) -> bool:
        """Whether a run has fed constants."""
        return any(core.last_step >= 0 for core in self._cores.values())

    def core_for(
        self, own: DataParallel, feed: Any, make: Callable[[Program, ReplicaMemory, int], DataParallel]
    ) -> DataParallel:
        """Return the core for a feed: `own`, or one that `make` makes for the Program's copy. Raises FeedError.

        A constant that one feed has for all replicas is each replica's, so it has the constant's sizes. With other
        trainers, which count on each other's graphs, constants are refused as any other variable that is made.
        """
        names = () if own.has_trainers else fed_constants(own.program, feed)
        if not names:
            return own
        copy = self._copies.for_feed(own.program, feed)
        for one in feed if isinstance(feed, (list, tuple)) else (feed,):
            for name in names:
                if name in one:
                    fitting(copy.variables[name], one[name])
        known = self._cores.get(names)
        if known is None or known.program is not copy:
            if known is not None:
                known.close()
            known = self._cores[names] = make(copy, own.memory, own.num_replicas)
        return known
