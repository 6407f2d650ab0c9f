"""Matrix kernels: a product may run another kernel than torch's, with its relu and its views; results stay near."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.networks import Feed, Network, ctr_dnn, fit_a_line, transformer
from tests.property.oracle import assert_passes_keep_results

import penstock as fluid
from penstock.errors import OperatorError, SpecError
from penstock.exec import flags
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.exec.pass_choice import settled
from penstock.graph import matmuls
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.operands import Shares
from penstock.graph.passes import MatrixKernels, PassChoice, run_sized_passes
from penstock.graph.passes.matrix_kernels import choose_matrix_kernels
from penstock.graph.ssa import Graph, Mode
from penstock.native.matrix_kernels import Conditions, KernelTimes, Product
from penstock.program.ir import Ref
from penstock.program.program import Program
from penstock.scope import Scope
from penstock.settings import MATRIX_KERNELS

ONEDNN = PassChoice(matrix=MatrixKernels(forced="onednn"))
# float32 sums of up to 128 terms in another order, carried through a few steps of training.
TOLERANCE = 2e-5


def tower(width: int = 128, dtype: str = "float32") -> Network:
    """Two layers with relu, wide enough that a product is worth a choice from 16 rows on."""
    main, startup = Program(seed=2), Program(seed=2)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[width], dtype=dtype)
        label = fluid.layers.data(name="label", shape=[1], dtype="int64")
        hidden = fluid.layers.fc(fluid.layers.fc(x, width, act="relu"), width, act="relu")
        predicted = fluid.layers.fc(hidden, 4, act="softmax")
        loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, label))
        fluid.optimizer.SGD(0.1).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {
            "x": random.normal(size=(rows, width)).astype(dtype),
            "label": random.integers(0, 4, (rows, 1)),
        }

    return Network("tower", main, startup, loss.name, feed, (predicted.name,))


def sized(network: Network, rows: int = 16, replicas: int = 1) -> tuple[Graph, Shares]:
    """Return the built graph of a network and the shares of equal batches."""
    graph = build_graph(network.main, mode="all_reduce", num_replicas=replicas, active=replicas)
    return graph, Shares([{network.main.symbols[0]: rows}] * replicas, [1.0 / replicas] * replicas)


def types(graph: Graph) -> list[str]:
    """Return the types of a graph's operators."""
    return [h.op.type for h in graph.handles]


Choose = Callable[[list[Product], Conditions], dict[Product, str]]


def choosing(asked: list[Product], taken: Callable[[Product], bool]) -> Choose:
    """Return a chooser that notes what it is asked and takes oneDNN where `taken` says so."""

    def choose(products: list[Product], conditions: Conditions) -> dict[Product, str]:
        asked.extend(products)
        return {p: "onednn" if taken(p) else "torch" for p in products}

    return choose


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("make", [fit_a_line, ctr_dnn, transformer])
def test_another_kernel_for_every_product_trains_as_torch(make: Callable[[str], Network], mode: Mode) -> None:
    # Not Adam: the key's bias in attention has no gradient but rounding, which Adam would blow up to a whole step.
    core = assert_passes_keep_results(make("sgd"), ONEDNN, mode=mode, num_replicas=2, rtol=TOLERANCE)
    assert "penstock.product.default" in types(core.sized_graph(_shares(core)))


def _shares(core: DataParallel) -> Shares:
    return core.shares([{core.program.symbols[0]: 3}] * 2, [3, 3])


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_tower_trains_as_with_torch_on_uneven_shares(num_replicas: int) -> None:
    assert_passes_keep_results(
        tower(), ONEDNN, mode="all_reduce", num_replicas=num_replicas, batches=(32, 33, 2, 40), rtol=TOLERANCE
    )


