"""Layers that keep state, draw, make variables from nothing, or refuse what they cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.scope import Scope

L: Any = fluid.layers
X = np.random.default_rng(8).normal(size=(6, 4))


def run(build: Callable[[Any], Any], *, for_test: bool = False, steps: int = 1) -> tuple[list[torch.Tensor], Scope]:
    """Record `build(x)` and run it; return (the last run's values, scope)."""
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = 11
    with fluid.program_guard(main, startup):
        out = build(fluid.data("x", [-1, 4], "float64"))
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    program = main.clone(for_test=True) if for_test else main
    for _ in range(steps):
        fetched = exe.run(program, {"x": X}, out if isinstance(out, list) else [out], scope=scope, return_numpy=False)
    return [value.rows for value in fetched], scope


@pytest.mark.parametrize(
    ("implementation", "training", "rest"), [("downgrade_in_infer", 1.0, 0.75), ("upscale_in_train", 4 / 3, 1.0)]
)
def test_dropout_scales_as_its_implementation_says(implementation: str, training: float, rest: float) -> None:
    def build(x: Any) -> Any:
        return L.dropout(x, 0.25, dropout_implementation=implementation)

    [trained], _ = run(build)
    kept = trained != 0
    assert 0 < int(kept.sum()) < X.size
    torch.testing.assert_close(trained[kept], torch.from_numpy(X)[kept] * training)
    [resting], _ = run(build, for_test=True)
    torch.testing.assert_close(resting, torch.from_numpy(X) * rest)


def test_batch_norm_tracks_running_statistics_and_uses_them() -> None:
    steps, x = 3, torch.from_numpy(X)
    _, scope = run(lambda x: L.batch_norm(x, momentum=0.8), steps=steps)
    mean, variance = (scope.find(f"batch_norm_0.{n}") for n in ("mean", "variance"))
    assert mean is not None
    assert variance is not None
    torch.testing.assert_close(mean, x.mean(0) * (1 - 0.8**steps))
    torch.testing.assert_close(variance, 0.8**steps + x.var(0) * (1 - 0.8**steps))
    [resting], scope = run(L.batch_norm, for_test=True, steps=2)
    torch.testing.assert_close(resting, x / (1 + 1e-5) ** 0.5)


def test_constants_ids_and_positions() -> None:
    def build(x: Any) -> list[Any]:
        best = L.argmax(x, 1)
        values, places = L.topk(x, 2)
        constant = L.fill_constant([2, 3], "int64", 7)
        return [best, places, constant, L.one_hot(L.unsqueeze(best, 1), 4), L.assign(X[:2]), L.assign(x), values]

    (best, places, constant, hot, array, copy, _), _ = run(build)
    wanted = torch.from_numpy(X)
    assert torch.equal(best, wanted.argmax(1))
    assert torch.equal(places, wanted.topk(2, 1).indices)
    assert torch.equal(constant, torch.full((2, 3), 7))
    assert torch.equal(hot, torch.nn.functional.one_hot(best, 4).float())
    assert torch.equal(array, wanted[:2])
    assert torch.equal(copy, wanted)


def test_accuracy_counts_into_declared_variables() -> None:
    def build(x: Any) -> list[Any]:
        correct, total = L.create_tensor("int64"), L.create_tensor("int32")
        label = L.argmin(x, 1)
        share = L.accuracy(L.softmax(x), L.reshape(label, [-1, 1]), k=4, correct=correct, total=total)
        return [share, correct, total]

    (share, correct, total), _ = run(build)
    assert (share.item(), correct.item(), total.item()) == (1.0, 6, 6)
    assert (correct.dtype, total.dtype) == (torch.int64, torch.int32)


def test_a_global_variable_lives_on_between_runs() -> None:
    def build(x: Any) -> Any:
        total = L.create_global_var([4], 1.0, "float64", persistable=True, name="total")
        return L.sums([total, L.reduce_sum(x, 0)], out=total)

    [got], scope = run(build, steps=3)
    torch.testing.assert_close(got, 1.0 + 3 * torch.from_numpy(X).sum(0))
    assert scope.find("total") is not None


def test_groups_record_their_layers() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        image = fluid.data("image", [-1, 1, 12, 12])
        first = fluid.nets.simple_img_conv_pool(image, 3, 5, 2, 2, act="relu")
        second = fluid.nets.img_conv_group(
            first,
            [4, 6],
            2,
            conv_act="relu",
            conv_with_batchnorm=True,
            conv_batchnorm_drop_rate=[0.3, 0.0],
            pool_stride=2,
        )
    assert first.desc.shape[1:] == (3, 4, 4)
    assert second.desc.shape[1:] == (6, 2, 2)
    kinds = [op.type.split(".")[1] for op in main.operators if op.role == Role.FORWARD]
    assert kinds.count("convolution") == 3
    assert kinds.count("native_batch_norm") == 2
    assert kinds.count("dropout") == 1


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "seeded dropout": (lambda x: L.dropout(x, 0.5, seed=3), "random_seed"),
    "implementation": (lambda x: L.dropout(x, 0.5, dropout_implementation="other"), "'other'"),
    "activation": (lambda x: L.fc(x, 3, act="softmaxx"), "softmaxx"),
    "layout": (lambda x: L.conv2d(L.reshape(x, [0, 1, 2, 2]), 2, 1, data_format="CHWN"), "CHWN"),
    "groups": (lambda x: L.conv2d(L.reshape(x, [0, 1, 2, 2]), 2, 1, groups=2), "2 groups"),
    "pool": (lambda x: L.pool2d(L.reshape(x, [0, 1, 2, 2]), 2, "median"), "median"),
    "prelu": (lambda x: L.prelu(x, "row"), "'row'"),
    "split": (lambda x: L.split(x, 3), "3 equal parts"),
    "split the batch": (lambda x: L.split(x, 3, 0), "another dimension"),
    "axis": (lambda x: L.elementwise_add(x, L.reduce_sum(x, 0), axis=3), "at axis 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layer_cannot_do_is_refused_with_the_value(name: str) -> None:
    build, text = REFUSED[name]
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 4])
        with pytest.raises(ProgramError, match=text):
            build(x)


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_of_infinite_logarithms_is_finite(soft: bool) -> None:
    main, p = fluid.Program(), np.array([[0.0, 0.5], [np.inf, 0.5], [1e-300, 0.5]])
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 2], "float64")
        x.stop_gradient = False
        label = L.cast(L.fill_constant_batch_size_like(x, [-1, 1], "int64", 0), "int64")
        loss = L.cross_entropy(x, L.cast(L.one_hot(label, 2), "float64") if soft else label, soft_label=soft)
        (slope,) = fluid.gradients(L.reduce_sum(loss), x)
    found = fluid.Executor().run(main, {"x": p}, [loss, slope], scope=Scope())
    np.testing.assert_allclose(found[0].ravel(), np.array([1e20, -1e20, 300 * np.log(10)]))
    np.testing.assert_allclose(found[1], np.array([[0.0, 0.0], [0.0, 0.0], [-1e300, 0.0]]))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize(("dtype", "cut"), [("float32", 95.0), ("float64", 720.0)])
