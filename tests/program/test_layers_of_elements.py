"""Functions of elements, comparisons, parts by position and further losses, against torch and their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import penstock as fluid
from penstock.errors import ProgramError

L = fluid.layers
X = torch.tensor(np.random.default_rng(0).normal(size=(4, 3)) * 2.0)
Y = torch.tensor(np.random.default_rng(1).normal(size=(4, 3)))
LABEL = torch.tensor([[0], [2], [1], [2]])
IMAGE = torch.tensor(np.random.default_rng(2).normal(size=(2, 4, 3, 3)))


def fetched(layer: Callable[..., Any], *operands: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return what a layer makes of the operands, and the gradient of its weighted sum for the first of them."""
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        inputs = [
            fluid.data(f"x{i}", [None, *x.shape[1:]], str(x.dtype).removeprefix("torch."))
            for i, x in enumerate(operands)
        ]
        inputs[0].stop_gradient = not operands[0].is_floating_point()
        made = layer(*inputs)
        wants = made.fake.requires_grad
        grads = fluid.gradients([(made * made).sum()], [inputs[0]]) if wants else [made]
    feed = {f"x{i}": x for i, x in enumerate(operands)}
    exe = fluid.Executor()
    exe.run(startup, scope=fluid.Scope())
    one, grad = exe.run(main, feed=feed, fetch_list=[made, *grads], scope=fluid.Scope())
    return one, grad


