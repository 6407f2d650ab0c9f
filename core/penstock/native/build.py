"""Build the native libraries in place: `python -m penstock.native.build`.

`_engine` (a Python module) comes from `src/engine/*.cpp`, `_ops` (a library for `torch.ops.load_library`) from
`src/ops/**/*.cpp`, `_table` and `_feed` (Python modules without torch) from `src/table/*.cpp` and `src/feed/*.cpp`.
Ninja rebuilds only what changed; a library is replaced by rename, so that a process that has the old one loaded keeps
running; two builds at once wait for each other.  Needs torch, ninja and a C++20 compiler.
The code has to run on any x86-64 or Arm core: no `-march`; a kernel that wants more uses target attributes.
What is in the checkout is named from its root, so that a copy of one with its `build/native` compiles nothing again.
Sources that include torch are compiled several at once: each such compilation takes three seconds, whatever its source,
for what torch's headers leave to be instantiated. So no two of a folder define the same name in `namespace {}`.
On failure: `UserError` with the compiler's output; libraries already built stay as they were.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from penstock.errors import UserError
from penstock.machine.cache import user_cache
from penstock.machine.cores import usable_cores
from penstock.machine.memory import usable_bytes
from penstock.native import python_abi
from penstock.settings import COMPILER, MAX_JOBS

NATIVE = Path(__file__).resolve().parent
ROOT = NATIVE.parents[2]
SOURCES = NATIVE / "src"
RECORD = NATIVE / "_built.json"
PRECOMPILED = SOURCES / "precompiled.h"
STANDARD = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-pthread"),
    "-falign-functions=64",  # else an edit anywhere moves the engine's inner loop, and its cost by 3 %
)
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")
JOB_BYTES = 2 << 30  # a unit with torch's headers takes up to 1.6 GiB to compile
UNIT = 8  # sources that are compiled at once, at most: an edit of one compiles all of them


@dataclass(frozen=True, slots=True)
class Unit:
    """What the compiler reads at once; `includes` are the sources, where `source` is written by the build."""

    source: Path
    object: Path
    includes: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Library:
    """One shared library: what goes in, what comes out, what it is linked with."""

    name: str
    sources: tuple[Path, ...]
    output: Path
    links: tuple[str, ...]
    defines: tuple[str, ...]


def libraries() -> list[Library]:
    """List the libraries whose folder has sources."""
    engine, feed = _sources("engine"), _sources("feed")
    operators = _sources("ops")
    table = (*_sources("table"), SOURCES / "ops" / "initial.cpp")
    servers = (*_sources("ps"), SOURCES / "ops" / "lookup.cpp")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    torch_links = ("-lc10", "-ltorch_cpu", "-ltorch")
    import torch  # see build()

    module = ("-DTORCH_EXTENSION_NAME=_engine", f'-DPENSTOCK_TORCH=\\"{torch.__version__}\\"')
    found = [  # those without torch first: they compile while torch's headers are
        Library("_table", table, NATIVE / f"_table{suffix}", (), ()),
        Library("_feed", feed, NATIVE / f"_feed{suffix}", (), ()),
        Library("_engine", engine, NATIVE / f"_engine{suffix}", (*torch_links, "-ltorch_python"), module),
        Library(
            "_ps", servers, NATIVE / f"_ps{suffix}", (*torch_links, "-ltorch_python"), ("-DTORCH_EXTENSION_NAME=_ps",)
        ),
        Library("_ops", operators, NATIVE / "_ops.so", torch_links, ()),
    ]
    return [library for library in found if library.sources]


def _sources(folder: str) -> tuple[Path, ...]:
    return tuple(sorted((SOURCES / folder).rglob("*.cpp")))


def compiler() -> str:
    """Find the C++ compiler: `$CXX`, g++, c++ or clang++.  Raises: UserError if there is none."""
    for name in (COMPILER.read(), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise UserError(
        "the native engine needs a C++20 compiler, and neither $CXX nor g++, c++ or clang++ was found on PATH. "
        "On Debian or Ubuntu: apt-get install g++"
    )


def build_folder() -> Path:
    """Name the folder for object files: `build/native` of a checkout, else one in the user's cache."""
    if (ROOT / "pyproject.toml").is_file():
        return ROOT / "build" / "native"
    return user_cache() / "penstock" / "native"


def build(*, jobs: int | None = None, debug: bool = False, verbose: bool = False) -> list[Path]:
    """Build every library that is out of date and return the paths of all.

    Cost: about two minutes from scratch on two cores, 0.1 s when nothing changed.  Raises: UserError if a tool is
    missing or a file does not compile.
    """
    import torch  # a plain import of this module must work where torch is not installed

    folder = build_folder()
    wanted = libraries()
    with compiled(wanted, folder, _torch_flags(debug=debug), _torch_link_flags(), jobs=jobs, verbose=verbose):
        names = [library.name for library in wanted]
        record = {"torch": torch.__version__, "abi": python_abi(), "libraries": names}
        _write_if_changed(RECORD, json.dumps(record) + "\n")
    return [library.output for library in wanted]


