"""`penstock agent join --once --ttl`: real server, real agents, real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from subprocess import Popen

from tests.cli.conftest import Site

Until = Callable[..., None]
WAITER = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists({go!r}): time.sleep(0.02)"


def join(site: Site, name: str, *arguments: str) -> Popen[str]:
    """Start an agent with the command, as a scheduler would."""
    with site.client as client:
        given = ["--url", client.url, "--join-token", client.join_token()["token"], "--name", name]
    folder = str(site.home / name)
    return site.start("penstock.cli", "agent", "join", *given, "--state-dir", folder, *arguments)


def states(site: Site) -> dict[str, str]:
    with site.client as client:
        return {node["name"]: node["state"] for node in client.nodes()}


def test_once_pilot_runs_one_job_and_ends(site: Site, until: Until) -> None:
    site.up("--no-agent")
    agent = join(site, "pilot", "--once")
    first = site.submit(site.job("first", "print('done')"))
    second = site.submit(site.job("second", "print('never')"))
    until(lambda: site.look(first)["state"] == "SUCCEEDED")
    assert agent.wait(30) == 0
    assert site.log(first) == "done\n"
    until(lambda: states(site) == {"pilot": "DOWN"})
    assert site.look(second)["state"] == "QUEUED"
    site.run("cancel", second)


def test_pilot_preempts_at_its_ttl_and_the_job_moves_on(site: Site, until: Until) -> None:
    site.up("--no-agent")
    job = site.submit(site.job("job", WAITER.format(go=str(site.home / "go")), restart={"max_restarts": 0}))
    agent = join(site, "short", "--ttl", "10", "--drain", "4")  # time to start a job on a busy machine, too
    until(lambda: site.log(job) == "up\n")
    until(lambda: states(site)["short"] == "DRAINING")
    assert site.look(job)["state"] == "RUNNING", "draining disturbs nothing"
    join(site, "long", "--ttl", "3600")
    assert agent.wait(30) == 0
    until(lambda: site.look(job)["state"] == "RUNNING" and site.look(job)["attempt"] == 2)
    (site.home / "go").touch()
    until(lambda: site.look(job)["state"] == "SUCCEEDED")
    assert site.look(job)["restarts"] == 0
    until(lambda: states(site)["short"] == "DOWN")


def test_terminated_pilot_preempts_what_it_runs(site: Site, until: Until) -> None:
    site.up("--no-agent")
    agent = join(site, "pilot", "--ttl", "3600")
    job = site.submit(site.job("job", WAITER.format(go="/never"), restart={"max_restarts": 0}))
    until(lambda: site.log(job) == "up\n")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
    until(lambda: site.look(job)["state"] == "RECOVERING")
    assert site.look(job)["reason"] == "preempted"
    site.run("cancel", job)


def test_drain_without_ttl_is_a_usage_error(site: Site) -> None:
    result = site.run("agent", "join", "--url", "http://127.0.0.1:1", "--join-token", "x", "--drain", "3")
    assert result.returncode == 2
    assert "--ttl" in result.stderr
