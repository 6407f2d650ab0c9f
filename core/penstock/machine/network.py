"""Addresses of this machine and of others, where one of the two families may be missing; a browser to open."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from penstock.machine.capability import Absent, capability, probe
from penstock.settings import DISPLAY, WAYLAND_DISPLAY

_PROBE_S = 2.0


def family_of(host: str) -> socket.AddressFamily:
    """Return the family in which to listen at `host`, a name or an address; IPv4 where both would do.

    Raises OSError (gaierror) for a name that resolves to no address of a family that this machine has.
    """
    found = {info[0] for info in socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)}
    if socket.AF_INET in found:
        return socket.AF_INET
    if not capability("ipv6").present:
        reason = f"{host} has IPv6 addresses alone, and this machine has no IPv6: {capability('ipv6').detail}"
        raise OSError(errno.EAFNOSUPPORT, reason)
    return socket.AF_INET6


def only_loopback(host: str) -> bool:
    """Whether nothing but this machine reaches what listens at `host`. A name that does not resolve counts as such."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)


@probe("ipv6", fallback="IPv4")
def _ipv6() -> str:
    if not socket.has_ipv6:
        raise Absent("this Python was built without IPv6")
    expected = os.urandom(16)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        listener.settimeout(_PROBE_S)
        with socket.create_connection(listener.getsockname()[:2], timeout=_PROBE_S) as client:
            server, _ = listener.accept()
            with server:
                client.sendall(expected)
                found = _received(server, len(expected))
    if found != expected:
        raise Absent("the loopback connection gives other bytes than were sent")
    return "the loopback address ::1 can be reached"


def _received(server: socket.socket, count: int) -> bytes:
    """Return what comes before the other side closes, at most `count` bytes. Raises TimeoutError."""
    server.settimeout(_PROBE_S)  # an accepted socket does not inherit its listener's
    found = b""
    while len(found) < count and (part := server.recv(count - len(found))):
        found += part
    return found


@probe("browser", fallback="the address is printed; open it on a machine with a display")
def _browser() -> str:
    """Find a graphical browser, without opening it: a text browser would take this terminal over."""
    import webbrowser  # only where a browser is asked for

    if not (DISPLAY.read() or WAYLAND_DISPLAY.read()):
        raise Absent("there is no display: neither DISPLAY nor WAYLAND_DISPLAY is set")
    found = webbrowser.get()  # raises webbrowser.Error where there is none
    name = getattr(found, "name", type(found).__name__)
    if isinstance(found, webbrowser.GenericBrowser) and not isinstance(found, webbrowser.BackgroundBrowser):
        raise Absent(f"{name} runs in this terminal")
    return str(name)


def open_browser(address: str) -> str | None:
    """Open a page in the user's browser; return why that failed, or None."""
    found = capability("browser")
    if not found.present:
        return found.detail
    import webbrowser  # see _browser

    try:
        return None if webbrowser.open(address) else f"{found.detail} could not be started"
    except (webbrowser.Error, OSError) as error:
        return str(error)
