"""The agent as a real process against a fake server: start, report, relay, stop, survive."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from penstock.process import cell, proc
from penstock.protocol.frames import Frame, Kind, decode, encode

Until = Callable[..., Awaitable[None]]
Order = Callable[..., dict[str, Any]]
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


class Server(Protocol):
    port: int
    grace_s: float
    ttl_s: float
    reports: list[dict[str, Any]]
    hellos: list[dict[str, Any]]
    heartbeats: list[dict[str, Any]]
    agent_ahead_ns: int
    frames: list[bytes]
    num_frames_at_end: int
    logs: dict[str, bytes]
    downloads: list[str]

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def want(self, *replicas: dict[str, Any]) -> None: ...
    def states(self, replica_id: str) -> list[str]: ...
    def last(self, replica_id: str) -> dict[str, Any]: ...


class Agent(Protocol):
    state_dir: Path

    def start(self, port: int, **environ: str) -> Any: ...
    def kill(self) -> None: ...


def gone(pid: int) -> bool:
    return proc.start_ticks(pid) is None


def socket_of(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(line.partition("=")[2] for line in environ if line.startswith("PENSTOCK_TELEMETRY_SOCKET="))


@pytest.mark.smoke
@pytest.mark.asyncio
async def test_a_command_runs_and_its_log_and_exit_code_arrive(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    code = "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(3)"
    await server.want(order("r1", "python", "-c", code))
    await until(lambda: "EXITED" in server.states("r1"))
    assert server.last("r1")["exit_code"] == 3
    assert sorted(server.logs["r1"].splitlines()) == [b"to stderr", b"to stdout"]
    await server.want()
    await until(lambda: not (agent.state_dir / "replicas" / "r1").exists())


@pytest.mark.asyncio
async def test_an_entrypoint_has_its_environment_but_no_agent_token(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    code = "import json, os, sys; print(json.dumps({**os.environ, 'executable': sys.executable}))"
    await server.want(order("r1", "python", "-c", code, env={"MINE": "1", "PENSTOCK_REPLICA_ID": "forged"}))
    await until(lambda: "EXITED" in server.states("r1"))
    seen = json.loads(server.logs["r1"])
    assert seen["PENSTOCK_REPLICA_ID"] == "r1"
    assert seen["MINE"] == "1"
    assert "PENSTOCK_TOKEN" not in seen
    assert Path(seen["executable"]).parent == Path(sys.executable).parent


@pytest.mark.asyncio
async def test_a_missing_entrypoint_exits_127_with_its_name_and_path(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    await server.want(order("r1", "no-such-program"))
    await until(lambda: "EXITED" in server.states("r1"))
    last = server.last("r1")
    assert last["exit_code"] == 127
    assert "'no-such-program' not found on PATH" in last["detail"]
    assert "RUNNING" not in server.states("r1")
    assert b"no-such-program" in server.logs["r1"]


@pytest.mark.asyncio
async def test_an_unreadable_order_is_reported_and_others_are_served(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    broken = order("bad", "python", "-c", "print('\ud800')")
    await server.want(order("r1", "python", "-c", SLEEPER), broken)
    await until(lambda: "RUNNING" in server.states("r1") and "EXITED" in server.states("bad"))
    assert "cannot read its order: entrypoint/2" in server.last("bad")["detail"]
    await server.want(order("r1", "python", "-c", SLEEPER), broken, order("r2", "true", env={"A": 1}))
    await until(lambda: "EXITED" in server.states("r2"))
    assert "env/A" in server.last("r2")["detail"]
    await server.want(order("r1", "python", "-c", SLEEPER))
    await until(lambda: not (agent.state_dir / "replicas" / "bad").exists())
    assert server.states("r1")[-1] == "RUNNING"
    assert len(server.hellos) == 1, "the connection was kept"


@pytest.mark.asyncio
async def test_an_order_of_no_epoch_costs_the_connection_alone(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    process = agent.start(server.port)
    await server.want(order("bad", "true", epoch=-1))
    await until(lambda: len(server.hellos) > 1)
    await server.want(order("r1", "true"))
    await until(lambda: "EXITED" in server.states("r1"))
    assert process.poll() is None


@pytest.mark.asyncio
async def test_an_unsendable_address_leaves_the_agent_running(server: Server, agent: Agent, until: Until) -> None:
    process = agent.start(server.port, PENSTOCK_NODE_ADDRESS="x" * 256)
    log = agent.state_dir / "agent.log"
    await until(lambda: "this node cannot register" in log.read_text())
    assert process.poll() is None


@pytest.mark.asyncio
async def test_undesired_replicas_end_with_detached_grandchildren(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "daemon = 'import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "daemon += 'os.fork() and os._exit(0); '\n"
        "daemon += 'print(os.getpid(), flush=True); time.sleep(600)'\n"
        "subprocess.run([sys.executable, '-c', daemon], start_new_session=True)\n"
        "print(os.getpid(), flush=True); time.sleep(600)\n"
    )
    await server.want(order("r1", "python", "-c", code, stop_grace_s=0.5))
    await until(lambda: server.logs.get("r1", b"").count(b"\n") == 2)
    pids = [int(word) for word in server.logs["r1"].split()]
    await server.want()
    await until(lambda: "KILLED" in server.states("r1"))
    assert all(gone(pid) for pid in pids)
    assert server.last("r1")["detail"] == "stopped"


@pytest.mark.asyncio
async def test_frames_of_the_socket_are_relayed_unless_foreign(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    await server.want(order("r1", "python", "-c", SLEEPER))
    await until(lambda: "RUNNING" in server.states("r1"))
    path = socket_of(server.last("r1")["pid"])
    frames = [
        Frame(Kind.HELLO, 7, 1, 0, body={"role": "trainer"}),
        Frame(Kind.HELLO, 8, 1, 1, body={"of": "another stream"}),
        Frame(Kind.PROGRESS, 7, 1, 2, body={"done": 1, "total": 2, "unit": "batches"}),
    ]
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.connect(path)
        for frame in frames:
            payload = encode(frame)
            trainer.sendall(struct.pack("<I", len(payload)) + payload)
    await until(lambda: len(server.frames) == 2)
    assert [decode(payload).seq for payload in server.frames] == [0, 2]


LAST_FRAMES = """
import os, socket, struct, sys, time
from penstock.protocol.frames import Frame, Kind, encode
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
peer = socket.socket(socket.AF_UNIX)
peer.connect(os.environ["PENSTOCK_TELEMETRY_SOCKET"])
for seq in range(50):
    payload = encode(Frame(Kind.SCALARS, 7, 1, seq, body={}))
    peer.sendall(struct.pack("<I", len(payload)) + payload)
