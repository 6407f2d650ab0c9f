"""Server and agent on two hosts, whose network fails: what runs goes on, and nothing is lost or doubled."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hosts.hosts import Faults, HostSite
from tests.support.waiting import until

Hosts = tuple[HostSite, HostSite]
COUNTING = (
    "import os, time\nn = 0\nwhile not os.path.exists({go!r}):\n    print(n, flush=True); n += 1; time.sleep(0.02)"
)
SMALL = {"memory": "64MiB"}


def joined(hosts: Hosts) -> HostSite:
    """Serve on the first host, with no agent there, and join the second; return where the server is."""
    server, other = hosts
    server.up("--no-agent", "--host", server.address, "--insecure")
    with server.inside(), server.client as client:
        other.join(client.url, client.join_token()["token"], "other")
    until(lambda: server.node_states() == ["READY"], "the second host has joined")
    return server


def is_counted(text: str) -> bool:
    """Whether every line is there, once, in order."""
    lines = text.splitlines()
    return len(lines) > 10 and lines == [str(n) for n in range(len(lines))]


@pytest.mark.parametrize(
    "fault",
    ["partition", pytest.param("deafen", marks=pytest.mark.soak), pytest.param("silence", marks=pytest.mark.soak)],
)
def test_job_goes_on_while_its_host_is_cut_off(hosts: Hosts, faults: Faults, fault: str, tmp_path: Path) -> None:
    """Cut off both ways, or one way only; connections are half open meanwhile, since none is closed."""
    server = joined(hosts)
    go = tmp_path / "go"
    job = server.submit(server.job("counting", COUNTING.format(go=str(go)), trainers=SMALL))
    until(lambda: len(server.log(job)) > 10, "the job counts")
    pid = server.look(job)["replicas"][0]["pid"]
    getattr(faults, fault)()
    until(lambda: server.node_states() == ["UNREACHABLE"], "the server notices")
    faults.heal()
    until(lambda: server.node_states() == ["READY"], "the node is back")
    go.touch()
    until(lambda: server.look(job)["state"] == "SUCCEEDED", "the job ends")
    ended = server.look(job)
    assert (ended["attempt"], ended["replicas"][0]["pid"]) == (1, pid), "it was not started a second time"
    assert is_counted(server.log(job))


@pytest.mark.soak
def test_server_that_restarts_behind_a_partition_finds_the_job(hosts: Hosts, faults: Faults, tmp_path: Path) -> None:
    """The agent's connection is to a server that is not there any more, and no packet says so: it is half open."""
    server = joined(hosts)
    go = tmp_path / "go"
    job = server.submit(server.job("counting", COUNTING.format(go=str(go)), trainers=SMALL))
    until(lambda: len(server.log(job)) > 10, "the job counts")
    with server.inside(), server.client as client:
        port = client.url.rpartition(":")[2]
    faults.partition()
    up = server.started[0]
    up.kill()
    up.wait()
    until(lambda: not server.alive(), "what it had started is gone")
    assert up.stdout is not None
    up.stdout.close()
    server.started.clear()
    server.start("penstock.cli", "up", "--no-agent", "--host", server.address, "--insecure", "--port", port)
    faults.heal()
    until(lambda: (server.home / ".penstock" / "config.json").exists() and server.inside_ready(), "the server is back")
    until(lambda: server.node_states() == ["READY"], "the agent is back")
    go.touch()
    until(lambda: server.look(job)["state"] == "SUCCEEDED", "the job ends")
    assert is_counted(server.log(job))


@pytest.mark.soak
def test_log_over_a_slow_and_lossy_link_is_whole(hosts: Hosts, faults: Faults) -> None:
    server = joined(hosts)
    faults.slow("4mbit")
    faults.lose(3)
    code = "for n in range(40_000): print(n)"
    job = server.submit(server.job("talking", code, trainers=SMALL))
    until(lambda: server.look(job)["state"] == "SUCCEEDED", "the job ends")
    assert server.log(job).splitlines() == [str(n) for n in range(40_000)]
    assert server.node_states() == ["READY"]


def test_host_with_a_new_address_gets_jobs_there(hosts: Hosts, faults: Faults, tmp_path: Path) -> None:
    server = joined(hosts)
    faults.change_address("10.83.0.77")
    until(lambda: server.node_states() == ["UNREACHABLE"], "the server notices")
    until(lambda: server.node_states() == ["READY"], "the agent is back, from elsewhere")
    assert server.nodes()["other"]["address"] == "10.83.0.77"
    job = server.submit(server.job("one", "print('here')", trainers=SMALL))
    until(lambda: server.look(job)["state"] == "SUCCEEDED", "a job runs there")
