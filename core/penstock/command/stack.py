"""A control plane and a local agent as child processes: what `up` and `demo` run."""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self
from urllib.parse import urlencode

from penstock.client import Client, Conflict
from penstock.command import profile
from penstock.errors import SpecError, Unavailable
from penstock.machine.network import family_of
from penstock.process import group
from penstock.process.signals import ignore_signals
from penstock.settings import JOIN_TOKEN, TOKEN, URL

READY_S = 60.0
POLL_S, CHECK_S = 0.05, 0.2
AGENT_STOP_S, SERVER_STOP_S = 9.0, 3.0
TAIL_LINES = 8


def check_port(host: str, port: int) -> None:
    """Raise Conflict if the port is taken, SpecError if the host is none of this machine's."""
    try:
        family = family_of(host)
    except OSError as error:
        raise SpecError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SpecError(f"cannot listen on {host}:{port}: {error.strerror}") from error
            raise Conflict(
                f"port {port} on {host} is in use; is another 'penstock up' running? "
                "Stop it, or take another port with --port (0: any free one)"
            ) from error


class Stack:
    """Server and agent with their state below one folder. A context manager: leaving it ends both, and all replicas.

    Both run in `environ`, without the address and the token that are for commands. `server_options`: arguments of the
    server besides those.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        host: str,
        port: int,
        agent: bool,
        environ: Mapping[str, str],
        server_options: Sequence[str] = (),
    ) -> None:
        self._state_dir = state_dir
        self._host = host
        self._port = port
        self._with_agent = agent
        self._options = server_options
        self._server: group.LoggedGroup | None = None
        self._agent: group.LoggedGroup | None = None
        self._environ = {name: value for name, value in environ.items() if name not in (URL.name, TOKEN.name)}
        self._profile: profile.UserProfile | None = None
        self.url = ""
        self.client: Client

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        check_port(self._host, self._port)
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        server_dir = self._state_dir / "server"
        argv = ["-m", "penstock_server", "--host", self._host, "--port", str(self._port), "--state-dir"]
        self._server = self._child("server", [*argv, str(server_dir), *self._options], {})
        self.url = self._until_ready(self._server, server_dir)
        token_file = server_dir / "admin.token"
        self.client = Client(self.url, token=token_file.read_text(encoding="utf-8").strip())
        self._profile = profile.UserProfile(self.url, str(token_file))
        profile.save(self._profile)
        if self._with_agent:
            self._start_agent()

    def _start_agent(self) -> None:
        argv = ["-m", "penstock_worker", "--url", self.url, "--state-dir", str(self._state_dir / "agent")]
        argv += ["--hide", str(self._state_dir / "server")]
        kept = self._state_dir / "agent" / "node.json"
        secrets = {JOIN_TOKEN.name: self.client.join_token()["token"]}
        if kept.exists() and json.loads(kept.read_text(encoding="utf-8"))["url"] == self.url:
            secrets = {}  # the same node as before comes back
        self._agent = self._child("agent", argv, secrets)
        end = time.monotonic() + READY_S
        while not any(node["state"] == "READY" for node in self.client.nodes()):
            self.check()
            if time.monotonic() > end:
                raise Unavailable(f"the agent did not connect within {READY_S:g} s:\n{_tail(self._agent)}")
            time.sleep(POLL_S)

    def _child(self, name: str, arguments: list[str], secrets: dict[str, str]) -> group.LoggedGroup:
        log = self._state_dir / f"{name}.log"
        return group.LoggedGroup([sys.executable, *arguments], log=log, env={**self._environ, **secrets}, appends=True)

    def _until_ready(self, server: group.LoggedGroup, server_dir: Path) -> str:
        """Return the address that the server wrote down, once it answers there."""
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            _check(server)
            url = _address(server_dir / "server.json", server.pid)
            if url is not None:
                with Client(url, token=None) as client:
                    if client.is_ready():
                        return url
            time.sleep(POLL_S)
        raise Unavailable(f"the server was not ready within {READY_S:g} s:\n{_tail(server)}")

    def login_link(self, job: str | None = None) -> str:
        """Return a link that logs a browser in, once, and opens the page of `job` (its id)."""
        fields = {"code": self.client.login_code()} | ({} if job is None else {"job": job})
        return f"{self.url}/login#{urlencode(fields)}"

    def check(self) -> None:
        """Raise Unavailable if one of the children has ended."""
        for child in (self._server, self._agent):
            if child is not None:
                _check(child)

    def serve(self) -> NoReturn:
        """Watch the children until a signal comes. Raises Unavailable if one of them ends."""
        while True:
            self.check()
            time.sleep(CHECK_S)

    def stop(self) -> None:
        """End the agent, which ends its replicas and reports them, then the server. Within 10 s if all is well."""
        ignore_signals()
        if self._profile is not None:
            profile.remove(self._profile)
        try:
            if self._agent is not None:
                group.stop([self._agent], AGENT_STOP_S)
        finally:
            if self._server is not None:
                group.stop([self._server], SERVER_STOP_S)
        if hasattr(self, "client"):
            self.client.close()


def _check(child: group.LoggedGroup) -> None:
    """Raise Unavailable, with the end of its log, if a child has ended."""
    code = child.status()
    if code is not None:
        raise Unavailable(f"the {child.log.stem} ended with exit code {code} (log: {child.log}):\n{_tail(child)}")


def _tail(child: group.LoggedGroup) -> str:
    return "\n".join(f"  {line}" for line in child.tail(TAIL_LINES))


def _address(path: Path, pid: int) -> str | None:
    """Return the URL in `server.json` if this very process wrote it."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # not there yet, or half written
        return None
    return str(fields["url"]) if fields.get("pid") == pid else None
