"""`python -m bench.peers setup [NAME …]`: make the environments of peers under build/peers, from pinned requirements.

pip finds packages as it is configured. An environment that was made from the same requirements is left alone; one
that was not finished, or was made from others, is made anew. `python -m bench.peers list` says which are there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence

from bench.peers import FOLDER, REQUIREMENTS, PeerMissing, environment, environments, python, stamp
from bench.peers.kernels import preloaded


def set_up(name: str) -> None:
    """Make one environment. On failure nothing is left that `environment` would take for complete.

    Raises CalledProcessError if pip fails.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if stamp(name).exists() and stamp(name).read_text(encoding="utf-8") == wanted:
        print(f"{name}: is there, in {FOLDER / name}")
        return
    print(f"{name}: installing into {FOLDER / name}", flush=True)
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    venv.create(FOLDER / name, with_pip=True)
    install = [str(python(name)), "-m", "pip", "--disable-pip-version-check", "install", "--requirement"]
    subprocess.run([*install, str(requirements)], check=True)
    stamp(name).write_text(wanted, encoding="utf-8")
    print(f"{name}: done")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `setup` or `list`."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="make the environments of the named peers, or of all")
    setup.add_argument("name", nargs="*", metavar="NAME", help=f"one of: {', '.join(environments())}")
    commands.add_parser("list", help="say which environments are there")
    options = parser.parse_args(arguments)
    if options.command == "list":
        return _list()
    unknown = sorted(set(options.name) - set(environments()))
    if unknown:
        parser.error(f"no peer environment is called {', '.join(unknown)}; there are: {', '.join(environments())}")
    print(f"matrix kernels: {preloaded('equal')}")
    for name in options.name or environments():
        try:
            set_up(name)
        except subprocess.CalledProcessError as error:
            print(f"{name}: pip ended with {error.returncode}; its message is above", file=sys.stderr)
            return 1
    return 0


def _list() -> int:
    for name in environments():
        try:
            print(f"{name}: {environment(name)}")
        except PeerMissing as error:
            print(f"{name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
