"""Run one benchmark by name: `python -m bench NAME [--rounds N] [--json] [options of that benchmark]`.

A benchmark is a module of this package with `main(rounds, json, extra)`, and, if it has options of its own,
`add_arguments(parser)`. It returns a `Report`; the last line printed is that report as one JSON object. Without
`--json` a table for people comes before it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report


def names() -> list[str]:
    """List the benchmarks: the modules of this package that define `main`."""
    found = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.ispkg]
    return sorted(name for name in found if not name.startswith("_") and name != "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the benchmark, print its report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = names()
    if not given or given[0] not in known:
        asked = f"no benchmark is called '{given[0]}'; " if given and not given[0].startswith("-") else ""
        print(f"{asked}usage: python -m bench NAME [--rounds N] [--json], NAME one of: {', '.join(known)}")
        return 0 if given[:1] in (["-h"], ["--help"]) else 2
    module = importlib.import_module(f"bench.{given[0]}")
    parser = argparse.ArgumentParser(prog=f"python -m bench {given[0]}", description=module.__doc__)
    parser.add_argument("--rounds", type=int, default=module.ROUNDS, help="alternating rounds (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    options = parser.parse_args(given[1:])
    report: Report = module.main(options.rounds, options.json, options)
    if not options.json:
        print(report.table())
    print(report.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
