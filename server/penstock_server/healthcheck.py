"""`python -m penstock_server.healthcheck`: whether the server of the state folder answers, for containers.

Looks at PENSTOCK_SERVER_STATE_DIR. Exit status: 0 it answers, 1 it does not. The certificate is not checked: what is
looked at is the own process, at the address that it has written.
"""

from __future__ import annotations

import ssl
import sys
import urllib.request

from penstock_server.settings import Settings
from penstock_server.statedir import read_address

LIMIT_S = 8.0


def main() -> int:
    """Ask for /healthz."""
    folder = Settings().state_dir
    try:
        url = read_address(folder)
        if url is None:
            raise ValueError("it has not started yet")
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(f"{url}/healthz", timeout=LIMIT_S, context=unchecked) as answer:
            answer.read()
    except (OSError, ValueError) as error:  # URLError is an OSError
        sys.stderr.write(f"no server of {folder} answers: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
