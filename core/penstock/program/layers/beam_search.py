"""Beam search over ragged candidates in a loop, the sentences that it finds, and paths through trees of beams.

Source: beam_search, beam_search_decode and gather_tree (Fluid 1.8).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.record.arrays import TensorArray, append
from penstock.program.record.context import default_main_program
from penstock.program.record.fakes import empty_fake
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.unsized import sized_in_block
from penstock.program.record.variable import record_call
from penstock.program.sequences import LENGTHS, lengths_of


def gather_tree(ids: Any, parents: Any) -> Any:
    """Return the ids on the way to each beam of the last step. Shapes: int [time, batch, beams], all three.

    `parents`: of each beam the one of the step before that it continues.
    """
    return record_call(torch.ops.penstock.gather_tree, (ids, parents), {})


def beam_search(
    pre_ids: Any,
    pre_scores: Any,
    ids: Any,
    scores: Any,
    beam_size: int,
    end_id: int,
    level: int = 0,
    is_accumulated: bool = True,
    name: str | None = None,
    return_parent_idx: bool = False,
) -> Any:
    """Choose the `beam_size` best continuations of each source; return their ids and scores [m, 1], with two levels.

    Shapes: pre_ids, pre_scores [rows, 1]; ids (None: the positions) and scores [rows, k], with the levels of sequences
    of `pre_scores`; `level` says which are the sources. `is_accumulated`: scores are of whole sequences, else
    probabilities. `return_parent_idx`: the row of each, int32 [m], as well. It stands in a block, such as a While's, as
    m follows from data; nothing is differentiated through it.
    """
    recording = recording_of(default_main_program())
    if not recording.open_blocks:
        raise ProgramError(f"{user_line()}: beam_search stands in a block, such as a While's; how many rows it chooses "
                           "follows from data")  # fmt: skip
    levels = lengths_of(recording.program, scores.desc.shape[0])
    if not 0 <= level < len(levels):
        raise ProgramError(
            f"{user_line()}: beam_search(level={level}): {scores!r} has {len(levels)} levels of sequences. Give it "
            "those of pre_scores (layers.lod_reset)",
            variable=scores.name,
        )
    operands = (
        pre_ids, pre_scores, ids, scores, [recording.handles[one] for one in levels], level, beam_size, end_id,
        bool(is_accumulated),
    )  # fmt: skip
    rows, sources, before = (recording.symbols.new_of_data() for _ in range(3))
    fakes = [
        empty_fake([rows, 1], None, pre_ids.dtype),
        empty_fake([rows, 1], None, scores.dtype),
        empty_fake([rows], None, torch.int32),
        empty_fake([sources, 1], None, torch.int64),
        empty_fake([before, 1], None, torch.int64),
    ]
    names = append(recording, "beam_search", operands, fakes)
    found = [recording.handle(fake) for fake in fakes]
    _give_levels(recording, names[0], names[4], names[3])
    return tuple(found[:3]) if return_parent_idx else tuple(found[:2])


def beam_search_decode(ids: Any, scores: Any, beam_size: int, end_id: int, name: str | None = None) -> tuple[Any, Any]:
    """Return the sentences that steps of `beam_search` have found, from arrays of their ids and scores.

    Both have two levels: the sentences of each source, the words of each sentence. Shapes: [words]; how many there are
    follows from data, so they are known when they are fetched.
    """
    recording = recording_of(default_main_program())
    for array in (ids, scores):
        if not isinstance(array, TensorArray) or array.sizes is None or len(array.levels) != 2:
            raise ProgramError(
                f"{user_line()}: beam_search_decode needs arrays of what beam_search chooses, with two levels of "
                f"sequences; got {array!r}. The first element decides: feed it with lod_level=2"
            )

    def decode() -> tuple[Any, Any]:
        words, sources, sentences = (recording.symbols.new_of_data() for _ in range(3))
        fakes = [
            empty_fake([words], None, torch.int64),
            empty_fake([words], None, scores.dtype),
            empty_fake([sources, 1], None, torch.int64),
            empty_fake([sentences, 1], None, torch.int64),
        ]
        own = recording.own(ids)
        operands = (own, recording.own(scores), *own.levels, beam_size, end_id)
        names = append(recording, "beam_search_decode", operands, fakes)
        _give_levels(recording, names[0], names[3], names[2])
        return recording.handle(fakes[0]), recording.handle(fakes[1])

    return sized_in_block(recording, decode)  # type: ignore[no-any-return]  # what decode returns


def _give_levels(recording: Recording, name: str, inner: str, outer: str) -> None:
    """Let a variable have two levels of lengths."""
    variables = recording.program.variables
    for lengths, level in ((inner, 2), (outer, 1)):
        rename_recorded(recording, recording.tensor_of(lengths), name + LENGTHS)
        variables[name] = replace(variables[name], lod_level=level)
        name += LENGTHS
