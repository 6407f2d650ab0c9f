"""What a webhook receives and when: body, signature, back-off. Pure.

Header names, the signed content and the form of secrets follow the Standard Webhooks specification
(https://www.standardwebhooks.com), so that its libraries verify what Penstock sends.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from datetime import datetime, timedelta
from typing import Any

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 24
FIRST_S = 5.0
LONGEST_S = 3600.0
MAX_FAILURES = 12
"""Failures in a row after which a webhook is disabled: some two hours."""
GONE = 410
JOB_STATE = "job.state"
TEST = "test"


def new_secret() -> str:
    """Return a random secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def body_of(kind: str, at: datetime, data: dict[str, Any]) -> str:
    """Return the JSON text of a delivery; the same text is sent and signed at each attempt."""
    return json.dumps({"type": kind, "timestamp": at.isoformat(), "data": data}, separators=(",", ":"))


def headers_of(delivery_id: str, body: str, secret: str, at: datetime) -> dict[str, str]:
    """Return the headers of an attempt at `at`."""
    second = str(int(at.timestamp()))
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    digest = hmac.new(key, f"{delivery_id}.{second}.{body}".encode(), hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "user-agent": "penstock-webhooks",
        "webhook-id": delivery_id,
        "webhook-timestamp": second,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def pause_after(failures: int, luck: float) -> timedelta:
    """Return the pause after so many failures in a row: exponential, with jitter. `luck`: uniform in [0, 1)."""
    longest = min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 1, 20))
    return timedelta(seconds=longest * (0.5 + luck / 2))
