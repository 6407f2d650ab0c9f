"""launch: what ranks are told, and that nothing is left behind. Scripts for torchrun run as jobs in tests/server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.conftest import Start
from tests.distributed.launching import is_alive, pids, waits
from tests.support.waiting import until

from penstock import identity
from penstock.distributed import launch as launcher
from penstock.distributed import rank_plan
from penstock.distributed.ports import free_ports
from penstock.distributed.supervisor import claimed
from penstock.errors import SpecError
from penstock.process.group import LoggedGroup, stop, wait_for_an_end
from penstock.protocol import contract

LAUNCH = [sys.executable, "-m", "penstock.distributed.launch"]
ROOT = Path(__file__).parents[2]
_TOLD = ("PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "CUDA_", "http", "OMP_", "MASTER_", "TORCHELASTIC_")
SAYS_WHO_IT_IS = f"""
import json, os, pathlib, sys
told = {{n: v for n, v in os.environ.items() if n.startswith({_TOLD!r}) or n.endswith(("RANK", "WORLD_SIZE"))}}
pathlib.Path("rank." + os.environ["RANK"] + ".json").write_text(json.dumps([told, sys.argv[1:]]))
print("rank", os.environ["RANK"], "is here")
"""
SIGNALLED = """
import os, pathlib, signal, sys, time
from penstock.distributed import launch
from penstock.process import group
ends_with_parent = group.end_with_parent()
def forked():
    pathlib.Path("forked").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)
    ends_with_parent()
