"""What is left running, and what goes on, when parts are stopped or killed. Real server, agent and command."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any, Protocol

import pytest

from penstock.client import Client
from penstock.distributed.ports import free_ports
from penstock.process import proc
from penstock.protocol.frames import Column, Kind, decode
from penstock.protocol.rest import Job

Until = Callable[..., None]
WAITER = (
    "import os, time\nprint(os.getpid(), flush=True)\nwhile not os.path.exists({go!r}): time.sleep(0.02)\nprint('end')"
)

DOCUMENT = Path(__file__).parents[1] / "golden" / "frames" / "graph.json"
TRAINER = """
import json, os, time
from pathlib import Path
import numpy as np
import penstock.telemetry
from penstock.protocol.graphdoc import GraphDocument

class Source:
    steps = []
    def drain(self):
        steps, self.steps = self.steps, []
        step = np.repeat(np.array(steps, np.int64), 600)
        op = np.arange(len(step)) % 3
        start = time.time_ns() + np.arange(len(step))
        return dict(start_ns=start, duration_ns=op + 900, op=op, step=step, thread=op % 2, lost=0)

print(os.getpid(), flush=True)
source = Source()
watch = penstock.telemetry.session().watch(source, name="train")
watch.graph(GraphDocument.model_validate(json.loads(Path({document!r}).read_text())["body"]))
step = 0
while not os.path.exists({go!r}):
    source.steps.append(step)
    now = time.time_ns()
    watch.step(step=step, start_ns=now - 1000, end_ns=now, samples=8, loss=0.5)
    step += 1
    time.sleep(0.004)
watch.close()
"""
"""Trains nothing, and produces the events of 250 steps a second, of which the budget takes a third."""


LOGS_TABLES = """
import os, time
import penstock

for step in (1, 2, 3):
    while not os.path.exists(f"{home}/step{{step}}"):
        time.sleep(0.02)
    penstock.log({{"confusion": penstock.Table(["step", "label"], [[step, "a"]])}}, step=step)
    open(f"{home}/logged{{step}}", "w").close()