CASES: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (L.sin, torch.sin), (L.cos, torch.cos), (L.atan, torch.atan), (L.sign, torch.sign), (L.floor, torch.floor),
    (L.ceil, torch.ceil), (L.round, torch.round), (L.reciprocal, torch.reciprocal), (L.erf, torch.erf),
    (L.softplus, F.softplus), (L.softsign, F.softsign), (L.logsigmoid, F.logsigmoid), (L.tanh_shrink, F.tanhshrink),
    (L.softshrink, F.softshrink), (L.hard_shrink, F.hardshrink), (L.relu6, F.relu6), (L.selu, F.selu),
    (lambda x: L.rsqrt(x * x), lambda x: x.abs() ** -1), (lambda x: L.asin(x / 9), lambda x: torch.asin(x / 9)),
    (lambda x: L.acos(x / 9), lambda x: torch.acos(x / 9)), (L.thresholded_relu, lambda x: F.threshold(x, 1.0, 0.0)),
    (lambda x: L.brelu(x, -1.0, 1.0), lambda x: x.clamp(-1, 1)), (L.hard_swish, F.hardswish),
    (L.soft_relu, lambda x: (1 + x.exp()).log()), (L.stanh, lambda x: 1.7159 * (0.67 * x).tanh()),
    (L.log_softmax, lambda x: F.softmax(x, -1).log()), (L.cumsum, lambda x: x.cumsum(-1)),
    (lambda x: L.cumsum(x, 1, True, True), lambda x: torch.stack([x[:, 1] + x[:, 2], x[:, 2], 0 * x[:, 0]], 1)),
    (lambda x: L.pad(x, [0, 0, 1, 2], 5.0), lambda x: F.pad(x, (1, 2), value=5.0)),
    (lambda x: L.reverse(x, 1), lambda x: x.flip(1)), (lambda x: L.argsort(x)[0], lambda x: x.sort(-1)[0]),
    (lambda x: L.label_smooth(x, epsilon=0.3), lambda x: 0.7 * x + 0.1),
    (lambda x: L.clip_by_norm(x, 2.0), lambda x: x * (2.0 / x.norm())),
    (lambda x: L.clip_by_norm(x, 2e3), lambda x: x * 1.0),
    (L.triu, torch.triu), (lambda x: L.tril(x, -1), lambda x: torch.tril(x, -1)),
    (lambda x: L.strided_slice(x, [1], [0], [3], [2]), lambda x: x[:, 0:3:2]),
    (lambda x: L.diag(L.reduce_sum(x, 0)), lambda x: torch.diag(x.sum(0))),
    (lambda x: x * L.full_like(x, 3.0), lambda x: x * 3.0),
    (lambda x: L.unstack(x, 1)[2] * 2, lambda x: x[:, 2] * 2),
    (lambda x: L.increment(x * 1.0, 2.0, in_place=False), lambda x: x + 2),
    (lambda x: L.zeros_like(x) + L.ones_like(x) * x, lambda x: x * 1.0),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_function_equals_torch_with_its_gradient(case: int) -> None:
    layer, oracle = CASES[case]
    made, grad = fetched(layer, X)
    x = X.clone().requires_grad_()
    want = oracle(x)
    (slope,) = torch.autograd.grad((want * want).sum(), [x])
    np.testing.assert_allclose(made, want.detach(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grad, slope, rtol=1e-9, atol=1e-12)


def _bpr(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    rows = [
        sum(-torch.log(torch.sigmoid(row[int(k)] - row[j])) for j in range(len(row)) if j != int(k)) / (len(row) - 1)
        for row, k in zip(x, label, strict=True)
    ]
    return torch.stack([torch.as_tensor(row) for row in rows]).reshape(-1, 1)


def _npair(a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    same = torch.eye(4, dtype=a.dtype)
    same[1, 3] = same[3, 1] = 1.0
    targets = same / same.sum(1, keepdim=True)
    entropy = -(targets * F.log_softmax(a @ p.t(), 1)).sum(1, keepdim=True)
    regular = 0.25 * 0.002 * ((a**2).sum(1).mean() + (p**2).sum(1).mean())
    return regular + (targets * entropy).sum(0).mean()


LOSSES: list[tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    (L.mse_loss, F.mse_loss, (X, Y)),
    (L.square_error_cost, lambda x, y: (x - y) ** 2, (X, Y[:, :1])),
    (L.kldiv_loss, lambda x, y: (y * (y.log() - x)).mean(), (X, Y.abs())),
    (lambda x, y: L.rank_loss(y, x, y), lambda x, y: (1 + (x - y).exp()).log() - y * (x - y), (X, Y)),
    (lambda x, y: L.margin_rank_loss(y, x, y), lambda x, y: F.relu(0.1 - y * (x - y)), (X, Y)),
    (L.bpr_loss, _bpr, (X, LABEL)),
    (
        L.dice_loss,
        lambda x, y: (1 - 2 * x.gather(1, y).sum(1) / (x.sum(1) + 1 + 1e-5)).mean(),
        (F.softmax(X, -1), LABEL),
    ),
    (L.npair_loss, lambda a, p, y: _npair(a, p), (X, Y, LABEL)),
    (L.gather, lambda x, i: x[i.reshape(-1)], (X, LABEL)),
    (L.gather_nd, lambda x, i: x[i.reshape(-1)], (X, LABEL)),
    (
        lambda x, i, y: L.scatter(x, i, y, overwrite=False),
        lambda x, i, y: torch.stack([y[0], y[2], y[1] + y[3], x[3]]),
        (X, LABEL, Y),
    ),
    (lambda x, y: L.expand_as(L.reduce_mean(x, 0, True), y), lambda x, y: x.mean(0, True).expand(4, 3), (X, Y)),
    (lambda x: L.pad2d(x, [1, 0, 0, 2], "edge"), lambda x: F.pad(x, (0, 2, 1, 0), "replicate"), (IMAGE,)),
]


@pytest.mark.parametrize("case", range(len(LOSSES)))
def test_a_loss_equals_its_formula_with_its_gradient(case: int) -> None:
    layer, oracle, operands = LOSSES[case]
    made, grad = fetched(layer, *operands)
    x = operands[0].clone().requires_grad_()
    want = oracle(x, *operands[1:])
    (slope,) = torch.autograd.grad((want * want).sum(), [x])
    np.testing.assert_allclose(made.reshape(want.shape), want.detach(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(grad, slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "want"),
    [
        (L.less_than, X < Y), (L.less_equal, X <= Y), (L.greater_than, X > Y), (L.greater_equal, X >= Y),
        (L.equal, X == Y), (L.not_equal, X != Y),
        (L.elementwise_mod, X.remainder(Y)),
        (L.elementwise_floordiv, X.floor_divide(Y)),
        (lambda x, y: L.logical_and(x > 0, y > 0), (X > 0) & (Y > 0)),
        (lambda x, y: L.logical_or(x > 0, L.logical_not(y > 0)), (X > 0) | (Y <= 0)),
        (lambda x, y: L.logical_xor(x > 0, y > 0), (X > 0) ^ (Y > 0)),
        (lambda x, y: L.reduce_all(x > y, 1), (X > Y).all(1)), (lambda x, y: L.reduce_any(x > y), (X > Y).any()),
        (lambda x, y: L.isfinite(x), torch.tensor(True)), (lambda x, y: L.has_nan(x / (y - y)), torch.tensor(False)),
        (lambda x, y: L.has_inf(x / (y - y)), torch.tensor(True)), (lambda x, y: L.argmin(x, 1), X.argmin(1)),
        (lambda x, y: L.shape(x), torch.tensor([4, 3])),
        (lambda x, y: L.range(1, 8, 3, "int64"), torch.tensor([1, 4, 7])),
        (lambda x, y: L.linspace(0.0, 1.0, 3, "float32"), torch.tensor([0, 0.5, 1])),
        (lambda x, y: L.eye(2, 3, [2]), torch.eye(2, 3).repeat(2, 1, 1)),
        (lambda x, y: L.fill_constant_batch_size_like(x, [-1, 2], "int64", 3), torch.full((4, 2), 3)),
        (lambda x, y: L.zeros([2], "float32") + L.ones([2], "float32"), torch.ones(2)),
    ],
)  # fmt: skip
def test_what_has_no_gradient_equals_torch(layer: Callable[..., Any], want: torch.Tensor) -> None:
    made, _ = fetched(lambda x, y: layer(x.detach(), y), X, Y)
    np.testing.assert_array_equal(made.reshape(want.shape), want)


@pytest.mark.parametrize(
    "more",
    [
        {"filter_size": 3},
        {"filter_size": [2, 3], "stride": 2, "padding": 1, "groups": 2},
        {"output_size": [7, 8], "stride": 2},
    ],
)
def test_a_transposed_convolution_equals_torch(more: dict[str, Any]) -> None:
    def layer(x: Any) -> Any:
        initial = fluid.initializer.Constant(0.25)
        return L.conv2d_transpose(x, 6, param_attr=fluid.ParamAttr(initializer=initial), bias_attr=False, **more)

    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        made = layer(fluid.data("x", [None, 4, 3, 3], "float64"))
    exe = fluid.Executor()
    exe.run(startup, scope=scope)
    (got,) = exe.run(main, feed={"x": IMAGE}, fetch_list=[made], scope=scope)
    weight = scope.find(main.all_parameters()[0].name)
    assert weight is not None
    size, behind = more.get("output_size"), 0
    if size is not None:
        assert list(got.shape[2:]) == size
        assert list(weight.shape[2:]) == [3, 4]
    want = F.conv_transpose2d(
        IMAGE, weight, None, more.get("stride", 1), more.get("padding", 0), behind, more.get("groups", 1)
    )
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_sizes_that_depend_on_data_are_refused() -> None:
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.layers.data("x", [3])
        with pytest.raises(ProgramError, match=r"range: end has the shape .*expected one element"):
            L.range(0, x, 1, "int64")
        with pytest.raises(ProgramError, match=r"create_tensor\(persistable=True\)"):
            L.create_tensor("float32", persistable=True)
        with pytest.raises(ProgramError, match="give filter_size or output_size"):
            L.conv2d_transpose(fluid.data("i", [None, 4, 3, 3]), 2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_group_norm_equals_torch(groups: int) -> None:
    made, grad = fetched(lambda x: L.group_norm(x, groups, epsilon=0.1, param_attr=False, bias_attr=False), IMAGE)
    x = IMAGE.clone().requires_grad_()
    want = F.group_norm(x, groups, eps=0.1)
    (slope,) = torch.autograd.grad((want * want).sum(), [x])
    np.testing.assert_allclose(made, want.detach(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(grad, slope, rtol=1e-9, atol=1e-12)


def test_a_counter_of_steps_is_shared_by_its_name() -> None:
    main, startup, scope = fluid.Program(), fluid.Program(), fluid.Scope()
    with fluid.program_guard(main, startup):
        counter = L.autoincreased_step_counter("steps", begin=5, step=2)
        assert L.autoincreased_step_counter("steps") is counter
        L.create_global_var([1], 0.0, "float32", persistable=True, name="other")
        with pytest.raises(ProgramError, match="'other' is no counter"):
            L.autoincreased_step_counter("other")
        with pytest.raises(ProgramError, match="a number of groups that divides the channels"):
            L.group_norm(fluid.data("i", [None, 4, 3, 3]), 3)
        with pytest.raises(ProgramError, match="expected positive ones"):
            L.strided_slice(fluid.layers.data("x", [3]), [1], [2], [0], [-1])
    exe = fluid.Executor()
    exe.run(startup, scope=scope)
    assert [int(exe.run(main, fetch_list=[counter], scope=scope)[0]) for _ in range(3)] == [5, 7, 9]


class Margin(torch.nn.Module):
    def forward(self, scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return scores - own  # of each column


def test_operators_in_modules_end_together_as_torchs() -> None:
    main, module = fluid.Program(), Margin()
    with fluid.program_guard(main, fluid.Program()):
        x, own = fluid.data("x", [None, 2], "float64"), fluid.data("own", [None], "float64")
        scores = torch.matmul(x, x.t())
        found = [module(scores, own), scores - own]
    rows, values = np.arange(6.0).reshape(3, 2), np.array([1.0, 2.0, 3.0])
    as_torch, as_fluid = fluid.Executor(fluid.CPUPlace()).run(main, {"x": rows, "own": values}, found)
    np.testing.assert_array_equal(as_torch, rows @ rows.T - values)
    np.testing.assert_array_equal(as_fluid, rows @ rows.T - values[:, None])


def test_operators_of_variables_begin_where_a_batch_does() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, 3, 1, 1], "float64")
        pair, each = fluid.data("pair", [None, 3], "float64"), fluid.data("each", [None], "float64")
        row = fluid.layers.fill_constant([3], "float64", 2.0)
        found = [x * pair, pair - x, each / pair, pair > each, pair * row, x + row, torch.mul(x[:, :, :, 0], each)]
    rng = np.random.default_rng(0)
    feed = {n: rng.random(s) + 0.1 for n, s in (("x", (4, 3, 1, 1)), ("pair", (4, 3)), ("each", (4,)))}
    got = fluid.Executor(fluid.CPUPlace()).run(main, feed, found, scope=fluid.Scope())
    a, b, c = feed["x"], feed["pair"], feed["each"]
    wide, column, two = b[:, :, None, None], c[:, None], np.full(3, 2.0)
    wanted = [a * wide, wide - a, column / b, b > column, b * two, a + two, a[:, :, :, 0] * c]
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


WHOLE = torch.tensor([[7, -7, 2], [0, 5, -3]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (lambda x: L.scale(x, 2.0, 1.0), WHOLE * 2 + 1),
        (lambda x: L.scale(x, -2.7, 1.9), WHOLE * -2 + 1),
        (lambda x: L.scale(x, np.int64(3), np.float32(1.9)), WHOLE * 3 + 1),
        (lambda x: L.scale(x, 2.7, -1.9, bias_after_scale=False), (WHOLE - 1) * 2),
        (lambda x: L.scale(x, L.fill_constant([1], "float32", 3.5)), WHOLE * 3),
        (lambda x: L.reduce_mean(x, 1), torch.tensor([0, 0])),
        (lambda x: L.reduce_mean(x, 0, keep_dim=True), torch.tensor([[3, -1, 0]])),
        (L.reduce_sum, WHOLE.sum()),
        (lambda x: L.reduce_sum(x, [1], keep_dim=True), WHOLE.sum(1, keepdim=True)),
        (lambda x: L.reduce_prod(x, 1), WHOLE.prod(1)),
        (lambda x: L.reduce_prod(x, [0, 1]), WHOLE.prod()),
        (lambda x: L.clip(x, -1.5, 2.9), WHOLE.clamp(-1, 2)),
        (lambda x: L.clip(x, 0, float("inf")), WHOLE.clamp(0)),
        (lambda x: L.clip(x, np.float32("-inf"), float("inf")), WHOLE),
        (lambda x: L.clip(x, 0, x.shape[0] - 1), WHOLE.clamp(0, 1)),
    ],
)
def test_whole_numbers_stay_whole_in_layers_of_elements(
    layer: Callable[[Any], Any], wanted: torch.Tensor, dtype: torch.dtype
) -> None:
    got, _ = fetched(layer, WHOLE.to(dtype))
    assert got.dtype == str(dtype).removeprefix("torch.")
    np.testing.assert_array_equal(got, wanted.numpy())


def test_a_bound_that_is_the_batch_follows_it() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.data("x", [None, 3], "int64")
        made = L.clip(x, 0, x.shape[0] - 1)
    for rows in (2, 4):
        fed = np.arange(3 * rows).reshape(rows, 3)
        (got,) = fluid.Executor().run(main, feed={"x": fed}, fetch_list=[made], scope=fluid.Scope())
        np.testing.assert_array_equal(got, fed.clip(0, rows - 1))
