"""webhooks add|list|remove|test|enable|deliveries: where changes of jobs' states are posted to."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.command.options import Json, Token, Url
from penstock.command.output import emit_json, emit_table, note, printable
from penstock.command.profile import connect

webhook_commands = typer.Typer(no_args_is_help=True, help="Webhooks: posts of changes of jobs' states.")
Id = Annotated[str, typer.Argument(help="of the webhook")]


@webhook_commands.command("add")
def add_webhook(
    to: Annotated[str, typer.Argument(metavar="URL", help="receives the posts")],
    event: Annotated[
        list[str] | None,
        typer.Option(
            "--event", help="a state that jobs come to; may be repeated (default: SUCCEEDED FAILED CANCELLED)"
        ),
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="its jobs alone (default: those of all)")] = None,
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Post changes of jobs' states to URL. Prints the secret that they are signed with; it is shown once."""
    fields = {"events": event, "project": project}
    with connect(url, token) as client:
        made = client.add_webhook(to, **{name: value for name, value in fields.items() if value})
    if json:
        emit_json(made)
        return
    note(f"webhook {made['id']}; its secret is shown once:")
    print(made["secret"])


@webhook_commands.command("list")
def list_webhooks(url: Url = None, token: Token = None, json: Json = False) -> None:
    """List webhooks, without their secrets."""
    with connect(url, token) as client:
        found = client.webhooks()
    if json:
        emit_json(found)
        return
    rows = [
        [
            one["id"], printable(one["url"]), ",".join(one["events"]), one["project"] or "-",
            "disabled" if one["disabled_at"] else "enabled", printable(one["reason"]) or "-",
        ]
        for one in found
    ]  # fmt: skip
    emit_table(["WEBHOOK", "URL", "EVENTS", "PROJECT", "STATE", "REASON"], rows, empty="there are no webhooks")


@webhook_commands.command("remove")
def remove_webhook(webhook: Id, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Remove a webhook, with its pending deliveries."""
    with connect(url, token) as client:
        client.remove_webhook(webhook)
    emit_json({"id": webhook}) if json else print(webhook)


@webhook_commands.command("test")
def send_test(webhook: Id, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Queue a delivery of the type `test`; `deliveries` shows whether it was received."""
    with connect(url, token) as client:
        queued = client.test_webhook(webhook)
    emit_json(queued) if json else print(queued["id"])


@webhook_commands.command("enable")
def enable_webhook(webhook: Id, url: Url = None, token: Token = None, json: Json = False) -> None:
    """Resume a disabled or paused webhook at once, starting with the oldest pending delivery."""
    with connect(url, token) as client:
        enabled = client.enable_webhook(webhook)
    emit_json(enabled) if json else print(webhook)


@webhook_commands.command("deliveries")
def list_deliveries(webhook: Id, url: Url = None, token: Token = None, json: Json = False) -> None:
    """List the deliveries of the last week, newest first."""
    with connect(url, token) as client:
        found = list(client.webhook_deliveries(webhook))
    if json:
        emit_json(found)
        return
    rows = [
        [
            one["id"], one["type"], one["created_at"], str(one["attempts"]), one["delivered_at"] or "-",
            printable(one["error"]) or "-",
        ]
        for one in found
    ]  # fmt: skip
    emit_table(["DELIVERY", "TYPE", "CREATED", "ATTEMPTS", "DELIVERED", "ERROR"], rows, empty="there are no deliveries")
