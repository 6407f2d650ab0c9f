"""nce, hsigmoid and the sampled softmax against loops in torch float64: costs, gradients and updates (1e-12).

A layer with a seed draws the numbers of `penstock::uniform` with it, so that an oracle knows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import OperatorError, ProgramError

L: Any = fluid.layers
N, WIDTH, CLASSES, SEED = 6, 4, 11, 7
DIST = [0.02, 0.18, 0.05, 0.05, 0.1, 0.2, 0.15, 0.05, 0.1, 0.06, 0.04]
Oracle = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def numbers(*sizes: int) -> torch.Tensor:
    found: torch.Tensor = torch.ops.penstock.uniform(list(sizes), 0.0, 1.0, SEED, torch.float64)
    return found


def batch(true: int = 1) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    return {"x": draw.normal(size=(N, WIDTH)), "label": draw.integers(0, CLASSES, (N, true))}


def check(build: Callable[[Any, Any], Any], oracle: Oracle, *, true: int = 1, **more: np.ndarray) -> None:
    """Compare the costs, the gradient of x and one step of SGD on w_0 and b_0."""
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    startup.random_seed = 2
    with fluid.program_guard(main, startup):
        x = L.data("x", [WIDTH], dtype="float64", stop_gradient=False)
        cost = build(x, L.data("label", [true], dtype="int64"))
        fluid.optimizer.SGD(1.0).minimize(L.reduce_sum(L.square(cost)))
    exe.run(startup, scope=scope)
    weight, bias = main.all_parameters()
    scope.find_var(bias.name).get_tensor().set(np.linspace(-1, 1, bias.shape[0])[:, None])
    before = [torch.tensor(np.array(scope.find_var(p.name)), requires_grad=True) for p in (weight, bias)]
    feed = {**batch(true), **more}
    leaf = torch.tensor(feed["x"], requires_grad=True)
    wanted = oracle(leaf, *before)
    of_x, *of_params = torch.autograd.grad(wanted.square().sum(), [leaf, *before])
    got = exe.run(main, feed, [cost, "x@GRAD"], scope=scope)
    np.testing.assert_allclose(got[0], wanted.detach(), rtol=1e-12)
    np.testing.assert_allclose(got[1], of_x, rtol=1e-12, atol=1e-13)
    for param, old, grad in zip((weight, bias), before, of_params, strict=True):
        np.testing.assert_allclose(scope.find_var(param.name), old.detach() - grad, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------- nce


def drawn_ids(sampler: str, num: int) -> torch.Tensor:
    uniform = numbers(N, num)
    if sampler == "uniform":
        return (uniform * CLASSES).long()
    if sampler == "log_uniform":
        return ((uniform * math.log(CLASSES)).exp().long() - 1) % (CLASSES - 1)
    return (uniform[..., None] >= torch.tensor(DIST, dtype=torch.float64).cumsum(0)).sum(-1)


def probability(sampler: str, c: int, classes: int = CLASSES) -> float:
    known = {"uniform": 1 / CLASSES, "log_uniform": math.log((c + 2) / (c + 1)) / math.log(classes)}
    return known.get(sampler, DIST[c])


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("sampler", ["uniform", "log_uniform", "custom_dist"])
def test_nce_costs_what_its_formula_says(sampler: str, is_sparse: bool) -> None:
    num, true, label = 5, 2, batch(2)["label"]
    others = drawn_ids(sampler, num)
    weights = np.linspace(0.5, 2.0, N)

    def oracle(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = []
        for i in range(N):
            total = torch.zeros((), dtype=torch.float64)
            for j, c in enumerate([*label[i].tolist(), *others[i].tolist()]):
                o, q = torch.sigmoid(x[i] @ w[c] + b[c, 0]), probability(sampler, c) * num
                total = total - torch.log((o if j < true else q) / (o + q))
            rows.append(total * weights[i])
        return torch.stack(rows)[:, None] / (num + 1)

    def build(x: Any, label: Any) -> Any:
        more: dict[str, Any] = {"custom_dist": DIST} if sampler == "custom_dist" else {}
        weight = L.data("weight", [1], dtype="float64")
        return L.nce(x, label, CLASSES, weight, None, None, num, None, sampler, seed=SEED, is_sparse=is_sparse, **more)

    check(build, oracle, true=true, weight=weights[:, None])


def test_nce_draws_ids_as_often_as_it_says() -> None:
    for sampler in ("uniform", "log_uniform", "custom_dist"):
        share = np.bincount(drawn_ids(sampler, 4000).reshape(-1), minlength=CLASSES) / (N * 4000)
        wanted = [probability(sampler, c) for c in range(CLASSES)]
        last = CLASSES - (sampler == "log_uniform")  # which never draws the last one
        np.testing.assert_allclose(share[:last], wanted[:last], atol=5 * 0.5 / (N * 4000) ** 0.5)


def test_nce_draws_others_in_each_run() -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        cost = L.nce(
            L.data("x", [WIDTH], dtype="float64"), L.data("label", [1], dtype="int64"), CLASSES, bias_attr=False
        )
    exe.run(startup, scope=scope)
    assert len(main.all_parameters()) == 1
    first, second = (exe.run(main, batch(), [cost], scope=scope)[0] for _ in range(2))
    assert not np.array_equal(first, second)


# ---------------------------------------------------------------- hsigmoid


def way_cost(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, way: list[tuple[int, int]], longest: int) -> Any:
    """Costs of a way; a position behind its end counts log 2, as in Fluid's kernel."""
    cost = torch.full((), (longest - len(way)) * math.log(2.0), dtype=torch.float64)
    for node, code in way:
        score = x @ w[node] + b[node, 0]
        cost = cost + torch.log1p(torch.exp(score)) - code * score
    return cost


