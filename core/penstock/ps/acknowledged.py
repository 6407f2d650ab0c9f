"""Which pushes a server has acknowledged, where there are no rounds; so that one that has lost them is noticed."""

from __future__ import annotations

import threading

from penstock.errors import PeerError


def state_lost(endpoint: str, how_far: str) -> PeerError:
    """Return the error of a server that does not know any more what it has acknowledged. `how_far`: its state."""
    return PeerError(
        f"{endpoint} {how_far}: it was started again without its state. Give servers a PENSTOCK_PS_STATE_DIR that "
        "outlives them, or start the job again",
        endpoint=endpoint,
    )


class Acknowledged:
    """Pushes of one trainer to one server, by their numbers, which only grow. Thread-safe.

    A push of another thread may be acknowledged while a join is on its way: what the join's answer has to know of is
    `newest` as it was when it was sent.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._newest = 0

    @property
    def newest(self) -> int:
        """The largest number of a push that is acknowledged; 0: none is."""
        return self._newest

    def note(self, number: int) -> None:
        """The server has acknowledged this push."""
        with self._lock:
            self._newest = max(self._newest, number)

    def check(self, applied: int, newest: int) -> None:
        """Raise PeerError if a server that has applied pushes up to `applied` has acknowledged `newest`."""
        if applied < newest:
            raise state_lost(
                self._endpoint, f"has applied this trainer's pushes up to {applied}, but has acknowledged {newest}"
            )
