"""nodes, token create|list|revoke, login-link, agent join|token."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock import settings
from penstock.command.draining import standing
from penstock.command.options import Json, Token, Url, memory_option
from penstock.command.output import emit_json, emit_table, note
from penstock.command.profile import connect

if TYPE_CHECKING:
    from penstock.client import Token as TokenOf  # loads httpx

token_commands = typer.Typer(no_args_is_help=True, help="API tokens.")
agent_commands = typer.Typer(no_args_is_help=True, help="The agent that runs jobs on a machine.")


def nodes(url: Url = None, token: Token = None, json: Json = False) -> None:
    """List the machines that run jobs."""
    with connect(url, token) as client:
        found = list(client.nodes())
        pilots = [] if json else client.pilots()
    if json:
        emit_json(found)
        return
    rows = [
        [
            n["id"], n["name"], n["state"], f"{n['cpus_used']:g}/{n['cpus']}", str(n["gpus"]), n["last_seen_at"] or "-",
            ",".join(f"{key}={value}" for key, value in sorted(n.get("labels", {}).items())) or "-",
            standing(n) or "-",
        ]
        for n in found
    ]  # fmt: skip
    empty = "there are no nodes; 'penstock agent token' makes a token with which one joins"
    emit_table(["NODE", "NAME", "STATE", "CPUS", "GPUS", "LAST SEEN", "LABELS", "REASON"], rows, empty=empty)
    if pilots:
        emit_table(
            ["PILOT", "CLUSTER", "STATE", "REASON"],
            [[one["name"], one["cluster"], one["state"], one["reason"]] for one in pilots],
            empty="",
        )
    for node in found:
        for one in node.get("findings", []):  # an older server sends none
            note(f"{node['name']}: {one['level']}: {one['name']}: {one['detail']} → {one['advice']}")


@token_commands.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="what the token is for")],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, submit, attach or admin, in all projects; may be repeated"),
    ] = None,
    role: Annotated[str | None, typer.Option("--role", help="viewer, runner or admin: instead of scopes")] = None,
    project: Annotated[
        list[str] | None,
        typer.Option("--project", metavar="NAME[=ROLE]", help="for this project alone; may be repeated (default: all)"),
    ] = None,
    expires_in: Annotated[int | None, typer.Option("--expires-in", metavar="SECONDS", min=1)] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Make a token. Its secret is printed once and kept nowhere."""
    projects = _roles(project or [], role)
    if (scope is not None) + (role is not None or bool(projects)) != 1:
        raise typer.BadParameter("give --scope, or --role, or --project with a role: one way of saying what it may do")
    with connect(url, token) as client:
        if projects:
            made = client.create_token(name, projects=projects, expires_in_s=expires_in)
        else:
            made = client.create_token(name, scope, role=role, expires_in_s=expires_in)
    emit_json(made) if json else print(made["token"])


def _roles(projects: list[str], role: str | None) -> dict[str, str]:
    """Return the role in each project; one that names none has `role`. Raises BadParameter."""
    found: dict[str, str] = {}
    for text in projects:
        name, _, own = text.partition("=")
        chosen = own or role
        if not chosen:
            raise typer.BadParameter(f"--project {text} has no role; write {name}=viewer, or give --role")
        if found.setdefault(name, chosen) != chosen:
            raise typer.BadParameter(f"--project {name} is given as {found[name]} and as {chosen}")
    return found


def _powers(item: TokenOf) -> str:
    projects = item.get("projects")  # an older server sends none
    if projects is None:
        return ",".join(item["scopes"])
    return ",".join(f"{name}={role}" for name, role in sorted(projects.items()))


@token_commands.command("list")
def list_tokens(url: Url = None, token: Token = None, json: Json = False) -> None:
    """List the tokens, without their secrets."""
    with connect(url, token) as client:
        found = list(client.tokens())
    if json:
        emit_json(found)
        return
    rows = [
        [
            item["id"], item["name"], _powers(item), item["expires_at"] or "never", item["last_used_at"] or "-",
            item["revoked_at"] or "-",
        ]
        for item in found
    ]  # fmt: skip
    emit_table(["TOKEN", "NAME", "SCOPES", "EXPIRES", "LAST USED", "REVOKED"], rows, empty="there are no tokens")


@token_commands.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="id, from 'penstock token list'")],
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Make a token worthless, and end the browser sessions that were opened by it."""
    with connect(url, token) as client:
        client.revoke_token(token_id)
    if json:
        emit_json({"id": token_id, "revoked": True})


def login_link(url: Url = None, token: Token = None, json: Json = False) -> None:
    """Print a link that logs a browser in, once, within five minutes."""
    with connect(url, token) as client:
        code = client.login_code()
        link = f"{client.url}/login#code={code}"  # of the server that has made it
    emit_json({"link": link}) if json else print(link)


@agent_commands.command("token")
def agent_token(
    expires_in: Annotated[int, typer.Option("--expires-in", metavar="SECONDS", min=1)] = 300,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Make a token with which one machine joins, once."""
    with connect(url, token) as client:
        made = client.join_token(expires_in_s=expires_in)
        if json:
            emit_json({**made, "url": client.urls})
            return
        note(f"on the new machine: penstock agent join --url {client.urls} --join-token …")
    print(made["token"])


@agent_commands.command("join")
def agent_join(
    url: Annotated[
        str | None,
        typer.Option("--url", envvar=settings.URL.name, help="of the server; of several, with commas between"),
    ] = None,
    join_token: Annotated[
        str | None, typer.Option("--join-token", envvar=settings.JOIN_TOKEN.name, help="from 'penstock agent token'")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="name of this node (default: host name)")] = None,
    state_dir: Annotated[Path | None, typer.Option("--state-dir", help="default: ~/.penstock/agent")] = None,
    grace: Annotated[
        float | None, typer.Option("--grace", metavar="SECONDS", help="how long jobs outlive a lost server")
    ] = None,
    cpus: Annotated[int | None, typer.Option("--cpus", min=1, help="cores that the node offers (default: all)")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs that the node offers (default: all)")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="memory that the node offers, e.g. 8GiB")] = None,
    once: Annotated[bool, typer.Option("--once", help="take one job, and end when it is over")] = False,
    ttl: Annotated[
        float | None, typer.Option("--ttl", metavar="SECONDS", help="end after this time: drain, then preempt")
    ] = None,
    drain: Annotated[
        float | None, typer.Option("--drain", metavar="SECONDS", help="of --ttl, the time without new jobs (60)")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="of this node, for node_selector of jobs; may be repeated"),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="certificate chain (PEM) of this node, for the server")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="private key of --tls-cert (PEM)")] = None,
    run_as: Annotated[
        str | None, typer.Option("--run-as", metavar="USER", help="as whom jobs run, of an agent that is root")
    ] = None,
) -> None:
    """Run the agent of this machine until it is stopped. The second start needs no join token."""
    size = None if memory is None else memory_option(memory)
    given = {
        "--url": url, "--name": name, "--state-dir": state_dir, "--grace-s": grace, "--ttl": ttl, "--drain": drain,
        "--cpus": cpus, "--gpus": gpus, "--memory": size, "--tls-cert": tls_cert, "--tls-key": tls_key,
        "--run-as": run_as,
    }  # fmt: skip
    arguments = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
    arguments += ["--once"] if once else []
    arguments += [f"--label={text}" for text in label or []]
    environ = dict(os.environ)
    if join_token is not None:
        environ[settings.JOIN_TOKEN.name] = join_token  # not an argument: those can be seen by everyone
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "penstock_worker", *arguments], environ)
