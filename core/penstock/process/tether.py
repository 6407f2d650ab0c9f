"""A command that ends in order when the process that started it is gone, and that waits for its predecessor.

    python -m penstock.process.tether PARENT LOCK COMMAND …

SIGTERM and the end of PARENT, a pid, reach the command as SIGTERM, and so does the end of this process, SIGKILL
included. So a supervisor that kills its children at once, as Ray's workers do when they end, cannot leave the command
behind and does not deprive it of its orderly end. LOCK is a file that the command has locked for as long as it lives,
however many tethers are gone: the next one on this host waits for that. Standard library only. Exit status: the
command's, 128 + N if signal N ended it, 75 with a line on stderr if the lock cannot be had within `WAIT_S`, or is not
this user's own.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time

from penstock.process import proc

WAIT_S = 40.0
"""How long to wait for the predecessor: an agent ends what it runs within 20 s."""
POLL_S = 0.1


def main(argv: list[str]) -> int:
    """Run the command to its end."""
    parent, path, *command = argv
    proc.prctl(proc.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the call
        return 128 + signal.SIGTERM
    try:
        lock = _locked(path)
    except OSError as error:
        sys.stderr.write(f"{path} cannot be locked: {error}\n")
        return os.EX_TEMPFAIL
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can be passed on
    child = subprocess.Popen(command, pass_fds=[lock], preexec_fn=proc.end_with_parent())  # noqa: PLW1509 - one thread
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(lock)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _locked(path: str) -> int:
    """Return the descriptor of the locked file. Raises OSError. SIGTERM ends this process while it waits."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    # its name can be guessed, and its folder may be one that others can write
    if (owner := os.fstat(lock).st_uid) != os.getuid():
        raise PermissionError(f"it belongs to user {owner}; remove it, or choose another folder")
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held it for {WAIT_S:g} s") from None
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