def test_relu_and_transposes_have_no_handle_any_more() -> None:
    graph, shares = sized(tower())
    fused = choose_matrix_kernels(graph, tower().main, MatrixKernels(forced="onednn"), shares)
    check(fused)
    before, after = types(graph), types(fused)
    assert before.count("aten.relu.default") == 2 and before.count("aten.t.default") > 0
    assert after.count("aten.relu.default") == after.count("aten.t.default") == 0
    assert after.count("penstock.product.default") == before.count("aten.addmm.default") + before.count(
        "aten.mm.default"
    )
    assert len(after) == len(before) - 2 - before.count("aten.t.default")


def test_what_is_fetched_is_still_made() -> None:
    network = tower()
    graph, shares = sized(network)
    relu = next(h for h in graph.handles if h.op.type == "aten.relu.default")
    fetched = graph.variables[relu.reads()[0]].name
    fused = run_sized_passes(graph, network.main, ONEDNN, shares, [fetched])
    check(fused)
    assert types(fused).count("aten.relu.default") == 1
    assert any(fused.variables[n].name == fetched for h in fused.handles for n in h.makes())


def test_an_inner_value_can_be_fetched_and_changes_no_bit() -> None:
    network = tower()
    scope = Scope()
    fluid.Executor(fluid.CPUPlace()).run(network.startup, scope=scope)
    inner = next(op.input_names()[0] for op in network.main.operators if op.type == "aten.relu.default")
    outer = next(op.output_names()[0] for op in network.main.operators if op.type == "aten.relu.default")
    test_program = network.main.clone(for_test=True)
    core = DataParallel(test_program, ReplicaMemory(scope), mode="all_reduce", num_replicas=2, choice=ONEDNN)
    try:
        feed = network.feed(32, 0)
        with_inner = core.run(feed, [inner, outer])
        without = core.run(feed, [outer])
    finally:
        core.close()
    for replica in range(2):
        assert torch.equal(with_inner[0][replica].relu(), with_inner[1][replica])
        assert torch.equal(with_inner[1][replica], without[0][replica])


def test_torch_stays_where_it_is_the_fastest() -> None:
    graph, shares = sized(tower())
    asked: list[Product] = []
    same = choose_matrix_kernels(graph, tower().main, MatrixKernels(), shares, (), choosing(asked, lambda _: False))
    assert same is graph
    assert asked


