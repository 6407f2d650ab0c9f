"""`python -m penstock_server.healthcheck`: whether the server of the state folder answers, for containers.

Looks at PENSTOCK_SERVER_STATE_DIR. Exit status: 0 it answers, 1 it does not. The certificate is not checked: what is
looked at is the own process, at the address that it has written.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.request

from penstock_server.settings import Settings

LIMIT_S = 8.0


def main() -> int:
    """Ask for /healthz."""
    path = Settings().state_dir / "server.json"
    try:
        url = json.loads(path.read_text(encoding="utf-8"))["url"]
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(f"{url}/healthz", timeout=LIMIT_S, context=unchecked) as answer:
            answer.read()
    except (OSError, ValueError, KeyError) as error:  # URLError is an OSError
        sys.stderr.write(f"no server of {path.parent} answers: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
