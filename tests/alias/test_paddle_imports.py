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
from penstock.alias.names import DEFAULT_ADVICE, INTERNAL, Standing, table
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


def test_names_of_the_table_are_of_fluid_and_exports_exist() -> None:
    names = table()
    for path, module in names.modules.items():
        public = set(module.names or ())
        assert not public & set(module.more), path
        assert {*module.exports, *module.stars} <= names.modules.keys(), path
        assert set(module.at) | set(module.differs) | set(module.instead) <= {*public, *module.more}, path


def test_every_module_of_1_8_5_is_imported(paddle: ModuleType) -> None:
    released = [path for path, module in table().modules.items() if module.is_released]
    assert len(released) == 254  # files below `paddle` of the release's wheel
    for path in released:
        assert isinstance(importlib.import_module(path), ModuleType), path
    assert paddle.fluid.incubate.fleet is paddle.fluid.fleet  # the package imports it


def test_each_public_name_of_1_8_5_is_there_or_says_what_to_use() -> None:
    names, told = table(), 0
    for path, module in names.modules.items():
        for name in module.names or ():
            found = names.look_up(path, name)
            if found.standing is Standing.MISSING:
                told += 1
                assert found.note not in (DEFAULT_ADVICE, INTERNAL, ""), found.path
            else:
                assert found.value is not None, found.path
    assert told


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from paddle.fluid.contrib.slim.core import Compressor", "slim.core.compressor.Compressor .*save_inference"),
        (
            "from paddle.fluid.transpiler.details.checkport import wait_server_ready",
            "checkport.wait_server_ready .*retry",
        ),
        ("from paddle.distributed.utils import get_cluster", "paddle.distributed.utils.get_cluster .*docs/launch.md"),
        ("from paddle.complex import matmul", "paddle.complex.tensor.linalg.matmul .*two variables"),
        ("import paddle.utils.torch2paddle as t; t.save_net_parameters", "save_net_parameters .*penstock.capture"),
        ("from paddle.fluid.layers.nn import _elementwise_op", "layers.nn._elementwise_op of Fluid 1.8 is not"),
    ],
)
@pytest.mark.usefixtures("paddle")
def test_modules_with_nothing_here_refuse_by_name(source: str, said: str) -> None:
    with pytest.raises((ImportError, AttributeError), match=said.replace(".", r"\.").replace(r"\.*", ".*")):
        run(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "from paddle.fluid.regularizer import append_regularization_ops as found",
            "regularizer.append_regularization_ops",
        ),
        ("from paddle.fluid.layers.control_flow import LayerHelper as found", "layer_helper.LayerHelper"),
        ("from paddle.fluid.dataset import core; found = core.CPUPlace", "CPUPlace"),
        ("from paddle.fluid import *; found = layers.fc", "layers.fc"),
        ("from paddle.utils import Ploter as found", "alias.plot.Ploter"),
    ],
)
@pytest.mark.usefixtures("paddle")
def test_what_a_module_of_fluid_imports_is_in_it(source: str, expected: str) -> None:
    found: Any = penstock
    for part in expected.split("."):
        found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
    assert run(source)["found"] is found


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
