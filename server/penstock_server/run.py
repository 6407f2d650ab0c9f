"""Serve: bind, open the runtime, run uvicorn until a signal, close everything in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import cast

import structlog
import uvicorn

from penstock.compat.uvicorn import HttpProtocol, SignalFreeServer, WebSocketProtocol
from penstock.errors import PenstockError, Unavailable
from penstock.machine.network import family_of, only_loopback
from penstock.protocol.frames import MAX_FRAME_BYTES
from penstock_server.admission import BACKLOG, AcceptErrors, Admission, room_for_connections
from penstock_server.app import app_of
from penstock_server.garbage import rarely_collected
from penstock_server.runtime import Runtime
from penstock_server.settings import Settings
from penstock_server.standby import opened_in_turn
from penstock_server.statedir import write_address
from penstock_server.watchdog import Watchdog

EXIT_OK, EXIT_UNAVAILABLE = 0, 6
_STOP_S = 5
SWITCH_S = 0.001
"""After so long a thread that wants the interpreter gets it. SQLite's lets go of it at each step of a statement, and
waits for a busy event loop each time: with Python's 5 ms a transaction of seven took 16 ms in the median."""
MAX_HEAD_BYTES = 64 << 10

log = structlog.get_logger(__name__)


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. A cause that a person can mend is one line on stderr."""
    configure_logging(settings)
    os.umask(0o077)  # the database, logs and telemetry are for no other user
    try:
        check_exposure(settings)
        with _bound(settings) as listener:
            asyncio.run(_serve(settings, listener))
    except PenstockError as error:
        print(f"penstock server: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    return EXIT_OK


def check_exposure(settings: Settings) -> None:
    """Raise Unavailable if tokens would cross a network in clear text without `insecure`."""
    if settings.tls_cert is not None or settings.insecure or only_loopback(settings.host):
        return
    raise Unavailable(
        f"{settings.host} can be reached from other machines, and without TLS what is on the way can read every token. "
        "Give --tls-cert and --tls-key; or, if the network is trusted or a proxy has the TLS, --insecure."
    )


@contextmanager
def _bound(settings: Settings) -> Generator[socket.socket]:
    try:
        family = family_of(settings.host)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except (OSError, OverflowError) as error:
            raise _cannot_listen(settings, error) from error
        yield listener


def _cannot_listen(settings: Settings, error: Exception) -> Unavailable:
    where = f"{settings.host}:{settings.port}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return Unavailable(
            f"cannot listen on {where}: the port is in use. Stop what listens there (`ss -ltnp` names it), "
            "or choose another port with --port (0: any free one)."
        )
    return Unavailable(f"cannot listen on {where}: {error}. Choose another address with --host and --port.")


def make_server(runtime: Runtime) -> uvicorn.Server:
    """Return a server over an open runtime; it takes no signals by itself."""
    settings = runtime.settings
    admission = Admission(settings.request_head_s, room_for_connections())
    config = uvicorn.Config(
        app_of(runtime),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        http=cast("type[asyncio.Protocol]", partial(HttpProtocol, admission)),  # called, and nothing else
        ws=WebSocketProtocol,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=_client_certificates(settings),
        ws_per_message_deflate=False,
        # uvicorn believes every local peer by default: any user of this machine could give another address as its own.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(network) for network in settings.trusted_proxies],
        ws_max_size=MAX_FRAME_BYTES + (1 << 20),
        timeout_graceful_shutdown=_STOP_S,
    )
    return _Server(config, runtime)


def _client_certificates(settings: Settings) -> ssl.VerifyMode:
    """Return what TLS wants of clients. Which of them may come without one, the guard decides, and can explain it."""
    if settings.tls_client_ca is None:
        return ssl.CERT_NONE
    return ssl.CERT_REQUIRED if settings.tls_client_required == "all" else ssl.CERT_OPTIONAL


class _Server(SignalFreeServer):
    def __init__(self, config: uvicorn.Config, runtime: Runtime) -> None:
        super().__init__(config)
        self._runtime = runtime

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Have requests that wait for a change answer now, then stop."""
        self._runtime.changes.close()
        self._runtime.log_changes.close()
        await super().shutdown(sockets)


async def _serve(settings: Settings, listener: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    sys.setswitchinterval(SWITCH_S)
    async with opened_in_turn(settings, listener) as runtime:
        if runtime is not None:
            await _lead(runtime, listener)
    log.info("server stopped")


async def _lead(runtime: Runtime, listener: socket.socket) -> None:
    settings = runtime.settings
    server = make_server(runtime)
    host, port = listener.getsockname()[:2]
    host = settings.advertise_host or host
    scheme = "http" if settings.tls_cert is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    write_address(settings.state_dir, url)
    log.info("server listens", url=url, state_dir=str(settings.state_dir))
    _stop_on_signals(server)
    ending = asyncio.create_task(_stop_when_taken_over(server, runtime))
    try:
        async with Watchdog(runtime.meters.stalls).watching(), rarely_collected():
            await server.serve(sockets=[listener])
    finally:
        ending.cancel()
    if runtime.database.taken_over.is_set():
        raise Unavailable("another server has taken over the database. Stop that one before you start this again.")


async def _stop_when_taken_over(server: uvicorn.Server, runtime: Runtime) -> None:
    await runtime.database.taken_over.wait()
    server.should_exit = True


def _stop_on_signals(server: uvicorn.Server) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True  # asked twice: do not wait for connections
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def configure_logging(settings: Settings) -> None:
    """Set up logging for the whole process; the standard library's loggers go the same way."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if settings.log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,  # the rich one prints locals, secrets among them
        )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for quiet in ("uvicorn", "uvicorn.error", "alembic", "aiosqlite", "asyncio"):
        logging.getLogger(quiet).setLevel(max(level, logging.WARNING))
