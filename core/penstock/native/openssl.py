"""TLS for channels, by the OpenSSL that Python's `ssl` module has loaded: no other TLS library is linked or looked for.

Where that library cannot be used (another library than OpenSSL 1.1.1 or 3, or one that is part of the interpreter and
shows no functions), the capability `channels.tls` is absent, and steps with TLS go through gRPC, which has its own.
"""

from __future__ import annotations

import ssl
import sys

from penstock.errors import PeerError
from penstock.machine.capability import Absent, probe
from penstock.native.channels import SecureSocket, TlsContext, load_openssl

__all__ = ["SecureSocket", "TlsContext"]

CHANNELS_TLS = "channels.tls"


@probe(CHANNELS_TLS, fallback="steps with TLS go through gRPC, which takes several times the processor time")
def _openssl() -> str:
    module = sys.modules["_ssl"]  # which `ssl` has imported; of the interpreter itself, it has no file
    if why := load_openssl(getattr(module, "__file__", None) or "", ssl.OPENSSL_VERSION):
        raise Absent(why)
    try:
        TlsContext.of_client(b"")
    except PeerError as error:
        if "no PEM text" not in str(error):
            raise Absent(str(error)) from error
        return f"{ssl.OPENSSL_VERSION}, which Python's ssl module has loaded"
    raise Absent(f"{ssl.OPENSSL_VERSION} takes an empty text for a certificate")
