"""`python -m penstock_server`: the control plane alone. `penstock up` starts it with an agent beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from penstock.imports import importing

with importing():
    from pydantic import ValidationError

    from penstock_server import backup
    from penstock_server.run import serve
    from penstock_server.settings import Settings

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the server with settings from the environment and, over them, the command line; or `backup`, `restore`."""
    given_arguments = sys.argv[1:] if argv is None else argv
    if given_arguments[:1] in (["backup"], ["restore"]):
        return backup.main(given_arguments)
    parser = argparse.ArgumentParser(prog="python -m penstock_server", description="Penstock's control plane")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 7080; 0: any free one)")
    parser.add_argument("--state-dir", type=Path, help="folder that holds everything (default ~/.penstock/server)")
    parser.add_argument(
        "--standby",
        action="store_true",
        default=None,
        help="if another server has the state folder: pass requests on to it, and take over when it ends",
    )
    parser.add_argument("--advertise-host", help="name or address at which standbys reach this server")
    parser.add_argument("--database-url", help="postgresql://… instead of SQLite in the state folder")
    parser.add_argument("--static-dir", type=Path, help="folder of the built dashboard")
    parser.add_argument("--log-format", choices=["console", "json"])
    parser.add_argument("--tls-cert", type=Path, help="certificate chain (PEM): the server speaks HTTPS")
    parser.add_argument("--tls-key", type=Path, help="private key of --tls-cert (PEM)")
    parser.add_argument(
        "--tls-client-ca", type=Path, help="authority (PEM) of client certificates: each agent needs one of its node"
    )
    parser.add_argument("--tls-client-required", choices=["agents", "all"], help="who needs one (default: agents)")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="serve plain HTTP although other machines reach --host"
    )
    given: dict[str, Any] = {k: v for k, v in vars(parser.parse_args(given_arguments)).items() if v is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(map(str, item["loc"])) or "of TLS"
            print(f"penstock server: setting {name}: {item['msg']}", file=sys.stderr)
        return EXIT_USAGE
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