def default_jobs() -> int:
    """Count how many files may compile at once: one per core, as far as memory allows; `$MAX_JOBS` overrides."""
    given = MAX_JOBS.read()
    if given is not None:
        return given
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    memory = min(free, usable_bytes())
    return max(1, min(usable_cores(), memory // JOB_BYTES))


@contextmanager
def compiled(
    wanted: Sequence[Library],
    folder: Path,
    flags: Sequence[str],
    link_flags: Sequence[str],
    *,
    jobs: int | None = None,
    verbose: bool = False,
) -> Iterator[None]:
    """Bring libraries or programs up to date, with their objects in `folder`, which is locked during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        script = folder / "build.ninja"
        _write_units(wanted, folder)
        _write_if_changed(script, _ninja_script(wanted, folder, flags, link_flags))
        _run_ninja(script, jobs=jobs or default_jobs(), verbose=verbose)
        yield


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def _torch_flags(*, debug: bool) -> list[str]:
    import torch  # see build()
    from torch.utils.cpp_extension import include_paths

    # -isystem: the headers of torch and Python are not ours to warn about
    headers = [f"-isystem {_escape(path)}" for path in (*include_paths(), sysconfig.get_path("include"))]
    # AT_PER_OPERATOR_HEADERS, as torch itself is compiled: its headers bring in the operators that they name, not all
    defines = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-DAT_PER_OPERATOR_HEADERS",
        "-DNDEBUG",
    ]
    return [*STANDARD, *WARNINGS, *headers, *defines, *(["-g"] if debug else [])]


def _torch_link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths  # see build()

    return ["-shared", "-pthread", *(f"-L{_escape(path)}" for path in library_paths())]


def _ninja_script(wanted: Sequence[Library], folder: Path, flags: Sequence[str], link_flags: Sequence[str]) -> str:
    """Write the build graph as text; a change of torch, Python or flags changes it, and ninja rebuilds."""
    precompiled = _named(folder / PRECOMPILED.name) + ".gch"
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {_named(folder)}",  # where it notes what it has built
        f"cxx = {_escape(compiler())}",
        # the folder of the precompiled header before that of the header itself: taken where the compiler can take it
        f"flags = {' '.join(flags)} -I{_named(folder)} -I{_named(SOURCES)}",
        # for at::parallel_for, when compiling only: at run time the symbols are those of torch's own runtime
        "torch = -fopenmp",
        f"link_flags = {' '.join(link_flags)}",
        "rule compile",
        "  command = $cxx -MD -MF $out.d $flags $defines -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule precompile",
        "  command = $cxx -MD -MF $out.d $flags $torch -x c++-header -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = precompile $in",
        "rule link",
        "  command = $cxx $in $link_flags $links -o $out.part && mv -f $out.part $out",
        "  description = link $out",
    ]
    if any(_includes_torch(source) for library in wanted for source in library.sources):
        lines += [f"build {precompiled}: precompile {_named(PRECOMPILED)}"]
    for library in wanted:
        defines, units = " ".join(library.defines), _units(library, folder)
        for unit in units:
            torch = _includes_torch(unit.includes[0] if unit.includes else unit.source)
            waits = f" | {precompiled}" if torch else ""
            lines += [f"build {_named(unit.object)}: compile {_named(unit.source)}{waits}"]
            lines += [f"  defines = {defines}{f' $torch -include {PRECOMPILED.name}' if torch else ''}"]
        lines += [f"build {_named(library.output)}: link {' '.join(_named(unit.object) for unit in units)}"]
        lines += [f"  links = {' '.join(library.links)}"]
    return "\n".join(lines) + "\n"


def _units(library: Library, folder: Path) -> list[Unit]:
    """Divide the sources: one that needs no torch is a unit, of those that do several are. The longest come first."""
    place = folder / library.name
    units = []
    for name, is_bound in (("bind", True), ("unit", False)):
        sources = [source for source in library.sources if ("bind" in source.stem) == is_bound]
        together = [source for source in sources if _includes_torch(source)]
        count = -(-len(together) // UNIT)
        units += [
            Unit(place / f"{name}{number}.cpp", place / f"{name}{number}.o", tuple(together[number::count]))
            for number in range(count)
        ]
        units += [
            Unit(source, (place / _within(source)).with_suffix(".o")) for source in sources if source not in together
        ]
    return units


def _within(source: Path) -> Path:
    return source.relative_to(SOURCES) if source.is_relative_to(SOURCES) else Path(source.name)


def _write_units(wanted: Sequence[Library], folder: Path) -> None:
    for library in wanted:
        for unit in _units(library, folder):
            if unit.includes:
                unit.source.parent.mkdir(parents=True, exist_ok=True)
                _write_if_changed(unit.source, "".join(f'#include "{_within(one)}"\n' for one in unit.includes))


@functools.cache
def _includes_torch(source: Path) -> bool:
    """Return whether a source or header includes one of torch's, or one of ours that does."""
    text = source.read_text()
    ours = (SOURCES / name for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE))
    return bool(re.search(r"^#include <(ATen|torch)/", text, re.MULTILINE)) or any(map(_includes_torch, ours))


def _named(path: Path) -> str:
    return _escape(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))


def _escape(text: str) -> str:
    return text.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


def _run_ninja(script: Path, *, jobs: int, verbose: bool) -> None:
    command = [_ninja(), "-f", str(script), "-j", str(jobs), *(["-v"] if verbose else [])]
    out = None if verbose else subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=out, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise UserError(f"the native build failed (ninja exit status {done.returncode}):\n{done.stdout or ''}")


def _ninja() -> str:
    """Return the program of this environment, else the one on PATH: the log of one makes another build all anew."""
    try:
        import ninja  # a build requirement: not there where an installed Penstock builds
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            text = "the native build needs ninja: pip install ninja, or apt-get install ninja-build"
            raise UserError(text) from None
        return found
    return str(Path(ninja.BIN_DIR) / "ninja")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m penstock.native.build", description="Build the native libraries.")
    parser.add_argument("--jobs", type=int, help="files to compile at once")
    parser.add_argument("--debug", action="store_true", help="with symbols")
    parser.add_argument("--verbose", action="store_true", help="show every command")
    options = parser.parse_args(arguments)
    try:
        for path in build(jobs=options.jobs, debug=options.debug, verbose=options.verbose):
            print(path)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
