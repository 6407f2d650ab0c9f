"""Every file goes to one worker, in order, the remainder to the first ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock.fleet.process import split_files


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (["a", "b", "c", "d", "e"], [["a", "b", "c"], ["d", "e"]]),
        (["a", "b"], [["a"], ["b"], []]),
        ([], [[], []]),
    ],
)
def test_files_are_split_as_fluid_documents(files: list[str], parts: list[list[str]]) -> None:
    assert [split_files(files, index, len(parts)) for index in range(len(parts))] == parts


@given(st.lists(st.text(max_size=3)), st.integers(1, 9))
def test_no_file_is_lost_and_none_is_read_twice(files: list[str], num_workers: int) -> None:
    parts = [split_files(files, index, num_workers) for index in range(num_workers)]
    assert [file for part in parts for file in part] == files
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_name_is_no_list() -> None:
    with pytest.raises(SpecError, match="list of file names; got 'part-0'"):
        split_files("part-0", 0, 1)