"""


class Site(Protocol):
    home: Path
    started: list[Popen[str]]

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> CompletedProcess[str]: ...
    @property
    def client(self) -> Client: ...
    def look(self, job: str) -> Job: ...
    def ready(self) -> bool: ...
    def node_states(self) -> list[str]: ...
    def start(self, *argv: str) -> Popen[str]: ...
    def up(self, *arguments: str) -> Popen[str]: ...
    def job(self, name: str, code: str, **fields: Any) -> Path: ...
    def submit(self, path: Path) -> str: ...
    def log(self, job: str) -> str: ...
    def alive(self) -> list[int]: ...


def gone(pid: int) -> bool:
    return proc.start_ticks(pid) is None


def join(site: Site) -> Popen[str]:
    """Start an agent of its own, as on another machine."""
    with site.client as client:
        arguments = ["--url", client.url, "--join-token", client.join_token()["token"]]
    return site.start("penstock_worker", *arguments, "--state-dir", str(site.home / "node"))


def run_waiter(site: Site, until: Until, **fields: Any) -> tuple[str, int]:
    """Submit a job that waits for a file; return its id and the pid of its process."""
    job = site.submit(site.job("waiter", WAITER.format(go=str(site.home / "go")), **fields))
    until(lambda: site.look(job)["state"] == "RUNNING")
    until(lambda: site.log(job).endswith("\n"))
    return job, int(site.log(job))


def test_a_killed_agent_that_comes_back_goes_on_with_its_job(site: Site, until: Until) -> None:
    site.up("--no-agent")
    agent = join(site)
    job, pid = run_waiter(site, until)
    agent.kill()
    agent.wait()
    assert not gone(pid)
    site.start("penstock_worker", "--state-dir", str(site.home / "node"))
    until(lambda: site.node_states() == ["READY"])
    (site.home / "go").touch()
    until(lambda: site.look(job)["state"] == "SUCCEEDED")
    assert site.log(job) == f"{pid}\nend\n"


def test_a_killed_agent_leaves_nothing_of_a_job_that_wants_that(impatient_site: Site, until: Until) -> None:
    site = impatient_site
    site.up("--no-agent")
    agent = join(site)
    job, pid = run_waiter(site, until, on_disconnect="stop", restart={"max_restarts": 0})
    agent.kill()
    agent.wait()
    until(lambda: gone(pid))
    until(lambda: site.look(job)["state"] == "FAILED")


def serve(site: Site, until: Until) -> tuple[Popen[str], list[str]]:
    """Start a server that can be killed and started again at its address, and an agent; return it and how."""
    state = str(site.home / "server")
    port = str(free_ports("127.0.0.1", 1)[0])  # who looks for a server that is down must not find itself there
    command = ["penstock_server", "--port", port, "--state-dir", state]
    server = site.start(*command)
    address = site.home / "server" / "server.json"
    until(lambda: address.exists() and (site.home / "server" / "admin.token").exists())
    url = json.loads(address.read_text())["url"]
    profile = {"url": url, "token_file": str(site.home / "server" / "admin.token")}
    (site.home / ".penstock").mkdir()
    (site.home / ".penstock" / "config.json").write_text(json.dumps(profile))
    until(site.ready)
    join(site)
    return server, command


@pytest.mark.smoke
def test_a_killed_server_that_comes_back_finds_the_job_going_on(site: Site, until: Until) -> None:
    server, command = serve(site, until)
    job, pid = run_waiter(site, until)
    reading = site.start("penstock.cli", "logs", "-f", job)
    assert reading.stdout is not None
    assert reading.stdout.readline() == f"{pid}\n"
    server.kill()
    server.wait()
    (site.home / "go").touch()
    until(lambda: gone(pid))
    site.start(*command)
    until(site.ready)
    until(lambda: site.look(job)["state"] == "SUCCEEDED")
    assert site.log(job) == f"{pid}\nend\n"
    assert reading.stdout.read() == "end\n", "a reader waits for the server as well"
    assert reading.wait() == 0


def test_a_table_logged_while_the_server_is_away_arrives_once(site: Site, until: Until) -> None:
    server, command = serve(site, until)
    job = site.submit(site.job("tables", LOGS_TABLES.format(home=str(site.home))))

    def steps() -> list[int]:
        with site.client as client:
            return [item["step"] for one in client.media(job) for item in one["items"]]

    (site.home / "step1").touch()
    until(lambda: steps() == [1])
    server.kill()
    server.wait()
    (site.home / "step2").touch()
    until((site.home / "logged2").exists)
    site.start(*command)
    until(site.ready)
    (site.home / "step3").touch()
    until(lambda: site.look(job)["state"] == "SUCCEEDED")
    with site.client as client:
        [series] = client.media(job)
        contents = [client.media_content(job, item["id"]) for item in series["items"]]
    assert [item["step"] for item in series["items"]] == [1, 2, 3], "none is lost or there twice"
    assert [one["rows"] for one in contents] == [[[step, "a"]] for step in (1, 2, 3)]


def recorded(client: Client, job: str, streams: list[int]) -> tuple[Counter[int], Counter[int]]:
    """Return the operator events in a job's recording, and the events that its sums have, by stream."""
    shown, summed = Counter[int](), Counter[int]()
    for stream in streams:
        content = client.frames(job, stream=stream, limit_bytes=16 << 20, kinds=[Kind.OP_EVENTS, Kind.OP_SUMS])
        while content:
            (size,) = struct.unpack_from("<I", content)
            frame, content = decode(content[4 : 4 + size]), content[4 + size :]
            if frame.kind is Kind.OP_EVENTS:
                shown[frame.stream] += frame.count
            else:
                summed[frame.stream] += int(frame.columns[Column.COUNT].sum())
    return shown, summed


