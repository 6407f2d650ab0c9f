"""Cursor pages over rows ordered by UUIDv7. A token is the last identifier that was shown, so pages never shift.

Of a list in another order a token has the place of that row as well, as it was when the page was given.
"""

from __future__ import annotations

import base64
import re
import uuid

from penstock_server.problems import Problem

DEFAULT_SIZE = 50
MAX_SIZE = 200
TOKEN = "^[A-Za-z0-9_-]{21}[AQgw]$"
"""Sixteen bytes in base64: the last character stands for two bits."""
PLACED_TOKEN = TOKEN[:-1] + "([.]([0-9]|[0-9a-f]{16}))?$"
"""With a place: of a group, or an IEEE double in hexadecimal digits."""


def to_token(last_id: str) -> str:
    """Return the token of the page after `last_id`."""
    return base64.urlsafe_b64encode(uuid.UUID(last_id).bytes).decode().rstrip("=")


def to_placed_token(last_id: str, place: str) -> str:
    """Return the token of the page after `last_id` at a place; '' for none."""
    return f"{to_token(last_id)}.{place}" if place else to_token(last_id)


def from_placed_token(token: str | None) -> tuple[str | None, str]:
    """Return the identifier and the place in a page token. Raises a problem if it is not one of ours."""
    return from_token(token, PLACED_TOKEN), (token or "").partition(".")[2]


def from_token(token: str | None, pattern: str = TOKEN) -> str | None:
    """Return the identifier in a page token. Raises a problem if it is not one of ours."""
    if token is None:
        return None
    if re.fullmatch(pattern, token) is None:
        raise Problem(422, "invalid_page_token", f"page_token {token[:40]!r} was not given by this server")
    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(token[:22] + "==")))
