"""Undo what a failed call has recorded, so that the Program stays as it was before that call.

Taken back: operators, variables, captured values, lookups and names, in the main Program and in the startup Program.
Kept: guards and size symbols, since torch has cached them and does not return to them. The numbers of names are kept
too, unless the whole Program was copied: then a second try gives the names that the first one would have given, and
torch takes back that tensors were changed in place, so that it may differentiate what was recorded before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.compat.torch import set_versions
from penstock.program.program import Program
from penstock.program.record.context import default_startup_program, recording_lock
from penstock.program.record.recording import Recording


@contextmanager
def undone_on_failure(recording: Recording, *, renames: bool = False) -> Iterator[None]:
    """Take back what the block has recorded if it raises. Other threads record before or after it.

    `renames`: the block may rename what was there before, or change its operators; costs a copy of the whole Program,
    while else the cost is that of what is taken back.
    """
    with recording_lock:
        dicts, lists = _containers(recording, default_startup_program(), names=renames)
        sizes = [len(d) for d in dicts], [len(entries) for entries in lists]
        saved = ([dict(d) for d in dicts], [list(entries) for entries in lists]) if renames else None
        seeds, versions = recording.num_seeds, recording.versions() if renames else None
        try:
            yield
        except BaseException:
            if saved is not None and versions is not None:
                _put_back(dicts, lists, *saved)
                # Those changes are of operators that are gone, so they have not happened.
                set_versions(*versions)
                for name, handle in recording.handles.items():
                    handle.name = name
            else:
                _cut(dicts, lists, *sizes)
            recording.num_seeds = seeds
            recording.program.revision += 1
            raise


def _containers(recording: Recording, startup: Program, *, names: bool) -> tuple[list[dict[Any, Any]], list[list[Any]]]:
    main = recording.program
    own, lookups = recording.state()
    counters: list[dict[Any, Any]] = [main._names, startup._names, main.num_scopes, startup.num_scopes]
    return (
        [main.variables, main.captured, startup.variables, startup.captured, *own, *(counters if names else ())],
        [main.operators, startup.operators, lookups],
    )


def _put_back(
    dicts: list[dict[Any, Any]], lists: list[list[Any]], old: list[dict[Any, Any]], entries: list[list[Any]]
) -> None:
    for mapping, before in zip(dicts, old, strict=True):
        mapping.clear()
        mapping.update(before)
    for sequence, kept in zip(lists, entries, strict=True):
        sequence[:] = kept


def _cut(dicts: list[dict[Any, Any]], lists: list[list[Any]], entries: list[int], lengths: list[int]) -> None:
    for mapping, size in zip(dicts, entries, strict=True):
        while len(mapping) > size:  # a dict keeps the order of insertion
            mapping.popitem()
    for sequence, length in zip(lists, lengths, strict=True):
        del sequence[length:]
