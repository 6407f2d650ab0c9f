"""The real command, server and agent as processes with a HOME of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases import lay_database
from tests.support.waiting import until

from penstock.client import Client
from penstock.command.jobs import find
from penstock.command.passing import without_settings
from penstock.process import proc
from penstock.protocol.rest import Job

TTL_S = "5"
_LEFT_OUT = ("PENSTOCK_", "FLAGS_", "DISPLAY", "WAYLAND_DISPLAY")
"""A test depends on no setting of its caller, and opens no browser."""


class Site:
    """One HOME with whatever is started in it; knows every process that carries its mark."""

    def __init__(self, home: Path, *, grace_s: float = 60.0) -> None:
        self.home = home
        home.mkdir(exist_ok=True)
        base = {name: value for name, value in without_settings(os.environ).items() if not name.startswith(_LEFT_OUT)}
        self.mark = f"SITE_OF_TEST={home}"
        self.environ = {
            **base,
            "HOME": str(home),
            "SITE_OF_TEST": str(home),
            "PENSTOCK_SERVER_LEASE_TTL_S": TTL_S,
            "PENSTOCK_SERVER_GRACE_S": str(grace_s),
            "COLUMNS": "200",
        }
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, timeout_s: float = 150.0, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `penstock` to its end."""
        argv = [sys.executable, "-m", "penstock.cli", *arguments]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, env={**self.environ, **environ}, check=False
        )

    def json(self, *arguments: str) -> Any:
        """Run `penstock … --json` and return its last line."""
        result = self.run(*arguments, "--json")
        assert result.stdout, f"exit {result.returncode}: {result.stderr}"
        return json.loads(result.stdout.splitlines()[-1])

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """Start a Python module that goes on."""
        errors = (self.home / f"stderr-{len(self.started)}").open("w")
        with errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv], env=self.environ, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.started.append(process)
        return process

    def up(self, *arguments: str, fresh: bool = False) -> subprocess.Popen[str]:
        """Start `penstock up` on a free port and wait until it serves. `fresh`: no database is laid into its home."""
        if "--state-dir" not in arguments and not fresh:
            lay_database(self.home / ".penstock" / "server")
        process = self.start("penstock.cli", "up", "--port", "0", "--json", *arguments)
        assert process.stdout is not None
        assert process.stdout.readline(), (self.home / f"stderr-{len(self.started) - 1}").read_text()
        return process

    def job(self, name: str, code: str, **fields: Any) -> Path:
        """Write a job file whose entrypoint is Python code."""
        path = self.home / f"{name}.yaml"
        spec = {"name": name, "entrypoint": ["python", "-c", code], "mode": "command", **fields}
        path.write_text(json.dumps(spec), encoding="utf-8")
        return path

    def submit(self, path: Path) -> str:
        """Submit a job file; return the job's id."""
        result = self.run("submit", str(path))
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    @property
    def client(self) -> Client:
        """A client of the server that this site's profile names: cheaper than a command for looking again and again."""
        profile = json.loads((self.home / ".penstock" / "config.json").read_text())
        return Client(profile["url"], token=Path(profile["token_file"]).read_text().strip())

    def look(self, job: str) -> Job:
        """Return a job by id or name."""
        with self.client as client:
            return find(client, job)

    def ready(self) -> bool:
        """True if the server answers."""
        with self.client as client:
            return client.is_ready()

    def node_states(self) -> list[str]:
        """Return the states of the server's nodes."""
        with self.client as client:
            return [node["state"] for node in client.nodes()]

    def log(self, job: str) -> str:
        """Return what the job's processes have written so far."""
        with self.client as client:
            found = find(client, job)
            return "".join(client.logs(found["id"], replica["id"])["text"] for replica in found["replicas"])

    def alive(self) -> list[int]:
        """Return every process that was started here, however far down."""
        return proc.with_environment(self.mark)

    def close(self) -> None:
        """End all, whatever a test did."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(12)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        proc.send(self.alive(), signal.SIGKILL)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def impatient_site(tmp_path: Path) -> Iterator[Site]:
    """A site whose replicas outlive a lost lease by a second only."""
    made = Site(tmp_path / "home", grace_s=1.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with `penstock up`, shared by the tests of a module."""
    made = Site(tmp_path_factory.mktemp("site") / "home")
    made.up()
    yield made
    made.close()


@pytest.fixture(scope="module")
def made_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Site]]:
    """Sites as many as a module asks for, closed with it."""
    made: list[Site] = []

    def make() -> Site:
        made.append(Site(tmp_path_factory.mktemp("site") / "home"))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until
