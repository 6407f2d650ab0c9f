"""`python -m penstock_worker`: run the agent of this machine (what `penstock agent join` starts).

Exit status: 0 stopped by a signal, 2 usage, 4 refused by the server, 5 the state folder is in use, 6 no server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.imports import importing

with importing():
    from filelock import FileLock, Timeout

    from penstock.client import AuthError, Conflict
    from penstock.errors import PenstockError, SpecError, Unavailable
    from penstock.failover import ServerAddresses
    from penstock.process.private import make_private
    from penstock.protocol.jobspec import labels_of
    from penstock.settings import JOIN_TOKEN, TLS_CERT, TLS_KEY
    from penstock.tls import ClientCertificate
    from penstock_worker import accounts, identity, lease, pilot
    from penstock_worker.agent import Agent, Settings

FILES = frozenset({"node.json", "agent.lock", "lease.json", "replicas", "snapshots"})
"""Of these one is there in a folder that an agent used before."""


def main(argv: list[str] | None = None) -> int:
    """Parse, join if need be, serve. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    state_dir: Path = arguments.state_dir.expanduser().absolute()
    hidden = tuple(path.expanduser().absolute() for path in arguments.hide)
    status = 0
    try:
        terms = _terms(arguments)
        labels = labels_of(arguments.label)  # before a join, which would use up the token
        certificate = ClientCertificate.of(arguments.tls_cert, arguments.tls_key)
        with _only_one(state_dir):
            identity = _identity(arguments, state_dir, certificate)
            settings = Settings(
                state_dir,
                arguments.grace_s,
                terms,
                hidden,
                certificate,
                _account(arguments.run_as),
                labels,
            )
            asyncio.run(_serve(Agent(identity, settings)))
    except* PenstockError as group:  # the agent's task group wraps what its tasks raise
        error = _first(group)
        print(f"penstock agent: {error}", file=sys.stderr)
        status = _status(error)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock agent join", description="Run the agent of this machine.")
    parser.add_argument(
        "--url", help="address of the server, e.g. http://127.0.0.1:8470; of several, with commas between"
    )
    parser.add_argument("--join-token", default=JOIN_TOKEN.read() or None, help=f"one-time token, or {JOIN_TOKEN.name}")
    parser.add_argument("--name", help="name of this node (default: host name)")
    parser.add_argument("--state-dir", type=Path, default=Path("~/.penstock/agent"))
    parser.add_argument("--grace-s", type=float, help="seconds that replicas outlive the lease (default: the server's)")
    parser.add_argument("--cpus", type=_whole, help="cores that this node offers (default: those of the machine)")
    parser.add_argument("--gpus", type=_whole, help="GPUs that this node offers")
    parser.add_argument("--memory", type=_whole, metavar="BYTES", help="memory that this node offers")
    parser.add_argument("--once", action="store_true", help="take one job, and leave when it is over")
    parser.add_argument("--ttl", type=_positive, metavar="S", help="leave after so many seconds: drain, then preempt")
    parser.add_argument("--drain", type=_positive, metavar="S", help="of them, how many to take no new job in")
    parser.add_argument(
        "--hide", type=Path, action="append", default=[], help="a path that jobs do not see, such as a server's state"
    )
    parser.add_argument(
        "--tls-cert", type=Path, default=TLS_CERT.read(), help="certificate chain (PEM) of this node, for the server"
    )
    parser.add_argument("--tls-key", type=Path, default=TLS_KEY.read(), help="private key of --tls-cert (PEM)")
    parser.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="of this node, for node_selector of jobs"
    )
    parser.add_argument("--run-as", metavar="USER", help="as whom jobs run, of an agent that is root")
    return parser


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _account(name: str | None) -> accounts.Account | None:
    try:
        return None if name is None else accounts.find(name)
    except ValueError as error:
        raise SpecError(str(error)) from error


def _terms(arguments: argparse.Namespace) -> pilot.Terms | None:
    if arguments.drain is not None and arguments.ttl is None:
        raise SpecError("--drain is part of --ttl; give that, too")
    return pilot.terms(once=arguments.once, ttl_s=arguments.ttl, drain_s=arguments.drain, now=lease.now())


def _identity(
    arguments: argparse.Namespace, state_dir: Path, certificate: ClientCertificate | None
) -> identity.Identity:
    url = None if arguments.url is None else str(ServerAddresses(arguments.url))
    former = identity.load(state_dir)
    known = _known(former, url)
    if known is not None and not arguments.join_token:
        if known != former:
            identity.write(state_dir, known)
        return known
    if url is None or not arguments.join_token:
        raise SpecError(
            f"{state_dir} holds no node of {url or 'any server'}; give --url and --join-token "
            "(make one with 'penstock agent token')"
        )
    is_pilot = arguments.once or arguments.ttl is not None
    offer = identity.offer(cpus=arguments.cpus, gpus=arguments.gpus, memory_bytes=arguments.memory)
    join = partial(
        identity.join, url, arguments.join_token, name=arguments.name, state_dir=state_dir, offer=offer,
        is_pilot=is_pilot, certificate=certificate,
    )  # fmt: skip
    return identity.join_within(join) if is_pilot else join()


def _known(former: identity.Identity | None, url: str | None) -> identity.Identity | None:
    """Return the node of a former run if it is one of the servers at `url`, with those addresses."""
    if former is None or url is None:
        return former
    return replace(former, url=url) if ServerAddresses(url).shares_one_with(former.url) else None


@contextmanager
def _only_one(state_dir: Path) -> Iterator[None]:
    """Hold the state folder's lock. Raises Conflict if another agent has it."""
    try:
        make_private(state_dir, FILES)
    except PermissionError as error:
        raise SpecError(str(error)) from error
    path = state_dir / "agent.lock"
    try:
        with FileLock(path, mode=0o600, blocking=False):  # else a job of another user could hold it
            path.chmod(0o600)  # of an older agent
            path.write_text(str(os.getpid()))
            yield
    except Timeout:
        raise Conflict(
            f"another agent (pid {path.read_text().strip()}) uses {state_dir}; stop it or give another --state-dir"
        ) from None


async def _serve(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps its meaning
            loop.add_signal_handler(number, agent.stop)
    await agent.run()


def _first(group: BaseExceptionGroup[PenstockError]) -> PenstockError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, PenstockError):
        raise error
    return error


def _status(error: PenstockError) -> int:
    match error:
        case AuthError():
            return 4
        case Conflict():
            return 5
        case Unavailable():
            return 6
        case _:
            return 2


if __name__ == "__main__":
    sys.exit(main())
