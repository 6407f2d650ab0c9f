"""Row 38 of the specification: Fluid's API records Programs, and says so to somebody who uses it eagerly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import penstock as fluid
from penstock.errors import PenstockError

COMPUTED, MODULE = torch.ones(4, 13), torch.nn.Linear(13, 1)
MISUSES: dict[str, Callable[[], object]] = {
    "ParallelExecutor": lambda: fluid.ParallelExecutor(False, loss_name="loss", main_program=MODULE),
    "CompiledProgram": lambda: fluid.CompiledProgram(MODULE),
    "Executor.run": lambda: fluid.Executor(fluid.CPUPlace()).run(MODULE, feed={}, fetch_list=[]),
    "a layer": lambda: fluid.layers.fc(input=COMPUTED, size=1),
    "minimize": lambda: fluid.optimizer.SGD(learning_rate=0.1).minimize(COMPUTED.sum()),
    "append_backward": lambda: fluid.append_backward(COMPUTED.sum()),
    "a fetch": lambda: fluid.Executor(fluid.CPUPlace()).run(fluid.Program(), feed={}, fetch_list=[COMPUTED]),
    "transpile": lambda: fluid.DistributeTranspiler().transpile(0, program=MODULE, pservers="127.0.0.1:1", trainers=1),
    "enable_dygraph": fluid.enable_dygraph,
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_row_38_eager_use_of_program_apis_fails_with_advice(misuse: str) -> None:
    with pytest.raises(PenstockError) as caught:
        MISUSES[misuse]()
    said = str(caught.value)
    assert "here is no eager mode here" in said
    assert "penstock.capture" in said
    assert len(said) < 600, "a tensor is named by its shape, not by its numbers"


def test_row_38_scripts_that_ask_for_dygraph_get_an_error() -> None:
    assert fluid.in_dygraph_mode() is False
    fluid.disable_dygraph()
    assert not hasattr(fluid, "dygraph")
    with pytest.raises(AttributeError, match="no attribute 'dygraph': there is no eager mode here"):
        _ = fluid.dygraph


def test_row_38_a_strategy_belongs_to_programs_without_a_mode() -> None:
    x = fluid.layers.data(name="x", shape=[13], dtype="float32")
    loss = fluid.layers.mean(fluid.layers.fc(input=x, size=1))
    fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    fluid.Executor(fluid.CPUPlace()).run(fluid.default_startup_program())
    settings = fluid.ExecutionStrategy()
    settings.num_threads = 4
    executor = fluid.ParallelExecutor(use_cuda=False, loss_name=loss.name, exec_strategy=settings)
    (value,) = executor.run([loss], {"x": torch.ones(4, 13).numpy()})
    assert value.ndim == 1
