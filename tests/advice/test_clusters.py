"""Other servers, trainers, modes and links: what follows from one recorded exchange."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.advice.cluster import LEAST_GAIN, Cluster, Placed, advise, candidates, current_of, late_by, link_of
from penstock.advice.exchanged import Exchanged, Mode, Report, ahead_of, deviation_of, exchanged_of
from penstock.protocol.exchange import Exchanged as Row
from penstock.protocol.exchange import ProcessRows, Sums

MS = 1e6
MB = 1e6


def recorded(**changes: object) -> Exchanged:
    """A trainer that computes for 30 ms, and exchanges 2.5 MB each way with one server over 1 Gbit/s."""
    run = Exchanged(
        "sync", 1, 1, rows=1000, turn_ns=43 * MS, wait_ns=13 * MS, sent_bytes=2.5 * MB, received_bytes=2.2 * MB,
        skew=1.0, ahead_ns=15 * MS, trainer_cpu_ns=30 * MS, server_cpu_ns=8 * MS, cores=2, num_hosts=2,
    )  # fmt: skip
    return replace(run, **changes)  # type: ignore[arg-type]  # of the names above


def placed(run: Exchanged, **changes: object) -> Placed:
    """Return the prediction for a setting that differs from the recorded one."""
    current = current_of(run)
    to = replace(current, **changes)  # type: ignore[arg-type]  # names of a setting
    return next(one for one in advise(run, current, [to]) if one.cluster == to)


def test_the_recorded_setting_is_predicted_as_it_was_measured() -> None:
    run = recorded()
    now = placed(run)
    assert now.is_current and now.turn_ns == pytest.approx(run.turn_ns, rel=1e-9)
    assert now.samples_per_s == pytest.approx(1000 / 0.043)
    assert now.reason.startswith("as recorded: a trainer waits 13.0 ms of 43.0 ms")


def test_the_rate_of_the_link_follows_from_bytes_and_waits() -> None:
    # 20 ms on the link, of which half is hidden, beside 2 ms of the server
    assert link_of(recorded(wait_ns=12 * MS, turn_ns=42 * MS)) == pytest.approx(1.0, rel=0.01)
    # nothing hides anything: the wait is all that the link takes
    assert link_of(recorded(wait_ns=22 * MS, turn_ns=52 * MS, ahead_ns=0.0)) == pytest.approx(1.0, rel=0.01)
    assert link_of(recorded(wait_ns=1 * MS)) == 100.0


def test_a_faster_link_takes_what_the_bytes_gain() -> None:
    run = recorded(wait_ns=22 * MS, turn_ns=52 * MS, ahead_ns=0.0)
    faster = placed(run, link_gbit=10.0)
    assert faster.turn_ns == pytest.approx(52 * MS - 8 * 2.5 * MB * 0.9, rel=0.01)


def test_a_second_server_halves_the_link_of_two_trainers() -> None:
    run = recorded(num_trainers=2, ahead_ns=0.0, wait_ns=45 * MS, turn_ns=75 * MS, num_hosts=3)
    one, two = placed(run), placed(run, num_pservers=2)
    assert two.link_ns == pytest.approx(one.link_ns / 2, rel=0.01)
    assert placed(replace(run, num_trainers=1), num_pservers=2).link_ns == pytest.approx(
        placed(replace(run, num_trainers=1)).link_ns
    )  # a trainer's own link is the slowest then


def test_uneven_blocks_leave_the_bytes_on_one_server() -> None:
    even, uneven = (recorded(num_pservers=2, num_trainers=2, num_hosts=4, skew=skew) for skew in (1.0, 2.0))
    wanted = {"num_pservers": 4, "num_trainers": 4, "link_gbit": 1.0}
    assert placed(uneven, **wanted).link_ns > placed(even, **wanted).link_ns


def test_trainers_on_one_host_share_its_cores() -> None:
    run = recorded(num_hosts=1, wait_ns=1 * MS, turn_ns=31 * MS, server_cpu_ns=2 * MS)
    assert current_of(run) == Cluster(1, 1, "sync", 0.0, is_shared=True)
    four = placed(run, num_trainers=4)
    assert four.own_ns > 1.9 * run.own_ns
    assert four.samples_per_s < 2.1 * placed(run).samples_per_s  # two cores
    apart = recorded(wait_ns=1 * MS, turn_ns=31 * MS)
    assert placed(apart, num_trainers=4).own_ns == pytest.approx(apart.own_ns)


def test_rounds_wait_for_the_last_trainer_and_async_does_not() -> None:
    run = recorded(deviation_ns=4 * MS, num_trainers=2, num_hosts=3)
    sync, without = placed(run), placed(run, mode="async")
    assert sync.straggler_ns == pytest.approx(late_by(2) * 4 * MS) and without.straggler_ns == 0
    assert without.turn_ns < sync.turn_ns
    assert "sync_mode=False" in without.reason


def test_the_last_of_normal_draws_is_as_late_as_in_tables() -> None:
    assert late_by(1) == 0
    assert [late_by(count) for count in (2, 4, 16)] == pytest.approx([0.5642, 1.0294, 1.7660], rel=0.05)


def test_only_sizes_can_be_run() -> None:
    run = recorded(num_hosts=1)
    found = advise(run, current_of(run))
    runnable = {(one.cluster.num_pservers, one.cluster.num_trainers) for one in found if one.can_run}
    assert runnable == set(itertools.product((1, 2, 4), repeat=2)) - {(1, 1)}
    others = [one.cluster for one in found if not one.can_run and not one.is_current]
    assert {one.link_gbit for one in others} == {0.0, 1.0, 10.0, 25.0} and "async" in {one.mode for one in others}


def test_geo_has_no_other_mode_and_no_other_link() -> None:
    found = candidates(Cluster(3, 1, "geo", 1.0, is_shared=False))
    assert {(one.mode, one.link_gbit) for one in found} == {("geo", 1.0)}
    assert {one.num_pservers for one in found} == {1, 2, 3, 4}


def test_a_gain_too_small_to_know_stands_behind_the_current() -> None:
    run = recorded(num_hosts=1)
    found = advise(run, current_of(run))
    now = next(one for one in found if one.is_current)
    before = found[: found.index(now)]
    assert all(one.samples_per_s > (1 + LEAST_GAIN) * now.samples_per_s for one in before)


@given(
    st.sampled_from(["sync", "async", "half_async"]), st.integers(1, 4), st.integers(1, 8), st.floats(0, 200),
    st.floats(1, 200), st.floats(0, 100), st.booleans(),
)  # fmt: skip
def test_every_prediction_is_a_time(
    mode: Mode, servers: int, trainers: int, wait_ms: float, own_ms: float, mb: float, apart: bool
) -> None:
    run = recorded(
        mode=mode, num_pservers=servers, num_trainers=trainers, wait_ns=wait_ms * MS, turn_ns=(wait_ms + own_ms) * MS,
        sent_bytes=mb * MB, received_bytes=mb * MB, num_hosts=servers + trainers if apart else 1, deviation_ns=MS,
    )  # fmt: skip
    found = advise(run, current_of(run))
    assert all(0 < one.own_ns <= one.turn_ns * (1 + 1e-9) and one.samples_per_s > 0 and one.reason for one in found)
    assert sum(one.is_current for one in found) == 1


def report(role: str, index: int, step: int, at_ms: int, cpu_ms: int, peers: dict[str, int], mode: str = "") -> Report:
    """Return a frame in which each peer has so many bytes sent, a tenth received, and as many ns waited."""
    rows = tuple(Row(peer, "w", Sums(1, n, n // 10, n)) for peer, n in peers.items())
    return Report(ProcessRows(role, index, step, rows), at_ms * 10**6, cpu_ms * 10**6, mode)


def two_servers(mode: str = "async") -> list[list[Report]]:
    return [
        [
            report("trainer", 0, 100, 0, 0, {"a": 500, "b": 0}),
            report("trainer", 0, 110, 1000, 300, {"a": 3500, "b": 1000}),
        ],
        [report("pserver", 0, 0, 5, 9000, {}, mode), report("pserver", 0, 0, 505, 9100, {}, mode)],
        [report("pserver", 1, 0, 0, 9000, {}, mode), report("pserver", 1, 0, 1000, 9100, {}, mode)],
    ]  # fmt: skip


def exchange(reports: list[list[Report]]) -> Exchanged | None:
    return exchanged_of(
        reports, turn_ns=100 * MS, deviation_ns=3.0, rows=8, ahead_ns=7.0, cores=4, num_hosts=3
    )  # fmt: skip


def test_two_frames_of_each_process_are_an_exchange() -> None:
    found = exchange(two_servers())
    assert found is not None
    assert found.server_cpu_ns == pytest.approx(30 * MS)  # they are busy for 0.2 and 0.1 of the time
    assert found == Exchanged(  # 4000 bytes in 10 steps
        "async", 2, 1, 8, 100 * MS, 400.0, 400.0, 40.0, 1.5, 7.0, 30 * MS, found.server_cpu_ns, 4, 3, 3.0
    )


@pytest.mark.parametrize("lacks", ["mode", "second frame of a server", "step", "trainer"])
def test_less_than_that_is_no_exchange(lacks: str) -> None:
    reports = two_servers("" if lacks == "mode" else "async")
    if lacks == "second frame of a server":
        reports[1:] = [[one[0]] for one in reports[1:]]
    elif lacks == "step":
        reports[0][1] = replace(reports[0][1], rows=replace(reports[0][1].rows, step=100))
    elif lacks == "trainer":
        del reports[0]
    assert exchange(reports) is None


def test_gradients_leave_from_the_first_message_to_the_last() -> None:
    types = {0: "aten.mm.default", 1: "penstock.send_ahead.default", 2: "penstock.send_ahead.default",
             3: "penstock.send_step.default"}  # fmt: skip
    step = [(0, 0, 0, 9), (1, 0, 10, 1), (2, 0, 20, 1), (3, 0, 35, 9)]
    assert ahead_of(types, [step, step]) == 25
    assert ahead_of(types, [[(0, 0, 0, 9), (3, 0, 35, 9)]]) == 0


def test_deviation_is_that_of_the_middle_half() -> None:
    normal = [-1.2816, -0.6745, -0.2, 0.0, 0.2, 0.6745, 1.2816]
    assert deviation_of([10 * value for value in normal]) == pytest.approx(10, rel=0.01)
    assert deviation_of([*normal[:-1], 500.0]) < 2 and deviation_of([1.0, 2.0]) == 0
