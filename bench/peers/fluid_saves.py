"""`python -m bench.peers.fluid_saves`: check that paddlepaddle 2.6.2 and Penstock read each other's saves.

2.6.2 writes a folder (`paddle_saves`); Penstock converts what is in it and back, into each of Fluid's forms; 2.6.2
reads those, and its network must give the result that it gave before, and Adam's power. `--write` keeps the folder as
tests/io/fluid_saves.zip, with which tests compare where no peer is installed. Needs the peer `paddle` (`make peers`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.peers import ROOT, PeerMissing, environment
from penstock.io.converting import Options, convert

SAVES = ROOT / "tests" / "io" / "fluid_saves.zip"
_TOLERANCE = 1e-6  # one rounding of a power in float32; parameters are the same bits
_POWER = 0.9**4  # of Adam's beta1 after three steps


def run_paddle(action: str, folder: Path) -> str:
    """Run `paddle_saves` in the peer's environment. Raises PeerMissing, CalledProcessError."""
    command = [str(environment("paddle")), "-m", "bench.peers.paddle_saves", action, str(folder)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def differences(folder: Path) -> list[str]:
    """Convert there and back, let 2.6.2 read it, and name what is not as it was."""
    back = folder / "back"
    convert(folder / "separate", folder / "ours", Options())
    convert(folder / "ours", back / "separate", Options())
    convert(folder / "ours", back / "combined", Options(filename="all"))
    convert(folder / "ours", back / "pickled" / "m.pdparams", Options())
    with np.load(folder / "expected.npz") as expected:
        wanted = [*map(float, expected["network"].reshape(-1)), _POWER]
    return [
        f"{way}: {found} instead of {wanted}"
        for way, found in json.loads(run_paddle("check", folder)).items()
        if not np.allclose(found, wanted, rtol=0.0, atol=_TOLERANCE)
    ]


def packed(folder: Path, target: Path) -> None:
    """Write the files of a folder to a zip whose bytes depend on nothing else."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.writestr(
                zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, or write the saves anew."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.fluid_saves", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep what 2.6.2 writes for the tests")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run_paddle("write", folder)
        except PeerMissing as error:
            print(error, file=sys.stderr)
            return 1
        if options.write:
            packed(folder, SAVES)
            print(f"{SAVES}: {SAVES.stat().st_size} bytes")
            return 0
        lines = differences(folder)
    print("\n".join(lines) or "2.6.2 reads what Penstock has converted from its own saves, with the same numbers")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
