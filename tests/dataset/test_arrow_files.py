"""Parquet and Arrow files give what the same rows as text give, with the same policies and positions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tests.dataset.oracle import Row, batches, dataset_of, rows

import penstock as fluid
from penstock.dataset import DataError, arrow
from penstock.errors import SpecError, UserError

SLOTS = [(False, 1), (True, 2), (False, 0)]
KINDS = ["QueueDataset", "InMemoryDataset"]


def expected(count: int) -> list[Row]:
    return [((n,), (n + 0.5, -1.0), (7,) * (n % 3 + 1)) for n in range(count)]


def table_of(found: list[Row], **changed: Any) -> Any:
    columns: dict[str, Any] = {"slot0": [int(row[0][0]) for row in found], "slot1": [list(row[1]) for row in found]}
    columns["slot2"] = [[int(v) for v in row[2]] for row in found]
    return pyarrow.table({"other": ["x"] * len(found), **columns, **changed})


def written(folder: Path, suffix: str, table: Any) -> Path:
    path = folder / f"part{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    return path


def read(path: Path, kind: str, policy: str = "raise") -> tuple[Any, list[Row]]:
    dataset = dataset_of([path.with_name("*" + path.suffix)], SLOTS, kind, batch_size=7)
    dataset.set_bad_line_policy(policy)
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
    return dataset, rows(dataset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_columns_are_read_by_the_names_of_the_slots(tmp_path: Path, suffix: str, kind: str) -> None:
    path = written(tmp_path, suffix, table_of(expected(500)))
    assert read(path, kind)[1] == expected(500)


BAD: list[tuple[str, Any, str]] = [
    ("slot0", None, "slot 'slot0' has no value"),
    ("slot1", [1.0], "slot 'slot1' has another number of values than the 2"),
    ("slot1", [1.0, float("nan")], "slot 'slot1' has a value that is no finite number"),
    ("slot1", [1.0, None], "slot 'slot1' has a value that is no finite number"),
    ("slot2", [], "slot 'slot2' has no values"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("column", "value", "reason"), BAD)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, kind: str, column: str, value: Any, reason: str) -> None:
    table = table_of(expected(20))
    values = table.column(column).to_pylist()
    values[11] = value
    path = written(tmp_path, ".parquet", table.set_column(table.schema.get_field_index(column), column, [values]))
    with pytest.raises(DataError, match=r"part\.parquet: row 12, column [123]: " + reason):
        read(path, kind)
    dataset, found = read(path, kind, "skip")
    assert found == [row for n, row in enumerate(expected(20)) if n != 11]
    assert dataset.num_skipped_lines == 1


@pytest.mark.parametrize("at_most", [0, 1, 2, 3])
def test_a_resumed_pass_skips_rows_even_after_bad_ones_dropped(
    tmp_path: Path, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "_ROWS", 8)
    values = [None if n in (3, 9) else n for n in range(24)]
    path = written(tmp_path, ".parquet", table_of(expected(24), slot0=values))
    dataset = dataset_of([path], SLOTS, batch_size=7)
    dataset.set_bad_line_policy("skip")
    before = [row for batch in batches(dataset, at_most) for row in batch]
    dataset.set_position(dataset.position())
    assert before + rows(dataset) == [row for n, row in enumerate(expected(24)) if values[n] is not None]


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column 'slot2'; it has 'other', 'slot0', 'slot1'"):
        read(written(tmp_path, ".parquet", table_of(expected(3)).drop(["slot2"])), "QueueDataset")
    with pytest.raises(DataError, match="column 'slot0' is string; expected whole numbers"):
        read(written(tmp_path, ".parquet", table_of(expected(3), slot0=["a", "b", "c"])), "QueueDataset")
    (tmp_path / "part.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"part\.parquet: cannot be read"):
        read(tmp_path / "part.parquet", "QueueDataset")


def test_row_87_a_list_for_a_sequence_fails_with_its_declaration(tmp_path: Path) -> None:
    dataset = fluid.DatasetFactory().create_dataset()
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        slot = fluid.layers.data("slot2", [1], dtype="int64", lod_level=1)
        fluid.layers.concat([slot, fluid.layers.data("dense", [1], dtype="int64")], axis=1)
        dataset.set_use_var([slot])
    dataset.set_filelist([str(written(tmp_path, ".parquet", table_of(expected(3))))])
    with pytest.raises(DataError, match=r"is list.*expected whole numbers\. 'slot2' has .*pool them first"):
        rows(dataset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_text", [False, True])
def test_a_pipe_command_is_refused_as_columns_are_no_text(tmp_path: Path, kind: str, with_text: bool) -> None:
    path = written(tmp_path, ".parquet", table_of(expected(3)))
    (tmp_path / "text").write_text("1 0 2 0.5 -1 1 7\n")
    dataset = dataset_of([tmp_path / "text"] * with_text + [path], SLOTS, kind)
    begin = dataset.load_into_memory if kind == "InMemoryDataset" else dataset.open
    dataset.set_pipe_command("false")
    with pytest.raises(SpecError, match=r"set_pipe_command\('false'\).*part\.parquet' has columns"):
        begin()
    dataset.set_pipe_command("cat")
    if kind == "InMemoryDataset":
        begin()
    assert len(rows(dataset)) == 3 + with_text


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ".parquet", table_of(expected(3)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'penstock\[parquet\]'"):
        read(path, "QueueDataset")
