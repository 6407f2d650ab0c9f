"""Certificates of agents: which node one names, and the refusal if it is another, or none came. Pure.

The TLS layer has verified a certificate's chain and dates before it is looked at here. A name is one of its DNS names
(subjectAltName), or of a certificate that has none its common name; case does not count, and there are no wildcards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_server.problems import Problem


def names_of(certificate: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in a certificate, as `ssl.SSLSocket.getpeercert` describes it, in lower case."""
    alternatives = {value.lower() for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    common = {
        value.lower()
        for attributes in certificate.get("subject", ())
        for kind, value in attributes
        if kind == "commonName"
    }
    return frozenset(alternatives or common)


def check_node(certificate: Mapping[str, Any] | None, node: str) -> None:
    """Raise a problem (403) unless a certificate came that names the node."""
    if not certificate:
        raise Problem(
            403,
            "certificate_required",
            f"node {node!r} came without a client certificate, and this server wants one of each agent",
            hint=f"start the agent with --tls-cert and --tls-key: a certificate with the DNS name {node!r}, signed by "
            "the authority that the server was given as --tls-client-ca",
        )
    names = names_of(certificate)
    if node.lower() not in names:
        found = ", ".join(sorted(names)) or "no name"
        raise Problem(
            403,
            "certificate_of_another_node",
            f"the client certificate is of {found}, and not of node {node!r}",
            hint=f"give the agent a certificate with the DNS name {node!r}, or join as a node of the certificate's "
            "name: penstock agent join --name NAME",
        )
