"""Where the API server is, and as whom to speak to it: kubeconfigs, credential plugins, service accounts, TLS."""

from __future__ import annotations

import base64
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from tests.engines.api_server import TOKEN, ApiServer

from penstock.cluster.kubernetes import access
from penstock.cluster.kubernetes.api import Api
from penstock.cluster.provisioner import EngineAway
from penstock.errors import SpecError

PODS = "/api/v1/namespaces/pilots/pods"


def kubeconfig(folder: Path, user: dict[str, Any], name: str = "config", **cluster: Any) -> Path:
    path = folder / name
    text = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "pilots"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(text))
    return path


def test_kubeconfig_names_server_namespace_and_token(tmp_path: Path) -> None:
    found = access.find(None, {"KUBECONFIG": str(kubeconfig(tmp_path, {"token": "t"}))})
    assert (found.server, found.namespace, found.token()) == ("http://127.0.0.1:9", "pilots", "t")


def test_first_of_two_kubeconfigs_has_precedence(tmp_path: Path) -> None:
    first, second = kubeconfig(tmp_path, {"token": "1"}, "first"), kubeconfig(tmp_path, {"token": "2"}, "second")
    found = access.find("here", {"KUBECONFIG": f"{first}:{second}"})
    assert found.token() == "1"


def test_context_that_is_not_there_is_named_with_the_known(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no context 'there' \(it has: here\)"):
        access.find("there", {"KUBECONFIG": str(kubeconfig(tmp_path, {}))})


@pytest.mark.parametrize(
    ("user", "cluster"), [({"auth-provider": {}}, {}), ({}, {"server": "https://a", "proxy-url": "http://b"})]
)
def test_what_is_not_supported_is_refused(tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"auth-provider|proxy-url"):
        access.find(None, {"KUBECONFIG": str(kubeconfig(tmp_path, user, **cluster))})


def test_no_configuration_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"{tmp_path}/none is not there, and this is no pod"):
        access.find(None, {"KUBECONFIG": str(tmp_path / "none")})


def plugin(folder: Path, until: str) -> dict[str, Any]:
    """Return a user whose plugin gives a token that counts its runs."""
    code = f"""
import json, os, pathlib
runs = pathlib.Path({str(folder / "runs")!r})
runs.write_text(str(int(runs.read_text() if runs.exists() else 0) + 1))
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
status = {{"token": asked["kind"] + os.environ["WHO"] + runs.read_text(), "expirationTimestamp": {until!r}}}
print(json.dumps({{**asked, "status": status}}))
"""
    return {"exec": {"command": sys.executable, "args": ["-c", code], "env": [{"name": "WHO", "value": "-me-"}]}}


def test_token_of_a_plugin_is_kept_until_it_expires(tmp_path: Path) -> None:
    kept = access.find(None, {"KUBECONFIG": str(kubeconfig(tmp_path, plugin(tmp_path, "2999-01-01T00:00:00Z")))})
    assert [kept.token(), kept.token()] == ["ExecCredential-me-1"] * 2
    expired = access.find(None, {"KUBECONFIG": str(kubeconfig(tmp_path, plugin(tmp_path, "2001-01-01T00:00:00Z")))})
    assert [expired.token(), expired.token()] == ["ExecCredential-me-2", "ExecCredential-me-3"]


def test_plugin_that_fails_or_is_missing_says_so(tmp_path: Path) -> None:
    failing = {"exec": {"command": sys.executable, "args": ["-c", "import sys; sys.exit('logged out')"]}}
    with pytest.raises(EngineAway, match="logged out"):
        access.find(None, {"KUBECONFIG": str(kubeconfig(tmp_path, failing))}).token()
    absent = {"exec": {"command": "no-such-plugin", "installHint": "Get it from your cloud."}}
    with pytest.raises(SpecError, match="'no-such-plugin', which is not there"):
        access.find(None, {"KUBECONFIG": str(kubeconfig(tmp_path, absent))}).token()


def test_service_account_token_is_read_anew(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "namespace").write_text("pilots\n")
    (tmp_path / "token").write_text("first")
    environ = {"KUBECONFIG": str(tmp_path / "none"), "KUBERNETES_SERVICE_HOST": "fd00::1"}
    found = access.find(None, environ, tmp_path)
    assert (found.server, found.namespace, found.token()) == ("https://[fd00::1]:443", "pilots", "first")
    (tmp_path / "token").write_text("rotated")
    assert found.token() == "rotated"


def test_client_certificate_of_a_kubeconfig_is_presented(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    mine = authority.issue_cert("me@example.org")
    encoded = {
        "client-certificate-data": base64.b64encode(mine.cert_chain_pems[0].bytes()).decode(),
        "client-key-data": base64.b64encode(mine.private_key_pem.bytes()).decode(),
    }
    for one in (authority, stranger):
        one.cert_pem.write_to_path(str(tmp_path / f"{one is authority}.crt"))
    with ApiServer(tls) as server:

        def items(user: dict[str, Any], trusted: str) -> list[Any]:
            path = kubeconfig(
                tmp_path, {"token": TOKEN, **user}, server=server.url, **{"certificate-authority": trusted}
            )
            api = Api(access.find(None, {"KUBECONFIG": str(path)}))
            try:
                return list(api.get(PODS)["items"])
            finally:
                api.close()

        assert items(encoded, "True.crt") == []
        for user, trusted in (({}, "True.crt"), (encoded, "False.crt")):
            with pytest.raises(EngineAway):
                items(user, trusted)
    assert json.dumps(server.requests) == json.dumps([f"GET {PODS}"])
