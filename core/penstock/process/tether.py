"""A command that ends in order when the process that started it is gone, and that waits for its predecessor.

    python -m penstock.process.tether PARENT LOCK COMMAND …

SIGTERM and the end of PARENT, a pid, reach the command as SIGTERM, and so does the end of this process, SIGKILL
included. So a supervisor that kills its children at once, as Ray's workers do when they end, cannot leave the command
behind and does not deprive it of its orderly end. LOCK is a file that the command has locked for as long as it lives,
however many tethers are gone: the next one on this host waits for that. Standard library only. Exit status: the
command's, 128 + N if signal N ended it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

from penstock.process import proc


def main(argv: list[str]) -> int:
    """Run the command to its end."""
    parent, path, *command = argv
    proc.prctl(proc.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the call
        return 128 + signal.SIGTERM
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # SIGTERM ends this process while it waits
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can be passed on
    child = subprocess.Popen(command, pass_fds=[lock], preexec_fn=proc.end_with_parent())  # noqa: PLW1509 - one thread
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(lock)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
