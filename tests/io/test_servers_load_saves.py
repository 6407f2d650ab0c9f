"""`fluid.io.load_persistables` of a server's program: its rows of a save that one process wrote."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.transpile.recorded import ENDPOINTS, ROWS, batch, tower, transpiled

import penstock as fluid
from penstock.errors import UserError
from penstock.serving.storage import ProgramStorage, storage_to_serve


def adam() -> object:
    return fluid.optimizer.Adam(0.01)


def saved(folder: Path, steps: int = 2) -> fluid.Scope:
    """Train on one machine and save."""
    local, scope, exe = tower(adam), fluid.Scope(), fluid.Executor()
    exe.run(local.startup, scope=scope)
    for seed in range(steps):
        exe.run(local.main, batch(seed=seed), [local.loss], scope=scope)
    fluid.io.save_persistables(exe, folder, local.main, scope=scope)
    return scope


def servers_of(folder: Path) -> list[ProgramStorage]:
    """Start the servers of the same program, and load."""
    made, exe, found = transpiled(tower(adam)), fluid.Executor(), list[ProgramStorage]()
    for endpoint in ENDPOINTS:
        scope = fluid.Scope()
        program, startup = made.get_pserver_programs(endpoint)
        exe.run(startup, scope=scope)
        fluid.io.load_persistables(exe, folder, program, scope=scope)
        found.append(storage_to_serve(program, scope))
    return found


def test_each_server_has_its_rows_of_parameters_and_moments(tmp_path: Path) -> None:
    scope = saved(tmp_path)
    whole: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for storage in servers_of(tmp_path):
        for name, tensors in storage.state():
            parameter, _, first = name.rpartition("@")
            for part in (parameter, f"adam_0.moment1.{parameter}", f"adam_0.moment2.{parameter}"):
                if part in tensors:
                    whole.setdefault(part, []).append((int(first), tensors[part]))
    assert len(whole["table"]) == 2, "the table is cut"
    assert {"adam_0.moment1.table", "adam_0.moment2.w"} <= whole.keys()
    for name, parts in whole.items():
        rows = torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])
        np.testing.assert_array_equal(rows, np.array(scope.find_var(name).get_tensor()))


def test_state_that_a_save_lacks_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scope, exe = saved(tmp_path / "all"), fluid.Executor()
    fluid.io.save_params(exe, tmp_path / "params", tower(adam).main, scope=scope)
    caplog.set_level(logging.WARNING)
    for storage in servers_of(tmp_path / "params"):
        for _, tensors in storage.state():
            assert all(not value.any() for name, value in tensors.items() if ".moment1." in name)
    assert "has no values of adam_0.moment1" in caplog.text
    assert "begin anew" in caplog.text


def test_a_save_without_a_servers_rows_is_refused(tmp_path: Path) -> None:
    scope, exe = saved(tmp_path / "all"), fluid.Executor()
    main = tower(adam).main
    few = [var for var in main.list_vars() if var.persistable and var.name != "table"]
    fluid.io.save_vars(exe, tmp_path / "few", main, vars=few, scope=scope)
    with pytest.raises(UserError, match=r"has no such variable, but server .* keeps rows 0 to \d+ of 'table'"):
        servers_of(tmp_path / "few")


def test_a_save_with_too_few_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.transpile.recorded.ROWS", ROWS // 4)
    saved(tmp_path, steps=0)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"has 500 rows of it, but server 10.0.0.1:6170 keeps rows 0 to 999 of 'table'"):
        servers_of(tmp_path)
