"""Feeds that are read natively: the shares that Python makes, the arrays' own memory, and Python's errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.property.networks import ctr_dnn

import penstock as fluid
from penstock.errors import FeedError
from penstock.exec import fed
from penstock.exec.fed import Feeds
from penstock.exec.feeding import Inputs
from penstock.native.engine import FeedReader, TorchPlan
from penstock.program.program import Program
from penstock.scope import Scope

REPLICAS = 3
Feed = dict[str, Any]


class OwnArray(np.ndarray):
    """An array that can be referenced weakly."""


@pytest.fixture(scope="module")
def program() -> Program:
    return ctr_dnn(metrics=False).main


@pytest.fixture(params=["arrays", "tensors"])
def feed(request: pytest.FixtureRequest) -> Feed:
    given = ctr_dnn(metrics=False).feed(7, 1)
    return {**given} if request.param == "arrays" else {name: torch.tensor(value) for name, value in given.items()}


def feeds(program: Program) -> Feeds:
    return Feeds(program, REPLICAS, fed_loss_gradient=False, scope=Scope())


def put(read: Any, names: list[str], replica: int) -> dict[str, torch.Tensor]:
    """Return what a share puts into the slots of a plan, one slot for each input."""
    plan = TorchPlan(len(names))
    for slot in range(len(names)):
        plan.keep(slot)
    plan.seal()
    read.shares.put(plan, replica, list(range(len(names))))
    found = {name: plan.get(slot) for slot, name in enumerate(names)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def test_a_feed_that_fits_is_split_as_python_splits_it(program: Program, feed: Feed) -> None:
    read = feeds(program).read(feed)
    assert isinstance(read, fed._Read)
    inputs = Inputs(program, REPLICAS, fed_loss_gradient=False)
    wanted = inputs.shares(feed)
    assert list(read.rows) == [inputs.rows(share) for share in wanted] == [2, 2, 3]
    assert read.bindings == [inputs.bindings(share) for share in wanted]
    for replica, share in enumerate(wanted):
        got = put(read, list(read.names), replica)
        assert got.keys() == share.keys()
        for name, tensor in share.items():
            assert torch.equal(got[name], tensor)
            assert (got[name].dtype, got[name].data_ptr()) == (tensor.dtype, tensor.data_ptr()), name


def ragged_program() -> Program:
    program: Program = fluid.Program()
    with fluid.program_guard(program, fluid.Program()):
        fluid.layers.data("dense", [2])
        fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
        fluid.layers.data("words", [1], lod_level=2)
    return program


@pytest.mark.parametrize("as_tensors", [False, True])
def test_ragged_inputs_are_split_by_sequences(as_tensors: bool) -> None:
    program, random = ragged_program(), np.random.default_rng(0)
    given: Feed = {
        "dense": random.normal(size=(4, 2)).astype("float32"),
        "ids": random.integers(0, 9, (6, 1)), "ids@LENGTHS": np.array([[2], [0], [3], [1]]),
        "words": random.normal(size=(7, 1)).astype("float32"), "words@LENGTHS": np.array([[1], [0], [2], [4]]),
        "words@LENGTHS@LENGTHS": np.array([[1], [2], [0], [1]]),
    }  # fmt: skip
    given = {name: torch.tensor(value) for name, value in given.items()} if as_tensors else given
    read: Any = feeds(program).read(given)
    assert isinstance(read, fed._Read)
    inputs = Inputs(program, REPLICAS, fed_loss_gradient=False)
    wanted = inputs.shares(given)
    assert read.bindings == [inputs.bindings(share) for share in wanted]
    for replica, share in enumerate(wanted):
        got = put(read, list(read.names), replica)
        assert all(torch.equal(got[name], tensor) for name, tensor in share.items())
        assert got.keys() == share.keys()
    with pytest.raises(FeedError, match="'ids' has 6 rows, but its lengths add up to 7"):
        feeds(program).read({**given, "ids@LENGTHS": np.array([[2], [1], [3], [1]])})


def test_fewer_rows_than_replicas_make_fewer_shares(program: Program) -> None:
    read = feeds(program).read(ctr_dnn(metrics=False).feed(2, 1))
    assert list(read.rows) == [1, 1]


def test_memory_lives_until_its_last_tensor_is_gone(program: Program) -> None:
    given: Feed = {name: value.view(OwnArray) for name, value in ctr_dnn(metrics=False).feed(6, 1).items()}
    watched = weakref.ref(given["numbers"])
    read: Any = feeds(program).read(given)
    assert isinstance(read, fed._Read)
    tensor = put(read, list(read.names), 1)["numbers"]
    expected = given["numbers"][2:4].tolist()
    del read, given
    gc.collect()
    assert watched() is not None
    assert tensor.tolist() == expected
    del tensor
    gc.collect()
    assert watched() is None


def other_order(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asfortranarray(np.repeat(value, 2, 1))[:, ::2]


def read_only(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy = value.copy()
    copy.flags.writeable = False
    return copy


def unaligned(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    raw = np.zeros(value.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(value.tobytes(), np.uint8)
    return raw[1:].view(value.dtype).reshape(value.shape)


@pytest.mark.parametrize(
    "changed",
    [other_order, read_only, unaligned, np.ndarray.tolist, lambda value: value.astype(value.dtype.newbyteorder(">"))],
    ids=["strided", "read_only", "unaligned", "list", "big_endian"],
)
def test_what_needs_converting_goes_through_python(program: Program, changed: Any) -> None:
    given: Feed = {**ctr_dnn(metrics=False).feed(7, 1)}
    wanted = torch.tensor(given["numbers"])
    given["numbers"] = changed(given["numbers"])
    read: Any = feeds(program).read(given)
    assert isinstance(read, fed._Listed)
    assert torch.equal(torch.cat([share["numbers"] for share in read.shares]), wanted)


WRONG: Mapping[str, tuple[Feed, str]] = {
    "dtype": ({"numbers": np.zeros((7, 3))}, "feed 'numbers' is float64"),
    "width": ({"numbers": np.zeros((7, 2), "float32")}, r"feed 'numbers' has shape \[7, 2\]"),
    "rank": ({"numbers": np.zeros(7, "float32")}, r"feed 'numbers' has shape \[7\]"),
    "rows": ({"numbers": np.zeros((6, 3), "float32")}, "must have the same number of rows"),
    "name": ({"more": np.zeros((7, 3), "float32")}, "feed 'more'"),
    "no name": ({1: np.zeros((7, 3), "float32")}, "feed 1: variable 1 is not in the program"),  # type: ignore[dict-item]  # a user's
    "sparse": ({"numbers": torch.zeros(7, 3).to_sparse()}, "feed 'numbers' is a sparse tensor"),
    "meta": ({"numbers": torch.zeros(7, 3, device="meta")}, "feed 'numbers' is a tensor on the meta device"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_feed_is_the_error_that_python_words(program: Program, case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(FeedError, match=message):
        feeds(program).read({**ctr_dnn(metrics=False).feed(7, 1), **change})


def test_an_empty_batch_is_refused(program: Program) -> None:
    empty = {name: value[:0] for name, value in ctr_dnn(metrics=False).feed(7, 1).items()}
    with pytest.raises(FeedError, match="has no rows"):
        feeds(program).read(empty)


def test_sizes_that_two_inputs_disagree_about_are_left_to_python() -> None:
    inputs: list[Any] = [(name, torch.float32, 2, [], [(0, 0), (1, 1)], True, -1) for name in ("x", "y")]
    reader = FeedReader(inputs, 2)
    given = {name: np.zeros((2, 3), "float32") for name in ("x", "y")}
    shares = reader.read(given, 2)
    assert shares is not None
    assert shares.sizes == [[1, 3], [1, 3]]
    assert reader.read({**given, "y": np.zeros((2, 4), "float32")}, 2) is None
