"""`penstock up` with a certificate: its agent and its commands connect by the authority that SSL_CERT_FILE names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.certificates import certificates

if TYPE_CHECKING:
    from tests.cli.conftest import Site


def test_up_with_a_certificate_has_agent_and_commands(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificates(site.home / "tls")
    monkeypatch.setenv("SSL_CERT_FILE", made["PENSTOCK_PS_TLS_CA"])
    site.environ["SSL_CERT_FILE"] = made["PENSTOCK_PS_TLS_CA"]
    site.up("--tls-cert", made["PENSTOCK_PS_TLS_CERT"], "--tls-key", made["PENSTOCK_PS_TLS_KEY"])
    assert [node["state"] for node in site.json("nodes")] == ["READY"]
    with site.client as client:
        assert client.url.startswith("https://127.0.0.1:")


def test_a_certificate_without_its_key_is_an_error(site: Site) -> None:
    made = certificates(site.home / "tls")
    result = site.run("up", "--port", "0", "--tls-cert", made["PENSTOCK_PS_TLS_CERT"])
    assert result.returncode != 0
    assert "tls_cert and tls_key are given together" in result.stderr and "Traceback" not in result.stderr
