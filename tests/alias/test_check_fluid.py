"""`penstock check-fluid`: names of Fluid in scripts that are read, not run."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.alias.check import Report, check
from penstock.alias.names import table
from penstock.cli import app

SCRIPT = """\
import paddle
import paddle.fluid as fluid
import numpy as np
from paddle.fluid.dygraph import Linear
from paddle.fluid.layers.nn import *

layers = fluid.layers

def network(x):
    y = layers.fc(x, 1)
    z = fluid.layers.fc(y, 1, act="relu").shape
    return relu(np.tanh(z)), fluid.io.DataLoader.from_generator, fluid.io.DataLoader.from_nothing

paddle.no_such_name
fluid.io.save_persistables(None, "dir")
raise SystemExit("it ran")
"""


def found(report: Report) -> dict[str, tuple[str, list[int]]]:
    return {one.name.path: (str(one.name.standing), [use.line for use in one.uses]) for one in report.findings}


def test_names_are_followed_through_imports_and_assignments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert found(check(script, table())) == {
        "paddle.fluid.dygraph.nn.Linear": ("missing", [4]),
        "paddle.fluid.reader.DataLoader.from_nothing": ("missing", [12]),
        "paddle.no_such_name": ("unknown", [14]),
        "paddle.fluid.io.save_persistables": ("differs", [15]),
        "paddle.fluid.layers.nn.fc": ("there", [10, 11]),
        "paddle.fluid.layers.nn.relu": ("there", [12]),
        "paddle.fluid.reader.DataLoader": ("there", [12]),
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import paddle.fluid.flui", "paddle.fluid.flui"),
        ("from paddle import flui", "paddle.flui"),
        ("from paddle.fluid.dygraph.nn import Linear as L", "paddle.fluid.dygraph.nn.Linear"),
        ("import paddle.fluid.dygraph.nn as nn\nnn.Linear(1)", "paddle.fluid.dygraph.nn.Linear"),
        ("import paddle as p\ndef f():\n    return p.fluid.dygraph.Linear", "paddle.fluid.dygraph.nn.Linear"),
    ],
)
def test_every_form_of_import_is_read(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "a.py").write_text(source)
    assert list(found(check(tmp_path, table()))) == [name]


def test_names_of_other_libraries_are_none_of_fluid(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import numpy as fluid\nfrom . import paddle\nfluid.layers.fc, paddle.nothing\n")
    assert found(check(tmp_path, table())) == {}


def test_the_command_exits_with_1_if_a_name_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paddle.fluid as fluid\nfluid.dygraph.Linear\n")
    result = CliRunner().invoke(app, ["check-fluid", str(tmp_path), "--json"])
    (name,) = json.loads(result.stdout)["names"]
    assert (result.exit_code, name["standing"], name["uses"]) == (1, "missing", [{"file": str(script), "line": 2}])
    assert "penstock.capture" in name["note"]
    script.write_text("import paddle.fluid as fluid\nfluid.Executor\n")
    result = CliRunner().invoke(app, ["check-fluid", str(script)])
    assert (result.exit_code, result.stdout.splitlines()[-1].split("; ")[0]) == (0, "1 files, 0 unread")


def test_a_file_of_python_2_is_listed_and_fails(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print 'x'\n")
    result = CliRunner().invoke(app, ["check-fluid", str(tmp_path)])
    assert (result.exit_code, "old.py: no Python 3: line 1" in result.stdout) == (1, True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x = 1\0", "null"),
        (b"x = " + b"(" * 5000 + b")" * 5000, "nest|parse"),
        (b"x = " + b"-" * 60_000 + b"1", "parse"),
        (None, "cannot be read: Permission denied"),
    ],
    ids=["zero bytes", "parentheses", "signs", "permission"],
)
def test_a_file_that_cannot_be_parsed_is_listed_and_fails(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd.py"
    odd.write_bytes(content or b"")
    if content is None:
        reads = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: reads(path) if path != odd else _refused())
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "train.py").write_text("import paddle\npaddle.no_such_name\n")
    report = check(tmp_path, table())
    assert list(found(report)) == ["paddle.no_such_name"]
    assert list(report.unread) == [odd]
    assert re.search(reason, report.unread[odd])
    result = CliRunner().invoke(app, ["check-fluid", str(odd)])
    assert (result.exit_code, result.stdout.startswith(f"{odd}: ")) == (1, True)


def _refused() -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_what_every_module_has_is_no_name_of_fluid(tmp_path: Path) -> None:
    source = "import paddle\nimport paddle.fluid as fluid\npaddle.__version__, fluid.__file__, fluid.layers.__name__\n"
    (tmp_path / "a.py").write_text(source)
    assert found(check(tmp_path, table())) == {}
