"""The user as whom replicas run where the agent is root: its rights, its files, and the way to them.

What a replica owns is its working folder and what its job keeps on the node. The agent's folder and those above the
replica's can be walked through then, not listed (0711), and what the agent writes into them is root's alone (0600).
Standard library only: the guard loads it.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
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

    def own_fresh(self, folder: Path) -> None:
        """Give a folder that no other user could enter until now (0700) to this one, contents first. Raises OSError.

        Never one that the user has had already: while it is walked, a process of theirs could put a link in the place
        of a folder, and have a file of root's given to it.
        """
        for _, folders, files, inside in os.fwalk(folder, follow_symlinks=False):
            for name in (*folders, *files):
                os.chown(name, self.uid, self.gid, dir_fd=inside, follow_symlinks=False)
        os.chown(folder, self.uid, self.gid, follow_symlinks=False)

    def keep(self, folder: Path) -> None:
        """Make a folder of this user's, or use the one that is there. Raises OSError, also if it is of another user."""
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.uid:
                raise PermissionError(
                    f"{folder} is not {self.name}'s, from before the agent had --run-as {self.name}: remove it, or "
                    f"give it to that user while no job runs on this node: chown -R -h {self.name} {folder}"
                ) from None
        else:
            os.chown(folder, self.uid, self.gid, follow_symlinks=False)


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


def privately(path: str, flags: int) -> int:
    """Open a file that, if it is made, only this process's user may open: an `opener`."""
    return os.open(path, flags, 0o600)


def open_way(state_dir: Path) -> None:
    """Let other users walk through an agent's folder to those of replicas. Raises OSError."""
    for folder, mode in ((state_dir, WAY), (state_dir / "replicas", WAY), (state_dir / "snapshots", PRIVATE)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
