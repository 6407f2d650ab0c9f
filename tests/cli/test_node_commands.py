"""`penstock node cordon|uncordon|drain` against a real server, agent and job."""

from __future__ import annotations

from typing import Any

from tests.cli.conftest import Site


def test_node_is_cordoned_drained_by_a_deadline_and_used_again(site: Site, until: Any) -> None:
    site.up()
    until(lambda: site.node_states() == ["READY"], "a node")
    job = site.submit(site.job("sleeper", "import time; print('up', flush=True); time.sleep(600)"))
    until(lambda: "up" in site.log(job), "the job runs")
    [node] = site.json("nodes")
    cordoned = site.run("node", "cordon", node["name"])
    assert "CORDONED: an administrator has cordoned it" in cordoned.stdout
    drained = site.run("node", "drain", node["id"], "--deadline", "1", "--wait")
    assert drained.returncode == 0, drained.stderr
    assert "is DRAINED" in drained.stdout
    assert "replicas run there; an administrator drains it" in drained.stderr
    found = site.look(job)
    assert (found["state"], found["reason"], found["restarts"]) == ("RECOVERING", "preempted", 0)
    assert "nothing runs there any more" in site.run("nodes").stdout
    assert site.json("node", "uncordon", node["name"])["state"] == "READY"
    until(lambda: site.look(job)["state"] == "RUNNING", "the next attempt")
    late = site.run("node", "drain", node["name"], "--wait", "--timeout", "1")
    assert late.returncode == 7
    assert "its drain goes on" in late.stderr
    assert site.run("node", "drain", "nowhere").returncode == 3
