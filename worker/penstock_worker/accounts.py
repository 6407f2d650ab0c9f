"""The user as whom replicas run where the agent is root: its rights, its files, and the way to them.

What a replica owns is its working folder and what its job keeps on the node. The agent's folder and those above the
replica's can be walked through then, not listed (0711), and what the agent writes into them is root's alone (0600).
Standard library only: the guard loads it.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

WAY, PRIVATE = 0o711, 0o700
_PR_SET_NO_NEW_PRIVS = 38


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the operating system."""

    name: str
    uid: int
    gid: int
    home: str
    groups: tuple[int, ...]

    def become(self) -> None:
        """Turn the calling process into one of this user for good: no program that it runs gives rights back.

        It clears the signal at the death of the parent. Raises OSError.
        """
        os.setgroups(self.groups)
        os.setgid(self.gid)
        os.setuid(self.uid)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no_new_privs could not be set")

    def environ(self) -> dict[str, str]:
        """Return the variables that describe this user."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def own(self, folder: Path) -> None:
        """Give a folder with all that is in it to this user. Links are not followed. Raises OSError."""
        os.chown(folder, self.uid, self.gid, follow_symlinks=False)
        for path, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(Path(path) / name, self.uid, self.gid, follow_symlinks=False)


def find(name: str) -> Account:
    """Return a user that replicas can run as. Raises ValueError with what to do."""
    if os.geteuid() != 0:
        raise ValueError(f"--run-as {name} needs an agent that is root; without it jobs run as the agent's user")
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(f"--run-as: there is no user {name!r} on this machine; make one with 'useradd'") from None
    if entry.pw_uid == 0:
        raise ValueError(f"--run-as: {name!r} is root; name a user without its rights")
    return Account(name, entry.pw_uid, entry.pw_gid, entry.pw_dir, tuple(os.getgrouplist(name, entry.pw_gid)))


def open_way(state_dir: Path) -> None:
    """Let other users walk through an agent's folder to those of replicas. Raises OSError."""
    for folder, mode in ((state_dir, WAY), (state_dir / "replicas", WAY), (state_dir / "snapshots", PRIVATE)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
