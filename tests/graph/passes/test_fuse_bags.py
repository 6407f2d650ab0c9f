"""Sums of embedded sequences in one operator each, their gradients without spread copies: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.graph.passes.test_fuse_tables import FUSED, KINDS, Make, built, types
from tests.property.networks import Feed, Network
from tests.property.oracle import assert_passes_keep_results

import penstock as fluid
from penstock.errors import OperatorError
from penstock.graph.check import check
from penstock.graph.passes.fuse_bags import fuse_bags
from penstock.graph.passes.fuse_sparse import fuse_sparse_updates
from penstock.program.program import Program

WIDTHS = (4, 16, 3)


def bags(make: Make, *, shared: bool = False, padding: bool = False, kind: str = "sum", alone: bool = False) -> Network:
    """Ragged slots with a table each, or one for all. `alone`: the first slot's rows are read again."""
    main, startup = Program(seed=7), Program(seed=7)
    layers = fluid.layers
    with fluid.program_guard(main, startup):
        pooled = []
        for number, width in enumerate(WIDTHS):
            ids = layers.data(name=f"slot{number}", shape=[1], dtype="int64", lod_level=1)
            name, size = ("table", [20, 8]) if shared else (f"table{number}", [20 + number, width])
            rows = layers.embedding(
                ids, size, is_sparse=True, padding_idx=2 if padding else None, param_attr=fluid.ParamAttr(name=name)
            )
            pooled.append(layers.sequence_pool(rows, kind))
            pooled += [layers.sequence_pool(rows, "max")] if alone and not number else []
        label = layers.data(name="label", shape=[1], dtype="float32")
        hidden = layers.fc(layers.concat(pooled, axis=1), 5, act="tanh")
        loss = layers.mean(layers.square_error_cost(layers.fc(hidden, 1), label))
        make().minimize(loss)

    def feed(count: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        found: Feed = {"label": random.normal(size=(count, 1)).astype("float32")}
        for number in range(len(WIDTHS)):
            lengths = random.integers(0, 5, (count, 1))
            found[f"slot{number}"] = random.integers(0, 20, (int(lengths.sum()), 1))
            found[f"slot{number}@LENGTHS"] = lengths
        return found

    return Network("bags", main, startup, loss.name, feed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"shared": True, "padding": True}, {"alone": True}], ids=str)
def test_training_keeps_its_bits(kind: str, options: dict[str, bool]) -> None:
    for mode, replicas in (("reduce", 2), ("all_reduce", 2), ("reduce", 1)):
        network = bags(KINDS[kind], **options)  # type: ignore[arg-type]  # bools
        assert_passes_keep_results(network, FUSED, mode=mode, num_replicas=replicas, batches=(7, 1))  # type: ignore[arg-type]  # literals


def test_each_slot_is_one_operator_and_no_row_is_spread() -> None:
    network = bags(KINDS["adam"])
    graph = fuse_bags(fuse_sparse_updates(built(network), network.main), network.main)
    check(graph)
    assert types(graph).count("lookup_pool") == 2 * len(WIDTHS)
    gone = {"lookup_table", "sequence_pool", "sequence_pool_backward", "sparse_adam_"}
    assert gone & set(types(graph)) == set()


def test_other_pools_and_rows_with_another_reader_stay() -> None:
    for network, pools in ((bags(KINDS["sgd"], kind="average"), 0), (bags(KINDS["sgd"], alone=True), 4)):
        graph = fuse_bags(fuse_sparse_updates(built(network), network.main), network.main)
        check(graph)
        assert types(graph).count("lookup_pool") == pools
        assert "sequence_pool_backward" in types(graph)


def test_an_id_outside_its_table_is_an_error_of_the_lookup() -> None:
    network = bags(KINDS["sgd"])
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(network.startup, scope=scope)
    feed = network.feed(3, 0)
    feed["slot1"] = torch.tensor(feed["slot1"]).fill_(21).numpy()
    with pytest.raises(OperatorError, match=r"penstock.lookup_table.*id 21 at position 0"):
        exe.run(network.main, feed, [network.loss], scope=scope)
