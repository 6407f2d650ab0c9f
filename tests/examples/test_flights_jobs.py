"""The job files of the flights example are jobs, and what they run is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.command.specfile import load

EXAMPLE = Path(__file__).parents[2] / "examples/ctr_flights"


@pytest.mark.parametrize(("file", "roles"), [("job.yaml", (1, 0)), ("job_servers.yaml", (2, 1))])
def test_a_job_file_is_a_job_that_fits_two_cores(file: str, roles: tuple[int, int]) -> None:
    spec = load(EXAMPLE / file)
    assert (spec.trainers.count, spec.pservers.count) == roles
    assert spec.trainers.count * spec.trainers.cpus + spec.pservers.count * spec.pservers.cpus <= 2
    assert (EXAMPLE / spec.entrypoint[1]).exists()
