"""The `penstock` command where no server is: messages, exit codes, start-up cost, profile."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.endpoints import free_endpoint
from typer.testing import CliRunner

from penstock.cli import app
from penstock.client import AuthError
from penstock.command import profile
from penstock.command.output import duration


def penstock(*arguments: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    argv = [sys.executable, "-m", "penstock.cli", *arguments]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=150, env={**base, "HOME": str(home), **environ}, check=False
    )


def test_help_lists_the_commands_and_the_exit_codes(tmp_path: Path) -> None:
    result = penstock("--help", home=tmp_path)
    assert result.returncode == 0
    for word in ("up", "demo", "submit", "jobs", "logs", "cancel", "wait", "nodes", "token", "login-link", "agent"):
        assert f"  {word} " in result.stdout
    assert "6 unavailable" in " ".join(result.stdout.split())


def test_the_command_loads_nothing_heavy_before_it_needs_it() -> None:
    code = "import sys, penstock.cli; print(sorted({'torch', 'httpx', 'pydantic', 'yaml'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_agent_and_the_client_load_no_torch_and_no_server() -> None:
    code = (
        "import sys, penstock_worker.__main__, penstock.client, penstock.command.demo; "
        "print(sorted({'torch', 'penstock_server'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_an_unreachable_server_is_named_with_what_to_do(tmp_path: Path) -> None:
    url = f"http://{free_endpoint()}"
    result = penstock("jobs", "--url", url, "--token", "x", home=tmp_path)
    assert result.returncode == 6
    assert url in result.stderr
    assert "penstock up" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_any_server_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    result = penstock("jobs", home=tmp_path)
    assert (result.returncode, result.stdout) == (6, "")
    assert "start one with 'penstock up'" in result.stderr


def test_an_unknown_url_without_token_fails_authentication(tmp_path: Path) -> None:
    result = penstock("jobs", "--url", "http://127.0.0.1:9", home=tmp_path)
    assert result.returncode == 4
    assert "PENSTOCK_TOKEN" in result.stderr


def test_a_wrong_option_is_a_usage_error(tmp_path: Path) -> None:
    assert penstock("jobs", "--sate", "x", home=tmp_path).returncode == 2
    assert penstock("submit", str(tmp_path / "no.yaml"), home=tmp_path).returncode == 2


@pytest.mark.parametrize("command", ["up", "demo"])
@pytest.mark.parametrize("text", ["99999", "-1", "abc"])
def test_a_port_that_cannot_be_is_a_usage_error(command: str, text: str) -> None:
    result = CliRunner().invoke(app, [command, f"--port={text}"])
    assert result.exit_code == 2
    assert f"'--port': {text!r} is no port number from 0 to 65535" in " ".join(result.output.split())


def test_text_in_a_job_file_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"name": "a", "entrypoint": ["a", "\\ud800"]}')
    result = penstock("submit", str(path), "--url", "http://127.0.0.1:9", "--token", "x", home=tmp_path)
    assert result.returncode == 2
    assert "/entrypoint/1: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = penstock("up", "--port", str(port), home=tmp_path)
    assert result.returncode == 5
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert "--port" in result.stderr
    assert not (tmp_path / ".penstock").exists()


def test_an_agent_without_token_or_identity_says_what_it_needs(tmp_path: Path) -> None:
    result = penstock("agent", "join", "--url", "http://127.0.0.1:9", home=tmp_path)
    assert result.returncode == 2
    assert "--join-token" in result.stderr


def test_a_state_that_jobs_do_not_have_is_refused_by_name(tmp_path: Path) -> None:
    result = penstock("jobs", "--state", "running,nope", "--url", "http://127.0.0.1:9", "--token", "t", home=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("penstock: --state has no NOPE; it is one of CREATED, QUEUED")


def test_an_agent_that_cannot_reach_its_server_to_join_says_so(tmp_path: Path) -> None:
    url = f"http://{free_endpoint()}"
    result = penstock("agent", "join", "--url", url, "--join-token", "t", home=tmp_path)
    assert result.returncode == 6
    assert url in result.stderr


def test_completion_is_offered_for_bash(tmp_path: Path) -> None:
    argv = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock lo", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'penstock'; from penstock.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **argv}, check=False
    )
    assert result.stdout.split() == ["logs", "login-link"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.json"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    return path


def test_the_profile_is_private_and_holds_no_secret(config: Path, tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text("secret\n")
    profile.save(profile.UserProfile("http://127.0.0.1:1", str(tmp_path / "admin.token")))
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert "secret" not in config.read_text()
    assert profile.resolve(None, None) == ("http://127.0.0.1:1", "secret")


def test_a_kept_token_is_only_used_for_its_own_server(config: Path, tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text("secret")
    profile.save(profile.UserProfile("http://127.0.0.1:1", str(tmp_path / "admin.token")))
    with pytest.raises(AuthError, match="no token is known for http://elsewhere"):
        profile.resolve("http://elsewhere", None)
    assert profile.resolve("http://elsewhere", "mine") == ("http://elsewhere", "mine")


def test_a_server_in_the_default_folder_needs_no_profile(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".penstock" / "server"
    folder.mkdir(parents=True)
    (folder / "server.json").write_text('{"url": "http://127.0.0.1:1", "pid": 1}')
    (folder / "admin.token").write_text("secret\n")
    assert not config.exists()
    assert profile.resolve(None, None) == ("http://127.0.0.1:1", "secret")


def test_a_profile_is_only_removed_by_its_owner(config: Path) -> None:
    mine = profile.UserProfile("http://127.0.0.1:1", "a")
    profile.save(profile.UserProfile("http://127.0.0.1:2", "b"))
    profile.remove(mine)
    assert json.loads(config.read_text())["url"] == "http://127.0.0.1:2"


def test_durations_read_as_a_person_writes_them() -> None:
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3600, 7500)] == ["0s", "59s", "1m00s", "59m59s", "1h00m", "2h05m"]
