"""How connections of httpx to a server are made: proxies, whom they trust, the bearer token. No torch."""

from __future__ import annotations

import ipaddress
import ssl
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock.tls import ClientCertificate

TIMEOUT_S = 15.0
LIMITS = httpx.Limits(keepalive_expiry=2.0)
"""A server closes a connection that is idle for 5 s (uvicorn's default), which is httpx's default for its reuse, too: a
request at that moment would be lost. Proxies close theirs later."""


def is_loopback(url: str) -> bool:
    """True if `url` points to this machine: a proxy from the environment must not be asked then."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _context(url: str, certificate: ClientCertificate | None, *, trust_env: bool) -> ssl.SSLContext:
    """Return a context that trusts what this machine does; to load that takes 20 ms, and http has no use for it."""
    if not url.startswith("https://"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context = httpx.create_ssl_context() if trust_env else ssl.create_default_context()
    if certificate is not None:
        certificate.show_in(context)
    return context


def options(url: str, token: str | None, certificate: ClientCertificate | None) -> dict[str, Any]:
    """Return how connections to a server are made."""
    local = is_loopback(url)  # is asked without the proxies of the environment, but by SSL_CERT_FILE, too
    return {
        "base_url": url, "headers": {} if token is None else {"Authorization": f"Bearer {token}"},
        "timeout": TIMEOUT_S, "limits": LIMITS,
        "trust_env": not local, "verify": _context(url, certificate, trust_env=not local),
    }  # fmt: skip
