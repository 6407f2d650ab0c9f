"""The server as a process: it starts without torch, stops on a signal, and says in one line why it cannot start."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(str(ROOT / source) for source in ("core", "server"))
NO_TORCH = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'server'; "
MAIN = NO_TORCH + "from penstock_server.__main__ import main; sys.exit(main(sys.argv[1:]))"
DEADLINE_S = 60.0


def command(state_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", MAIN, "--state-dir", str(state_dir), *arguments]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    return {**kept, "PYTHONPATH": PATHS}


@contextmanager
def serving(
    state_dir: Path, *arguments: str, before: Sequence[str] = (), **environ: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server in which torch cannot be imported; yield it and its address. `before`: a command that runs it."""
    log = state_dir.with_suffix(".log").open("wb")
    line = [*before, *command(state_dir, "--port", "0", *arguments)]
    process = subprocess.Popen(line, stderr=log, env={**environment(), **environ})
    try:
        yield process, _address(process, state_dir)
    finally:
        process.kill()
        process.wait()
        log.close()


def _address(process: subprocess.Popen[bytes], state_dir: Path) -> str:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, state_dir.with_suffix(".log").read_text()
        try:
            url: str = json.loads((state_dir / "server.json").read_text())["url"]
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return url
        except (OSError, ValueError):
            time.sleep(0.05)  # another process, so there is nothing to wait on but its answer
    raise AssertionError("the server did not start in time")


def get(url: str, token: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def run(state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end at once."""
    line = command(state_dir, *arguments)
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def refuse(state_dir: Path, *arguments: str) -> str:
    """Start a server that cannot start; return what it says."""
    done = subprocess.run(
        command(state_dir, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_starts_without_torch_and_keeps_its_secrets_to_itself(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state) as (_, url):
        token = (state / "admin.token").read_text().strip()
        assert get(f"{url}/api/v1/me", token)["name"] == "admin"
        for name in ("admin.token", "pepper.key"):
            assert stat.S_IMODE((state / name).stat().st_mode) == 0o600
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert token.encode() not in (state / "penstock.db").read_bytes() + (state / "penstock.db-wal").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_it_cleanly_with_connections_open(tmp_path: Path, number: signal.Signals) -> None:
    state = tmp_path / "state"
    with serving(state) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as idle:
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(12) == b"HTTP/1.1 200"
            process.send_signal(number)
            assert process.wait(timeout=DEADLINE_S) == 0
    assert "server stopped" in state.with_suffix(".log").read_text()


def test_admin_token_survives_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state):
        first = (state / "admin.token").read_text()
    with serving(state) as (_, url):
        assert (state / "admin.token").read_text() == first
        assert get(f"{url}/api/v1/jobs", first.strip()) == {"items": [], "next_page_token": None}


def test_port_in_use_is_one_line_that_names_it_and_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = refuse(tmp_path / "state", "--port", str(port))
    assert re.fullmatch(
        rf"penstock server: cannot listen on 127\.0\.0\.1:{port}: the port is in use\. .*--port.*\n", says
    )
    assert not (tmp_path / "state").exists()


def test_a_second_server_on_one_state_folder_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state) as (process, url):
        says = refuse(state, "--port", "0")
        assert f"in use by another server (process {process.pid})" in says
        with urllib.request.urlopen(f"{url}/healthz", timeout=DEADLINE_S) as answer:
            assert answer.status == 200


def test_wrong_setting_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    done = run(tmp_path / "state", "--port", "99999")
    assert (done.returncode, "setting port" in done.stderr) == (2, True)
