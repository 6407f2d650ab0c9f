"""Training over two hosts: by the commands of the README, over TLS, by collectives, by launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from tests.engines.run_over_engine import SCRIPT, trains
from tests.hosts.hosts import HostSite
from tests.support.waiting import until

from penstock.process import proc

Hosts = tuple[HostSite, HostSite]
README = Path(__file__).parents[2] / "README.md"
RANKS = Path(__file__).with_name("ranks.py")
MEAN = "gradient [1.5, 1.5, 1.5, 1.5]"
"""Of what the two ranks have: 1 and 2."""


def certificates(folder: Path, *addresses: str) -> dict[str, str]:
    """Write those of servers at these addresses; return the settings that name them."""
    authority = trustme.CA()
    issued = authority.issue_cert(*addresses)
    folder.mkdir()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for part in issued.cert_chain_pems:
        part.write_to_path(str(folder / "cert.pem"), append=True)
    return {f"PENSTOCK_PS_TLS_{name.upper()}": str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}


def commands_of_readme() -> list[list[str]]:
    """Return the commands under 'A second machine' that begin with `penstock`."""
    section = README.read_text().partition("## A second machine")[2].partition("\n## ")[0]
    lines = [line.partition("#")[0].split() for line in section.splitlines() if line.startswith("penstock ")]
    assert [line[1:3] for line in lines] == [
        ["up", "--host"],
        ["agent", "token"],
        ["agent", "join"],
        ["submit", "job.yaml"],
    ]
    return lines


@pytest.mark.soak
def test_job_over_two_hosts_survives_the_loss_of_one(hosts: Hosts, tmp_path: Path) -> None:
    """By the commands of the README; the working folder of the job reaches both hosts as a snapshot."""
    first, second = hosts
    up, token, join, submit = commands_of_readme()
    values = {"ADDRESS": first.address, "TOKEN": ""}
    first.up(*[values.get(word, word) for word in up[2:]], "--state-dir", str(first.home / "state"))
    values["TOKEN"] = first.run(*token[1:]).stdout.strip()
    with first.inside(), first.client as client:
        values["URL"] = client.url
    joining = [values.get(word, word) for word in join[1:]]
    agent = second.start("penstock.cli", *joining, "--name", "second", "--cpus", "2")
    until(lambda: first.node_states() == ["READY", "READY"], "both hosts are READY")
    marks = tmp_path / "marks"
    marks.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(SCRIPT.read_text())
    each = {"count": 2, "cpus": 1, "memory": "256MiB"}
    env = {**certificates(tmp_path / "tls", first.address, second.address), "OMP_NUM_THREADS": "1"}
    job_file = work / "job.yaml"
    spec = {
        "name": "regression", "mode": "pserver", "entrypoint": ["python", "train.py", str(marks)], "workdir": ".",
        "trainers": each, "pservers": each, "env": env, "restart": {"max_restarts": 2}, "stop_grace_s": 2,
    }  # fmt: skip
    job_file.write_text(json.dumps(spec))
    job = first.run(submit[1], str(job_file)).stdout.strip()
    until(lambda: trains(first, job, marks, 1), "both trainers train")
    running = first.look(job)
    assert len({replica["node_id"] for replica in running["replicas"]}) == 2, "it runs on both hosts"

    agent.kill()
    agent.wait()
    proc.send(second.alive(), signal.SIGKILL)  # all of the second host, as when it loses its power
    until(lambda: first.nodes()["second"]["state"] == "DOWN", "the loss is noticed")
    second.start("penstock.cli", "agent", "join")  # and it is back: its identity is in its home
    until(lambda: first.look(job)["attempt"] == 2, "the job recovers")
    until(lambda: trains(first, job, marks, 2), "both trainers train again")
    (marks / "go").touch()
    until(lambda: first.look(job)["state"] == "SUCCEEDED", "the job ends")
    assert "loss fell from" in first.log(job)


@pytest.mark.soak
def test_ranks_on_two_hosts_reduce_over_gloo(hosts: Hosts) -> None:
    first = hosts[0]
    first.up("--host", first.address, "--insecure", "--no-agent")
    with first.inside(), first.client as client:
        url, tokens = client.url, [client.join_token()["token"] for _ in hosts]
    for site, token, name in zip(hosts, tokens, ("a", "b"), strict=True):
        site.start("penstock.cli", "agent", "join", "--url", url, "--join-token", token, "--name", name, "--cpus", "1")
    until(lambda: first.node_states() == ["READY", "READY"], "both hosts are READY")
    ranks = {"count": 2, "cpus": 1, "memory": "256MiB"}
    job = first.submit(first.job("ranks", RANKS.read_text(), mode="collective", trainers=ranks))
    until(lambda: first.look(job)["state"] in ("SUCCEEDED", "FAILED"), "the job ends")
    assert first.log(job).count(MEAN) == 2, first.log(job)
    assert len({replica["node_id"] for replica in first.look(job)["replicas"]}) == 2


@pytest.mark.soak
def test_launchers_on_two_hosts_meet(hosts: Hosts, tmp_path: Path) -> None:
    addresses = ",".join(site.address for site in hosts)
    started = []
    for site in hosts:
        logs = str(tmp_path / f"logs-{site.number}")
        argv = [sys.executable, "-m", "penstock.distributed.launch", "--cluster_node_ips", addresses,
                "--node_ip", site.address, "--nproc_per_node", "1", "--log_dir", logs, str(RANKS)]  # fmt: skip
        with site.inside():
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    texts = [path.read_text() for path in sorted(tmp_path.glob("logs-*/workerlog.*"))]
    assert [text.count(MEAN) for text in texts] == [1, 1]
