"""Where the API server is and as whom to speak to it: of a pod's service account, or of a kubeconfig.

Tokens that expire are fetched again: a service account's is read from its file for each request, and a kubeconfig's
credential plugin is run when what it gave has expired. Of kubeconfig, all is read that kubectl reads, but proxies and
the auth providers that Kubernetes has removed, which are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from penstock.cluster.provisioner import EngineAway
from penstock.errors import SpecError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_LIMIT_S = 60.0
_EXPIRES_EARLY_S = 30.0

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Access:
    """`token`: returns a bearer token, or ''. `tls`: of https. `namespace`: unless another is asked for."""

    server: str
    namespace: str
    token: Callable[[], str]
    tls: ssl.SSLContext | bool = True


def find(context: str | None, environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> Access:
    """Return the access of KUBECONFIG or ~/.kube/config, else of the pod that this runs in. Raises SpecError.

    As kubectl, a kubeconfig that is there has precedence.
    """
    named = environ.get("KUBECONFIG", "")
    paths = [Path(one) for one in named.split(os.pathsep) if one] or [Path("~/.kube/config").expanduser()]
    found = [path for path in paths if path.is_file()]
    if found:
        return of_kubeconfig(found, context)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host and (service_account / "token").is_file() and not context:
        host = f"[{host}]" if ":" in host else host
        return _of_service_account(f"https://{host}:{port}", service_account)
    raise SpecError(f"no cluster is configured: {' and '.join(map(str, paths))} is not there, and this is no pod")


def _of_service_account(server: str, folder: Path) -> Access:
    tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    namespace = (folder / "namespace").read_text().strip()
    return Access(server, namespace, lambda: (folder / "token").read_text().strip(), tls)


def of_kubeconfig(paths: list[Path], context: str | None) -> Access:
    """Return the access of a context, or of the current one. Of entries of one name the first is used."""
    merged: dict[str, dict[str, tuple[Entry, Path]]] = {"clusters": {}, "contexts": {}, "users": {}}
    current = context or ""
    for path in paths:
        text = _parsed(path)
        current = current or str(text.get("current-context") or "")
        for kind, entries in merged.items():
            for one in text.get(kind) or ():
                entries.setdefault(one["name"], (one.get(kind[:-1]) or {}, path))
    if current not in merged["contexts"]:
        known = ", ".join(sorted(merged["contexts"])) or "none"
        raise SpecError(f"the kubeconfig has no context {current!r} (it has: {known})")
    chosen, path = merged["contexts"][current]
    try:
        cluster, user = merged["clusters"][chosen["cluster"]], merged["users"].get(chosen.get("user", ""), ({}, path))
        server = str(cluster[0]["server"]).rstrip("/")
    except KeyError as error:
        raise SpecError(f"context {current!r} of {path} names what is not there: {error}") from error
    credential = _Credential(*user)
    return Access(server, chosen.get("namespace") or "default", credential.token, _tls(cluster, credential))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SpecError(f"kubeconfig {path} cannot be read: {error}") from error
    if not isinstance(text, dict):
        raise SpecError(f"{path} is no kubeconfig")
    return text


@dataclass(slots=True)
class _Credential:
    """A user of a kubeconfig, with what its plugin gave last."""

    user: Entry
    path: Path
    clock: Callable[[], float] = time.time
    _given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for refused in ("auth-provider", "username"):
            if refused in self.user:
                raise SpecError(f"kubeconfig {self.path} has {refused!r}, which Kubernetes does not take any more")

    def token(self) -> str:
        if "exec" in self.user:
            return str(self._from_plugin().get("token", ""))
        if "tokenFile" in self.user:
            return _beside(self.path, self.user["tokenFile"]).read_text().strip()
        return str(self.user.get("token", ""))

    def certificate(self) -> tuple[bytes, bytes] | None:
        """Return certificate and key of the client as PEM, if it has them."""
        if "exec" in self.user:
            given = self._from_plugin()
            certificate, key = given.get("clientCertificateData", ""), given.get("clientKeyData", "")
            return (certificate.encode(), key.encode()) if certificate else None
        found, secret = (_content(self.user, name, self.path) for name in ("client-certificate", "client-key"))
        return (found, secret) if found and secret else None

    def _from_plugin(self) -> dict[str, Any]:
        if self._given and self._given["until"] - self.clock() > _EXPIRES_EARLY_S:
            return self._given
        given = _run_plugin(self.user["exec"], self.path)
        ends = given.get("expirationTimestamp")
        until = datetime.fromisoformat(ends).timestamp() if ends else float("inf")
        self._given = {**given, "until": until}
        return self._given


def _run_plugin(plugin: Entry, path: Path) -> dict[str, Any]:
    """Run a credential plugin as kubectl does, without a terminal."""
    version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
    asked = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    extra = {one["name"]: one["value"] for one in plugin.get("env") or ()}
    environ = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(asked)}
    command = str(plugin["command"])
    if os.sep in command:
        command = str(_beside(path, command))
    try:
        done = subprocess.run(
            [command, *(plugin.get("args") or ())], env=environ, capture_output=True, text=True,
            timeout=PLUGIN_LIMIT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError as error:
        hint = plugin.get("installHint", "")
        raise SpecError(f"kubeconfig {path} needs {command!r}, which is not there. {hint}".strip()) from error
    except subprocess.TimeoutExpired as error:
        raise EngineAway(f"{command} has given no credential within {PLUGIN_LIMIT_S:g} s") from error
    if done.returncode:
        raise EngineAway(f"{command} gave no credential: {done.stderr.strip() or f'exit status {done.returncode}'}")
    try:
        return dict(json.loads(done.stdout)["status"])
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{command} of {path} has printed no ExecCredential with a status") from error


def _tls(cluster: tuple[Entry, Path], credential: _Credential) -> ssl.SSLContext | bool:
    settings, path = cluster
    if not str(settings["server"]).startswith("https:"):
        return True
    for refused in ("proxy-url", "tls-server-name"):
        if refused in settings:
            raise SpecError(f"kubeconfig {path} has {refused!r}, which is not supported")
    authority = _content(settings, "certificate-authority", path)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if settings.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    pair = credential.certificate()
    if pair is not None:
        with tempfile.NamedTemporaryFile(prefix="penstock-") as file:  # 0600: it is loaded from files alone
            file.write(b"\n".join(pair))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _content(settings: Entry, name: str, path: Path) -> bytes:
    """Return what NAME-data holds, or the file that NAME names; nothing if there is neither."""
    if settings.get(f"{name}-data"):
        try:
            return base64.b64decode(settings[f"{name}-data"])
        except binascii.Error as error:
            raise SpecError(f"{name}-data of {path} is no base64") from error
    return _beside(path, settings[name]).read_bytes() if settings.get(name) else b""


def _beside(path: Path, named: str) -> Path:
    """Return a file that a kubeconfig names, relative to its own folder."""
    return path.parent / Path(named).expanduser()
