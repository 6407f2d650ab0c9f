"""Secrets and their keyed hashes. A secret is shown once; the database holds HMAC-SHA-256 of it.

The key ("pepper") lies in a file of its own, so that a stolen database opens nothing. Looking a token up
is one indexed equality on the hash, which shows nothing of how near a guess was.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Literal

from penstock.process.private import write_private

TokenKind = Literal["user", "node", "join", "login", "session", "pilot"]

_PREFIX: dict[TokenKind, str] = {
    "user": "psu", "node": "psn", "join": "psj", "login": "psl", "session": "pss", "pilot": "psp",
}  # fmt: skip


def new_secret(kind: TokenKind) -> str:
    """Return a fresh secret of 256 bits; its prefix names its kind."""
    return f"{_PREFIX[kind]}_{secrets.token_urlsafe(32)}"


def keyed_hash(pepper: bytes, secret: str) -> str:
    """Return the hash under which a secret is stored."""
    return hmac.new(pepper, secret.encode(), hashlib.sha256).hexdigest()


def load_pepper(state_dir: Path) -> bytes:
    """Return the server's key, made at the first start."""
    path = state_dir / "pepper.key"
    if not path.exists():
        write_private(path, secrets.token_bytes(32), durable=True)
    return path.read_bytes()
