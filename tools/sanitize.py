"""Stress tests of the native code under a sanitizer: `python -m tools.sanitize thread`.

Each file of tests/native/stress is a program, built with the sources of its part (`PARTS`) and run. Parts that use
torch are linked with it as it is installed: what it does itself is not looked at.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import UserError
from penstock.native import build

TESTS = Path(__file__).resolve().parents[1] / "tests" / "native" / "stress"
_CHANNEL = ("ps/channel.cpp", "ps/message.cpp", "ps/region.cpp", "ps/stream.cpp")
PARTS = {
    "engine": ("engine/clock.cpp", "engine/engine.cpp", "engine/host.cpp", "engine/schedule.cpp"),
    "table": ("table/batch.cpp", "table/index.cpp", "table/pool.cpp", "table/table.cpp", "ops/initial.cpp"),
    "feed": ("feed/blocks.cpp", "feed/line.cpp", "feed/rows.cpp", "feed/store.cpp", "feed/stream.cpp"),
    "ring": ("ops/ring/memory.cpp", "ops/ring/ring.cpp", "ops/ring/sums.cpp"),
    "channels": (*_CHANNEL, "ps/inbox.cpp"),
    "meeting": (*_CHANNEL, "ps/columns.cpp", "ps/meeting.cpp", "ps/rows.cpp"),
    "prepared": (
        *_CHANNEL, "ops/lookup.cpp", "ps/crc32.cpp", "ps/log_file.cpp", "ps/outbox.cpp", "ps/prepared.cpp",
    ),
    "session": (
        *_CHANNEL, "ps/columns.cpp", "ps/inbox.cpp", "ps/meeting.cpp", "ps/next_rows.cpp", "ps/outbox.cpp",
        "ps/rows.cpp", "ps/session.cpp", "ps/session_ahead.cpp", "ps/session_counts.cpp", "ps/session_look_ups.cpp",
    ),
}  # fmt: skip
"""Parts with the sources that a stress test is built with."""
USES_TORCH = {
    "channels": ("c10",), "meeting": ("c10", "torch_cpu"), "prepared": ("c10", "torch_cpu"),
    "session": ("c10", "torch_cpu"),
}  # fmt: skip
"""Parts that use torch, with its libraries that they are linked with. channels: the dtypes alone."""


def sanitize(kind: str, part: str, *, seconds: float = 5.0, tests: Path = TESTS) -> str:
    """Build the stress test of a part with a sanitizer, run it, and return what it printed.

    `kind` is "thread" or "address" (with undefined behaviour), `part` one of PARTS.  Raises: UserError if the
    compiler cannot, or if the run found something; the text holds the sanitizer's report.
    """
    checks = {"thread": ["-fsanitize=thread"], "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]}
    folder = build.build_folder() / f"stress-{kind}" / part
    sources = (*(build.SOURCES / name for name in PARTS[part]), tests / f"{part}.cpp")
    headers, links = _of_torch(USES_TORCH[part]) if part in USES_TORCH else ([], [])
    program = build.Library("stress", sources, folder / "run-stress", ("-pthread", *links), ())
    # The loader would choose among clones of a function before the sanitizer is ready: there are none here.
    no_clones = "'-Dtarget_clones(...)='"
    flags = ["-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread", no_clones, *build.WARNINGS, *headers]
    flags.append(f"-I{tests}")
    with build.compiled([program], folder, [*flags, *checks[kind]], checks[kind]):
        # Address randomisation beyond what thread-sanitizer can map makes it stop at random; setarch turns it off.
        setarch = shutil.which("setarch")
        prefix = [setarch, "-R"] if setarch and kind == "thread" else []
        command = [*prefix, str(program.output), str(seconds)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise UserError(f"the stress test failed under {kind} sanitizer with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def _of_torch(libraries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags that find torch's headers, and those that link these of its libraries."""
    from torch.utils.cpp_extension import include_paths, library_paths  # the other parts need no torch

    links = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return [f"-isystem {path}" for path in include_paths()], [*links, *(f"-l{name}" for name in libraries)]


def main() -> int:
    """Run the command line; the exit status is 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["thread", "address"])
    parser.add_argument("--part", choices=list(PARTS), help="the stress test of this part alone")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each stress test runs, at least")
    options = parser.parse_args()
    try:
        for part in [options.part] if options.part else PARTS:
            print(sanitize(options.kind, part, seconds=options.seconds), end="", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
