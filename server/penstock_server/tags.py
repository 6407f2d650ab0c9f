"""Tags (ETag, If-Match) by which a writer names the state that it has seen. Pure.

Of rows with states a tag is their version; of a token, whether it was revoked; of a project, a hash of its terms, since
what it uses changes all the time.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from penstock_server.problems import Problem


def of_token(revoked_at: datetime | None) -> str:
    """Return the tag of a token: nothing else of it ever changes."""
    return "1" if revoked_at is None else "2"


def of_terms(share: float, *limits: int | None) -> str:
    """Return the tag of a project's terms."""
    return hashlib.sha256(repr((share, *limits)).encode()).hexdigest()[:16]


def require(what: str, current: str, given: str | None) -> None:
    """Raise a problem (412) if the caller names a state, and it is not the present one."""
    if given is not None and given != current:
        raise Problem(
            412,
            "version_mismatch",
            f"{what} has version {current}; If-Match names {given}",
            hint="look at it again, and decide anew",
        )
