"""`penstock record`: real server, real agent, whose process finds the request beside its socket."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.cli.conftest import Site

Until = Callable[..., None]
WAITS = """
import os, time
from pathlib import Path
request = Path(os.environ["PENSTOCK_TELEMETRY_SOCKET"]).with_suffix(".record")
print("up", flush=True)
while not request.exists():
    time.sleep(0.01)
print("asked", flush=True)
time.sleep(600)
"""


def test_the_processes_of_a_running_job_are_asked(serving: Site, until: Until) -> None:
    site = serving
    job = site.submit(site.job("waits", WAITS))
    until(lambda: site.log(job) == "up\n")
    assert site.run("record", job, "--seconds", "30").stdout == "trainer 0: was asked to record every step for 30 s\n"
    until(lambda: site.log(job) == "up\nasked\n")
    found = json.loads(site.run("record", job, "--json").stdout)
    assert (found["seconds"], found["processes"][0]["error"]) == (5, "")
    assert site.run("record", job, "--seconds", "31").returncode == 2
    site.run("cancel", job, "--wait")
    over = site.run("record", job)
    assert over.returncode == 5 and "no trainer of this job is running" in over.stderr
