"""A whole job over TLS: it comes to the same, nobody reads along, and a stranger gets nowhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.faults.fluid_jobs import Job, Process, Undisturbed
from tests.ps.proxy import Proxy
from tests.support.certificates import certificates

SECRET = "the-secret-of-this-job"
OPEN = {"PENSTOCK_PS_TRANSPORT": "tcp", "PENSTOCK_PS_TOKEN": SECRET}
SAYS = b'"kind"'
"""Stands in the head of every message."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def started(job: Callable[..., Job], steps: int, **environ: str) -> tuple[Job, Proxy, list[Process]]:
    """Start a job, the second trainer of which is overheard."""
    one = job(**OPEN, **environ)
    one.server()
    proxy = Proxy(int(one.endpoints[0].rpartition(":")[2]), listens=True)
    return one, proxy, [one.trainer(0, "--steps", steps), one.trainer(1, "--steps", steps, at=[proxy.endpoint])]


def test_who_listens_to_a_job_in_the_open_reads_along(job: Callable[..., Job]) -> None:
    """So the next test can fail."""
    one, proxy, _ = started(job, 3)
    with closing(proxy):
        one.all_end_well()
        assert SECRET.encode() in proxy.overheard
        assert SAYS in proxy.overheard


def test_job_over_tls_comes_to_the_same_and_nobody_reads_along(
    job: Callable[..., Job], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    one, proxy, trainers = started(job, undisturbed.steps, **certificates(tmp_path / "ours"))
    with closing(proxy):
        one.all_end_well()
        assert len(proxy.overheard) > 100_000
        assert SECRET.encode() not in proxy.overheard
        assert SAYS not in proxy.overheard
    undisturbed.is_what_became_of(one, trainers)


@pytest.mark.parametrize("trusts", ["another authority", "everybody"])
def test_trainer_that_cannot_know_its_server_names_it_and_ends(
    job: Callable[..., Job], tmp_path: Path, trusts: str
) -> None:
    """One that would speak in the open is not answered; the server goes on to wait for others."""
    theirs = {"another authority": certificates(tmp_path / "theirs")["PENSTOCK_PS_TLS_CA"], "everybody": ""}
    one = job(**OPEN, **certificates(tmp_path / "ours"))
    server = one.server()
    stranger = one.trainer(0, "--steps", 3, PENSTOCK_PS_TLS_CA=theirs[trusts], PENSTOCK_PS_START_S="3")
    assert stranger.end() == 1
    assert f"the parameter servers {one.endpoints[0]} did not start within 3 s" in stranger.errors
    assert server.status is None
    for number in (0, 1):
        one.trainer(number, "--steps", 3)
    assert [process.end() for process in one.processes if process is not stranger] == [0, 0, 0], one.said
