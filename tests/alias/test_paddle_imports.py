"""`import paddle` means Penstock: what module paths and names resolve to, and what is not there."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock
from penstock.alias import finder
from penstock.alias.names import Standing, table
from penstock.errors import Bug


@pytest.fixture(autouse=True)
def _no_alias_before_and_after() -> Iterator[None]:
    yield
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, finder.Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "paddle"]:
        del sys.modules[name]


@pytest.fixture
def paddle() -> ModuleType:
    assert finder.install()
    return importlib.import_module("paddle")


def run(source: str) -> dict[str, Any]:
    """Run import statements as a script has them."""
    names: dict[str, Any] = {}
    exec(compile(source, "script.py", "exec"), names)  # noqa: S102 - imports by every form that there is
    return names


@pytest.mark.usefixtures("paddle")
@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("import paddle.fluid as fluid; found = fluid.layers.fc", "found", "layers.fc"),
        ("import paddle.fluid; found = paddle.fluid.layers.nn.fc", "found", "layers.fc"),
        ("from paddle.fluid.layers import *", "fc", "layers.fc"),
        ("from paddle import fluid; found = fluid.Executor", "found", "Executor"),
        ("from paddle.fluid.framework import Program, program_guard", "Program", "Program"),
        ("import paddle.fluid.core as core; found = core.EOFException", "found", "core.EOFException"),
        ("from paddle.fluid.param_attr import ParamAttr", "ParamAttr", "ParamAttr"),
        ("import paddle.fluid.optimizer as o; found = o.AdamOptimizer", "found", "optimizer.AdamOptimizer"),
        ("import paddle.fluid.data, paddle.fluid; found = paddle.fluid.data", "found", "data"),
        (
            "from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet",
            "fleet",
            "fleet.parameter_server.fleet",
        ),
        ("from paddle.fluid.incubate.fleet.base import role_maker as r; f = r.Role", "f", "fleet.roles.Role"),
        ("import paddle.batch; found = paddle.batch", "found", "dataset.readers.batch"),
        ("import paddle; found = paddle.reader.shuffle", "found", "dataset.readers.shuffle"),
        ("import paddle.fluid as fluid; found = fluid.io.xmap_readers", "found", "dataset.readers.xmap_readers"),
        ("from paddle.dataset.mnist import train", "train", "alias.dataset.mnist.train"),
        ("import paddle.distributed.launch as found", "found", "distributed.launch"),
    ],
)
def test_every_form_of_import_gives_penstock_s_object(source: str, name: str, expected: str) -> None:
    found: Any = penstock
    for part in expected.split("."):
        found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
    assert run(source)[name] is found


def test_modules_are_those_of_fluid_and_made_once(paddle: Any) -> None:
    fluid = importlib.import_module("paddle.fluid")
    assert (fluid.__name__, fluid.layers.__name__, paddle.__version__) == (
        "paddle.fluid",
        "paddle.fluid.layers",
        "1.8.5",
    )
    assert paddle.fluid is fluid
    assert fluid.layers is importlib.import_module("paddle.fluid.layers")
    assert {"fc", "data"} <= set(dir(fluid.layers)) & set(fluid.layers.__all__)


def test_a_script_may_set_the_folder_of_data_sets(paddle: Any, tmp_path: Path) -> None:
    from penstock.alias.dataset import common

    before = common.DATA_HOME
    try:
        paddle.dataset.common.DATA_HOME = str(tmp_path)
        assert common.path_of("http://host.example/a/b.txt", "imdb") == tmp_path / "imdb" / "b.txt"
    finally:
        common.DATA_HOME = before


def test_classes_pickle_by_where_penstock_has_them(paddle: Any) -> None:
    place = pickle.loads(pickle.dumps(paddle.fluid.CPUPlace()))  # noqa: S301 - our own bytes
    assert isinstance(place, penstock.CPUPlace)


def test_a_name_that_is_missing_says_what_to_use_instead(paddle: Any) -> None:
    said = r"paddle\.fluid\.layers\.detection\.generate_proposals of Fluid 1\.8 .*torchvision\.ops"
    with pytest.raises(AttributeError, match=said):
        _ = paddle.fluid.layers.generate_proposals
    with pytest.raises(ImportError, match=said):
        run("from paddle.fluid.layers import generate_proposals")
    assert not hasattr(paddle.fluid.layers, "generate_proposals")


def test_the_inference_engine_is_in_the_core(paddle: Any) -> None:
    run("from paddle.fluid.core import AnalysisConfig, NativeConfig, PaddleBuf, PaddleTensor, create_paddle_predictor")
    assert paddle.fluid.core.PaddleDType.INT64.value == "int64"


@pytest.mark.parametrize("use", ["Linear(1, 2)", "Linear.forward", "class Mine(Linear): ..."])
def test_a_name_of_eager_mode_is_refused_where_it_is_used(paddle: Any, use: str) -> None:
    run("from paddle.fluid.dygraph import Linear; assert not isinstance(1, Linear)")
    with pytest.raises(AttributeError, match=r"paddle\.fluid\.dygraph\.nn\.Linear of Fluid 1\.8 .*penstock\.capture"):
        run(f"from paddle.fluid.dygraph import Linear\n{use}")


def test_a_name_that_fluid_has_not_is_an_ordinary_error(paddle: Any) -> None:
    with pytest.raises(AttributeError, match=r"did you mean paddle\.fluid\.layers\.elementwise_sub\?"):
        _ = paddle.fluid.layers.elementwise_sum
    with pytest.raises(ModuleNotFoundError, match=r"paddle\.fluid\.flui"):
        run("import paddle.fluid.flui")
    with pytest.raises(ImportError):
        run("from paddle.fluid import flui")


def a_real_paddle(folder: Path) -> Path:
    package = folder / "paddle" / "__init__.py"
    package.parent.mkdir()
    package.write_text("real = True")
    return package


def test_a_real_paddle_stays_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = a_real_paddle(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert not finder.install()
    assert importlib.import_module("paddle").__file__ == str(package)
    assert "PENSTOCK_PADDLE_ALIAS=shadow" in caplog.text
    monkeypatch.setenv("PENSTOCK_PADDLE_ALIAS", "shadow")
    assert finder.install()
    assert isinstance(importlib.import_module("paddle"), finder.FluidModule)


def test_a_folder_named_paddle_is_no_real_paddle(tmp_path: Path) -> None:
    (tmp_path / "paddle").mkdir()
    assert finder.installed_paddle([str(tmp_path)]) is None
    assert finder.installed_paddle([str(finder.SHIM)]) is None


def test_public_names_are_listed_once_and_exports_exist() -> None:
    names = table()
    for path, module in names.modules.items():
        assert not set(module.names) & set(module.more), path
        assert set(module.exports) <= names.modules.keys(), path
        assert set(module.at) | set(module.differs) | set(module.instead) <= {*module.names, *module.more}, path


def test_modules_of_penstock_in_fluid_s_place_exist() -> None:
    for module in table().modules.values():
        if module.whole:
            importlib.import_module(f"penstock.{module.whole}")


def test_an_unknown_key_of_the_table_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tomllib.loads", lambda _: {"paddle.fluid": {"nmaes": "fc"}})
    with pytest.raises(Bug, match="nmaes"):
        table.__wrapped__()


def test_what_scripts_use_most_is_there() -> None:
    for name in ("layers.fc", "layers.data", "layers.reshape", "Executor", "ParamAttr", "optimizer.Adam", "io.batch"):
        module, _, last = f"paddle.fluid.{name}".rpartition(".")
        assert table().look_up(module, last).standing in (Standing.THERE, Standing.DIFFERS), name


def test_program_to_code_prints_the_text(paddle: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    given = run("import paddle.fluid as fluid\nfrom paddle.fluid.transpiler.details import program_to_code")
    fluid, code = given["fluid"], io.StringIO()
    with fluid.program_guard(main := fluid.Program(), fluid.Program()):
        fluid.layers.fc(fluid.data("x", [None, 3]), 2)
    given["program_to_code"](main)
    fluid.transpiler.details.program_to_code(main, fout=code, skip_op_callstack=False)
    printed = capsys.readouterr().out
    assert printed == code.getvalue()
    assert fluid.Program.parse(printed) == main
