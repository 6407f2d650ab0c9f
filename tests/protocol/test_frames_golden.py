"""The Python codec against the golden frames, both ways; TypeScript is held to the same files."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import PeerError
from penstock.protocol.frames import COLUMN_DTYPE, Column, Frame, Kind, decode, encode

GOLDEN = Path(__file__).parents[1] / "golden" / "frames"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.bin"))
REASONS: dict[str, str] = json.loads((GOLDEN / "refused" / "reasons.json").read_text())


def wanted(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return document


def values(column: dict[str, Any]) -> list[Any]:
    """Undo the JSON spelling of 64-bit integers and of floats that are not finite."""
    cast = float if column["dtype"] in ("<f4", "<f8") else int
    return [cast(value) for value in column["values"]]


def frame_of(document: dict[str, Any]) -> Frame:
    columns = {
        Column[name]: np.array(values(column), dtype=column["dtype"]) for name, column in document["columns"].items()
    }
    return Frame(
        Kind[document["kind"]],
        stream=document["stream"],
        epoch=document["epoch"],
        seq=int(document["seq"]),
        t0_ns=int(document["t0_ns"]),
        step=int(document["step"]),
        flags=document["flags"],
        columns=columns,
        body=document["body"],
    )


def test_every_kind_has_a_golden_frame() -> None:
    assert {wanted(name)["kind"] for name in NAMES} == set(Kind.__members__)


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes_decode_to_the_golden_content(name: str) -> None:
    frame, want = decode((GOLDEN / f"{name}.bin").read_bytes()), wanted(name)
    assert frame.kind == Kind[want["kind"]]
    assert [frame.stream, frame.epoch, frame.flags, frame.count] == [
        want[k] for k in ("stream", "epoch", "flags", "count")
    ]
    assert [str(frame.seq), str(frame.t0_ns), str(frame.step)] == [want["seq"], want["t0_ns"], want["step"]]
    assert frame.body == want["body"]
    assert {column.name for column in frame.columns} == set(want["columns"])
    for column, array in frame.columns.items():
        assert array.dtype == COLUMN_DTYPE[column] == np.dtype(want["columns"][column.name]["dtype"])
        for got, expected in zip(array.tolist(), values(want["columns"][column.name]), strict=True):
            assert got == expected or (math.isnan(got) and math.isnan(expected))


@pytest.mark.parametrize("name", NAMES)
def test_golden_content_encodes_to_the_golden_bytes(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    from_disk = decode(golden)
    frame = frame_of(wanted(name))
    ordered = {column: frame.columns[column] for column in from_disk.columns}  # JSON keys are sorted, columns are not
    assert encode(Frame(**{**{k: getattr(frame, k) for k in Frame.__slots__}, "columns": ordered})) == golden


@pytest.mark.parametrize("name", sorted(REASONS))
def test_a_bad_frame_is_refused(name: str) -> None:
    with pytest.raises(PeerError):
        decode((GOLDEN / "refused" / f"{name}.bin").read_bytes())


def test_files_are_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_golden_frames", GOLDEN / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    monkeypatch.setattr(make, "HERE", tmp_path)
    make.main()
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    stored = {
        path.relative_to(GOLDEN): path.read_bytes() for path in GOLDEN.rglob("*.*") if path.suffix in (".bin", ".json")
    }
    assert written == stored
