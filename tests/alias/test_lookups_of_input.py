"""`fluid.embedding` and `fluid.one_hot` of a script of Fluid: a last size of 1 stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as fluid
from penstock.alias import input as of_input
from penstock.alias.names import Standing, table

WORDS, WIDTH, FIELDS = 10, 4, 39


def run(feed: dict[str, Any], fetches: list[Any]) -> list[Any]:
    executor = fluid.Executor()
    executor.run(fluid.default_startup_program())
    return list(executor.run(feed=feed, fetch_list=fetches))


@pytest.fixture(autouse=True)
def _own_program() -> Any:
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        yield


@pytest.mark.parametrize("name", ["embedding", "one_hot"])
@pytest.mark.parametrize("module", ["paddle.fluid", "paddle.fluid.input"])
def test_scripts_of_fluid_get_these(module: str, name: str) -> None:
    found = table().look_up(module, name)
    assert (found.standing, found.value) == (Standing.THERE, getattr(of_input, name))


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("declared", "fed"), [([-1, 1], (3, 1)), ([-1], (3,)), ([-1, 2], (3, 2))])
def test_the_sizes_of_the_ids_stay(declared: list[int], fed: tuple[int, ...], is_sparse: bool) -> None:
    ids = fluid.data("ids", declared, "int64")
    rows = of_input.embedding(ids, [WORDS, WIDTH], is_sparse, param_attr="table")
    ones = of_input.one_hot(ids, WORDS)
    given = np.arange(np.prod(fed)).reshape(fed)
    found, marked = run({"ids": given}, [rows, ones])
    np.testing.assert_array_equal(found, np.array(fluid.global_scope().find_var("table"))[given])
    np.testing.assert_array_equal(marked, np.eye(WORDS, dtype="float32")[given])


def test_one_id_is_one_row() -> None:
    ids = fluid.layers.fill_constant([1], "int64", 3)
    (marked,) = run({}, [of_input.one_hot(ids, WORDS)])
    assert marked.shape == (1, WORDS) and marked[0, 3] == 1.0


def test_a_padded_length_of_one_is_as_good_as_others() -> None:
    ids = fluid.data("ids", [-1, -1], "int64")
    rows = of_input.embedding(ids, [WORDS, WIDTH], param_attr="table")
    for length in (2, 1):
        (found,) = run({"ids": np.ones((3, length), "int64")}, [rows])
        assert found.shape == (3, length, WIDTH)


def test_ragged_ids_of_a_number_of_fields_become_fields() -> None:
    """What click models of the time do with a slot that has one id a field, beside values of the batch."""
    ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
    values = fluid.layers.data("values", [FIELDS], dtype="float32")
    rows = of_input.embedding(ids, [WORDS, WIDTH], is_sparse=True, padding_idx=0, param_attr="table")
    fields = fluid.layers.reshape(rows, [-1, FIELDS, WIDTH]) * fluid.layers.reshape(values, [-1, FIELDS, 1])
    loss = fluid.layers.reduce_sum(fields)
    fluid.optimizer.SGD(0.5).minimize(loss)
    given, factors = np.arange(2 * FIELDS) % WORDS, np.arange(2.0 * FIELDS, dtype="float32").reshape(2, FIELDS)
    ragged = fluid.create_lod_tensor(given.reshape(-1, 1), [[FIELDS, FIELDS]], fluid.CPUPlace())
    executor = fluid.Executor()
    executor.run(fluid.default_startup_program())
    before = np.array(fluid.global_scope().find_var("table"))
    (found,) = executor.run(feed={"ids": ragged, "values": factors}, fetch_list=[loss])
    known = np.where(given[:, None] == 0, 0, before[given])
    np.testing.assert_allclose(found, (known * factors.reshape(-1, 1)).sum(), rtol=1e-4)  # float32, 312 terms
    gradient = np.zeros_like(before)
    np.add.at(gradient, given, factors.reshape(-1, 1))
    gradient[0] = 0
    np.testing.assert_allclose(np.array(fluid.global_scope().find_var("table")), before - 0.5 * gradient, rtol=1e-5)
