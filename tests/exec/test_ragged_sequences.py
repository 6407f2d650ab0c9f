"""Ragged inputs from feed to fetch: against torch in float64, one sequence after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import FeedError, OperatorError, ProgramError, UserError
from penstock.exec.parallel import ParallelExecutor

NUM_IDS, WIDTH = 12, 3
POOLS = {
    "sum": lambda x: x.sum(0),
    "average": lambda x: x.mean(0),
    "sqrt": lambda x: x.sum(0) / len(x) ** 0.5,
    "max": lambda x: x.amax(0),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
}
LENGTHS = [[2, 0, 3, 1], [1, 1, 1, 1], [4, 4, 4, 4], [0, 0, 7, 0], [5]]


class Model:
    """Pools of embedded ids, beside dense numbers, through a layer to a loss; trained by SGD at rate 1."""

    def __init__(self, kind: str = "sum", *, sparse: bool = False, dtype: str = "int64") -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            ids = fluid.layers.data("ids", [1], dtype=dtype, lod_level=1)
            dense = fluid.layers.data("dense", [2], dtype="float64")
            table = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0, seed=2))
            rows = fluid.layers.embedding(ids, [NUM_IDS, WIDTH], is_sparse=sparse, param_attr=table, dtype="float64")
            self.pooled = fluid.layers.sequence_pool(rows, kind)
            weight = fluid.ParamAttr(name="weight", initializer=fluid.initializer.Normal(0.0, 1.0, seed=3))
            both = fluid.layers.concat([self.pooled, dense], axis=1)
            out = fluid.layers.fc(both, 1, param_attr=weight, bias_attr=False, act="tanh")
            self.loss = fluid.layers.mean(out * out)
            fluid.optimizer.SGD(1.0).minimize(self.loss)
        self.exe = fluid.Executor(fluid.CPUPlace())
        self.exe.run(self.startup, scope=self.scope)

    def values(self) -> dict[str, torch.Tensor]:
        return {n: torch.tensor(np.array(self.scope.find_var(n))) for n in ("table", "weight")}


def batch(lengths: list[int], seed: int = 0, dtype: str = "int64") -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, NUM_IDS, (sum(lengths), 1)).astype(dtype), random.normal(size=(len(lengths), 2))


def expected(model: Model, kind: str, ids: np.ndarray, lengths: list[int], dense: np.ndarray) -> dict[str, Any]:
    """The parameters after a step, and the loss, by a loop over the sequences."""
    values = {n: v.requires_grad_(True) for n, v in model.values().items()}
    flat, pooled, first = torch.tensor(ids[:, 0]).long(), [], 0
    for length in lengths:
        own = values["table"][flat[first : first + length]]
        pooled.append(POOLS[kind](own) if length else torch.zeros(WIDTH, dtype=torch.float64))
        first += length
    out = torch.tanh(torch.cat([torch.stack(pooled), torch.tensor(dense)], 1) @ values["weight"])
    loss = (out * out).mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch
    return {"loss": loss.item(), **{n: (v - v.grad).detach() for n, v in values.items() if v.grad is not None}}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", POOLS)
def test_a_step_is_that_of_a_loop_over_the_sequences(kind: str, sparse: bool) -> None:
    model = Model(kind, sparse=sparse)
    for seed, lengths in enumerate(LENGTHS):
        ids, dense = batch(lengths, seed)
        wanted = expected(model, kind, ids, lengths, dense)
        lod = fluid.create_lod_tensor(ids, [lengths], fluid.CPUPlace())
        (loss,) = model.exe.run(model.main, {"ids": lod, "dense": dense}, [model.loss], scope=model.scope)
        assert float(loss[0]) == pytest.approx(wanted["loss"], rel=1e-12)
        for name, value in model.values().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_share_a_batch_by_sequences(
    replicas: int, sparse: bool, reduce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", str(replicas))
    model, build = Model("average", sparse=sparse), fluid.BuildStrategy()
    if reduce and replicas > 1:
        build.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    executor = ParallelExecutor(False, model.loss.name, model.main, build_strategy=build, scope=model.scope)
    for seed, lengths in enumerate(LENGTHS * 2):
        ids, dense = batch(lengths, seed)
        wanted = expected(model, "average", ids, lengths, dense)
        lod = fluid.create_lod_tensor(ids, [lengths], fluid.CPUPlace())
        executor.run([model.loss.name], {"ids": lod, "dense": dense})
        for name, value in model.values().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
    assert len(executor.statistics()["plans"]) == 2  # of 4 sequences and of 1, whatever their rows
    executor.close()


def test_dropped_rows_differ_between_replicas_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = 7
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [16], lod_level=1)
        kept = fluid.layers.dropout(x, 0.5)
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.sequence_pool(kept, "sum"), 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
    scope = fluid.Scope()
    fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
    executor = ParallelExecutor(False, loss.name, main, scope=scope)
    feed = {"x": fluid.create_lod_tensor(np.ones((8, 16), np.float32), [[4, 4]])}
    masks = [np.asarray(executor.run([kept.name], feed)[0]) != 0 for _ in range(2)]
    executor.close()
    halves = [half for mask in masks for half in (mask[:4].tobytes(), mask[4:].tobytes())]
    assert len(set(halves)) == 4
    assert 0.3 < np.mean(masks) < 0.7


def test_int32_ids_train_as_int64_ids_do() -> None:
    for sparse in (False, True):
        model, lengths = Model(sparse=sparse, dtype="int32"), [2, 1]
        ids, dense = batch(lengths, dtype="int32")
        wanted = expected(model, "sum", ids, lengths, dense)
        model.exe.run(model.main, {"ids": fluid.create_lod_tensor(ids, [lengths]), "dense": dense}, scope=model.scope)
        torch.testing.assert_close(model.values()["table"], wanted["table"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_each_form_of_a_feed_gives_the_same(data_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    model, lengths = Model(), [2, 0, 1]
    test = model.main.clone(for_test=True)
    program = fluid.CompiledProgram(test).with_data_parallel() if data_parallel else test
    ids, dense = batch(lengths)
    by_lod = fluid.LoDTensor()
    by_lod.set(ids, fluid.CPUPlace())
    by_lod.set_lod([[0, 2, 2, 3]])
    lists = fluid.create_lod_tensor([[int(i) for i in ids[:2, 0]], [], [int(ids[2, 0])]], [lengths], fluid.CPUPlace())
    nested = [ids[:2, 0].tolist(), [], ids[2:, 0].tolist()]
    beside = {"ids": ids, "ids@LENGTHS": np.array(lengths)[:, None]}
    feeds = [{"ids": by_lod}, {"ids": lists}, {"ids": nested}, beside]
    found = [model.exe.run(program, {**feed, "dense": dense}, [model.pooled], scope=model.scope)[0] for feed in feeds]
    without = fluid.LoDTensor()
    without.set(dense, fluid.CPUPlace())
    found.append(model.exe.run(program, {**beside, "dense": without}, [model.pooled], scope=model.scope)[0])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("data_parallel", [False, True])
def test_a_fetch_has_the_lod_of_its_rows(data_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.layers.data("x", [2], dtype="float64", lod_level=1)
        doubled, pooled = x * 2.0, fluid.layers.sequence_pool(x, "sum")
    assert (x.lod_level, doubled.lod_level, pooled.lod_level) == (1, 1, 0)
    program = fluid.CompiledProgram(main).with_data_parallel() if data_parallel else main
    rows = np.arange(8.0).reshape(4, 2)
    lod = fluid.create_lod_tensor(rows, [[1, 0, 3]], fluid.CPUPlace())
    exe = fluid.Executor(fluid.CPUPlace())
    found, flat = exe.run(program, {"x": lod}, [doubled, pooled], return_numpy=False)
    assert found.recursive_sequence_lengths() == [[1, 0, 3]]
    assert found.lod() == [[0, 1, 1, 4]]
    np.testing.assert_array_equal(np.array(found), rows * 2)
    np.testing.assert_array_equal(flat, [rows[0], [0, 0], rows[1:].sum(0)])
    assert flat.recursive_sequence_lengths() == []
    assert isinstance(exe.run(program, {"x": lod}, [doubled])[0], np.ndarray)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_two_levels_are_pooled_one_after_the_other(data_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.layers.data("x", [1], dtype="float64", lod_level=2)
        inner = fluid.layers.sequence_pool(x, "sum")
        outer = fluid.layers.sequence_pool(inner, "max")
    assert (x.lod_level, inner.lod_level, outer.lod_level) == (2, 1, 0)
    program = fluid.CompiledProgram(main).with_data_parallel() if data_parallel else main
    rows = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])
    lod = fluid.create_lod_tensor(rows, [[2, 0, 1], [1, 2, 2]], fluid.CPUPlace())
    exe = fluid.Executor(fluid.CPUPlace())
    whole, sums, most = exe.run(program, {"x": lod}, [x, inner, outer], return_numpy=False)
    assert whole.recursive_sequence_lengths() == [[2, 0, 1], [1, 2, 2]]
    assert sums.recursive_sequence_lengths() == [[2, 0, 1]]
    assert np.array(sums).tolist() == [[1.0], [5.0], [9.0]]
    assert np.array(most).tolist() == [[5.0], [0.0], [9.0]]
    lists = [[[1.0], [2.0, 3.0]], [], [[4.0, 5.0]]]
    np.testing.assert_array_equal(exe.run(program, {"x": lists}, [outer])[0], most)


def test_rows_used_beside_the_batch_are_one_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
        dense = fluid.layers.data("dense", [2])
        both = fluid.layers.concat([fluid.layers.embedding(ids, [9, 2]), dense], axis=1)
        label = fluid.layers.data("label", [1], dtype="int64", lod_level=1)
        loss = fluid.layers.mean(fluid.layers.cross_entropy(fluid.layers.fc(both, 3, act="softmax"), label))
        fluid.optimizer.SGD(0.1).minimize(loss)
    assert [v.name for v in main.feeds()] == ["ids", "dense", "label"]
    assert main.symbols == ["s0"]
    assert fluid.Program.parse(str(main)) == main
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    feed = {"ids": np.array([[1], [2], [3]]), "dense": np.ones((3, 2), np.float32), "label": np.array([[0], [1], [2]])}
    (alone,) = exe.run(main.clone(for_test=True), feed, [both], scope=scope)
    compiled = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name)
    np.testing.assert_array_equal(exe.run(compiled, feed, [both], scope=scope)[0], alone)


def test_two_ragged_inputs_used_together_have_the_same_rows() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x, y = (fluid.layers.data(name, [1], dtype="float64", lod_level=1) for name in ("x", "y"))
        first = fluid.layers.sequence_pool(x + y, "sum")
        second = fluid.layers.sequence_pool(x - y, "sum")
    exe, rows = fluid.Executor(fluid.CPUPlace()), np.array([[1.0], [2.0], [3.0]])
    feed = {"x": fluid.create_lod_tensor(rows, [[2, 1]]), "y": fluid.create_lod_tensor(2 * rows, [[2, 1]])}
    found = exe.run(main, feed, [first, second])
    assert [f.tolist() for f in found] == [[[9.0], [9.0]], [[-3.0], [-3.0]]]
    with pytest.raises(FeedError, match="'x' and 'y' must have the same number of rows, but have 3 and 2"):
        exe.run(main, {**feed, "y": fluid.create_lod_tensor(rows[:2], [[1, 1]])}, [first])


def test_pooled_sequences_are_no_rows_of_their_own() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.layers.data("x", [1], dtype="float64", lod_level=1)
        pooled = fluid.layers.sequence_pool(x, "sum")
        with pytest.raises(ProgramError, match="cannot be recorded"):
            x + pooled
        assert x.desc.shape[0] != pooled.desc.shape[0]


def test_a_program_with_ragged_inputs_is_its_text(tmp_path: Any) -> None:
    model, lengths = Model(sparse=True), [3, 0, 2]
    assert fluid.Program.parse(str(model.main)) == model.main
    ids, dense = batch(lengths)
    feed = {"ids": fluid.create_lod_tensor(ids, [lengths]), "dense": dense}
    (before,) = model.exe.run(model.main.clone(for_test=True), feed, [model.pooled], scope=model.scope)
    with fluid.scope_guard(model.scope):
        fluid.io.save_inference_model(str(tmp_path), ["ids"], [model.pooled], model.exe, model.main)
    other = fluid.Scope()
    with fluid.scope_guard(other):
        program, names, targets = fluid.io.load_inference_model(str(tmp_path), model.exe)
        assert names == ["ids"]
        found = model.exe.run(program, {"ids": feed["ids"]}, targets)[0]
    np.testing.assert_array_equal(found, before)


def test_feeds_without_a_lod_are_refused_where_it_counts() -> None:
    model, (ids, dense) = Model(), batch([2, 1])
    with pytest.raises(FeedError, match=r"'ids' has no lengths of its sequences.*create_lod_tensor"):
        model.exe.run(model.main, {"ids": ids, "dense": dense}, scope=model.scope)
    with pytest.raises(FeedError, match="'ids' is a list that is no 1-fold nest of sequences"):
        model.exe.run(model.main, {"ids": [["a"], ["b"]], "dense": dense}, scope=model.scope)
    two = fluid.create_lod_tensor(ids, [[2], [2, 1]])
    with pytest.raises(FeedError, match=r"expected 1 level\(s\) of lengths"):
        model.exe.run(model.main, {"ids": two, "dense": dense}, scope=model.scope)
    given = {"ids": ids, "ids@LENGTHS": np.array([[2], [2]]), "dense": dense[:2]}
    with pytest.raises(OperatorError, match="lengths of 2 sequences add up to more than the 3 rows"):
        model.exe.run(model.main, given, scope=model.scope)
    with pytest.raises(UserError, match="do not add up"):
        fluid.create_lod_tensor(ids, [[2, 2]], fluid.CPUPlace())


LINES = ["2 3 4 1 0.5", "1 7 1 -1", "4 0 1 2 3 1 2", "1 11 1 1", "3 5 5 5 1 0"]


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
def test_a_data_set_gives_rows_and_lengths(kind: str, tmp_path: Any) -> None:
    def parameters(train: Any) -> Any:
        main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
        main.random_seed = startup.random_seed = 5
        with fluid.program_guard(main, startup):
            ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
            dense = fluid.layers.data("dense", [1])
            rows = fluid.layers.embedding(ids, [NUM_IDS, 4], is_sparse=True)
            pooled = fluid.layers.concat([fluid.layers.sequence_pool(rows, "sum"), dense], axis=1)
            loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(pooled, 1)))
            fluid.optimizer.SGD(0.1).minimize(loss)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup, scope=scope)
        train(exe, main, [ids, dense], scope)
        return {v.name: np.array(scope.find_var(v.name)) for v in main.parameters()}

    def by_data_set(exe: Any, main: Any, use: list[Any], scope: Any) -> None:
        dataset = fluid.DatasetFactory().create_dataset(kind)
        dataset.set_use_var(use)
        dataset.set_batch_size(2)
        (tmp_path / "lines").write_text("\n".join(LINES) + "\n")
        dataset.set_filelist([str(tmp_path / "lines")])
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
        exe.train_from_dataset(main, dataset, scope=scope)

    def by_feeds(exe: Any, main: Any, use: list[Any], scope: Any) -> None:
        words = [line.split() for line in LINES]
        ids = [[int(word) for word in line[1:-2]] for line in words]
        dense = np.array([[float(line[-1])] for line in words], np.float32)
        for first in (0, 2, 4):
            feed = {"ids": ids[first : first + 2], "dense": dense[first : first + 2]}
            exe.run(fluid.CompiledProgram(main), feed, scope=scope)

    found, wanted = parameters(by_data_set), parameters(by_feeds)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_lengths_beyond_the_rows_are_refused() -> None:
    rows, beyond = torch.randn(8, 3), torch.tensor([2**62, 2**62, 2**62, 2**62, 8])  # add up to 8 modulo 2 ** 64
    with pytest.raises(ValueError, match="lengths of 5 sequences add up to more than the 8 rows"):
        torch.ops.penstock.sequence_pool(rows, beyond, "sum", 0.0)


@pytest.mark.parametrize("lengths", [[-1, 4], [4, -1], [2, 2, -1, 0]])
def test_lengths_below_0_are_refused_on_replicas(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    model = Model()
    ids, dense = np.zeros((3, 1), np.int64), np.zeros((len(lengths), 2))
    feed = {"ids": ids, "ids@LENGTHS": np.array(lengths)[:, None], "dense": dense}
    program = fluid.CompiledProgram(model.main).with_data_parallel(model.loss.name)
    with pytest.raises(FeedError, match=r"'ids' has a length below 0 among \["):
        model.exe.run(program, feed, [model.loss], scope=model.scope)
