"""Every optimizer, schedule, initializer, regularizer, clip, metric and loss of Fluid is compared with Fluid's numbers.

The rows are in bench/peers/fluid_names.py. No test here computes: those of the cases do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.peers import ROOT
from bench.peers.fluid_names import GROUPS, LOSSES_ELSEWHERE, ROWS
from bench.peers.fluid_numbers import read

from penstock.alias.names import Standing, table

THERE = (Standing.THERE, Standing.DIFFERS)
DRIVERS = {path.name: path.read_text(encoding="utf-8") for path in Path(ROOT / "tests" / "program").glob("*fluid.py")}


def is_compared(row: str) -> bool:
    path, _, test = row.partition("::")
    if test:
        return f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
    group, _, case = row.partition(": ")
    return row == "has no numbers of its own" or case in GROUPS[group]


@pytest.mark.parametrize("module", ROWS)
def test_every_name_is_compared_with_fluid(module: str) -> None:
    found = {name: table().look_up(module, name) for name in table().public(module)}
    names = {name: one.value for name, one in found.items() if one.standing in THERE}
    covered = [names[name] for name in ROWS[module]]
    assert [name for name, value in names.items() if not any(value is one for one in covered)] == []


def test_every_row_of_a_name_has_a_case() -> None:
    rows = [row for rows in (ROWS, LOSSES_ELSEWHERE) for some in rows.values() for row in some.values()]
    assert [row for row in rows if not is_compared(row)] == []
    missing = [
        f"{module}.{name}"
        for module, some in LOSSES_ELSEWHERE.items()
        for name in some
        if table().look_up(module, name).standing not in THERE
    ]
    assert missing == []


def test_the_recorded_table_has_every_case_and_no_other() -> None:
    assert {group: set(some) for group, some in read().items()} == {group: set(some) for group, some in GROUPS.items()}


def test_every_group_is_compared_by_a_test() -> None:
    assert [group for group in GROUPS if not any(f'"{group}"' in text for text in DRIVERS.values())] == []
