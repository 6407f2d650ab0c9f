"""Rows of docs/fluid-parity.md on parameter servers that no test nearer to their part shows: whole jobs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conformance.server_jobs import (
    MODELS,
    WAIT_S,
    free_endpoints,
    locally,
    process,
    serve,
    table_feeds,
    table_model,
    together,
    told,
    train,
)
from tests.support.nursery import Nursery

MB = 10**6


@pytest.mark.parametrize(("model", "table_bytes"), [("16 GB of any ids", 16 * 10**9), ("128 MB by rows", 2**27)])
def test_row_45_a_trainer_allocates_no_memory_for_remote_tables(
    nursery: Nursery, tmp_path: Path, model: str, table_bytes: int
) -> None:
    make, _ = MODELS[model]
    parameter = make().main.variables["table"]
    assert 4 * parameter.shape[0] * parameter.shape[1] == table_bytes
    endpoints = free_endpoints(["127.0.0.1"])
    with (
        ThreadPoolExecutor(1) as pool,
        process(nursery, tmp_path / "trainer", "TRAINER", 0, endpoints, 1, model) as trainer,
    ):
        server = pool.submit(serve, make, endpoints, endpoints, 1)
        seen = told(trainer)
        scope = server.result(WAIT_S)
    assert not seen["has_table"]
    assert seen["grown_bytes"] < 64 * MB, "connections, the dense layer, the rows of a batch"
    assert np.isfinite(seen["losses"]).all()
    kept = scope.find("table")
    assert model != "128 MB by rows" or (kept is not None and kept.nbytes == table_bytes)


def test_row_49_roles_run_in_their_own_processes_or_share_one(nursery: Nursery, tmp_path: Path) -> None:
    make, highest = MODELS["small"]
    endpoints = free_endpoints(["127.0.0.2", "localhost"])
    here, there = endpoints.split(",")
    feeds = table_feeds(6, 16, highest=highest, part=0, parts=2)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        others = [
            stack.enter_context(process(nursery, tmp_path / role, role, 1, endpoints, 2, "small"))
            for role in ("PSERVER", "TRAINER")
        ]
        server = pool.submit(serve, make, here, endpoints, 2)
        trainer = pool.submit(train, make, 0, endpoints, 2, feeds)
        first, (_, second) = trainer.result(WAIT_S), map(told, others)
        server.result(WAIT_S)
    alone = locally(make, table_feeds(6, 16, highest=highest))
    assert {endpoint for endpoint, _ in first.rows} >= {here, there}
    for weight in (first.scope.find("w"), torch.tensor(second["w"])):
        expected = alone.scope.find("w")
        assert weight is not None and expected is not None
        assert torch.allclose(weight, expected, rtol=1e-5, atol=1e-6)  # float32; means of halves


def bytes_of_a_step(dict_size: int, rows: int, *, distributed: bool) -> tuple[int, int]:
    """Return the bytes that the table costs in a step: (sent, received)."""
    num, feeds = 4, table_feeds(4, rows, highest=1000)
    (seen,) = together(lambda: table_model(dict_size, 8, distributed=distributed), [feeds], servers=2)
    of_table = [row for (endpoint, name), row in seen.rows.items() if endpoint and name.startswith("table")]
    sent, received = sum(row.sent_bytes for row in of_table), sum(row.received_bytes for row in of_table)
    assert sent % num == received % num == 0
    return sent // num, received // num


@pytest.mark.parametrize("distributed", [True, False])
def test_row_59_a_step_moves_its_ids_bytes_whatever_the_table(distributed: bool) -> None:
    sizes = (1000, 10**9) if distributed else (1000, 100_000)
    small, large = (bytes_of_a_step(size, 16, distributed=distributed) for size in sizes)
    assert small == large
    num_ids = 16 * 4  # all different
    assert large[1] == num_ids * 8 * 4, "the rows of the ids"
    assert large[0] == 2 * num_ids * 8 + num_ids * 8 * 4, "ids to look up, ids of gradients, gradients"
    assert bytes_of_a_step(sizes[0], 32, distributed=distributed) == (2 * large[0], 2 * large[1])
