"""Webhooks: where changes of jobs' states are posted to."""

from __future__ import annotations

from penstock_server.auth.principal import Principal, by_project, scoped
from penstock_server.description import problems
from penstock_server.guard import require_project
from penstock_server.problems import Problem
from penstock_server.routers.deps import Asker, Id, PageSize, PageToken, Server
from penstock_server.routers.guarded import guarded_router
from penstock_server.schemas import api, webhooks
from penstock_server.services.pages import DEFAULT_SIZE

router = guarded_router("/api/v1", tag="webhooks")

ADMIN = frozenset({"admin"})


@router.post("/webhooks", status_code=201, operation_id="createWebhook", responses=problems(409))
@scoped("admin")
@by_project
async def create_webhook(server: Server, asker: Asker, body: webhooks.WebhookRequest) -> webhooks.WebhookMade:
    """Post changes of jobs' states to a URL from now on. The secret is in this answer and nowhere else.

    An administrator of projects makes webhooks for one of these.
    """
    _require_administrator(asker, body.project)
    return await server.webhooks.add(body)


def _require_administrator(asker: Principal, project: str | None) -> None:
    if asker.projects is None:
        return
    if project is None:
        raise Problem(
            403, "restricted_token", f"token {asker.name!r} makes webhooks for projects alone",
            hint=f"give 'project', of {', '.join(sorted(asker.projects_with(ADMIN) or ()))}",
        )  # fmt: skip
    require_project(asker, project, ADMIN)


@router.get("/webhooks", operation_id="listWebhooks")
@scoped("admin")
@by_project
async def list_webhooks(server: Server, asker: Asker) -> api.Items[webhooks.Webhook]:
    """List webhooks, oldest first. An administrator of projects sees those of these."""
    return api.Items(items=await server.webhooks.all(asker.projects_with(ADMIN)))


@router.delete("/webhooks/{webhook_id:id}", status_code=204, operation_id="removeWebhook")
@scoped("admin")
@by_project
async def remove_webhook(server: Server, asker: Asker, webhook_id: Id) -> None:
    """Remove a webhook, with its pending deliveries."""
    await server.webhooks.remove(webhook_id, asker.projects_with(ADMIN))


@router.post("/webhooks/{webhook_id:id}:enable", operation_id="enableWebhook")
@scoped("admin")
@by_project
async def enable_webhook(server: Server, asker: Asker, webhook_id: Id) -> webhooks.Webhook:
    """Resume a disabled or paused webhook at once, starting with the oldest pending delivery."""
    return await server.webhooks.enable(webhook_id, asker.projects_with(ADMIN))


@router.post("/webhooks/{webhook_id:id}:test", status_code=202, operation_id="testWebhook", responses=problems(409))
@scoped("admin")
@by_project
async def send_test(server: Server, asker: Asker, webhook_id: Id) -> webhooks.WebhookDelivery:
    """Queue a delivery of the type `test`."""
    return await server.webhooks.test(webhook_id, asker.projects_with(ADMIN))


@router.get("/webhooks/{webhook_id:id}/deliveries", operation_id="listWebhookDeliveries")
@scoped("admin")
@by_project
async def list_deliveries(
    server: Server, asker: Asker, webhook_id: Id, page_size: PageSize = DEFAULT_SIZE, page_token: PageToken = None
) -> api.Page[webhooks.WebhookDelivery]:
    """List the deliveries of the last week, newest first."""
    only = asker.projects_with(ADMIN)
    return await server.webhooks.deliveries(webhook_id, size=page_size, token=page_token, only=only)