group.end_with_parent = lambda: forked
sys.exit(launch.main(sys.argv[1:]))
"""
Told = dict[int, dict[str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with none of the variables that a launcher reads."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("PADDLE_", "POD_", "CUDA_", "OMP_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def launch(folder: Path, script: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [*LAUNCH, *options]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **env}
    )


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


def told(folder: Path) -> Told:
    return {int(f.name.split(".")[1]): json.loads(f.read_text())[0] for f in folder.glob("rank.*.json")}


# -- what is started ---------------------------------------------------------------------------------


def test_rows_76_78_79_every_rank_gets_its_place_and_arguments(folder: Path) -> None:
    given = {"PADDLE_NUM_TRAINERS": "1", "NCCL_SOCKET_IFNAME": "eth2", "GLOO_SOCKET_IFNAME": "lo", "http_proxy": "http://p",
             "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "7", "ROLE_RANK": "6"}  # fmt: skip
    done = launch(folder, SAYS_WHO_IT_IS, "--nproc_per_node", "3", "script.py", "--arg1", "a b", **given)
    assert done.returncode == 0, done.stderr
    found = told(folder)
    assert sorted(found) == [0, 1, 2]
    endpoints = found[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    master = (found[0]["MASTER_ADDR"], found[0]["MASTER_PORT"])
    assert len({*endpoints, ":".join(master)}) == 4, "every listener has a port of its own"
    for rank, mine in found.items():
        assert {mine[n] for n in ("PADDLE_TRAINER_ID", "RANK", "LOCAL_RANK", "ROLE_RANK")} == {str(rank)}
        assert mine["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank]
        sizes = (
            "PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"
        )  # fmt: skip
        assert [mine[name] for name in sizes] == ["3"] * 5
        assert (mine["MASTER_ADDR"], mine["MASTER_PORT"]) == master
        assert (mine["NCCL_SOCKET_IFNAME"], mine["GLOO_SOCKET_IFNAME"]) == ("eth2", "lo")
        absent = {"http_proxy", "FLAGS_selected_gpus", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_WORLD_SIZE"}
        assert not absent & set(mine)
        assert mine["TORCHELASTIC_RUN_ID"], "torch.distributed.is_torchelastic_launched() would say no"
        assert json.loads((folder / f"rank.{rank}.json").read_text())[1] == ["--arg1", "a b"]


def test_row_77_each_rank_has_a_log_and_rank_0_is_shown(folder: Path) -> None:
    done = launch(folder, SAYS_WHO_IT_IS, "--gpus", "2", "script.py", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 is here\n"
    assert {f.name: f.read_text() for f in (folder / "mylog").iterdir()} == {
        "workerlog.0": "rank 0 is here\n",
        "workerlog.1": "rank 1 is here\n",
    }
    assert {rank: one["FLAGS_selected_gpus"] for rank, one in told(folder).items()} == {0: "0", 1: "1"}
    assert told(folder)[1]["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_row_77_selected_gpus_are_the_only_ones_that_ranks_see(folder: Path) -> None:
    options = ("--selected_gpus", "5,7", "--log_dir", "out/logs", "--log_level", "WARNING", "script.py")
    done = launch(folder, SAYS_WHO_IT_IS, *options, CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert (done.returncode, done.stderr) == (0, ""), "above INFO only failures are told"
    seen = [(one["CUDA_VISIBLE_DEVICES"], one["FLAGS_selected_gpus"]) for _, one in sorted(told(folder).items())]
    assert seen == [("5,7", "0"), ("5,7", "1")]
    assert (folder / "out/logs/workerlog.1").exists()


def test_row_77_selected_gpus_without_gpus_are_cpu_ranks(folder: Path) -> None:
    done = launch(folder, SAYS_WHO_IT_IS, "--selected_gpus", "0,3", "script.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "what --selected_gpus 0,3 starts computes on CPU" in done.stderr
    seen = {rank: one.get("FLAGS_selected_gpus") for rank, one in told(folder).items()}
    assert seen == {0: None, 1: None}


def test_hosts_run_the_same_command_and_make_one_job(
    folder: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    port = free_ports("127.0.0.1", 1)[0]
    job = ["--cluster_node_ips", "127.0.0.1,127.0.0.2", "--started_port", str(port), "--nproc_per_node", "2"]
    hosts = [
        started(SAYS_WHO_IT_IS, *job, "--node_ip", f"127.0.0.{host}", "--log_dir", f"log{host}", "script.py")
        for host in (1, 2)
    ]
    assert [host.wait(60) for host in hosts] == [0, 0]
    found = told(folder)
    endpoints = [f"127.0.0.{host}:{port + i}" for host in (1, 2) for i in (0, 1)]
    assert {one["PADDLE_TRAINER_ENDPOINTS"] for one in found.values()} == {",".join(endpoints)}
    assert [found[rank]["PADDLE_CURRENT_ENDPOINT"] for rank in range(4)] == endpoints
    assert [(found[rank]["LOCAL_RANK"], found[rank]["GROUP_RANK"]) for rank in range(4)] == [
        ("0", "0"), ("1", "0"), ("0", "1"), ("1", "1"),
    ]  # fmt: skip
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found.values()} == {("127.0.0.1", str(port + 2))}
    assert (folder / "log2/workerlog.1").exists(), "logs have local numbers"


@pytest.mark.parametrize(
    ("cloud", "expected"),
    [
        ({}, ["127.0.0.1:6170", "127.0.0.1:6171", "127.0.0.2:6170", "127.0.0.2:6171"]),
        ({"PADDLE_PORT": "7000"}, ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.2:7000", "127.0.0.2:7001"]),
        (
            {"DISTRIBUTED_TRAINER_ENDPOINTS": "127.0.0.1:7003,127.0.0.1:7005,127.0.0.2:7001,127.0.0.2:7004"},
            ["127.0.0.1:7003", "127.0.0.1:7005", "127.0.0.2:7001", "127.0.0.2:7004"],
        ),
    ],
)
def test_paddlecloud_tells_hosts_and_ports(cloud: Mapping[str, str], expected: list[str]) -> None:
    args = launcher.parser().parse_args(["--use_paddlecloud", "--nproc_per_node", "2", "script.py"])
    environ = {"PADDLE_TRAINERS": "127.0.0.1,127.0.0.2", "POD_IP": "127.0.0.2", **cloud}
    layout = launcher.layout_of(args, 2, environ)
    assert layout.endpoints == tuple(expected)
    assert layout.local == tuple(expected[2:])
    assert layout.master == f"127.0.0.1:{int(expected[1].split(':')[1]) + 1}"


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (["--nproc_per_node", "2", "missing.py"], {}, "there is no script 'missing.py'"),
        (["--nproc_per_node", "0", "script.py"], {}, "'0' is no number from 1 on"),
        (["--nproc_per_node", "2", "--gpus", "2", "script.py"], {}, "not allowed with argument"),
        (["script.py"], {"CUDA_VISIBLE_DEVICES": ""}, "set the number of ranks on CPU with --nproc_per_node N"),
        (["--gpus", "3", "script.py"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "asks for 3 GPUs, but visible here are 0, 1"),
        (["--selected_gpus", "1,9", "script.py"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "asks for GPU 9, but visible"),
        (["--selected_gpus", "1,1", "script.py"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "expected different GPUs"),
        (["--selected_gpus", "1,1", "script.py"], {"CUDA_VISIBLE_DEVICES": ""}, "expected different GPUs"),
        (["--started_port", "65535", "--nproc_per_node", "1", "script.py"], {}, "leaves no room for 2 ports"),
        (["--nproc_per_node", "1", "--node_ip", "192.0.2.1", "script.py"], {}, "no rank can listen at 192.0.2.1"),
        (["--cluster_node_ips", "a,b", "--nproc_per_node", "1", "script.py"], {}, "expected which of --cluster"),
        (["--nproc_per_node", "2", "script.py"], {"PADDLE_NUM_TRAINERS": "5"}, "PADDLE_NUM_TRAINERS is '5'"),
        (["--use_paddlecloud", "--nproc_per_node", "1", "script.py"], {}, "needs the environment variable"),
        (["--nproc_per_node", "1", "script.py"], {"PADDLE_TRAINERS": "a,b"}, "Add --use_paddlecloud to take the hosts"),
        (["--use_paddlecloud", "--nproc_per_node", "1", "script.py"],
         {"PADDLE_TRAINERS": "a,b", "POD_IP": "b", "PADDLE_TRAINER_ID": "0"}, "POD_IP b is number 1 of"),
        (["--use_paddlecloud", "--nproc_per_node", "2", "script.py"],
         {"PADDLE_TRAINERS": "a", "POD_IP": "a", "TRAINER_PORTS_NUM": "1"}, "TRAINER_PORTS_NUM is '1', but"),
        (["--nproc_per_node", "1", "--stop_s", "nan", "script.py"], {}, "'nan' is no number of seconds from 0 on"),
        (["--nproc_per_node", "1", "--log_dir", "script.py", "script.py"], {}, "script.py/workerlog.0 cannot be"),
        (["--log_level", "loud", "--nproc_per_node", "1", "script.py"], {}, "'loud' is neither a number nor one of"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    env: Mapping[str, str],
    words: str,
) -> None:
    (folder / "script.py").write_text(SAYS_WHO_IT_IS)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    try:
        status: object = launcher.main(options)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert words in capsys.readouterr().err
    assert not told(folder)


@pytest.mark.parametrize(("told_ranks", "is_said"), [("2", True), ("1", False), ("", False)])
def test_row_78_an_ambiguous_number_is_taken_as_ranks_and_logged(
    capsys: pytest.CaptureFixture[str], told_ranks: str, is_said: bool
) -> None:
    args = launcher.parser().parse_args(["--nproc_per_node", "2", "script.py"])
    environ = {"PADDLE_NUM_TRAINERS": told_ranks} if told_ranks else {}
    assert len(launcher.plan_of(args, environ).processes) == 2
    said = capsys.readouterr().err
    expected = (
        "PADDLE_NUM_TRAINERS is 2, taken as the number of ranks: all of them are on this host. If it is the number of "
        "hosts, name them with --cluster_node_ips on each\n"
    )
    assert said == (expected if is_said else "")


def test_row_78_hosts_that_are_named_leave_no_doubt() -> None:
    args = launcher.parser().parse_args(
        ["--nproc_per_node", "1", "--cluster_node_ips", "a,b", "--node_ip", "a", "s.py"]
    )
    environ = {"PADDLE_NUM_TRAINERS": "2"}
    assert rank_plan.doubt(environ, launcher.layout_of(args, 1, environ)) == ""


def test_a_taken_port_is_named_before_anything_starts(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = launcher.parser().parse_args(["--started_port", str(port), "--nproc_per_node", "1", "script.py"])
        with pytest.raises(SpecError, match=f"can listen at 127.0.0.1:{port}: Address already in use"):
            launcher.plan_of(args, {})


def test_a_log_file_has_one_launcher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(SAYS_WHO_IT_IS)
    log = folder / "mylog/workerlog.1"
    with claimed([log]):
        log.write_text("of another job\n")
        assert launcher.main(["--nproc_per_node", "2", "script.py"]) == 2
    assert "another launcher writes to mylog/workerlog.1" in capsys.readouterr().err
    assert (log.read_text(), told(folder)) == ("of another job\n", {})


def test_the_first_rank_of_a_launcher_in_a_job_reports_for_it() -> None:
    replica = contract.Managed("j", "job", "r1", "trainer", 3, 1, 9, "/agent.sock")
    args = launcher.parser().parse_args(["--nproc_per_node", "2", "script.py"])
    environs: list[dict[str, str]] = []
    for process in launcher.plan_of(args, replica.environ()).processes:
        given = {**replica.environ(), **process.env}
        environs.append({name: value for name, value in given.items() if value is not None})
    assert [contract.from_environ(one) for one in environs] == [replica, contract.UnwatchedProcess()]
    assert [one[identity.REPLICA_ID] for one in environs] == ["r1", "r1"], "an agent could not find what is left"


def test_the_manuals_command_trains_ranks_like_one_process(folder: Path, trainers: Start) -> None:
    """`PADDLE_NUM_TRAINERS=… launch --gpus N script args` where there is no GPU; Penstock exchanges the gradients."""
    script = str(Path(__file__).with_name("nccl2_job.py"))
    env = {"CPU_NUM": "1", "CUDA_VISIBLE_DEVICES": "", "PADDLE_NUM_TRAINERS": "1", "PYTHONPATH": str(ROOT)}
    done = launch(folder, "", "--gpus", "2", script, ".", **env)
    assert done.returncode == 0, done.stderr
    assert "what --gpus 2 starts computes on CPU" in done.stderr
    (single,) = trainers(1)
    alone = single.values()
    assert alone
    for rank in range(2):
        with np.load(f"rank{rank}.npz") as file:
            for name, value in alone.items():
                if np.issubdtype(value.dtype, np.floating):
                    np.testing.assert_allclose(file[name], value, rtol=0, atol=1e-9, err_msg=f"{name} of rank {rank}")


# -- how it ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("sys.exit(7)", 7, "exit status 7"), ("os.kill(os.getpid(), 9)", 137, "signal 9 (SIGKILL)")],
)
def test_the_first_rank_to_fail_is_named_and_sets_exit_status(folder: Path, end: str, status: int, words: str) -> None:
    fails = f"if index == '1':\n    print('last words', flush=True)\n    {end}"
    done = launch(folder, waits(2, fails), "--nproc_per_node", "2", "--log_level", "30", "script.py")
    assert done.returncode == status
    assert done.stderr == f"rank 1 failed with {words}; the end of mylog/workerlog.1:\n  last words\n"
    assert len(pids(folder, 2)) == 4, "not all ranks had started"
    until(lambda: not [pid for pid in pids(folder, 2) if is_alive(pid)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_with_all_that_it_started(
    folder: Path, started: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = started(waits(2), "--nproc_per_node", "2", "script.py")
    until(lambda: bool(pids(folder, 2)))
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    until(lambda: not [pid for pid in pids(folder, 2) if is_alive(pid)])


def test_a_signal_while_ranks_are_started_leaves_nobody(folder: Path) -> None:
    """The signal comes between the fork of the first rank and the start of its program."""
    (folder / "launcher.py").write_text(SIGNALLED)
    (folder / "script.py").write_text("import time; time.sleep(600)")
    command = [sys.executable, "launcher.py", "--nproc_per_node", "2", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (128 + signal.SIGTERM, "stopped by SIGTERM")
    until(lambda: not is_alive(int((folder / "forked").read_text())))


def test_an_end_is_seen_at_once(tmp_path: Path) -> None:
    ends = LoggedGroup(["sleep", "0.1"], env=os.environ, log=tmp_path / "ends")
    stays = LoggedGroup(["sleep", "600"], env=os.environ, log=tmp_path / "stays")
    try:
        wait_for_an_end([stays, ends], 300)  # the test's own limit ends it, if this is not so
        assert (ends.status(), stays.status()) == (0, None)
    finally:
        stop([ends, stays], 5)


def test_ranks_go_on_when_nobody_reads_what_the_launcher_shows(folder: Path) -> None:
    lines = "import time\nfor i in range(20):\n    print(i, flush=True)\n    time.sleep(0.02)"
    (folder / "script.py").write_text(lines)
    command = [*LAUNCH, "--nproc_per_node", "1", "script.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert (folder / "mylog/workerlog.0").read_text().split() == [str(i) for i in range(20)]


def test_what_ignores_sigterm_is_killed(folder: Path, started: Callable[..., subprocess.Popen[str]]) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(f'{index}.up').touch()"
    process = started(waits(2, stubborn), "--nproc_per_node", "2", "--stop_s", "0.3", "script.py")
    until(lambda: len(list(folder.glob("*.up"))) == 2)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    until(lambda: not [pid for pid in pids(folder, 2) if is_alive(pid)])


def test_a_launcher_that_is_killed_leaves_nobody(folder: Path, started: Callable[..., subprocess.Popen[str]]) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(f'{index}.up').touch()"
    process = started(waits(2, stubborn), "--nproc_per_node", "2", "--stop_s", "0.3", "script.py")
    until(lambda: len(list(folder.glob("*.up"))) == 2)
    process.kill()
    until(lambda: not [pid for pid in pids(folder, 2) if is_alive(pid)])
