"""What a server takes of a save of another program: all of it, or nothing without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError, UserError
from penstock.fleet import saving
from penstock.fleet.saving import SERVERS
from penstock.io.saves.manifest import ServersPart
from penstock.io.saves.variables import manifest_path, persistables, write_variables
from penstock.program.program import Program
from penstock.ps.durability.server_snapshots import Cut, Item, SnapshotWriter
from penstock.serving.storage import ProgramStorage

ENDPOINTS = ["10.0.0.1:6170", "10.0.0.2:6170"]


class Model:
    """A table of `rows` rows and a layer, with what its servers keep."""

    def __init__(
        self, *, rows: int = 2000, has_more: bool = False, seed: int = 1, is_distributed: bool = False,
        optimizer: Callable[[], Any] = lambda: fluid.optimizer.Adam(0.1),
    ) -> None:  # fmt: skip
        main, startup = fluid.Program(), fluid.Program()
        startup.random_seed = seed
        with fluid.program_guard(main, startup):
            ids = fluid.layers.data("ids", [1], dtype="int64")
            found: Any = fluid.layers.embedding(
                ids, [rows, 16], is_sparse=True, is_distributed=is_distributed, param_attr="table"
            )
            for name in ("w", "more")[: 1 + has_more]:
                found = fluid.layers.fc(found, 16, param_attr=name, bias_attr=False)
            optimizer().minimize(fluid.layers.mean(found))
        self.origin = main.clone()
        made = fluid.DistributeTranspiler()
        made.transpile(0, main, ",".join(ENDPOINTS), 1, startup_program=startup)
        self.programs: list[Program] = []
        self.storages: list[ProgramStorage] = []
        self.scopes: list[Any] = []
        for endpoint in ENDPOINTS:
            program, begins = made.get_pserver_programs(endpoint)
            scope = fluid.Scope()
            fluid.Executor().run(begins, scope=scope)
            self.programs.append(program)
            self.scopes.append(scope)
            self.storages.append(ProgramStorage(program, scope))

    def save(self, folder: Path, name: str = "1") -> None:
        """Write a save of the job, as far as its servers have to do with it."""
        self.write_parts(folder, name)
        written = ServersPart(f"{SERVERS}/{name}", 2)
        write_variables(manifest_path(folder, None), self.origin, [], fluid.Scope(), resumes=True, servers=written)

    def write_parts(self, folder: Path, name: str) -> None:
        """Write what the servers of a job write."""
        for index, storage in enumerate(self.storages):
            part = folder / SERVERS / name / f"{index}-of-2"
            part.parent.mkdir(parents=True, exist_ok=True)
            writer = SnapshotWriter(part)
            writer.add([Item(name, tensors, 0) for name, tensors in storage.state()])
            writer.finish(Cut("job", index, "sync", 0, list(storage.blocks())), {})

    def load(self, folder: Path) -> None:
        """Begin from a save."""
        for storage, program in zip(self.storages, self.programs, strict=True):
            saving.load(folder, storage, program, self.origin)

    def value(self, block: str) -> torch.Tensor:
        """Return a block of whichever server has it."""
        return next(s.value(block) for s in self.storages if block in s.blocks())


def test_a_save_of_the_same_program_is_taken_whole(tmp_path: Path) -> None:
    saved, other = Model(seed=1), Model(seed=2)
    saved.save(tmp_path)
    assert not torch.equal(saved.value("table.block0"), other.value("table.block0"))
    other.load(tmp_path)
    for block in ("table.block0", "table.block1", "w"):
        assert torch.equal(saved.value(block), other.value(block))


def test_a_save_aborted_before_its_manifest_leaves_the_previous(tmp_path: Path) -> None:
    first, second, other = Model(seed=1), Model(seed=2), Model(seed=3)
    first.save(tmp_path)
    second.write_parts(tmp_path, "2")
    other.load(tmp_path)
    assert torch.equal(first.value("w"), other.value("w"))
    second.save(tmp_path, "2")
    other.load(tmp_path)
    assert torch.equal(second.value("w"), other.value("w"))


def test_a_manifest_that_leads_servers_elsewhere_is_refused(tmp_path: Path) -> None:
    model = Model()
    for folder in ("../1", "/1", ""):
        written = ServersPart(folder, 2)
        write_variables(manifest_path(tmp_path, None), model.origin, [], fluid.Scope(), servers=written)
        with pytest.raises(UserError, match="expected one below its own"):
            model.load(tmp_path)


def test_a_save_without_a_parameter_of_the_program_is_refused(tmp_path: Path) -> None:
    Model().save(tmp_path)
    with pytest.raises(UserError, match=r"has no variable 'more', which the program trains; it has \['table', 'w'\]"):
        Model(has_more=True).load(tmp_path)


@pytest.mark.parametrize("rows", [1500, 2500])
def test_a_save_with_another_number_of_rows_is_refused(tmp_path: Path, rows: int) -> None:
    Model().save(tmp_path)
    with pytest.raises(UserError, match=f"has 2000 rows of 'table', but the program gives it {rows}"):
        Model(rows=rows).load(tmp_path)


def saved_on_one_machine(folder: Path, model: Model, names: list[str]) -> None:
    """Write variables as `fluid.io` does."""
    scope = fluid.Scope()
    kept = [v for v in persistables(model.origin) if v.name in names]
    for var in kept:
        scope.set(var.name, torch.full([int(str(d)) for d in var.shape], 3.0))
    write_variables(manifest_path(folder, None), model.origin, kept, scope, resumes=True)


@pytest.mark.parametrize("rows", [1500, 2500])
def test_local_values_with_another_number_of_rows_are_refused(tmp_path: Path, rows: int) -> None:
    saved_on_one_machine(tmp_path, Model(), ["table", "w"])
    with pytest.raises(UserError, match=f"has 2000 rows of 'table', but the program gives it {rows}"):
        Model(rows=rows).load(tmp_path)


def test_optimizer_state_missing_from_a_local_save_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    saved_on_one_machine(tmp_path, model, ["table", "w", "adam_0.moment1.w"])
    model.load(tmp_path)
    assert torch.equal(model.value("table.block1"), torch.full((1000, 16), 3.0))
    said = caplog.text
    assert "adam_0.moment2.w" in said and "adam_0.moment1.table" in said and "which begin anew" in said
    assert "adam_0.moment1.w" not in said


def test_a_save_of_a_whole_table_does_not_load_as_a_hashed_one(tmp_path: Path) -> None:
    Model().save(tmp_path)
    with pytest.raises(ProgramError, match=r"a snapshot of 'table' holds .* another program wrote it"):
        Model(is_distributed=True).load(tmp_path)
