"""`fluid.profiler`: a table and a trace of what an Executor and the engine run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import penstock as fluid
from penstock.errors import SpecError


def built(*, compiled: bool) -> Callable[[], object]:
    """Return what runs a program once."""
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.data("x", [4]), 3))
    exe = fluid.Executor()
    exe.run(startup, scope=scope)
    program = fluid.CompiledProgram(main).with_data_parallel(places=fluid.cpu_places(1)) if compiled else main
    return lambda: exe.run(program, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss], scope=scope)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_profile_has_the_operators_of_runs(
    compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = tmp_path / "new" / "profile", built(compiled=compiled)
    with fluid.profiler.profiler("CPU", "calls", str(path)):
        run()
        run()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    calls = [int(row[1]) for row in rows if row and row[0].startswith("aten::")]
    assert calls == sorted(calls, reverse=True)
    (product,) = [row for row in rows if row[:1] == ["aten::addmm"]]
    assert product[1] == "2"
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("aten::addmm") == 2


def test_a_profile_is_started_and_stopped_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fluid.profiler.stop_profiler("name")
    fluid.profiler.reset_profiler()
    with pytest.raises(SpecError, match="state is 'TPU'"):
        fluid.profiler.start_profiler("TPU")
    run = built(compiled=False)
    fluid.profiler.start_profiler("All")
    fluid.profiler.start_profiler("CPU")
    run()
    fluid.profiler.reset_profiler()
    with pytest.raises(SpecError, match="sorted_key is 'name'"):
        fluid.profiler.stop_profiler("name")
    fluid.profiler.stop_profiler("total", str(tmp_path / "profile"))
    assert "aten::addmm" not in capsys.readouterr().out


def test_an_error_of_the_block_is_the_one_that_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyError, match="body"), fluid.profiler.profiler("CPU", None, str(tmp_path / "file" / "below")):
        raise KeyError("body")
    assert "could not be written" in caplog.text
    with pytest.raises(SpecError, match="sorted_key is 'name'"), fluid.profiler.profiler("CPU", "name"):
        pytest.fail("the block has run")
    with pytest.raises(KeyError), fluid.profiler.profiler("CPU", None, str(tmp_path / "profile")):
        raise KeyError("body")
    assert (tmp_path / "profile").is_file()