class Forgetful:
    """A store that has nothing and keeps nothing."""

    def load(self) -> Mapping[str, Mapping[str, float]]:
        return {}

    def add(self, found: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
        return found


def onednn_is_faster(
    products: list[Product], conditions: Conditions, budget_s: float, available: Collection[str]
) -> dict[Product, dict[str, float | None]]:
    """Measure nothing: oneDNN takes half the time."""
    return {p: {"torch": 2.0, "onednn": 1.0} for p in products}


@pytest.fixture(params=["forced", "chosen"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PassChoice:
    """Let oneDNN multiply: because it is forced, or because the default choice has found it faster."""
    if request.param == "forced":
        return ONEDNN
    times = KernelTimes(Forgetful(), onednn_is_faster, available=lambda: ("torch", "onednn"))
    monkeypatch.setattr(matmuls, "known_times", lambda: times)
    return PassChoice()


def by_both(program: Program, feed: Feed, fetch: str, choice: PassChoice, scope: Scope) -> tuple[Any, torch.Tensor]:
    """Run a program by the Executor and, with oneDNN's products, by the engine; return what each has fetched."""
    wanted = fluid.Executor(fluid.CPUPlace()).run(program, feed=feed, fetch_list=[fetch], scope=scope)[0]
    core = DataParallel(program, ReplicaMemory(scope), mode="all_reduce", num_replicas=1, choice=choice)
    try:
        got = core.run(feed, [fetch])[0][0]
        rows = len(next(iter(feed.values())))
        lowered = core.sized_graph(core.shares([{program.symbols[0]: rows}], [rows]))
    finally:
        core.close()
    assert "penstock.product.default" in types(lowered)
    return torch.as_tensor(np.asarray(wanted)), got


@pytest.mark.parametrize("stride", [0, 1, 2])
def test_a_bias_may_have_any_stride(onednn: PassChoice, stride: int) -> None:
    main, startup, scope = Program(seed=1), Program(seed=1), Scope()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[64], dtype="float32")
        w = fluid.layers.create_parameter([64, 64], "float32", name="w")
        b = fluid.layers.create_parameter([max(64 * stride, 1)], "float32", name="b")
        bias = b.expand(64) if stride == 0 else b[::stride]
        out = fluid.layers.scale(torch.nn.functional.linear(x, w, bias), 1.0)
    fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
    random = np.random.default_rng(1)
    scope.set("b", torch.from_numpy(random.normal(size=max(64 * stride, 1)).astype("float32")))
    feed = {"x": random.normal(size=(64, 64)).astype("float32")}
    wanted, got = by_both(main, feed, out.name, onednn, scope)
    # 64 roundings of half a unit of sums of size about 10, with room.
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_passes_relu_as_with_torch(onednn: PassChoice, bad: float) -> None:
    network, scope = tower(), Scope()
    fluid.Executor(fluid.CPUPlace()).run(network.startup, scope=scope)
    relu = next(op.output_names()[0] for op in network.main.operators if op.type == "aten.relu.default")
    feed = network.feed(32, 0)
    feed["x"][3, 5] = bad
    wanted, got = by_both(network.main.clone(for_test=True), feed, relu, onednn, scope)
    assert not wanted.isfinite().all()
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize(("bad", "seen"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_the_check_for_nan_sees_what_a_fused_relu_makes(onednn: PassChoice, bad: float, seen: str) -> None:
    network, scope = tower(), Scope()
    fluid.Executor(fluid.CPUPlace()).run(network.startup, scope=scope)
    bias = next(op.args[0] for op in network.main.operators if op.type == "aten.addmm.default")
    assert isinstance(bias, Ref)
    # A bias is a parameter: an Inf in it does not excuse the result.
    scope.set(bias.name, torch.full((128,), bad))
    flags.set_flags({"FLAGS_check_nan_inf": True})
    core = DataParallel(network.main, ReplicaMemory(scope), mode="all_reduce", num_replicas=1, choice=onednn)
    try:
        with pytest.raises(OperatorError, match=rf"penstock\.product.*{seen}|{seen}.*penstock\.product"):
            core.run(network.feed(32, 0), [network.loss])
    finally:
        core.close()


def test_only_the_product_that_is_faster_changes() -> None:
    graph, shares = sized(tower())
    asked: list[Product] = []
    choose = choosing(asked, lambda p: p.transpose_x)
    fused = choose_matrix_kernels(graph, tower().main, MatrixKernels(), shares, (), choose)
    check(fused)
    taken = [h for h in fused.handles if h.op.type == "penstock.product.default"]
    assert {p.transpose_x for p in asked} == {False, True} and len(taken) == 2  # of the two hidden layers
    assert all(h.op.args[3:] == (True, False, "none", "onednn") for h in taken)
    assert types(fused).count("aten.relu.default") == 2


def test_products_of_a_few_microseconds_are_not_asked_for() -> None:
    graph, shares = sized(tower(), rows=3)
    asked: list[Product] = []
    assert choose_matrix_kernels(graph, tower().main, MatrixKernels(), shares, (), choosing(asked, bool)) is graph
    assert not asked


def test_shares_of_nearly_one_size_ask_for_one_product() -> None:
    network = tower()
    graph, _ = sized(network, replicas=2)
    symbol = network.main.symbols[0]
    asked: list[Product] = []
    shares = Shares([{symbol: 333}, {symbol: 334}], [0.5, 0.5])
    choose_matrix_kernels(graph, network.main, MatrixKernels(at_once=2), shares, (), choosing(asked, lambda _: False))
    forward = {p for p in asked if p.bias and p.n == 128}
    assert forward == {Product(384, 128, 128, bias=True)}


def test_float64_keeps_the_kernel_of_torch() -> None:
    network = tower(dtype="float64")
    graph, shares = sized(network)
    assert choose_matrix_kernels(graph, network.main, MatrixKernels(forced="onednn"), shares) is graph


def test_sequential_order_holds_after_handles_have_gone() -> None:
    choice = PassChoice(sequential=True, matrix=MatrixKernels(forced="onednn"))
    core = assert_passes_keep_results(tower(), choice, mode="reduce", num_replicas=2, batches=(32, 32), rtol=TOLERANCE)
    handles = core.sized_graph(_shares(core)).handles
    mine = [h for h in handles if h.replica == 0]
    assert "penstock.product.default" in [h.op.type for h in mine]
    reach: list[set[int]] = []
    for handle in handles:
        reach.append(set().union(*(reach[b] | {b} for b in handle.before)))
    assert all(a.index in reach[b.index] for a, b in pairwise(mine))


def test_the_flag_forces_a_kernel_on_every_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in (("onednn", True), ("torch", False)):
        monkeypatch.setenv("PENSTOCK_MATRIX_KERNELS", word)
        core = DataParallel(tower().main, ReplicaMemory(Scope()), mode="reduce", num_replicas=2)
        core.close()
        assert core.choice.matrix == MatrixKernels(word, core.max_running, core.intra_op_threads)
        assert ("penstock.product.default" in types(core.sized_graph(_shares(core)))) is expected
    monkeypatch.setenv("PENSTOCK_MATRIX_KERNELS", "fast")
    with pytest.raises(SpecError, match="PENSTOCK_MATRIX_KERNELS is 'fast'; expected one of auto, torch, onednn"):
        DataParallel(tower().main, ReplicaMemory(Scope()), mode="reduce", num_replicas=2)


def test_set_flags_overrides_the_environment_and_checks_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MATRIX_KERNELS", "torch")
    flags.set_flags({"PENSTOCK_MATRIX_KERNELS": "onednn"})
    assert flags.get_flags("PENSTOCK_MATRIX_KERNELS") == {"PENSTOCK_MATRIX_KERNELS": "onednn"}
    with pytest.raises(SpecError, match="PENSTOCK_MATRIX_KERNELS is 'mkl'"):
        flags.set_flags({"FLAGS_check_nan_inf": True, "PENSTOCK_MATRIX_KERNELS": "mkl"})
    assert flags.value_of(MATRIX_KERNELS) == "onednn"
    assert flags.get_flags("FLAGS_check_nan_inf") == {"FLAGS_check_nan_inf": False}


def test_the_former_name_of_the_flag_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match="FLAGS_matrix_kernels is deprecated: use PENSTOCK_MATRIX_KERNELS"):
        flags.set_flags({"FLAGS_matrix_kernels": "onednn"})
    assert flags.value_of(MATRIX_KERNELS) == "onednn"


def test_the_former_name_of_the_variable_is_deprecated() -> None:
    with pytest.warns(FutureWarning, match="FLAGS_matrix_kernels is deprecated"):
        assert MATRIX_KERNELS.read({"FLAGS_matrix_kernels": "torch"}) == "torch"
    assert MATRIX_KERNELS.read({"FLAGS_matrix_kernels": "torch", "PENSTOCK_MATRIX_KERNELS": "onednn"}) == "onednn"


def test_a_former_name_is_warned_of_once_per_process() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            MATRIX_KERNELS.read({"FLAGS_matrix_kernels": "torch"})
            flags.get_flags("FLAGS_matrix_kernels")
    assert [one.category for one in caught] == [FutureWarning]


def test_gpus_keep_their_own_kernels() -> None:
    choice = settled(ONEDNN, devices=(torch.device("cpu"),), at_once=2, intra_op=1)
    assert not choice.matrix_kernels
