"""`bench advise --workload servers`: from recordings of cells to errors, without processes."""

from __future__ import annotations

from typing import Any, cast

import pytest
from bench.advise_servers import PLACES, Cell, Job, add_figures, places_of
from bench.report import Report

from penstock.advice.cluster import Cluster

MS = 1_000_000


def cell(place: str, servers: int, trainers: int, turn_ms: int) -> Cell:
    """A job that waits for 4 ms of each turn, half a megabyte each way, on one or on several hosts."""
    on_hosts = place != "one host"
    job = Job(Cluster(servers, trainers, "sync", is_shared=not on_hosts), on_hosts, cast(Any, None))
    recording = {
        "turn_ns": [turn_ms * MS] * 4,
        "exchanged": {f"h:{server}": [2 * 10**6, 10**6, 16 * MS] for server in range(servers)},
        "trainer_cpu_ns": 10 * MS, "server_cpu_ns": [2 * MS] * servers, "ahead_ns": 0,
    }  # fmt: skip
    return Cell(job, place, [recording])


def test_errors_and_the_advised_settings_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("advise", 1)
    cells = [cell("1gbit", 1, 1, 20), cell("1gbit", 1, 2, 40), cell("100mbit", 1, 1, 60)]
    add_figures(report, "1gbit", cells, 100, 2, json=False)
    assert report.figures["servers_1gbit_settings"] == 2
    # half a megabyte takes 4 ms; the other link is a tenth as fast, and nothing of it is hidden
    assert report.figures["servers_1gbit_link_gbit"] == pytest.approx(1.14, abs=0.02)
    assert report.figures["servers_1gbit_error_most"] > report.figures["servers_1gbit_error_q1"] > 0
    # two trainers were advised, and have the rate of one: 100 rows in 20 ms
    assert report.ratios["servers_1gbit_advised_of_best"] == pytest.approx(1.0)
    assert capsys.readouterr().out.count("(recorded)") == 1


def test_places_are_those_that_are_known() -> None:
    assert places_of("one host,1gbit,one host") == ["one host", "1gbit"] and places_of(",".join(PLACES)) == list(PLACES)
    with pytest.raises(SystemExit, match="10gbit"):
        places_of("10gbit")
