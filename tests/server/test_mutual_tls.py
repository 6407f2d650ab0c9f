"""Mutual TLS: an agent is what its certificate says; people and their tokens need none, unless the server wants it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from tests.support.waiting import LIMIT_S, until

from penstock.client import Client
from penstock.errors import Unavailable
from penstock.tls import ClientCertificate
from penstock_server.auth.certificates import check_node, names_of
from penstock_server.problems import Problem
from penstock_server.settings import Settings

YESTERDAY = datetime.now(UTC) - timedelta(days=1)


class Site:
    """A server on HTTPS whose agents need a certificate, and authorities that issue some."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, ""
        self.authority, self.other = trustme.CA(), trustme.CA()
        self.authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        self.server = self.certificate("127.0.0.1")

    def certificate(self, name: str, *, by_other: bool = False, not_after: datetime | None = None) -> ClientCertificate:
        issued = (self.other if by_other else self.authority).issue_cert(name, not_after=not_after)
        number = len(list(self.folder.glob("*.key")))
        chain, key = self.folder / f"{number}.pem", self.folder / f"{number}.key"
        issued.private_key_pem.write_to_path(str(key))
        for part in issued.cert_chain_pems:
            part.write_to_path(str(chain), append=True)
        return ClientCertificate(chain, key)

    @property
    def admin(self) -> str:
        return (self.folder / "state" / "admin.token").read_text().strip()

    def client(self, certificate: ClientCertificate | None = None) -> Client:
        return Client(self.url, token=self.admin, certificate=certificate)

    @contextmanager
    def serving(self, *options: str) -> Iterator[None]:
        """Run a server; the authority is in SSL_CERT_FILE."""
        line = [
            sys.executable, "-m", "penstock_server", "--port", "0", "--state-dir", str(self.folder / "state"),
            "--tls-cert", str(self.server.chain), "--tls-key", str(self.server.key),
            "--tls-client-ca", str(self.folder / "ca.pem"), *options,
        ]  # fmt: skip
        with (self.folder / "server.log").open("wb") as log:
            process = subprocess.Popen(line, stdout=log, stderr=log)
        try:
            address = self.folder / "state" / "server.json"
            until(lambda: process.poll() is not None or _says(address, process.pid), "the server's address")
            assert process.poll() is None, (self.folder / "server.log").read_text()
            self.url = json.loads(address.read_text())["url"]
            until(self._listens, "the server")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)

    def _listens(self) -> bool:
        parts = httpx.URL(self.url)
        with socket.socket() as probe:
            return probe.connect_ex((parts.host, parts.port or 0)) == 0

    def agent_line(self, state: str, *options: str) -> list[str]:
        line = [sys.executable, "-m", "penstock_worker", "--url", self.url, "--state-dir", str(self.folder / state)]
        return [*line, *options]

    def refused(self, name: str, certificate: ClientCertificate | None) -> tuple[int, str]:
        """Have an agent join that is refused; return its exit status and what it says."""
        shown = [] if certificate is None else ["--tls-cert", str(certificate.chain), "--tls-key", str(certificate.key)]
        with self.client() as client:
            environ = {**os.environ, "PENSTOCK_JOIN_TOKEN": client.join_token()["token"]}
        line = self.agent_line(f"agent-{name}", "--name", name, *shown)
        ended = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return ended.returncode, ended.stderr