"""


@pytest.mark.asyncio
async def test_an_end_is_reported_after_the_last_frames(
    server: Server, agent: Agent, order: Order, until: Until, tmp_path: Path
) -> None:
    process = agent.start(server.port)
    await server.want(order("r1", "python", "-c", LAST_FRAMES, str(tmp_path / "go")))
    await until(lambda: "RUNNING" in server.states("r1"))
    guard = json.loads((agent.state_dir / "replicas" / "r1" / "guard.json").read_text())["pid"]
    process.send_signal(signal.SIGSTOP)  # it finds the frames and the end at the same time
    try:
        (tmp_path / "go").touch()
        await until(lambda: gone(guard))
    finally:
        process.send_signal(signal.SIGCONT)
    await until(lambda: "EXITED" in server.states("r1"))
    assert server.num_frames_at_end == 50


@pytest.mark.asyncio
async def test_a_killed_agent_comes_back_and_adopts_its_replica(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    code = "import sys; print('first', flush=True); sys.stdin; open('ready', 'w'); import os, time\n"
    code += "while not os.path.exists('go'): time.sleep(0.01)\nprint('second')"
    await server.want(order("r1", "python", "-c", code))
    await until(lambda: server.logs.get("r1") == b"first\n")
    await until(lambda: server.last("r1")["state"] == "RUNNING")
    pid = server.last("r1")["pid"]
    agent.kill()
    assert not gone(pid)
    agent.start(server.port)
    await until(lambda: len(server.hellos) == 2)
    await until(lambda: server.states("r1")[-1] == "RUNNING" and len(server.states("r1")) > 1)
    assert server.hellos[1]["replicas"][0]["replica_id"] == "r1"
    assert server.last("r1")["pid"] == pid
    (agent.state_dir / "replicas" / "r1" / "work" / "go").touch()
    await until(lambda: "EXITED" in server.states("r1"))
    assert server.last("r1")["exit_code"] == 0
    assert server.logs["r1"] == b"first\nsecond\n"


@pytest.mark.asyncio
async def test_without_its_agent_a_replica_ends_when_the_grace_is_over(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    server.grace_s, server.ttl_s = 0.5, 1.0
    agent.start(server.port)
    await server.want(order("r1", "python", "-c", SLEEPER, on_disconnect="stop"))
    await until(lambda: "RUNNING" in server.states("r1"))
    pid = server.last("r1")["pid"]
    agent.kill()
    await until(lambda: gone(pid))
    await until((agent.state_dir / "replicas" / "r1" / "exit.json").exists)
    outcome = json.loads((agent.state_dir / "replicas" / "r1" / "exit.json").read_text())
    assert (outcome["state"], outcome["detail"]) == ("KILLED", "lease expired")


@pytest.mark.asyncio
async def test_by_default_a_replica_outlives_agent_and_lease(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    server.grace_s, server.ttl_s = 0.2, 1.0
    agent.start(server.port)
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    await server.want(order("r1", "python", "-c", code))
    await until(lambda: "RUNNING" in server.states("r1"))
    agent.kill()
    await asyncio.sleep(3.0)  # more than lease and grace
    assert not gone(server.last("r1")["pid"])
    agent.start(server.port)
    await until(lambda: len(server.hellos) == 2)
    (agent.state_dir / "replicas" / "r1" / "work" / "go").touch()
    await until(lambda: "EXITED" in server.states("r1"))
    assert server.last("r1")["exit_code"] == 0


@pytest.mark.asyncio
async def test_replicas_outlive_a_lost_server_and_report_on_reconnect(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    agent.start(server.port)
    code = "import os, time\nprint('first', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('end')"
    await server.want(order("r1", "python", "-c", code))
    await until(lambda: server.logs.get("r1") == b"first\n")
    await server.close()
    (agent.state_dir / "replicas" / "r1" / "work" / "go").touch()
    await until((agent.state_dir / "replicas" / "r1" / "exit.json").exists)
    await server.open()
    await until(lambda: "EXITED" in server.states("r1"))
    assert server.logs["r1"] == b"first\nend\n"


@pytest.mark.asyncio
async def test_a_signalled_agent_does_not_wait_out_a_long_grace(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    process = agent.start(server.port)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    stubborn += "time.sleep(600)"
    await server.want(order("r1", "python", "-c", stubborn, stop_grace_s=600.0))
    await until(lambda: server.logs.get("r1") == b"up\n")
    pid = server.last("r1")["pid"]
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert gone(pid)
    assert server.last("r1")["state"] == "KILLED"


@pytest.mark.asyncio
async def test_a_stop_does_not_wait_for_a_download_that_hangs(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    process = agent.start(server.port)
    await server.want(order("r1", "python", "-c", SLEEPER, snapshot="0" * 64))
    await until(lambda: bool(server.downloads))
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert server.states("r1") == ["PREPARING", "KILLED"]


@pytest.mark.asyncio
async def test_a_killed_guard_takes_its_replica_along_and_is_reported(
    server: Server, agent: Agent, order: Order, until: Until
) -> None:
    # Its processes are found by the replica's id in their environment: no other test has this one.
    agent.start(server.port)
    code = (
        "import subprocess, sys, time\n"
        "made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(made.pid, flush=True); time.sleep(600)\n"
    )
    await server.want(order("orphaned", "python", "-c", code))
    await until(lambda: server.logs.get("orphaned", b"").endswith(b"\n"))
    guard = json.loads((agent.state_dir / "replicas" / "orphaned" / "guard.json").read_text())["pid"]
    os.kill(guard, signal.SIGKILL)
    await until(lambda: "KILLED" in server.states("orphaned"))
    assert "guard" in server.last("orphaned")["detail"]
    await until(lambda: gone(int(server.logs["orphaned"])))


@pytest.mark.asyncio
async def test_killed_guard_leaves_no_control_group(server: Server, agent: Agent, order: Order, until: Until) -> None:
    name = f"ungrouped-{os.getpid()}"
    if (made := cell.make(name, cell.Limits(memory_bytes=1 << 26))).missing:
        pytest.skip(f"needs a control group with memory: {made.missing}")
    [group] = made.groups.values()
    made.remove()
    agent.start(server.port)
    await server.want(order(name, "python", "-c", SLEEPER, limits={"memory_bytes": 1 << 30}))
    await until(lambda: "RUNNING" in server.states(name))
    assert group.exists()
    os.kill(json.loads((agent.state_dir / "replicas" / name / "guard.json").read_text())["pid"], signal.SIGKILL)
    await until(lambda: "KILLED" in server.states(name))
    assert not group.exists()


@pytest.mark.asyncio
async def test_a_second_agent_on_the_same_folder_is_refused(server: Server, agent: Agent, until: Until) -> None:
    agent.start(server.port)
    await until(lambda: bool(server.hellos))
    second = agent.start(server.port)
    await until(lambda: second.poll() is not None)
    assert second.returncode == 5
    assert "uses" in (agent.state_dir / "agent.log").read_text()


@pytest.mark.asyncio
async def test_what_the_machine_lacks_is_said_when_the_agent_connects(
    server: Server, agent: Agent, until: Until
) -> None:
    agent.start(server.port, PENSTOCK_ABSENT="memfd")
    await until(lambda: bool(server.hellos))
    found = {one["name"]: one for one in server.hellos[0]["findings"]}
    assert found["memfd"]["level"] == "warning"
    assert "this machine: memfd: absent: declared absent" in (agent.state_dir / "agent.log").read_text()


@pytest.mark.asyncio
async def test_an_end_is_reported_without_pidfd(server: Server, agent: Agent, order: Order, until: Until) -> None:
    agent.start(server.port, PENSTOCK_ABSENT="pidfd")
    await server.want(order("r1", "python", "-c", "raise SystemExit(3)"))
    await until(lambda: "EXITED" in server.states("r1"))
    assert server.last("r1")["exit_code"] == 3


@pytest.mark.asyncio
async def test_heartbeats_hold_how_far_the_clock_is_ahead(server: Server, agent: Agent, until: Until) -> None:
    server.ttl_s, server.agent_ahead_ns = 1.0, 3_200_000_000
    agent.start(server.port)
    await until(lambda: any("clock" in one for one in server.heartbeats))
    assert "clock" not in server.heartbeats[0]
    found = next(one["clock"] for one in server.heartbeats if "clock" in one)
    assert abs(found["offset_ns"] - server.agent_ahead_ns) <= found["error_ns"] < 1_000_000_000

    server.agent_ahead_ns = -7_000_000_000  # a clock is set
    none = {"offset_ns": 0}
    await until(
        lambda: any(
            abs(one.get("clock", none)["offset_ns"] - server.agent_ahead_ns) < 1_000_000_000
            for one in server.heartbeats
        )
    )
