"""Network interfaces that Gloo and NCCL are told to use: checked by name before anybody waits for a connection.

A wrong name otherwise shows as a hang or as an error of a library's depth. GLOO_SOCKET_IFNAME is a list of names;
NCCL_SOCKET_IFNAME one of prefixes, '=eth0' an exact name, '^docker,lo' what not to take. They are read, never written,
but for GLOO_SOCKET_IFNAME where nobody has set it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from penstock.errors import SpecError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def names() -> list[str]:
    """Return the interfaces of this machine."""
    return [name for _, name in socket.if_nameindex()]


def check_interfaces(environ: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise SpecError naming the variable, the interface that it asks for, and those that there are."""
    for name in filter(None, environ.get(GLOO, "").split(",")):
        if name not in known:
            raise _unknown(GLOO, name, known)
    wanted = environ.get(NCCL, "")
    exact, kept_out = wanted.startswith("="), wanted.startswith("^")
    asked = [name for name in wanted.removeprefix("^").removeprefix("=").split(",") if name]
    if asked and not any(_fits(name, asked, exact=exact) != kept_out for name in known):
        raise _unknown(NCCL, wanted, known)


def _fits(name: str, asked: Sequence[str], *, exact: bool) -> bool:
    return any(name == one if exact else name.startswith(one) for one in asked)


def _unknown(variable: str, name: str, known: Sequence[str]) -> SpecError:
    return SpecError(
        f"{variable} asks for the network interface {name!r}, but this machine ({socket.gethostname()}) has "
        f"{', '.join(known)}",
        pointer=variable,
        got=name,
    )


def choose_for_gloo(host: str) -> None:
    """Let Gloo use the interface that has the address of `host`, unless the user has chosen one."""
    if os.environ.get(GLOO):
        return
    address = socket.gethostbyname(host)
    for name in names():
        if _address(name) == address:
            os.environ[GLOO] = name
            return


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has no address
            return None
    return socket.inet_ntoa(found[20:24])
