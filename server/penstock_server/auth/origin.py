"""Whether a browser's request comes from our own pages. Pure.

A cookie is sent by the browser on its own, so a write (or a websocket) that rests on one must say where it
comes from. A missing Origin is a refusal: every browser that we support sends it on writes and websockets.
"""

from __future__ import annotations

from collections.abc import Collection

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def origin_allowed(origin: str | None, *, scheme: str, host: str | None, extra: Collection[str]) -> bool:
    """Whether `origin` is the server's own address as the request names it, or one that was configured."""
    if origin is None:
        return False
    own = {"ws": "http", "wss": "https"}.get(scheme, scheme)
    return origin in extra or (host is not None and origin == f"{own}://{host}")
