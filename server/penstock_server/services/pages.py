"""Cursor pages over rows ordered by UUIDv7. A token is the last identifier that was shown, so pages never shift."""

from __future__ import annotations

import base64
import re
import uuid

from penstock_server.problems import Problem

DEFAULT_SIZE = 50
MAX_SIZE = 200
TOKEN = "^[A-Za-z0-9_-]{21}[AQgw]$"
"""Sixteen bytes in base64: the last character stands for two bits."""


def to_token(last_id: str) -> str:
    """Return the token of the page after `last_id`."""
    return base64.urlsafe_b64encode(uuid.UUID(last_id).bytes).decode().rstrip("=")


def from_token(token: str | None) -> str | None:
    """Return the identifier in a page token. Raises a problem if it is not one of ours."""
    if token is None:
        return None
    if re.fullmatch(TOKEN, token) is None:
        raise Problem(422, "invalid_page_token", f"page_token {token[:40]!r} was not given by this server")
    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(token + "==")))
