"""Secrets and their keyed hashes. A secret is shown once; the database holds HMAC-SHA-256 of it.

The key ("pepper") lies in a file of its own, so that a stolen database opens nothing. Looking a token up
is one indexed equality on the hash, which shows nothing of how near a guess was.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

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


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read (0600), whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_pepper(state_dir: Path) -> bytes:
    """Return the server's key, made at the first start."""
    path = state_dir / "pepper.key"
    if not path.exists():
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()
