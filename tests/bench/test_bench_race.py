"""Contenders take fair turns, and a race that was not fair is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from bench.paired import add_ratios_of_times
from bench.peers.contender import ROOF, fetches
from bench.peers.race import Results, alternate, check_losses
from bench.peers.remote import PeerFailed
from bench.report import Report


@dataclass(slots=True)
class Recorded:
    """A contender that writes down when it was called. `leak_s`: processor time used whenever somebody looks."""

    key: str
    calls: list[str] = field(default_factory=list)
    leak_s: float = 0.0
    used_s: float = 0.0
    rests: int = 0

    def rest(self) -> None:
        self.rests += 1

    def run(self, num_steps: int) -> float:
        self.calls.append(self.key)
        return float(len(self.calls) * num_steps)

    def cpu_seconds(self) -> float:
        self.used_s += self.leak_s
        return self.used_s


@dataclass(slots=True)
class Failing(Recorded):
    """One whose process ends in its call number `fails_at`, the warm-up being the first."""

    fails_at: int = 0

    def run(self, num_steps: int) -> float:
        taken = Recorded.run(self, num_steps)
        if self.calls.count(self.key) == self.fails_at:
            raise PeerFailed("it ended")
        return taken


def _settled(contender: object) -> None:
    """Fakes have no threads to wait for."""


def test_contenders_warm_up_and_then_lead_in_turns() -> None:
    calls: list[str] = []
    contenders = [Recorded("a", calls), Recorded("b", calls)]
    results = Results(num_steps=1)
    alternate(contenders, results, num_rounds=3, settle=_settled)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert results.seconds == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}
    assert results.idle_share == 0.0
    assert [one.rests for one in contenders] == [4, 4]


def test_processor_time_of_an_idle_contender_is_seen() -> None:
    contenders = [Recorded("quiet"), Recorded("spinning", leak_s=1.0)]
    results = Results(num_steps=1)
    alternate(contenders, results, num_rounds=2, settle=_settled)
    assert results.idle_share > 0.0
    assert results.cpu_seconds == {"quiet": 0.0, "spinning": 2.0}


def test_the_loss_is_fetched_every_fifty_steps_and_at_the_end() -> None:
    assert [step for step in range(120) if fetches(step, 120)] == [49, 99, 119]


def test_losses_within_the_band_pass_and_the_roof_has_none() -> None:
    check_losses({"a": [0.7, 0.50], "b": [0.7, 0.51], ROOF: [0.0, 0.0]}, band=0.02)


def test_a_contender_that_learned_something_else_is_named() -> None:
    with pytest.raises(PeerFailed, match=r"c learned something else: last losses a 0\.50000, b 0\.51000, c 0\.61000"):
        check_losses({"a": [0.50], "b": [0.51], "c": [0.61]}, band=0.02)


def test_a_nan_loss_is_refused_even_if_the_last_one_is_finite() -> None:
    with pytest.raises(PeerFailed, match="a loss of b is not finite"):
        check_losses({"a": [0.5, 0.5], "b": [float("nan"), 0.5]}, band=1.0)


def test_a_failing_peer_loses_its_numbers_and_the_others_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    results = Results(num_steps=1)
    contenders = [Recorded("penstock", calls), Failing("peer", calls, fails_at=3)]
    alternate(contenders, results, num_rounds=3, settle=_settled, needed={"penstock"})
    assert len(results.seconds["penstock"]) == 3
    assert calls.count("peer") == 3
    assert "peer" not in results.seconds
    assert "peer" not in results.cpu_seconds
    assert "failed in round 2: it ended" in results.missing["peer"]
    assert "goes on without peer" in capsys.readouterr().err


def test_ours_failing_ends_the_race() -> None:
    contenders = [Failing("penstock", fails_at=2), Recorded("peer")]
    with pytest.raises(PeerFailed, match="it ended"):
        alternate(contenders, Results(num_steps=1), num_rounds=3, settle=_settled, needed={"penstock"})


def test_times_that_a_round_lacks_are_left_out_of_pairs() -> None:
    """On a busy machine `bench engine` crosses no edge between threads in some rounds, or in none."""
    report = Report("paired", 3)
    ours = [
        {"wide_operator_us": 2.0, "cross_thread_edge_us": 1.0},
        {"wide_operator_us": 2.0},
        {"wide_operator_us": 2.0},
    ]
    other = [
        {"wide_operator_us": 4.0},
        {"wide_operator_us": 6.0, "cross_thread_edge_us": 1.0},
        {"wide_operator_us": 8.0},
    ]
    add_ratios_of_times(report, ours, other)
    assert report.ratios == {"wide_operator_us": 3.0}
    assert "cross_thread_edge_us" in report.missing

    ours[0]["cross_thread_edge_us"], other[0]["cross_thread_edge_us"] = 1.0, 0.5
    once = Report("paired", 3)
    add_ratios_of_times(once, ours, other)
    assert once.ratios["cross_thread_edge_us"] == 0.5
