"""Addresses of the servers of one control plane, of which a process uses one until it fails. No I/O.

One server leads and the others pass connections on to it, so any address that answers will do (docs/server.md, standby
servers). What is sent to which of them, and what counts as a failure, is the caller's to decide.
"""

from __future__ import annotations

from penstock.errors import SpecError


class ServerAddresses:
    """`text`: one address, or several separated by commas, each `http://HOST:PORT` or https. Raises SpecError."""

    def __init__(self, text: str) -> None:
        self._all = tuple(dict.fromkeys(one.strip().rstrip("/") for one in text.split(",")))
        for one in self._all:
            if not one.startswith(("http://", "https://")):
                raise SpecError(f"server URL is {text!r}; expected http://… or https://…, several with commas between")
        self._index = self._num_failed = 0
        self._refusing: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __str__(self) -> str:
        return ",".join(self._all)

    @property
    def current(self) -> str:
        """The address to use now."""
        return self._all[self._index]

    @property
    def from_current(self) -> str:
        """All addresses as text, the current one first: for another process or client to begin with it."""
        return ",".join(self._all[self._index :] + self._all[: self._index])

    def failed(self, address: str) -> bool:
        """Go to the next address, unless another caller has gone on from `address`.

        Returns whether all have failed since the last success: wait before the next attempt.
        """
        if address != self.current:
            return False
        self._index = (self._index + 1) % len(self._all)
        self._num_failed += 1
        return self._num_failed % len(self._all) == 0

    def succeeded(self) -> None:
        """Begin to count anew: the current address answers."""
        self._num_failed = 0
        self._refusing.clear()

    def refused(self, address: str) -> bool:
        """Note that what answers at `address` refuses this caller; return whether all have, since the last success."""
        self._refusing.add(address)
        return len(self._refusing) == len(self._all)

    def shares_one_with(self, text: str) -> bool:
        """Return whether one of these addresses is in `text`: then both are of the same control plane."""
        return not set(self._all).isdisjoint(ServerAddresses(text)._all)
