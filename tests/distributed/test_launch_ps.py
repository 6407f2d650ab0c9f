"""launch_ps: what its processes are told, when a job is over, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.distributed.launching import is_alive, pids, waits
from tests.support.waiting import until

from penstock import identity
from penstock.distributed import launch_ps
from penstock.distributed.local_job import Draining, Failed, Finished, Plan, Running, Verdict, planned, verdict
from penstock.distributed.ports import free_ports
from penstock.protocol import contract

LAUNCH = [sys.executable, "-m", "penstock.distributed.launch_ps"]
SAYS_WHO_IT_IS = """
import json, os, pathlib, sys
names = sorted(n for n in os.environ if n.startswith(("PADDLE_", "TRAINING_", "POD_", "PENSTOCK_")))
mine = {n: os.environ[n] for n in names}
kind = os.environ["TRAINING_ROLE"]
pathlib.Path(f"{kind}.{os.environ['PENSTOCK_INDEX']}.json").write_text(json.dumps([mine, sys.argv[1:]]))
print(f"{kind} is here")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with none of the variables that a job has."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("PADDLE_", "TRAINING_", "POD_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def launch(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run([*LAUNCH, *options], cwd=folder, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Launchers that run in the background, ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(script: str, *options: str) -> subprocess.Popen[str]:
        (folder / "script.py").write_text(script)
        process = subprocess.Popen([*LAUNCH, *options], cwd=folder, stderr=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


# -- what is started ---------------------------------------------------------------------------------


def test_every_process_is_told_its_place_and_gets_the_arguments(folder: Path) -> None:
    done = launch(folder, SAYS_WHO_IT_IS, "--server_num", "2", "--worker_num=2", "script.py", "--lr", "0.1", "a b")
    assert done.returncode == 0, done.stderr
    assert "pserver 0   127.0.0.1:" in done.stderr, "the processes are shown"
    told = {file.name.removesuffix(".json"): json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert sorted(told) == ["PSERVER.0", "PSERVER.1", "TRAINER.0", "TRAINER.1"]
    servers = told["TRAINER.0"][0]["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    for name, (environ, arguments) in told.items():
        kind, index = name.split(".")
        assert arguments == ["--lr", "0.1", "a b"]
        assert environ["PADDLE_PSERVERS_IP_PORT_LIST"] == ",".join(servers)
        assert environ["PADDLE_TRAINERS_NUM"] == "2"
        if kind == "TRAINER":
            assert environ["PADDLE_TRAINER_ID"] == index
        else:
            assert f"{environ['POD_IP']}:{environ['PADDLE_PORT']}" == servers[int(index)]
    shared = ("PENSTOCK_JOB_ID", "PENSTOCK_PS_TOKEN", "PENSTOCK_PS_SAVE_DIRS")
    assert len({tuple(environ[name] for name in shared) for environ, _ in told.values()}) == 1
    assert told["TRAINER.0"][0]["PENSTOCK_PS_SAVE_DIRS"] == str(folder)


def test_output_goes_to_logs_and_that_of_trainer_0_is_shown(folder: Path) -> None:
    done = launch(folder, SAYS_WHO_IT_IS, "--log_dir", "out/logs", "script.py")
    assert done.stdout == "TRAINER is here\n"
    assert {file.name: file.read_text() for file in (folder / "out/logs").iterdir()} == {
        "serverlog.0": "PSERVER is here\n",
        "serverlog.1": "PSERVER is here\n",
        "workerlog.0": "TRAINER is here\n",
        "workerlog.1": "TRAINER is here\n",
    }


def test_print_config_false_prints_nothing_and_still_starts(folder: Path) -> None:
    done = launch(folder, SAYS_WHO_IT_IS, "--print_config", "false", "script.py")
    assert "pserver 0   127.0.0.1:" not in done.stderr
    assert (folder / "TRAINER.1.json").exists()


def test_endpoints_and_ports_may_be_chosen(folder: Path) -> None:
    chosen = ",".join(f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    done = launch(folder, SAYS_WHO_IT_IS, "--endpoints", chosen, "script.py")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "TRAINER.0.json").read_text())[0]["PADDLE_PSERVERS_IP_PORT_LIST"] == chosen


def test_a_taken_port_is_named_before_anything_starts(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(folder, SAYS_WHO_IT_IS, "--started_port", str(port), "--server_num", "1", "script.py")
    assert done.returncode == 2
    assert f"no server can listen at 127.0.0.1:{port}: Address already in use" in done.stderr
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        (["--server_num", "0", "script.py"], "'0' is no number from 1 on"),
        (["--print_config", "", "script.py"], "'' is neither true nor false"),
        (["--endpoints", "a", "script.py"], "'a' is no host:port"),
        (["--endpoints", "a:1", "--server_num", "2", "script.py"], "--endpoints has 1 entries, but --server_num is 2"),
        (["--endpoints", "a:1", "--started_port", "1", "script.py"], "not allowed with argument"),
        (["--started_port", "65535", "script.py"], "leaves no room for 2 ports"),
        (["--node_ip", "192.0.2.1", "script.py"], "no server can listen at 192.0.2.1"),
        (["--cluster_node_ips", "a,b", "script.py"], "--node_ip is '127.0.0.1'; expected which of --cluster_node_ips"),
        (["--cluster_node_ips", "a,a", "--node_ip", "a", "script.py"], "--cluster_node_ips has 'a' twice"),
        (["--cluster_node_ips", "a:1,b", "--node_ip", "b", "script.py"], "has 'a:1'; expected addresses of hosts"),
        (["--cluster_node_ips", "127.0.0.1,b", "script.py"], "one secret"),
        (["--cluster_node_ips", "127.0.0.1,b", "--endpoints", "c:1", "script.py"], "'c:1', but that host is not in"),
    ],
)
def test_a_wrong_command_line_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    (folder / "script.py").write_text(SAYS_WHO_IT_IS)
    try:
        status: object = launch_ps.main(options)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert words in capsys.readouterr().err
    assert not list(folder.glob("*.json"))


def test_hosts_run_the_same_command_and_make_one_job(
    folder: Path, started: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PS_TOKEN", "ours")
    port = free_ports("127.0.0.1", 1)[0]
    job = ["--cluster_node_ips", "127.0.0.1,127.0.0.2", "--started_port", str(port), "--server_num", "1"]
    hosts = [
        started(SAYS_WHO_IT_IS, *job, "--worker_num", "2", "--node_ip", f"127.0.0.{host}", "script.py")
        for host in (1, 2)
    ]
    assert [host.wait(60) for host in hosts] == [0, 0]
    told = {file.name.removesuffix(".json"): json.loads(file.read_text())[0] for file in folder.glob("*.json")}
    assert sorted(told) == ["PSERVER.0", "PSERVER.1", *(f"TRAINER.{i}" for i in range(4))]
    assert {one["PADDLE_PSERVERS_IP_PORT_LIST"] for one in told.values()} == {f"127.0.0.1:{port},127.0.0.2:{port}"}
    assert {one["PADDLE_TRAINERS_NUM"] for one in told.values()} == {"4"}
    assert (told["PSERVER.1"]["POD_IP"], told["PSERVER.1"]["PADDLE_PORT"]) == ("127.0.0.2", str(port))
    assert len({(one["PENSTOCK_JOB_ID"], one["PENSTOCK_PS_TOKEN"]) for one in told.values()}) == 1


# -- how it ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit(7)", 7, "exit status 7"),
        ("os.kill(os.getpid(), 9)", 137, "signal 9 (SIGKILL)"),
        ("raise ValueError('bad feed')", 1, "  ValueError: bad feed"),
    ],
)
def test_the_first_failure_is_named_and_sets_exit_status(folder: Path, end: str, status: int, words: str) -> None:
    fails = f"if (kind, index) == ('trainer', '1'):\n    print('last words', flush=True)\n    {end}"
    done = launch(folder, waits(4, fails), "script.py")
    assert done.returncode == status
    assert "trainer 1 failed with" in done.stderr
    assert "workerlog.1" in done.stderr
    assert words in done.stderr
    assert "  last words" in done.stderr
    assert len(pids(folder, 4)) == 8, "not all processes had started"
    until(lambda: not [pid for pid in pids(folder, 4) if is_alive(pid)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_with_all_that_it_started(
    folder: Path, started: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = started(waits(4), "script.py")
    until(lambda: bool(pids(folder, 4)))
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    until(lambda: not [pid for pid in pids(folder, 4) if is_alive(pid)])


def test_what_ignores_sigterm_is_killed(folder: Path, started: Callable[..., subprocess.Popen[str]]) -> None:
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(f'{kind}.{index}.up').touch()"
    )
    process = started(waits(4, stubborn), "--stop_s", "0.3", "script.py")
    until(lambda: len(list(folder.glob("*.up"))) == 4)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    until(lambda: not [pid for pid in pids(folder, 4) if is_alive(pid)])


def test_servers_that_outlive_the_last_trainer_are_stopped(folder: Path) -> None:
    trainers_end = "if kind == 'trainer':\n    grandchild.kill(); sys.exit(0)"
    done = launch(folder, waits(4, trainers_end), "--server_grace_s", "0.2", "script.py")
    assert done.returncode == 0, done.stderr
    assert "pserver 0 still served 0.2 s after the last trainer had ended, and was stopped" in done.stderr
    until(lambda: not [pid for pid in pids(folder, 4) if is_alive(pid)])


# -- the decision ------------------------------------------------------------------------------------


@pytest.fixture
def plan() -> Plan:
    """Servers at places 0 and 1, trainers at 2 and 3."""
    return planned(["a:1", "b:1"], 2, Path("logs"), {}, defaults={})


@pytest.mark.parametrize(
    ("ended", "grace_over", "expected"),
    [
        ([], False, Running()),
        ([(2, 0)], True, Running()),
        ([(0, 0), (1, 0)], True, Running()),
        ([(2, 0), (3, 0)], False, Draining()),
        ([(2, 0), (3, 0), (0, 0)], True, Finished((1,))),
        ([(2, 0), (3, 0), (0, 0), (1, 0)], False, Finished()),
        ([(2, 0), (3, -11), (0, 1)], False, Failed(3, -11)),
        ([(2, 0), (3, 0), (0, 4)], False, Failed(0, 4)),
    ],
)
def test_a_job_is_over_when_its_trainers_are(
    plan: Plan, ended: list[tuple[int, int]], grace_over: bool, expected: Verdict
) -> None:
    assert verdict(plan, ended, grace_over=grace_over) == expected


def test_what_the_launcher_was_told_stands_above_its_defaults() -> None:
    told = {"PENSTOCK_PS_TOKEN": "mine"}
    made = planned(["a:1"], 1, Path("logs"), told, defaults={"PENSTOCK_PS_TOKEN": "new", "PENSTOCK_JOB_ID": "job"})
    for process in made.processes:
        assert (process.env["PENSTOCK_PS_TOKEN"], process.env["PENSTOCK_JOB_ID"]) == ("mine", "job")


def test_the_first_trainer_of_a_launcher_in_a_job_reports_for_it() -> None:
    replica = contract.Managed("j", "job", "r1", "trainer", 0, 1, 9, "/agent.sock").environ()
    made = planned(["a:1"], 2, Path("logs"), replica, defaults={})
    reports = [process.env.get(identity.SOCKET, "the launcher's") for process in made.processes]
    assert reports == [None, "the launcher's", None]
