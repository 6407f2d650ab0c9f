"""The native build: what it says when it cannot, and what the sanitizers say about the core."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.sanitize import PARTS, sanitize

from penstock import native
from penstock.errors import UserError
from penstock.native import build

SAYS = {
    "engine": "4 workers: ", "table": "rounds of 4 threads", "feed": "feed: ", "ring": "runs of 1 to 4 ranks",
    "channels": "connections", "meeting": "rounds", "session": "rounds",
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["address", "thread"])
@pytest.mark.parametrize("part", PARTS)
def test_native_code_is_clean_under_a_sanitizer(part: str, kind: str) -> None:
    assert SAYS[part] in sanitize(kind, part, seconds=1.0)


def test_what_a_stress_test_finds_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("int main(int, char** given) { return given[1][1000000]; }")
    monkeypatch.setitem(PARTS, "broken", ())
    monkeypatch.setattr(build, "build_folder", lambda: tmp_path / "objects")
    with pytest.raises(UserError, match="AddressSanitizer"):
        sanitize("address", "broken", tests=tmp_path)


def test_a_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"apt-get install g\+\+"):
        build.compiler()


def test_a_source_that_does_not_compile_shows_compiler_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "src" / "ops" / "broken.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int main() { return undeclared_name; }")
    library = build.Library("_ops", (source,), tmp_path / "_ops.so", (), ())
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "libraries", lambda: [library])
    monkeypatch.setattr(build, "build_folder", lambda: tmp_path / "objects")
    monkeypatch.setattr(build, "RECORD", tmp_path / "_built.json")
    with pytest.raises(UserError, match="undeclared_name"):
        build.build(jobs=1)
    assert not library.output.exists()


def test_an_up_to_date_build_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "src" / "ops" / "fine.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int answer() { return 42; }")
    library = build.Library("_ops", (source,), tmp_path / "_ops.so", (), ())
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "libraries", lambda: [library])
    monkeypatch.setattr(build, "build_folder", lambda: tmp_path / "objects")
    monkeypatch.setattr(build, "RECORD", tmp_path / "_built.json")
    assert build.build(jobs=1) == [library.output]
    first = library.output.stat().st_mtime_ns
    build.build(jobs=1)
    assert library.output.stat().st_mtime_ns == first
    source.write_text("int answer() { return 43; }")
    build.build(jobs=1)
    assert library.output.stat().st_mtime_ns > first


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (None, "is not built"),
        ('{"torch": "1.0.0", "abi": "cpython-30", "libraries": ["_engine"]}', r"built with torch 1\.0\.0, but torch"),
        ('{"torch": "1.0.0", "abi": "cpython-30", "libraries": ["_engine"]}', "with Python cpython-30, but this is"),
        ('{"torch": "1.0.0", "libraries": ["_engine"]}', "with Python of an older build, but this is"),
        ('{"torch": "1.0.0", "abi": "cpython-30", "libraries": []}', "not _engine"),
    ],
)
def test_a_library_that_does_not_fit_is_refused(tmp_path: Path, record: str | None, says: str) -> None:
    if record is not None:
        (tmp_path / "_built.json").write_text(record)
    with pytest.raises(UserError, match=f"{says}.*python -m penstock.native.build"):
        native.check_built("_engine", tmp_path)


@pytest.mark.parametrize(
    ("torch", "abi", "count"),
    [
        ("2.13.0+cpu", "cpython-311-x86_64-linux-gnu", 0),
        ("2.13.1+cu130", "cpython-311-x86_64-linux-gnu", 0),
        ("2.14.0", "cpython-311-x86_64-linux-gnu", 1),
        ("2.13.0", "cpython-312-x86_64-linux-gnu", 1),
        ("2.13.0", "cpython-311-aarch64-linux-gnu", 1),
        ("2.14.0", "cpython-312-x86_64-linux-gnu", 2),
    ],
)
def test_a_build_fits_one_minor_torch_one_python_one_platform(torch: str, abi: str, count: int) -> None:
    built = {"torch": "2.13.0+cpu", "abi": "cpython-311-x86_64-linux-gnu"}
    assert len(native.mismatches(built, torch=torch, abi=abi)) == count


def test_each_source_is_compiled_once_several_of_torch_together(tmp_path: Path) -> None:
    for library in build.libraries():
        units = build._units(library, tmp_path)
        compiled = [source for unit in units for source in (unit.includes or (unit.source,))]
        assert sorted(compiled) == sorted(library.sources)
        assert len({unit.object for unit in units}) == len(units)
        assert all(len(unit.includes) <= build.UNIT for unit in units)
        assert all(build._includes_torch(source) == bool(unit.includes) for unit in units for source in unit.includes)
        assert not any(build._includes_torch(unit.source) for unit in units if not unit.includes)