def test_cross_entropy_of_a_softmax_is_at_most_64(soft: bool, reshaped: bool, dtype: str, cut: float) -> None:
    main, gaps = fluid.Program(), [0.0, 63.0, 80.0, cut, 1000.0]
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 2], dtype)
        x.stop_gradient = False
        label = L.cast(L.fill_constant_batch_size_like(x, [-1, 1], "int64", 0), "int64")
        target = L.cast(L.one_hot(label, 2), dtype) if soft else label
        p = L.softmax(x)
        loss = L.cross_entropy(L.reshape(p, [-1, 2]) if reshaped else p, target, soft_label=soft)
        (slope,) = fluid.gradients(L.reduce_sum(loss), x)
    fed = np.array([[0.0, gap] for gap in gaps], dtype)
    found, slopes = fluid.Executor().run(main, {"x": fed}, [loss, slope], scope=Scope())
    np.testing.assert_allclose(found.ravel(), np.array([np.log(2), 63.0, 64.0, 64.0, 64.0]), rtol=1e-6)
    expected = [[-0.5, 0.5], [-1.0, 1.0], [-1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(slopes, np.array(expected), rtol=1e-5)


def test_cross_entropy_of_float16_ends_at_its_largest_number() -> None:
    main, p = fluid.Program(), np.array([[0.0, 1.0], [0.5, 0.5]], "float16")
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [-1, 2], "float16")
        label = L.cast(L.fill_constant_batch_size_like(x, [-1, 1], "int64", 0), "int64")
        loss = L.cross_entropy(x, label)
    (found,) = fluid.Executor().run(main, {"x": p}, [loss], scope=Scope())
    np.testing.assert_allclose(found.ravel(), np.array([65504.0, np.log(2)]), rtol=1e-3)
