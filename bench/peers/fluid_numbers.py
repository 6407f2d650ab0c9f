"""`python -m bench.peers.fluid_numbers`: check that the table of Fluid's numbers is what paddlepaddle 2.6.2 gives.

The table, tests/program/fluid_numbers.json, has the results of the cases of `fluid_cases`; tests compare Penstock with
it where no peer is installed. `--write` writes it anew, after a case was added. Needs the peer `paddle` (`make peers`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.peers import ROOT, PeerMissing, environment
from bench.peers.fluid_cases import SINGLE

TABLE = ROOT / "tests" / "program" / "fluid_numbers.json"
Table = dict[str, dict[str, dict[str, list[float]]]]


def read(path: Path = TABLE) -> Table:
    """Return the table: group -> case -> name -> values."""
    found: Table = json.loads(path.read_text(encoding="utf-8"))
    return found


def differences(one: Any, other: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Name what is in one table alone, and numbers that differ by more than `tolerance`, relative to 1 or more."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key), other.get(key), tolerance, f"{where} {key}".strip())
    elif not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        yield f"{where}: is in one table alone"
    else:
        worst = max((abs(a - b) / max(1.0, abs(a)) for a, b in zip(one, other, strict=True)), default=0.0)
        if not worst <= tolerance:
            yield f"{where}: differs by {worst:.3g}"


def numbers_of_paddle() -> Table:
    """Run the cases in the peer's environment. Raises PeerMissing, CalledProcessError."""
    command = [str(environment("paddle")), "-m", "bench.peers.paddle_numbers"]
    ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: Table = json.loads(ran.stdout)
    return found


def written(table: Table) -> str:
    """Return the text of a table, a line a case."""
    groups = []
    for group, some in table.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in some.items())
        groups.append(f"{json.dumps(group)}: {{\n{lines}\n}}")
    return "{" + ",\n".join(groups) + "}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or write the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.fluid_numbers", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table anew")
    options = parser.parse_args(arguments)
    try:
        found = numbers_of_paddle()
    except PeerMissing as error:
        print(error, file=sys.stderr)
        return 1
    if options.write:
        TABLE.write_text(written(found), encoding="utf-8")
        print(f"{TABLE}: {sum(map(len, found.values()))} cases")
        return 0
    # a kernel in float32 may add in another order on another processor
    lines = list(differences(found, read(), SINGLE))
    print("\n".join(lines) or f"{sum(map(len, found.values()))} cases are as in {TABLE}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