def test_counts_outlive_a_killed_trainer_and_a_killed_server(site: Site, until: Until) -> None:
    server, command = serve(site, until)
    code = TRAINER.format(go=str(site.home / "go"), document=str(DOCUMENT))
    job = site.submit(site.job("counted", code, restart={"max_restarts": 1, "on": ["infra", "user"]}))

    def reports(attempt: int) -> bool:
        with site.client as client:
            processes = client.completeness(job)["processes"]
            return any(one["attempt"] == attempt and one["reported_at"] and one["rows"] for one in processes)

    until(lambda: reports(1))
    os.kill(int(site.log(job)), signal.SIGKILL)
    until(lambda: reports(2))
    server.kill()
    server.wait()
    site.start(*command)
    until(site.ready)
    (site.home / "go").touch()
    until(lambda: site.look(job)["state"] == "SUCCEEDED")
    with site.client as client:
        found = client.completeness(job)
        shown, summed = recorded(client, job, [one["stream"] for one in found["processes"]])
    assert found["holds"], found
    killed, ended = sorted(found["processes"], key=lambda one: one["attempt"])
    assert killed["unknown_since"] is not None and ended["unknown_since"] is None
    assert [note.split(":")[0] for note in found["notes"]] == ["trainer 0 of attempt 1"]
    for process in (killed, ended):
        rows = {one["kind"]: one for one in process["rows"]}
        events, stream = rows["OP_EVENTS"], process["stream"]
        assert events["shown"] == shown[stream] > 0
        assert events["sampled_out"] > 0 and events["unexplained"] == 0
        if not rows["OP_SUMS"]["dropped"]:  # the sums have every event: an account of its own
            assert events["produced"] <= summed[stream] if process is killed else events["produced"] == summed[stream]
    [events] = [one for one in found["rows"] if one["kind"] == "OP_EVENTS"]
    assert events["shown"] == shown.total()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_up_leaves_nothing_running_however_it_ends(site: Site, until: Until, number: signal.Signals) -> None:
    up = site.up()
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITER.format(go="/never")
    job = site.submit(site.job("stubborn", code, stop_grace_s=0.5))
    until(lambda: site.log(job).endswith("\n"))
    assert len(site.alive()) >= 5, "up, server, agent, guard and the job"
    up.send_signal(number)
    assert up.wait(60) == (-number if number is signal.SIGKILL else 0)
    until(lambda: site.alive() == [])


def test_the_demo_shrinks_to_its_node_and_leaves_nothing_running(
    site: Site,
) -> None:
    code = (
        "import json, os, socket, struct, sys\n"
        "from penstock.protocol.frames import Column, Frame, Kind, encode\n"
        "peer = socket.socket(socket.AF_UNIX); peer.connect(os.environ['PENSTOCK_TELEMETRY_SOCKET'])\n"
        "stream = int(os.environ['PENSTOCK_STREAM']); seq = 0\n"
        "def send(kind, body):\n"
        "    global seq\n"
        "    data = encode(Frame(kind, stream, 1, seq, body=body)); seq += 1\n"
        "    peer.sendall(struct.pack('<I', len(data)) + data)\n"
        "send(Kind.HELLO, {'role': 'trainer', 'index': 0, 'host': 'h', 'pid': os.getpid(), 'version': '0'})\n"
        "for step, auc in enumerate([0.7, 0.9, 0.8]):\n"
        "    values = {'test_auc': auc, 'samples_per_s': 100.0 + step}\n"
        "    send(Kind.SCALARS, {'step': step, 'time_ns': 1 + step, 'values': values})\n"
        "assert sys.argv[1:] == ['--passes', '3'], sys.argv\n"
        "assert os.environ['CPU_NUM'] != '4096'\n"
    )
    needs = {"env": {"CPU_NUM": "4096"}, "trainers": {"cpus": 4096, "memory": "1000TiB"}}
    path = site.job("stub", code, **needs)
    result = site.run("demo", "--exit-when-done", "--json", "--port", "0", "--passes", "3", "--job", str(path))
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["state"], last["auc"], last["auc_first_pass"], last["samples_per_s"]) == ("SUCCEEDED", 0.9, 0.7, 101.0)
    (link,) = (line for line in result.stderr.splitlines() if "/login#code=" in line)
    assert link.endswith(f"&job={last['url'].rpartition('/')[2]}")
    assert "trainers.cpus is lowered from 4096" in result.stderr
    assert site.alive() == []


def test_a_demo_whose_job_crashes_says_why_and_exits_1(site: Site) -> None:
    path = site.job("stub", "raise SystemExit('no luck today')")
    result = site.run("demo", "--exit-when-done", "--json", "--port", "0", "--job", str(path))
    assert result.returncode == 1
    assert json.loads(result.stdout.splitlines()[-1])["state"] == "FAILED"
    assert "no luck today" in result.stderr
    assert site.alive() == []


def test_a_demo_without_a_display_says_why_no_browser_opens(site: Site) -> None:
    path = site.job("stub", "pass")
    result = site.run("demo", "--exit-when-done", "--port", "0", "--job", str(path))
    assert "no browser was opened: there is no display" in result.stderr


def test_a_demo_that_no_node_can_ever_hold_says_why_and_exits_1(site: Site) -> None:
    path = site.job("gpus", "1", trainers={"count": 1, "gpus": 64})
    result = site.run("demo", "--exit-when-done", "--json", "--port", "0", "--job", str(path))
    assert result.returncode == 1, result.stderr
    assert "no READY node has that" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["state"] == "QUEUED"
    assert site.alive() == []
