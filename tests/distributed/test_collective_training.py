"""Several trainers learn what one learns from all their rows: judged by one process on the whole batch, in float64."""

from __future__ import annotations

import pytest
from tests.distributed.conftest import Start, differences

pytestmark = pytest.mark.slow
TOLERANCE = 1e-9


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("count", "options", "environ"),
    [
        (2, [], {}),
        (3, ["--optimizer", "adam", "--dropout", "0.2"], {}),
        (2, ["--rows", "11", "--fleet"], {}),
        (2, ["--reduce", "--rings", "2", "--fleet"], {"CPU_NUM": "2"}),
        (2, ["--dropout", "0.3", "--optimizer", "adam"], {"CPU_NUM": "2"}),
        (2, ["--mode", "grad_allreduce"], {}),
        (2, ["--mode", "local_sgd", "--dense", "--fleet"], {}),
        (2, ["--optimizer", "adam"], {"PENSTOCK_COLLECTIVE_TRANSPORT": "gloo"}),
        (4, ["--dense", "--inter", "2"], {"PENSTOCK_COLLECTIVE_TRANSPORT": "gloo"}),
    ],
    ids=str,
)
def test_rows_47_and_74_parameters_equal_one_process_whole_batch(
    trainers: Start, count: int, options: list[str], environ: dict[str, str]
) -> None:
    if "--rows" in options:
        options = [*options, "--dense"]
    ranks = trainers(count, *options, **environ)
    (alone,) = trainers(1, *options, **environ)
    expected, first = alone.values(), ranks[0].values()
    assert max(differences(expected, first).values()) <= TOLERANCE
    for other in ranks[1:]:
        assert set(differences(first, other.values()).values()) == {0.0}  # to the bit


def test_row_80_a_rank_out_of_data_continues_with_a_warning(trainers: Start) -> None:
    first, second = trainers(2, "--steps", 10, 7, "--join", "--optimizer", "adam")
    assert set(differences(first.values(), second.values()).values()) == {0.0}
    assert (first.steps, second.steps) == (10, 7)
    assert "rank 1" in second.errors
    assert "has no more data; it takes part without rows until rank 0" in second.errors
    assert "has no more data after 7 steps" in first.errors


def test_row_80_a_trainer_that_ends_first_delays_no_other(trainers: Start) -> None:
    assert [rank.end() for rank in trainers(2, "--steps", 2, 5)] == [0, 0]


def test_large_gradients_are_summed_in_the_executors_memory(trainers: Start) -> None:
    ranks = trainers(2, "--wide", 160, "--steps", 6)
    (alone,) = trainers(1, "--wide", 160, "--steps", 6)
    expected, first, second = (rank.values() for rank in (alone, *ranks))
    assert max(differences(expected, first).values()) <= TOLERANCE
    assert set(differences(first, second).values()) == {0.0}
    for rank in ranks:
        assert rank.said("in place") >= 4  # the first steps of a plan are watched, and run in ordinary memory


@pytest.mark.parametrize(("count", "options"), [(2, ["--rings", "2"]), (4, ["--inter", "2", "--dense"])], ids=str)
def test_groups_have_ended_before_the_interpreter_ends(trainers: Start, count: int, options: list[str]) -> None:
    """A worker of Gloo that takes the interpreter's lock later aborts the process."""
    ranks = trainers(count, "--count-workers", *options, destructors=True, PENSTOCK_COLLECTIVE_TRANSPORT="gloo")
    assert [(rank.end(), rank.said("Gloo workers")) for rank in ranks] == [(0, 0)] * count
