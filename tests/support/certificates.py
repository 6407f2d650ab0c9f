"""Certificates for parameter servers at 127.0.0.1, by an authority that lives as long as the call."""

from __future__ import annotations

from pathlib import Path

import trustme


def certificates(folder: Path) -> dict[str, str]:
    """Write those of a server at 127.0.0.1; return the settings that name them."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    folder.mkdir()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for part in issued.cert_chain_pems:
        part.write_to_path(str(folder / "cert.pem"), append=True)
    return {f"PENSTOCK_PS_TLS_{name.upper()}": str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
