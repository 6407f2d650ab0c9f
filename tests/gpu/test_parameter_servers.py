"""Jobs with parameter servers where there is a GPU: a trainer may compute on it; what servers keep is never there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.conformance.server_jobs import (
    WAIT_S,
    free_endpoints,
    locally,
    serve,
    table_feeds,
    table_model,
    transpiled,
)

import penstock as fluid

pytestmark = pytest.mark.gpu


def make() -> Any:
    """The table's model, small."""
    return table_model(500, 8, distributed=False)


@pytest.mark.parametrize("server_on_gpu", [False, True])
def test_row_50_a_server_serves_a_gpu_trainer_on_any_place(server_on_gpu: bool) -> None:
    feeds, endpoints = table_feeds(6, 16, highest=500), free_endpoints(["127.0.0.1"])
    gpu = fluid.CUDAPlace(0)
    _, model = transpiled(make, 0, endpoints, 1)
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(serve, make, endpoints, endpoints, 1, gpu if server_on_gpu else fluid.CPUPlace())
        scope, exe = fluid.Scope(), fluid.Executor(gpu)
        exe.run(model.startup, scope=scope)
        losses = [float(exe.run(model.main, feed, [model.loss], scope=scope)[0].item()) for feed in feeds]
        exe.close()
        kept = server.result(WAIT_S)
    trained, table = scope.find("w"), kept.find("table")
    assert trained is not None and trained.device.type == "cuda"
    assert table is not None and table.device.type == "cpu"
    alone = locally(make, feeds)
    expected = alone.scope.find("table")
    assert expected is not None
    assert losses == pytest.approx(alone.losses, rel=1e-4)  # float32, sums in another order
    assert torch.allclose(table, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_beyond_the_cards_memory_trains_a_model_on_it(compiled: bool) -> None:
    def make_large() -> Any:
        return table_model(10**10, 16, distributed=True)  # 640 GB, of which rows exist once they are used

    def losses_on(place: Any) -> list[float]:
        endpoints = free_endpoints(["127.0.0.1"])
        _, model = transpiled(make_large, 0, endpoints, 1)
        with ThreadPoolExecutor(1) as pool:
            server = pool.submit(serve, make_large, endpoints, endpoints, 1, fluid.CPUPlace())
            scope, exe = fluid.Scope(), fluid.Executor(place)
            exe.run(model.startup, scope=scope)
            program: Any = model.main
            if compiled:
                program = fluid.CompiledProgram(program).with_data_parallel(model.loss, places=[place])
            found = [exe.run(program, feed, [model.loss], scope=scope)[0] for feed in feeds]
            exe.close()
            server.result(WAIT_S)
        return [float(loss.reshape(-1)[0]) for loss in found]

    feeds = table_feeds(8, 64, highest=2**60)
    wanted = losses_on(fluid.CPUPlace())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert losses_on(fluid.CUDAPlace(0)) == pytest.approx(wanted, rel=1e-4)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