def _says(path: Path, pid: int) -> bool:
    return path.exists() and json.loads(path.read_text())["pid"] == pid


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that wants certificates of agents."""
    with pytest.MonkeyPatch.context() as patch:
        made = Site(tmp_path_factory.mktemp("mtls"))
        patch.setenv("SSL_CERT_FILE", str(made.folder / "ca.pem"))
        with made.serving():
            yield made


def test_an_agent_with_its_certificate_runs_a_job(site: Site) -> None:
    shown = site.certificate("n1")
    with site.client() as client:
        environ = {**os.environ, "PENSTOCK_JOIN_TOKEN": client.join_token()["token"]}
        options = ("--name", "n1", "--cpus", "2", "--tls-cert", str(shown.chain), "--tls-key", str(shown.key))
        with (site.folder / "agent.log").open("wb") as log:
            agent = subprocess.Popen(site.agent_line("agent", *options), env=environ, stderr=log)
        try:
            workdir = site.folder / "work.tar.gz"
            subprocess.run(["tar", "-czf", workdir, "-C", "/etc", "hostname"], check=True)
            snapshot = client.upload_snapshot(workdir)["sha256"]  # which the agent downloads by its certificate
            look = f"import os; print(os.path.exists({str(shown.key)!r}), 'PENSTOCK_TLS_KEY' in os.environ)"
            spec = {"name": "j", "entrypoint": [sys.executable, "-c", look], "mode": "command", "snapshot": snapshot}
            job = client.submit({**spec, "trainers": {"memory": "1MiB"}})
            job = client.job(job["id"], wait_s=60.0)
            assert job["state"] == "SUCCEEDED", (job["why"], (site.folder / "agent.log").read_text())
        finally:
            agent.terminate()
            agent.wait(LIMIT_S)


def test_an_agent_without_a_certificate_is_refused(site: Site) -> None:
    status, said = site.refused("n2", None)
    assert status == 4
    assert "node 'n2' came without a client certificate" in said
    assert "--tls-cert and --tls-key" in said


def test_a_certificate_of_another_node_is_refused(site: Site) -> None:
    status, said = site.refused("n3", site.certificate("n4"))
    assert status == 4
    assert "the client certificate is of n4, and not of node 'n3'" in said


@pytest.mark.parametrize("wrong", [{"by_other": True}, {"not_after": YESTERDAY}], ids=["authority", "expired"])
def test_a_certificate_that_is_not_valid_is_refused(site: Site, wrong: dict[str, Any]) -> None:
    status, said = site.refused("n5", site.certificate("n5", **wrong))
    assert status == 6, said
    assert "has expired, or is not of the authority of its --tls-client-ca: look at 'openssl x509" in said


def test_a_stolen_node_token_is_of_no_use_without_certificate(site: Site) -> None:
    own, others = site.certificate("n6"), site.certificate("n7")
    with site.client(own) as client:
        node = {"join_token": client.join_token()["token"], "name": "n6", "host": "h", "cpus": 1, "memory_bytes": 1}
        secret = client.register_node(node)["node_token"]  # type: ignore[arg-type]
    for certificate, code in ((None, "certificate_required"), (others, "certificate_of_another_node")):
        context = httpx.create_ssl_context()
        if certificate is not None:
            certificate.show_in(context)
        with httpx.Client(base_url=site.url, verify=context, headers={"Authorization": f"Bearer {secret}"}) as thief:
            answer = thief.get(f"/api/v1/snapshots/{'0' * 64}")
            assert (answer.status_code, answer.json()["code"]) == (403, code)


def test_people_need_no_certificate(site: Site) -> None:
    with site.client() as client:
        assert list(client.jobs()) is not None
    assert httpx.get(f"{site.url}/readyz", verify=httpx.create_ssl_context()).status_code == 200


def test_all_may_have_to_show_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with site.serving("--tls-client-required", "all"):
        with site.client() as client, pytest.raises(Unavailable, match="set PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY"):
            list(client.jobs())
        shown = site.certificate("laptop-of-ana")
        monkeypatch.setenv("PENSTOCK_TLS_CERT", str(shown.chain))
        monkeypatch.setenv("PENSTOCK_TLS_KEY", str(shown.key))
        with site.client() as client:
            assert list(client.jobs()) == []


def test_names_of_a_certificate() -> None:
    subject = ((("commonName", "N1"),),)
    assert names_of({"subject": subject}) == {"n1"}
    assert names_of({"subject": subject, "subjectAltName": (("DNS", "n2"), ("IP Address", "10.0.0.1"))}) == {"n2"}
    check_node({"subject": subject}, "n1")
    for certificate in ({}, None, {"subject": subject, "subjectAltName": (("DNS", "*.n1"),)}):
        with pytest.raises(Problem):
            check_node(certificate, "n1")


def test_a_client_authority_without_https_is_refused() -> None:
    for given, said in (
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca needs tls_cert"),
        ({"tls_client_required": "all"}, "no tls_client_ca"),
    ):
        with pytest.raises(ValueError, match=said):
            Settings.model_validate(given)


def test_half_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="given together"):
        ClientCertificate.of(tmp_path / "cert.pem", None)
    with pytest.raises(Exception, match="cannot be used"):
        ClientCertificate(tmp_path / "no.pem", tmp_path / "no.key").show_in(ssl.create_default_context())
