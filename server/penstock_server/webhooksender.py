"""One request to a receiver of webhooks, which any user may name: no way into the operator's own network.

The name is resolved here, every address that it has is checked, and the connection goes to one of these addresses: a
name that resolves to something else a moment later changes nothing. Loopback, link-local (cloud metadata among them),
private, shared, multicast and reserved addresses are refused unless `webhook_allow` has their network. No redirect is
followed; proxies of the environment are not used. An attempt takes at most `LIMIT_S`, and ends with the head of the
answer: no body is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LIMIT_S = 10.0
CONNECT_S = 3.0
"""Of one address of a name: the next is tried after it."""
MAX_LOOKUPS = 128
"""Names that are resolved at once, each in one thread: more than there are webhooks, so that name servers that hang
delay no other name."""
_NOT_PUBLIC: tuple[Network, ...] = (
    ipaddress.IPv4Network("192.0.0.0/24"),  # metadata of some clouds; newer Pythons know that it is not global
    ipaddress.IPv4Network("168.63.129.16/32"),  # Azure's platform, from within a machine of it
    ipaddress.IPv4Network("192.88.99.0/24"),  # a relay of 6to4
)
"""What `is_global` takes for public."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


class NotSent(Exception):
    """An attempt that had no answer. The text says why."""


class Refused(NotSent):
    """An address that webhooks may not go to."""


def embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if it stands for one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None) or address


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Whether webhooks may go to an address: a public one, or one of a network that the operator allows."""
    meant = embedded(address)
    if any(one in network for network in allowed for one in (address, meant)):
        return True
    if isinstance(meant, ipaddress.IPv6Address) and meant not in _GLOBAL_UNICAST:
        return False  # site-local and IPv4-compatible ones, and prefixes that are not assigned
    return meant.is_global and not meant.is_multicast and not any(meant in network for network in _NOT_PUBLIC)


def require_allowed(host: str, addresses: Iterable[str], allowed: Sequence[Network]) -> None:
    """Raise Refused if one of a host's addresses may not be connected to."""
    for text in addresses:
        if not is_allowed(ipaddress.ip_address(text.partition("%")[0]), allowed):
            what = f"{host} has the address {text}, which is not public" if host != text else f"{host} is not public"
            raise Refused(f"{what}; an operator may allow its network with PENSTOCK_SERVER_WEBHOOK_ALLOW")


def _addresses(host: str) -> list[str]:
    """Ask the machine's name servers, as long as that takes."""
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class _Checked(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, and to no other."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed, self._inner = allowed, httpcore.AnyIOBackend()
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="webhook-name")
        self._running: dict[str, asyncio.Future[list[str]]] = {}  # look-ups, by host

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._look_up(host)
        require_allowed(host, addresses, self._allowed)
        failure: Exception = NotSent(f"{host} has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(address, port, timeout or CONNECT_S, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _look_up(self, host: str) -> list[str]:
        """Return the addresses of a host. What waits for the same name shares a thread, and may stop waiting for it."""
        running = self._running.get(host)
        if running is None:
            running = asyncio.get_running_loop().run_in_executor(self._lookups, _addresses, host)
            self._running[host] = running
            running.add_done_callback(partial(self._looked_up, host))
        return await asyncio.shield(running)

    def _looked_up(self, host: str, done: asyncio.Future[list[str]]) -> None:
        del self._running[host]
        if not done.cancelled():
            done.exception()  # seen, also if no task waits for it any more

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class Sender:
    """Sends to receivers. Owned by one event loop; keeps no connection."""

    def __init__(self, allowed: Sequence[Network], *, limit_s: float = LIMIT_S) -> None:
        self._backend, self._limit_s = _Checked(allowed), limit_s
        self._tls: ssl.SSLContext | None = None

    async def post(self, url: str, headers: dict[str, str], body: str) -> int:
        """Return the status of the answer. Raises NotSent if there is none."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._post(url, headers, body)
        except TimeoutError as error:
            raise NotSent(f"no answer within {self._limit_s:g} s") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
            raise NotSent(f"cannot be reached: {error}") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise NotSent(f"{type(error).__name__}: {error}") from error

    async def _post(self, url: str, headers: dict[str, str], body: str) -> int:
        if self._tls is None and url.startswith("https:"):
            self._tls = await asyncio.to_thread(ssl.create_default_context)  # reads the machine's certificates
        pool = httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=self._backend)
        async with pool, pool.stream("POST", url, headers=[*headers.items()], content=body.encode()) as answer:
            return int(answer.status)
