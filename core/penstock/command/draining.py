"""node cordon|uncordon|drain: which machines take jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.command.exits import TimedOut
from penstock.command.follow import Away
from penstock.command.options import Json, Timeout, Token, Url
from penstock.command.output import emit_json, note, printable
from penstock.command.profile import connect
from penstock.errors import SpecError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.client import Client, Node  # loads httpx

node_commands = typer.Typer(no_args_is_help=True, help="Machines: whether jobs are placed on them.")
POLL_S = 1.0
_AWAY = ("UNREACHABLE", "JOINING")
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="id of a node, or its name")]


@node_commands.command("cordon")
def cordon(name: NodeName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Place nothing more on a node. What runs there goes on."""
    with connect(url, token) as client:
        _show(client.want_node(find(client, name)["id"], "cordon"), json=json)


@node_commands.command("uncordon")
def uncordon(name: NodeName, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Place jobs on a node again; ends a drain."""
    with connect(url, token) as client:
        _show(client.want_node(find(client, name)["id"], "uncordon"), json=json)


@node_commands.command("drain")
def drain(
    name: NodeName,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=0,
            help="preempt what still runs after this long (default: wait for it)",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="return once nothing runs there any more")] = False,
    timeout: Timeout = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Place nothing more on a node, and empty it: what runs there ends, or is preempted after the deadline."""
    with connect(url, token) as client:
        node = client.want_node(find(client, name)["id"], "drain", deadline_s=deadline)
        if wait:
            node = wait_until_drained(client, node, timeout_s=timeout)
    _show(node, json=json)


def find(client: Client, name: str) -> Node:
    """Return the node of this id or name. Raises NotFound, or SpecError if several have the name."""
    from penstock.problems import NotFound  # loads httpx

    found = [node for node in client.nodes() if name in (node["id"], node["name"])]
    if not found:
        raise NotFound(f"there is no node {name!r}; 'penstock nodes' lists them")
    if len(found) > 1:
        ids = ", ".join(f"{node['id']} on {node['host']}" for node in found)
        raise SpecError(f"{len(found)} nodes have the name {name!r}; give the id of one: {ids}")
    return found[0]


def wait_until_drained(
    client: Client,
    node: Node,
    *,
    timeout_s: float | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Node:
    """Return a draining node once nothing runs on it. A server that is unreachable is waited for, for a minute.

    Raises TimedOut after `timeout_s`, SpecError if the drain was ended meanwhile.
    """
    give_up_at = None if timeout_s is None else clock() + timeout_s
    away, said = Away(clock), ""
    while node["state"] == "DRAINING" or node["state"] in _AWAY:
        if standing(node) != said:
            said = standing(node)
            note(f"{node['name']}: {node['replicas']} replicas run there; {said}")
        if give_up_at is not None and clock() >= give_up_at:
            raise TimedOut(f"node {node['name']!r} is {node['state']} after {timeout_s:g} s; its drain goes on")
        sleep(POLL_S)
        try:
            node = client.node(node["id"])
        except Unavailable as error:
            away.silent(error)
        else:
            away.answered()
    if node["state"] not in ("DRAINED", "DOWN"):
        raise SpecError(f"node {node['name']!r} is {node['state']}: its drain was ended by someone else")
    return node


def standing(node: Node) -> str:
    """Describe why a node is in its state; empty for one that takes jobs, or of an older server."""
    return "" if node["state"] in ("READY", "JOINING") else str(node.get("reason_detail", ""))


def _show(node: Node, *, json: bool) -> None:
    if json:
        emit_json(node)
        return
    why = standing(node)
    print(printable(f"{node['name']} is {node['state']}" + (f": {why}" if why else "")))
