"""Network interfaces that Gloo and NCCL shall use: checked by name before a rank waits for a connection.

A wrong name otherwise shows as a hang or as an error of a library's depth. GLOO_SOCKET_IFNAME is a list of names;
NCCL_SOCKET_IFNAME one of prefixes, '=eth0' an exact name, '^docker,lo' what not to take. They are read, never written,
but for GLOO_SOCKET_IFNAME where it is not set.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import SpecError
from penstock.settings import GLOO_INTERFACES, NCCL_INTERFACES

_SIOCGIFADDR = 0x8915


def names() -> list[str]:
    """Return the interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def check_interfaces(known: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    """Raise SpecError naming the variable, the interface that it asks for, and those that there are."""
    for name in GLOO_INTERFACES.read(environ):
        if name not in known:
            raise _unknown(GLOO_INTERFACES.name, name, known)
    wanted = NCCL_INTERFACES.read(environ)
    exact, kept_out = wanted.startswith("="), wanted.startswith("^")
    asked = [name for name in wanted.removeprefix("^").removeprefix("=").split(",") if name]
    if asked and not any(_fits(name, asked, exact=exact) != kept_out for name in known):
        raise _unknown(NCCL_INTERFACES.name, wanted, known)


def _fits(name: str, asked: Sequence[str], *, exact: bool) -> bool:
    return any(name == one if exact else name.startswith(one) for one in asked)


def _unknown(variable: str, name: str, known: Sequence[str]) -> SpecError:
    return SpecError(
        f"{variable} asks for the network interface {name!r}, but this machine ({socket.gethostname()}) has "
        f"{', '.join(known)}",
        pointer=variable,
        got=name,
    )


def choose_for_gloo(host: str, of_version_6: Path = Path("/proc/net/if_inet6")) -> None:
    """Let Gloo use the interface that has the address of `host`, unless the user has chosen one."""
    if GLOO_INTERFACES.read():
        return
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # a name that does not resolve here: Gloo uses what the machine's own name resolves to
        return
    known = _addresses_of_version_6(of_version_6)
    for name in names():
        if _address(name) in addresses or known.get(name, set()) & addresses:
            GLOO_INTERFACES.export(name)
            return


def _addresses_of_version_6(table: Path) -> dict[str, set[str]]:
    """Return the IPv6 addresses of each interface; none where the kernel has no IPv6."""
    found: dict[str, set[str]] = {}
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:
        return found
    for address, _, _, _, _, name in (line.split() for line in lines):
        found.setdefault(name, set()).add(str(ipaddress.IPv6Address(int(address, 16))))
    return found


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has no address
            return None
    return socket.inet_ntoa(found[20:24])