@pytest.mark.parametrize("classes", [2, 8, CLASSES])
def test_hsigmoid_costs_the_way_in_the_complete_tree(classes: int) -> None:
    label = batch()["label"][:, 0] % classes

    def way(leaf: int) -> list[tuple[int, int]]:
        digits = f"{leaf + classes:b}"
        return [(int(digits[:i], 2) - 1, int(digits[i])) for i in range(len(digits) - 1, 0, -1)]

    def oracle(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        longest = math.ceil(math.log2(classes))
        return torch.stack([way_cost(x[i], w, b, way(int(label[i])), longest) for i in range(N)])[:, None]

    check(lambda x, y: L.hsigmoid(x, L.elementwise_mod(y, L.fill_constant([1], "int64", classes)), classes), oracle)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_hsigmoid_costs_the_way_in_a_tree_of_ones_own(is_sparse: bool) -> None:
    table = np.array([[0, 2, 4], [0, 1, -1], [0, 2, 5], [0, -1, -1], [3, 1, 0], [2, -1, -1]])
    code = np.array([[1, 0, 1], [0, 1, -1], [0, 0, 0], [1, -1, -1], [1, 1, 1], [0, -1, -1]])

    def oracle(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ways = [
            [(int(n), int(c)) for n, c in zip(*row, strict=True) if n >= 0] for row in zip(table, code, strict=True)
        ]
        return torch.stack([way_cost(x[i], w, b, way, 3) for i, way in enumerate(ways)])[:, None]

    def build(x: Any, label: Any) -> Any:
        own: dict[str, Any] = {name: L.data(name, [3], dtype="int64") for name in ("path_table", "path_code")}
        return L.hsigmoid(x, label, CLASSES, is_custom=True, is_sparse=is_sparse, **own)

    check(build, oracle, path_table=table, path_code=code)


def test_hsigmoid_cuts_scores_and_not_their_gradients() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = L.data("x", [1], dtype="float64", stop_gradient=False)
        weight = fluid.ParamAttr(initializer=fluid.initializer.Constant(1.0))
        cost = L.hsigmoid(x, L.data("label", [1], dtype="int64"), 2, param_attr=weight, bias_attr=False)
        fluid.append_backward(L.reduce_sum(cost))
    exe = fluid.Executor()
    exe.run(startup)
    got = exe.run(main, {"x": np.array([[50.0], [-60.0]]), "label": np.array([[0], [1]])}, [cost, "x@GRAD"])
    np.testing.assert_allclose(got[0], [[40.0], [40.0]], rtol=1e-12)
    np.testing.assert_allclose(got[1], [[1.0], [-1.0]], rtol=1e-12)


# ---------------------------------------------------------------- sampled softmax


def shared(num: int) -> tuple[list[int], int]:
    found: list[int] = []
    for tries, id_ in enumerate(((numbers(1000) * math.log(CLASSES + 1)).exp().long() - 1) % CLASSES, 1):
        if int(id_) not in found:
            found.append(int(id_))
        if len(found) == num:
            return found, tries
    raise AssertionError(num)


def among(c: int, num: int, tries: int) -> float:
    each = probability("log_uniform", c, CLASSES + 1)
    return each * num if num == tries else -math.expm1(tries * math.log1p(-each))


@pytest.mark.parametrize("num", [1, 4, 8])
@pytest.mark.parametrize("removes", [True, False])
def test_sampled_softmax_costs_what_its_formula_says(num: int, removes: bool) -> None:
    others, tries = shared(num)
    label = batch()["label"][:, 0]

    def oracle(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = []
        for i in range(N):
            ids = [int(label[i]), *(c for c in others if not (removes and c == label[i]))]
            scores = torch.stack([x[i] @ w[:, c] + b[c] - math.log(among(c, num, tries)) for c in ids])
            rows.append(torch.logsumexp(scores, 0) - scores[0])
        return torch.stack(rows)[:, None]

    def build(x: Any, y: Any) -> Any:
        call = L.sampled_softmax_with_cross_entropy
        return call(L.fc(x, CLASSES), y, num, remove_accidental_hits=removes, seed=SEED)

    check_fc(build, oracle)


def check_fc(build: Callable[[Any, Any], Any], oracle: Oracle) -> None:
    main, startup, scope, exe = fluid.Program(), fluid.Program(), fluid.Scope(), fluid.Executor()
    with fluid.program_guard(main, startup):
        x = L.data("x", [WIDTH], dtype="float64", stop_gradient=False)
        cost = build(x, L.data("label", [1], dtype="int64"))
        fluid.append_backward(L.reduce_sum(L.square(cost)))
    exe.run(startup, scope=scope)
    params = [torch.tensor(np.array(scope.find_var(p.name))) for p in main.all_parameters()]
    leaf = torch.tensor(batch()["x"], requires_grad=True)
    wanted = oracle(leaf, params[0], params[1])
    (of_x,) = torch.autograd.grad(wanted.square().sum(), [leaf])
    got = exe.run(main, batch(), [cost, "x@GRAD"], scope=scope)
    np.testing.assert_allclose(got[0], wanted.detach(), rtol=1e-10)
    np.testing.assert_allclose(got[1], of_x, rtol=1e-10, atol=1e-12)


def test_sampled_softmax_takes_samples_that_are_given() -> None:
    main = fluid.Program()
    ids, q = np.array([[2, 0, 1], [3, 3, 4]]), np.array([[0.5, 0.2, 0.1], [0.3, 0.3, 0.4]])
    with fluid.program_guard(main, fluid.Program()):
        logits, label = L.data("x", [5], dtype="float64"), L.data("label", [1], dtype="int64")
        names = ("customized_samples", "int64"), ("customized_probabilities", "float64")
        given: dict[str, Any] = {name: L.data(name, [3], dtype=dtype) for name, dtype in names}
        cost = L.sampled_softmax_with_cross_entropy(logits, label, 2, use_customized_samples=True, **given)
    x = np.arange(10.0).reshape(2, 5) / 7
    feed = {"x": x, "label": ids[:, :1], "customized_samples": ids, "customized_probabilities": q}
    (got,) = fluid.Executor().run(main, feed, [cost])
    for i, columns in enumerate(([0, 1, 2], [0, 2])):  # the second row's first sample is its true class
        scores = x[i, ids[i, columns]] - np.log(q[i, columns])
        np.testing.assert_allclose(got[i, 0], np.log(np.exp(scores).sum()) - scores[0], rtol=1e-12)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "sampler": (lambda x, y: L.nce(x, y, 5, sampler="alias"), "sampler is 'alias'; expected one of uniform"),
    "no dist": (lambda x, y: L.nce(x, y, 5, sampler="custom_dist"), "for each of the 5 classes; got None"),
    "short dist": (lambda x, y: L.nce(x, y, 5, sampler="custom_dist", custom_dist=[1.0]), "classes; got 1"),
    "ids": (lambda x, y: L.nce(x, x, 5), "nce needs ids"),
    "flat label": (lambda x, y: L.nce(x, L.reshape(y, [-1]), 5), r"labels int64 \[n, number of true classes\]"),
    "one leaf": (lambda x, y: L.hsigmoid(x, y, 1), "num_classes is 1; a tree needs at least 2"),
    "no table": (lambda x, y: L.hsigmoid(x, y, 4, is_custom=True), "needs path_table, path_code"),
    "table": (lambda x, y: L.hsigmoid(x, y, 4, path_table=y), "need is_custom=True"),
    "too many": (lambda x, y: L.sampled_softmax_with_cross_entropy(x, y, 4), "4 different ones of 4 classes"),
    "true": (lambda x, y: L.sampled_softmax_with_cross_entropy(x, y, 2, num_true=2), "one true class is possible"),
    "no samples": (
        lambda x, y: L.sampled_softmax_with_cross_entropy(x, y, 2, use_customized_samples=True),
        "needs customized_samples",
    ),
    "no weight": (lambda x, y: L.nce(x, y, 5, param_attr=False), "and a weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_loss_can_be_made_of_is_refused(case: str) -> None:
    build, words = REFUSED[case]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x, y = L.data("x", [WIDTH]), L.data("label", [1], dtype="int64")
        with pytest.raises(ProgramError, match=words):
            build(x, y)


def test_a_label_beyond_the_classes_is_an_error_of_the_run() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        cost = L.nce(L.data("x", [WIDTH], dtype="float64"), L.data("label", [1], dtype="int64"), 3)
    fluid.Executor().run(startup, scope=scope)
    with pytest.raises(OperatorError, match="nce"):
        fluid.Executor().run(main, {**batch(), "label": np.full((N, 1), 3)}, [cost], scope=scope)
