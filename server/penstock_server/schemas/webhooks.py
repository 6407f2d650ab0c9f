"""Webhooks as the REST API takes and gives them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from penstock.protocol.jobspec import NAME
from penstock.protocol.states import JobState
from penstock_server.schemas.api import Answer, Request, Timestamp

_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
URL = rf"^https?://[a-z0-9]([a-z0-9.-]{{0,250}}[a-z0-9])?(:({_PORT}))?(/[!-~]{{0,1000}})?$"
SECRET = r"^whsec_([A-Za-z0-9+/]{4}){8,16}$"
ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class WebhookRequest(Request):
    """A webhook to make."""

    url: Annotated[str, StringConstraints(pattern=URL)] = Field(
        description="receives POST requests; http or https, its host in lower case",
        examples=["https://hooks.example.org/penstock"],
    )
    events: list[JobState] = Field(list(ENDS), min_length=1, max_length=9, description="states that jobs come to")
    project: Annotated[str, StringConstraints(pattern=NAME)] | None = Field(
        None, description="jobs of this project alone; default: of all"
    )
    secret: Annotated[str, StringConstraints(pattern=SECRET)] | None = Field(
        None, description="base64 of 24 to 48 bytes after 'whsec_'; default: the server makes one"
    )


class Webhook(Answer):
    """A webhook, without its secret. `reason`: why it is disabled, or how the last attempt failed."""

    id: str
    url: str
    events: list[JobState]
    project: str | None
    created_at: Timestamp
    failures: int = Field(description="attempts in a row that failed")
    next_at: Timestamp | None = Field(description="before this nothing is sent, since the last attempt failed")
    disabled_at: Timestamp | None
    reason: str


class WebhookMade(Webhook):
    """A new webhook with its secret, which is shown once."""

    secret: str


class WebhookDelivery(Answer):
    """What a webhook receives. `id`: the header `webhook-id`, the same at each attempt."""

    id: str
    webhook_id: str
    type: str
    body: str
    created_at: Timestamp
    attempts: int
    delivered_at: Timestamp | None
    status: int | None = Field(description="of the last answer")
    error: str
