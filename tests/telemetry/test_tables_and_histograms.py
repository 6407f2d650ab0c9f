"""Tables and histograms are checked at the line that makes them, and sent a frame each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PeerError
from penstock.protocol.contract import Managed
from penstock.protocol.media import MAX_BYTES, MEDIA, received
from penstock.telemetry.media import Histogram, Table, split
from penstock.telemetry.sessions import Watched


def test_cells_of_any_kind_of_number_become_plain_ones() -> None:
    table = Table(["a", "b", "c"], [[np.float32(0.5), torch.tensor([3]), np.bool_(True)], ["x", None, math.nan]])
    assert table.content() == {"type": "table", "columns": ["a", "b", "c"], "rows": [[0.5, 3, True], ["x", None, None]]}
    assert [type(cell) for cell in table.content()["rows"][0]] == [float, int, bool]


def test_a_row_that_is_added_later_is_not_in_what_was_logged() -> None:
    table = Table(["a"])
    before = table.content()
    table.add_row(1)
    assert (before["rows"], len(table)) == ([], 1)


@pytest.mark.parametrize(
    ("columns", "rows", "error", "words"),
    [
        ([], [], ValueError, "has 0 columns; expected 1 to 50"),
        (["c"] * 51, [], ValueError, "has 51 columns"),
        ([""], [], ValueError, "named ''"),
        (["a", "b"], [[1]], ValueError, "row 0 of a Table has 1 cells; expected 2"),
        (["a"], [[1], [object]], TypeError, "the cell of row 1, column 'a', is <class 'object'>; expected text"),
        (["a"], [[np.zeros(2)]], TypeError, "expected one element"),
        (["a"], ([1] for _ in range(10_001)), ValueError, "at most 10,000 rows"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(
    columns: Any, rows: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Table(columns, rows)


def test_a_table_beyond_a_mebibyte_is_refused_by_name() -> None:
    large = Table(["text"], [["x" * 1000]] * 1100)
    with pytest.raises(ValueError, match=r"'large' cannot be logged: it is 1,\d{3},\d{3} bytes as JSON"):
        split({"large": large})
    _, media = split({"small": Table(["text"], [["x" * 1000]] * 1000)})
    assert received(media["small"])[0] == "table"


@given(st.lists(st.floats(width=32), min_size=1, max_size=50), st.integers(1, 20))
def test_a_histogram_counts_every_value_once(values: list[float], bins: int) -> None:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        with pytest.raises(ValueError, match="none of them finite"):
            Histogram(values, bins)
        return
    made = Histogram(np.array(values, np.float32), bins)
    assert (sum(made.counts), made.left_out) == (len(finite), len(values) - len(finite))
    assert (made.edges[0] <= min(finite), made.edges[-1] >= max(finite), len(made.counts)) == (True, True, bins)
    kind, _ = received(made.content())
    assert kind == "histogram"


def test_a_histogram_of_equal_values_has_bins_around_them() -> None:
    made = Histogram([2.0**60] * 3, 512)
    assert (sum(made.counts), made.edges[0] < 2.0**60 < made.edges[-1]) == (3, True)
    with pytest.raises(ValueError, match="range is no finite number"):
        Histogram([-1.7e308, 1.7e308])


def test_a_histogram_takes_tensors_of_any_dtype_and_shape() -> None:
    made = Histogram(torch.tensor([[0.0, 1.0], [1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True), 2)
    assert (made.counts, made.edges) == ([1, 3], [0.0, 1.0, 2.0])


def test_counts_of_the_script_are_taken_as_they_are() -> None:
    assert Histogram.of_counts([0, 1, 4], [2, 3]).content() == {
        "type": "histogram", "edges": [0.0, 1.0, 4.0], "counts": [2, 3], "left_out": 0,
    }  # fmt: skip
    for edges, counts in (([0, 1], [1, 2]), ([0, 0, 1], [1, 2]), ([0, math.inf], [1]), ([0, 1], [-1])):
        with pytest.raises(ValueError, match="a Histogram"):
            Histogram.of_counts(edges, counts)


@pytest.mark.parametrize("bins", [0, 513])
def test_a_histogram_of_no_or_very_many_bins_is_refused(bins: int) -> None:
    with pytest.raises(ValueError, match=f"has {bins} bins; expected 1 to 512"):
        Histogram([1.0], bins)


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"type": "image"},
        {"type": "table", "columns": ["a"], "rows": [[1, 2]]},
        {"type": "table", "columns": ["a"], "rows": [[[1]]]},
        {"type": "table", "columns": ["a"] * 51, "rows": []},
        {"type": "table", "columns": ["a"], "rows": [["x" * MAX_BYTES]]},
        {"type": "table", "columns": ["a"], "rows": [[math.inf]]},
        {"type": "histogram", "edges": [0.0, 1.0], "counts": [1, 2]},
        {"type": "histogram", "edges": [1.0, 0.0], "counts": [1]},
        {"type": "histogram", "edges": [0.0, math.nan], "counts": [1]},
    ],
    ids=range(10),
)
def test_what_another_process_sends_is_checked(content: object) -> None:
    with pytest.raises(PeerError):
        received(content)


def test_each_is_a_frame_of_its_own_beside_the_scalars() -> None:
    session = Watched(Managed("job", "name", "replica", "trainer", 0, 1, 7, "no-such-socket"))
    session._started = True  # no threads: what waits is looked at
    session.log(7, loss=0.5, confusion=Table(["a"], [[1]]), weights=Histogram([1.0, 2.0], 2))
    bodies = list(session._scalars)
    assert [(one["step"], one["values"], sorted(one.get("media", {}))) for one in bodies] == [
        (7, {"loss": 0.5}, []),
        (7, {}, ["confusion"]),
        (7, {}, ["weights"]),
    ]
    assert MEDIA.validate_python(bodies[1]["media"]["confusion"]).type == "table"
    with pytest.raises(ValueError, match="scalar name"):
        session.log(7, **{"a\0b": Table(["a"])})


def test_penstock_log_is_the_one_of_telemetry() -> None:
    import penstock
    from penstock import telemetry

    assert (penstock.log, penstock.Table, penstock.Histogram) == (telemetry.log, Table, Histogram)
