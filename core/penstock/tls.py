"""TLS as this process speaks it to a server: whom it trusts, and the certificate that it shows if it has one.

Trust follows the system and SSL_CERT_FILE. The certificate of this machine is read anew for each connection's context,
so that one that was renewed is used by the next.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpecError
from penstock.settings import TLS_CERT, TLS_KEY


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """Files (PEM) of a certificate chain, and of its private key."""

    chain: Path
    key: Path

    @classmethod
    def from_environ(cls) -> ClientCertificate | None:
        """Return the one of PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY, None without. Raises SpecError for half of it."""
        return cls.of(TLS_CERT.read(), TLS_KEY.read())

    @classmethod
    def of(cls, chain: Path | None, key: Path | None) -> ClientCertificate | None:
        """Return the certificate of two files, None without any. Raises SpecError if one is missing."""
        if chain is None and key is None:
            return None
        if chain is None or key is None:
            raise SpecError(f"a certificate and its key are given together: {TLS_CERT.name} and {TLS_KEY.name}")
        return cls(chain.expanduser().absolute(), key.expanduser().absolute())

    def show_in(self, context: ssl.SSLContext) -> None:
        """Have connections of a context show this certificate. Raises SpecError if the files are no good."""
        try:
            context.load_cert_chain(self.chain, self.key)
        except (OSError, ssl.SSLError) as error:
            raise SpecError(
                f"the client certificate {self.chain} with the key {self.key} cannot be used: {error}. "
                "Give PEM files of a chain and of its own key, which this user can read"
            ) from error


def context_for(url: str, certificate: ClientCertificate | None) -> ssl.SSLContext | None:
    """Return the context of a websocket to `url`; None without TLS."""
    if not url.startswith(("https://", "wss://")):
        return None
    context = ssl.create_default_context()
    if certificate is not None:
        certificate.show_in(context)
    return context


def advice_on_silence(url: str, certificate: ClientCertificate | None) -> str:
    """Return what to look at when a server has closed a connection without an answer; '' without TLS.

    It is how asyncio refuses a certificate: no alert is sent that would name the reason.
    """
    if not url.startswith(("https://", "wss://")):
        return ""
    if certificate is None:
        return (
            "; a server with --tls-client-required all does so to a process without a certificate: "
            f"set {TLS_CERT.name} and {TLS_KEY.name}"
        )
    return (
        "; a server does so to a certificate that has expired, or is not of the authority of its --tls-client-ca: "
        f"look at 'openssl x509 -noout -dates -issuer -in {certificate.chain}'"
    )
