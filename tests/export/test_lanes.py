"""Slices on lanes: whatever overlaps, those of one lane nest, and each begins and ends once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.export.lanes import Lanes

Frame = list[tuple[int, int, int]]  # thread, start, duration
SLICES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 25)), max_size=12)


def turns_of(lanes: Lanes, frame: Frame) -> list[tuple[int, int, bool, int, int]]:
    """Place a frame; return (time, lane of a thread, is an end, duration, thread) as a trace holds them."""
    thread, start, duration = (np.array(column, np.int64) for column in zip(*frame, strict=True))
    placed = lanes.place(thread, start, start + duration)
    turns = placed.turns
    if turns is None:
        turns = [turn for row in placed.order.tolist() for turn in (row, -1 - row)]
    assert sorted(turns) == sorted([*range(len(frame)), *(-1 - row for row in range(len(frame)))])
    rows = [(turn if turn >= 0 else -1 - turn, turn < 0) for turn in turns]
    return [
        (int(start[r] + (duration[r] if ends else 0)), int(placed.lane[r]), ends, int(duration[r]), int(thread[r]))
        for r, ends in rows
    ]


def paired(turns: list[tuple[int, int, bool, int, int]]) -> list[tuple[int, int]]:
    """Return (start, duration) of the slices that a reader finds, which pairs begins and ends as a stack."""
    stacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    found = []
    for at, lane, ends, _, thread in sorted(turns, key=lambda turn: turn[0]):
        if ends:
            began = stacks[thread, lane].pop()
            found.append((began, at - began))
        else:
            stacks[thread, lane].append(at)
    return sorted(found)


@given(st.lists(SLICES.filter(bool), max_size=6))
@example([[(0, 0, 2), (0, 1, 2)], [(0, 3, 0)], [(0, 0, 1)]])  # a late frame, after one that ran on one lane
def test_each_slice_is_found_with_its_own_duration(frames: list[Frame]) -> None:
    lanes = Lanes()
    turns = [turn for frame in frames for turn in turns_of(lanes, frame)]
    assert paired(turns) == sorted((start, duration) for frame in frames for _, start, duration in frame)


def test_successive_and_nested_operators_share_a_lane() -> None:
    lanes = Lanes()
    assert {lane for _, lane, *_ in turns_of(lanes, [(0, 0, 5), (0, 5, 0), (0, 5, 3), (1, 2, 9)])} == {0}
    assert {lane for _, lane, *_ in turns_of(lanes, [(0, 10, 9), (0, 11, 3), (0, 14, 5), (1, 11, 1)])} == {0}


def test_an_overlapping_operator_takes_the_next_lane() -> None:
    assert [lane for _, lane, *_ in turns_of(Lanes(), [(0, 0, 5), (0, 4, 3)])] == [0, 1, 0, 1]
