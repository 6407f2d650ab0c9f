"""`python -m bench.peers.fluid_protos`: compare the table of operators by type with the protos of paddlepaddle 2.6.2.

`--write` writes what 2.6.2 has of these types as tests/program/fluid_protos.json, with which a test compares the table
where no peer is installed. Needs the peer `paddle` (`make peers`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

from bench.peers import ROOT, PeerMissing, environment
from penstock.program.framework.kinds.table import KINDS

PROTOS = ROOT / "tests" / "program" / "fluid_protos.json"


def of_paddle() -> dict[str, list[object]]:
    """Return the protos of the types in the table that 2.6.2 has. Raises PeerMissing, CalledProcessError."""
    command = [str(environment("paddle")), "-m", "bench.peers.paddle_protos", *sorted(KINDS)]
    found = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(found)  # type: ignore[no-any-return]  # what paddle_protos prints


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, or write what 2.6.2 has."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.fluid_protos", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file that the test reads")
    options = parser.parse_args(arguments)
    try:
        found = of_paddle()
    except PeerMissing as error:
        print(error, file=sys.stderr)
        return 1
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(proto)}" for name, proto in sorted(found.items()))
    text = f"{{\n{lines}\n}}\n"
    if options.write:
        PROTOS.write_text(text, encoding="utf-8")
        return 0
    same = PROTOS.read_text(encoding="utf-8") == text
    print("2.6.2 has what tests/program/fluid_protos.json says" if same else "the protos of 2.6.2 differ; --write them")
    return not same


if __name__ == "__main__":
    sys.exit(main())
