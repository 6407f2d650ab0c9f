"""Submit, watch, cancel: the command against a real server and a real agent, started by `penstock up`."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any, Protocol

import pytest

from penstock.client import NotFound
from penstock.process import proc
from penstock.protocol.rest import Job

Until = Callable[..., None]
STUBBORN = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\n"
    "made = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
    "print(os.getpid(), made.pid, flush=True); time.sleep(600)\n"
)


class Site(Protocol):
    home: Path
    started: list[Popen[str]]

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> CompletedProcess[str]: ...
    def json(self, *arguments: str) -> Any: ...
    def job(self, name: str, code: str, **fields: Any) -> Path: ...
    def submit(self, path: Path) -> str: ...
    def look(self, job: str) -> Job: ...
    def log(self, job: str) -> str: ...


@pytest.mark.smoke
def test_a_command_job_runs_to_its_end_and_its_log_can_be_read(serving: Site) -> None:
    result = serving.run("submit", str(serving.job("hello", "print('hello')")), "--wait", "--json")
    assert result.returncode == 0, result.stderr
    job = json.loads(result.stdout)
    assert job["state"] == "SUCCEEDED"
    assert serving.run("logs", "hello").stdout == "hello\n", "a name stands for the newest job of that name"
    assert job["id"] in [item["id"] for item in serving.json("jobs", "--state", "succeeded")]


def test_plan_names_nodes_and_quotas_without_a_job(serving: Site) -> None:
    path = serving.job("planned", "print('never')", project="lab")
    planned = serving.run("plan", str(path))
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("it would start now\nNODE") and "takes trainer 0" in planned.stdout
    assert serving.run("project", "set", "lab", "--jobs", "0").stdout == "lab\n"
    refused = serving.run("plan", str(path), "--json")
    assert refused.returncode == 1
    assert "the quota of project 'lab' is 0" in json.loads(refused.stdout)["why"]
    assert [row.split() for row in serving.run("project", "list").stdout.splitlines()][1] == [
        *("lab", "1", "0", "0", "0/0", "0")
    ]
    assert "planned" not in [item["name"] for item in serving.json("jobs")]


def test_a_crash_fails_the_job_and_says_why(serving: Site) -> None:
    result = serving.run("submit", str(serving.job("crash", "raise RuntimeError('broken on purpose')")), "--wait")
    assert result.returncode == 1
    shown = serving.run("job", "crash").stdout
    assert "exited with code 1" in shown
    assert "broken on purpose" in serving.log("crash")


def test_a_missing_entrypoint_fails_the_job_and_is_named(serving: Site) -> None:
    path = serving.home / "missing.json"
    path.write_text('{"name": "missing", "entrypoint": ["no-such-program"], "mode": "command"}')
    assert serving.run("submit", str(path), "--wait").returncode == 1
    assert "'no-such-program' not found on PATH" in serving.look("missing")["why"]


def test_cancelling_a_job_that_ignores_term_kills_grandchildren(serving: Site, until: Until) -> None:
    job = serving.submit(serving.job("stubborn", STUBBORN, stop_grace_s=1))
    until(lambda: serving.log(job).endswith("\n"))
    pids = [int(word) for word in serving.log(job).split()]
    start = time.monotonic()
    result = serving.run("cancel", job, "--wait", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["state"] == "CANCELLED"
    assert time.monotonic() - start < 60
    assert [pid for pid in pids if proc.start_ticks(pid) is not None] == []


def test_logs_follow_until_the_job_has_ended(serving: Site) -> None:
    code = "import time\nfor i in range(4): print('line', i, flush=True); time.sleep(0.2)"
    job = serving.submit(serving.job("follow", code))
    result = serving.run("logs", "-f", job)
    assert result.stdout == "line 0\nline 1\nline 2\nline 3\n"


def test_the_workdir_travels_and_what_is_ignored_does_not(serving: Site) -> None:
    folder = serving.home / "project"
    (folder / ".git").mkdir(parents=True)
    (folder / "train.py").write_text("import os; print(sorted(os.listdir('.')))")
    path = folder / "job.yaml"
    path.write_text("{name: folder, entrypoint: [python, train.py], workdir: ., mode: command}")
    assert serving.run("submit", str(path), "--wait").returncode == 0
    assert serving.log("folder") == "['job.yaml', 'train.py']\n"


def test_two_replicas_say_who_writes(serving: Site) -> None:
    path = serving.job("two", "import os; print('I am', os.environ['PENSTOCK_INDEX'])", trainers={"count": 2})
    assert serving.run("submit", str(path), "--wait").returncode == 0
    lines = sorted(serving.run("logs", "two").stdout.splitlines())
    assert lines == ["[trainer 0] I am 0", "[trainer 1] I am 1"]
    assert serving.run("logs", "two", "--replica", "trainer/1").stdout == "I am 1\n"


def test_waiting_ends_after_its_timeout_and_the_job_goes_on(serving: Site) -> None:
    job = serving.submit(serving.job("long", "import time; time.sleep(600)"))
    result = serving.run("wait", job, "--timeout", "0.5")
    assert result.returncode == 7
    assert serving.look(job)["state"] in ("QUEUED", "STARTING", "RUNNING")
    assert serving.run("cancel", job).returncode == 0


def test_an_unknown_job_is_not_found(serving: Site) -> None:
    name = "0190aaaa-0000-7000-8000-000000000000"
    result = serving.run("logs", name)
    assert result.returncode == 3
    assert name in result.stderr
    assert "penstock jobs" in result.stderr
    with pytest.raises(NotFound, match="no-such-job"):
        serving.look("no-such-job")


def test_a_wrong_token_is_refused(serving: Site) -> None:
    result = serving.run("jobs", "--token", "wrong")
    assert result.returncode == 4
    assert "Traceback" not in result.stderr


def test_a_token_does_what_its_scope_says_until_it_is_revoked(serving: Site) -> None:
    made = serving.json("token", "create", "reader", "--scope", "read")
    assert serving.run("jobs", "--token", made["token"]).returncode == 0
    assert serving.run("submit", str(serving.job("no", "1")), "--token", made["token"]).returncode == 4
    assert made["id"] in serving.run("token", "list").stdout
    assert serving.run("token", "revoke", made["id"]).returncode == 0
    assert serving.run("jobs", "--token", made["token"]).returncode == 4
    assert serving.run("token", "revoke", "0190aaaa-0000-7000-8000-000000000000").returncode == 3


def test_the_local_agent_is_listed_and_a_login_link_is_made(serving: Site) -> None:
    assert " READY " in serving.run("nodes").stdout
    assert "/login#code=" in serving.run("login-link").stdout


def test_up_says_what_ails_a_child_that_ends(serving: Site) -> None:
    second = serving.run("up", "--port", "0")
    assert second.returncode == 6
    assert "in use by another server" in second.stderr
    assert serving.started[0].poll() is None


def test_the_profile_of_up_is_private(serving: Site) -> None:
    profile = serving.home / ".penstock" / "config.json"
    assert stat.S_IMODE(profile.stat().st_mode) == 0o600
    node = serving.home / ".penstock" / "agent" / "node.json"
    assert stat.S_IMODE(node.stat().st_mode) == 0o600
