"""`penstock`: the command line. Commands live in `penstock.command`; this turns their errors into one message and an
exit code (docs/cli.md). Imports no torch.
"""

from __future__ import annotations

import sys

from penstock.command.app import app
from penstock.command.exits import exit_of
from penstock.errors import PenstockError


def main() -> None:
    """Run the command that the arguments name; exits."""
    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(exit_of(error))
    except BrokenPipeError:  # `penstock logs … | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
