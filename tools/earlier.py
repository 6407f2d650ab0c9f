"""The control plane of an earlier commit, packed for the tests of version skew (tests/cli/test_version_skew.py).

    python -m tools.earlier COMMIT

writes tests/golden/earlier.tar.xz: server, agent, command, client and telemetry of that commit, from the repository,
without what needs the native libraries. The same commit gives the same bytes. A checkout without history, or an sdist,
has no earlier commit to read, so the archive is part of the repository. Choose a commit whose messages differ from
today's (`git log -- core/penstock/protocol`).
"""

from __future__ import annotations

import io
import lzma
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHIVE = ROOT / "tests" / "golden" / "earlier.tar.xz"
FOLDERS = ("worker", "server", "alembic")
PACKAGES = ("advice", "alias", "command", "compat", "machine", "process", "protocol", "telemetry")
"""Of `core/penstock`, beside its own modules: what these three and a script that logs metrics import."""
LEFT_OUT = re.compile(
    r"core/penstock/(alias/(?!(__init__|finder|names|notes)\.py)|command/(doctor_|demo)|compat/(?!__init__|aiosqlite|uvicorn)"
    r"|(captured|core|default_scope_funcs|evaluator|install_check|lod_tensor|metrics|operators|profiler|scope)\.py)"
)
SMALLEST = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0, "dict_size": 1 << 24}]
"""The filter that compresses text most."""


def main(argv: list[str]) -> int:
    """Write the archive. Returns the exit status."""
    [commit] = argv
    archive = subprocess.run(["git", "archive", commit, *FOLDERS, "core"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as found:
        ARCHIVE.write_bytes(lzma.compress(_packed(found), filters=SMALLEST))
    print(f"{ARCHIVE.relative_to(ROOT)}: {ARCHIVE.stat().st_size} bytes, of commit {commit}")
    return 0


def _packed(found: tarfile.TarFile) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as target:
        for member in found:
            if member.isfile() and _is_needed(member.name):
                target.addfile(member, found.extractfile(member))
    return packed.getvalue()


def _is_needed(name: str) -> bool:
    parts = Path(name).parts
    if parts[0] in FOLDERS:
        return True
    is_own_module = len(parts) == 3 and parts[-1].endswith(".py")
    is_listed = is_own_module or parts[2:3] in [(package,) for package in PACKAGES]
    return parts[:2] == ("core", "penstock") and is_listed and LEFT_OUT.match(name) is None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
