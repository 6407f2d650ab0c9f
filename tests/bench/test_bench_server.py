"""`bench server`: its statistics, and a small round on a real server with all measurements."""

from __future__ import annotations

import argparse

import pytest

from bench import server


def test_percentiles_are_samples_not_below_their_share() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [server.percentile(values, share) for share in (0.5, 0.95, 0.99)] == [51.0, 96.0, 100.0]
    assert server.percentile([7.0], 0.99) == 7.0


@pytest.mark.soak
@pytest.mark.parametrize("waiting", [0, 20])
def test_a_small_control_plane_is_measured(waiting: int) -> None:
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    small = ["--agents", "4", "--jobs", "8", "--browsers", "4", "--finished", "50", "--reporting", "2"]
    asked = parser.parse_args([*small, "--cost-jobs", "5", "--seconds", "2", "--waiting", str(waiting)])
    figures = server.main(1, json=True, extra=asked).figures
    assert 0 < figures["restart_s"] < 30
    assert 14 < figures["dead_node_s"] < 60, "the lease is 15 s"
    assert 0 < figures["submit_p50_ms"] <= figures["submit_p99_ms"]
    assert 0 < figures["placement_p50_ms"] <= figures["placement_p95_ms"]
