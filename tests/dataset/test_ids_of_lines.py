"""Lines that begin with an id and a content; lines of one id as one sample; slots that are shuffled on their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dataset.oracle import Row, batches, dataset_of

import penstock as fluid
from penstock.dataset import DataError
from penstock.errors import SpecError

SLOTS = [(False, 0), (False, 1), (True, 0)]


def rows(dataset: Any) -> list[Row]:
    """Return all rows of a pass, without the numbers of their ids."""
    first = len(dataset._held_slots) - len(SLOTS) if hasattr(dataset, "_held_slots") else 0
    return [row[first:] for batch in batches(dataset) for row in batch]


def loaded(path: Path, lines: list[str], **settings: Any) -> Any:
    path.write_text("".join(f"{line}\n" for line in lines))
    dataset: Any = dataset_of([path], SLOTS, kind="InMemoryDataset")
    for name, value in settings.items():
        getattr(dataset, name)(value)
    dataset.load_into_memory()
    return dataset


def test_ids_and_contents_are_left_out_of_the_samples(tmp_path: Path) -> None:
    lines = ["1 a7 1 what_was_seen 2 3 4 1 5 1 0.5", "1 a8  1 other 1 3 1 6 2 0.5 1"]
    dataset = loaded(tmp_path / "part", lines, set_parse_ins_id=True, set_parse_content=True)
    assert rows(dataset) == [((3, 4), (5,), (0.5,)), ((3,), (6,), (0.5, 1.0))]
    assert (dataset.parse_ins_id, dataset.parse_content) == (True, True)
    only = loaded(tmp_path / "part", ["1 what 1 3 1 6 1 0.5"], set_parse_content=True)
    assert rows(only) == [((3,), (6,), (0.5,))]


@pytest.mark.parametrize("line", ["2 a b 1 3 1 6 1 0.5", "1 a", "", "x a 1 3 1 6 1 0.5"])
def test_a_line_without_its_id_is_a_bad_line(tmp_path: Path, line: str) -> None:
    good = "1 a 1 3 1 6 1 0.5"
    with pytest.raises(DataError, match="part:2:1: the number of values of slot '@INSTANCE_ID'"):
        loaded(tmp_path / "part", [good, line, good], set_parse_ins_id=True)
    dataset = loaded(tmp_path / "part", [good, line, good], set_parse_ins_id=True, set_bad_line_policy="skip")
    assert len(rows(dataset)) == 2
    assert dataset.num_skipped_lines == 1


MERGED = [
    "1 b 1 3 1 0 1 0",
    "1 a 2 5 6 1 0 1 0.5",
    "1 b 1 0 1 7 1 2.5",
    "1 c 1 1 1 1 1 1",
    "1 a 1 0 1 9 1 0",
    "1 d 1 1 1 1 1 0",
    "1 d 1 2 1 1 1 0",
]


def test_lines_of_an_id_become_one_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = loaded(tmp_path / "part", MERGED, set_merge_by_lineid=2)
    dataset.local_shuffle(seed=3)  # does not merge
    assert dataset.get_memory_data_size() == 7
    dataset.global_shuffle()
    # of `d` two lines have the first slot, of `c` there is one line
    assert sorted(rows(dataset)) == [((3,), (7,), (2.5,)), ((5, 6), (9,), (0.5,))]
    assert "left out 3 of 7 lines" in caplog.text
    dataset.global_shuffle()  # once
    assert dataset.get_memory_data_size() == 2


def test_any_number_of_lines_may_be_merged(tmp_path: Path) -> None:
    dataset = loaded(tmp_path / "part", MERGED[:5], set_parse_ins_id=True)
    dataset.set_merge_by_lineid(0)
    dataset.dataset.merge_by_lineid()
    assert sorted(rows(dataset)) == [((1,), (1,), (1.0,)), ((3,), (7,), (2.5,)), ((5, 6), (9,), (0.5,))]


def test_merging_needs_ids_and_one_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = loaded(tmp_path / "part", ["1 3 1 6 1 0.5"])
    with pytest.raises(SpecError, match=r"loaded without ids; call set_parse_ins_id\(True\)"):
        dataset.merge_by_lineid()
    with pytest.raises(SpecError, match="set_merge_by_lineid is given -1"):
        dataset.set_merge_by_lineid(-1)
    dataset.set_merge_by_lineid()
    monkeypatch.setattr("penstock.dataset.memory.peers_of", lambda *_: object())
    with pytest.raises(SpecError, match="with several trainers"):
        dataset.global_shuffle()


def test_slots_are_shuffled_on_their_own(tmp_path: Path) -> None:
    lines = [f"1 id{n} {n % 3 + 1} {' '.join([str(n)] * (n % 3 + 1))} 1 {n} 1 {n}.5" for n in range(40)]
    dataset = loaded(tmp_path / "part", lines, set_parse_ins_id=True)
    with pytest.raises(SpecError, match="without set_fea_eval"):
        dataset.slots_shuffle(["s0"])
    before = rows(dataset)
    dataset.set_fea_eval(100, True)
    names = [slot.name for slot in dataset._slots]
    dataset.slots_shuffle(names[:1], seed=1)
    after = rows(dataset)
    assert [row[1:] for row in after] == [row[1:] for row in before]
    assert [row[0] for row in after] != [row[0] for row in before]
    assert sorted(row[0] for row in after) == sorted(row[0] for row in before)
    dataset.slots_shuffle(names[1:], seed=1)  # the first slot is back
    again = rows(dataset)
    assert [row[0] for row in again] == [row[0] for row in before]
    assert [row[2][0] - row[1][0] for row in again] == [0.5] * 40  # both from one sample
    with pytest.raises(SpecError, match="slots_shuffle is given 'other', which is no slot"):
        dataset.slots_shuffle(["other"])


def test_what_announces_ids_to_servers_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = loaded(tmp_path / "part", ["1 3 1 6 1 0.5"])
    dataset.set_generate_unique_feasigns(True, 15)
    dataset.generate_local_tables_unlock(0, 11, 1, 25, 15)
    assert caplog.text.count("has no effect") == 2


def test_remote_files_are_read_by_a_command(tmp_path: Path) -> None:
    (tmp_path / "part a").write_text("1 3 1 6 1 0.5\n")
    script = tmp_path / "fetch"
    script.write_text(f'#!/bin/bash\ncat "{tmp_path}/${{1#afs:}}"\n')
    script.chmod(0o755)
    for kind in ("QueueDataset", "InMemoryDataset", "FileInstantDataset"):
        dataset: Any = dataset_of([tmp_path / "part a"], SLOTS, kind=kind)
        dataset.set_filelist(["afs:part a"])
        dataset.set_download_cmd(str(script))
        dataset.set_pipe_command("sed s/6/7/")
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
        assert rows(dataset) == [((3,), (7,), (0.5,))]


def test_hdfs_is_read_by_hadoop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hadoop = tmp_path / "hadoop"
    settings = "fs.default.name=hdfs:// hadoop.job.ugi=me,pw -text"
    hadoop.write_text(f'#!/bin/bash\n[ "$3 $5 $6" = "{settings}" ] && echo 1 3 1 6 1 0.5\n')
    hadoop.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    dataset: Any = dataset_of([tmp_path / "none"], SLOTS)
    dataset.set_filelist(["hdfs:/data/part-0"])
    dataset.set_hdfs_config("hdfs://", "me,pw")
    assert rows(dataset) == [((3,), (6,), (0.5,))]
    with pytest.raises(SpecError, match="empty command"):
        dataset.set_download_cmd(" ")


@pytest.mark.parametrize(("num_samples", "sizes"), [(22, [4, 4, 4, 4, 3, 3]), (18, [4, 4, 4, 2, 2, 2]), (2, [])])
def test_each_place_gets_as_many_samples(tmp_path: Path, num_samples: int, sizes: list[int]) -> None:
    dataset = loaded(tmp_path / "part", [f"1 {n} 1 {n} 1 {n}" for n in range(num_samples)])
    dataset.set_batch_size(4)
    loader = fluid.io.DataLoader.from_dataset(dataset, fluid.cpu_places(3), drop_last=False)
    names = [slot.name for slot in dataset._slots]
    found = [feed for group in loader for feed in group]
    dense = [feed[names[1]] for feed in found if feed]
    assert [tensor.shape()[0] for tensor in dense] == sizes
