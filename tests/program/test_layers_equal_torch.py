"""Every layer, forward and gradient, against the same formula written in plain torch (float64).

The gradient is that of a factor on the input (each element's is then input times upstream gradient, summed over the
batch) and of the layer's own parameters. Same kernels or the same sums in another order: 1e-12 relative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import penstock as fluid
from penstock.scope import Scope

L: Any = fluid.layers
ROWS = 5
Case = tuple[tuple[int, ...], Callable[[Any], Any], Callable[..., torch.Tensor]]


def _smooth(d: torch.Tensor, sigma: float) -> torch.Tensor:
    s2 = sigma * sigma
    return torch.where(d.abs() < 1 / s2, 0.5 * s2 * d * d, d.abs() - 0.5 / s2).flatten(1).sum(1, keepdim=True)


def _lrn(x: torch.Tensor) -> torch.Tensor:
    c = x.shape[1]
    total = torch.stack([(x[:, max(0, i - 2) : i + 3] ** 2).sum(1) for i in range(c)], 1)
    return x / (1.0 + 0.1 * total) ** 0.75


CASES: dict[str, Case] = {
    "relu": ((4,), L.relu, lambda x: x.clamp_min(0)),
    "leaky_relu": ((4,), L.leaky_relu, lambda x: torch.where(x > 0, x, 0.02 * x)),
    "elu": ((4,), lambda x: L.elu(x, 0.7), lambda x: torch.where(x > 0, x, 0.7 * (x.exp() - 1))),
    "gelu": ((4,), L.gelu, lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
    "gelu by tanh": ((4,), lambda x: L.gelu(x, True), lambda x: F.gelu(x, approximate="tanh")),
    "swish": ((4,), lambda x: L.swish(x, 1.5), lambda x: x * torch.sigmoid(1.5 * x)),
    "hard_sigmoid": ((4,), L.hard_sigmoid, lambda x: (0.2 * x + 0.5).clamp(0, 1)),
    "prelu all": ((3, 2, 2), lambda x: L.prelu(x, "all"), lambda x, w_0: torch.where(x > 0, x, w_0 * x)),
    "prelu channel": (
        (3, 2, 2),
        lambda x: L.prelu(x, "channel"),
        lambda x, w_0: torch.where(x > 0, x, w_0.reshape(1, 3, 1, 1) * x),
    ),
    "sqrt": ((4,), lambda x: L.sqrt(L.square(x) + 1.0), lambda x: (x * x + 1).sqrt()),
    "exp log": ((4,), lambda x: L.log(L.exp(x) + 1.0), F.softplus),
    "abs": ((4,), L.abs, lambda x: x.abs()),
    "pow": ((4,), lambda x: L.pow(L.abs(x), 1.5), lambda x: x.abs() ** 1.5),
    "clip": ((4,), lambda x: L.clip(x, -0.5, 0.7), lambda x: x.clamp(-0.5, 0.7)),
    "scale": ((4,), lambda x: L.scale(x, 2.0, 3.0), lambda x: 2 * x + 3),
    "scale after": ((4,), lambda x: L.scale(x, 2.0, 3.0, False, "relu"), lambda x: (2 * (x + 3)).relu()),
    "elementwise_add": (
        (3, 4),
        lambda x: L.elementwise_add(x, L.reduce_sum(x, [0, 2]), axis=1, act="tanh"),
        lambda x: torch.tanh(x + x.sum((0, 2))[:, None]),
    ),
    "elementwise_sub": ((4,), lambda x: L.elementwise_sub(x, L.square(x)), lambda x: x - x * x),
    "elementwise_mul": ((4,), lambda x: L.elementwise_mul(x, L.exp(x)), lambda x: x * x.exp()),
    "elementwise_div": ((4,), lambda x: L.elementwise_div(x, L.exp(x)), lambda x: x / x.exp()),
    "elementwise_max": ((4,), lambda x: L.elementwise_max(x, L.square(x)), lambda x: torch.maximum(x, x * x)),
    "elementwise_min": ((4,), lambda x: L.elementwise_min(x, L.square(x)), lambda x: torch.minimum(x, x * x)),
    "matmul": (
        (3, 4),
        lambda x: L.matmul(x, x, transpose_y=True, alpha=0.5),
        lambda x: 0.5 * x @ x.transpose(1, 2),
    ),
    "mul": (
        (2, 6),
        lambda x: L.mul(x, L.reshape(L.reduce_sum(x, 0), [2, 6, 1]), 1, 2),
        lambda x: x.flatten(1) @ x.sum(0).reshape(12, 1),
    ),
    "sum": ((4,), lambda x: L.sum([x, L.square(x), L.exp(x)]), lambda x: x + x * x + x.exp()),
    "cos_sim": (
        (4,),
        lambda x: L.cos_sim(x, L.exp(x)),
        lambda x: F.cosine_similarity(x, x.exp(), 1).unsqueeze(1),
    ),
    "reshape": ((6, 2), lambda x: L.reshape(x, [0, -1, 3]), lambda x: x.reshape(-1, 4, 3)),
    "transpose": ((6, 2), lambda x: L.transpose(x, [0, 2, 1]), lambda x: x.permute(0, 2, 1)),
    "squeeze unsqueeze": ((6,), lambda x: L.squeeze(L.unsqueeze(x, [1, 3]), [1]), lambda x: x.unsqueeze(-1)),
    "flatten": ((6, 2, 3), lambda x: L.flatten(x, 2), lambda x: x.reshape(-1, 6)),
    "split": ((6,), lambda x: L.split(x, [2, -1, 1])[1], lambda x: x[:, 2:5]),
    "split equally": ((6,), lambda x: L.split(x, 3, 1)[2], lambda x: x[:, 4:6]),
    "stack": ((6,), lambda x: L.stack([x, L.square(x)], 1), lambda x: torch.stack([x, x * x], 1)),
    "slice": ((6, 4), lambda x: L.slice(x, [1, 2], [1, -3], [9, -1]), lambda x: x[:, 1:, -3:-1]),
    "expand": ((3, 2), lambda x: L.expand(x, [1, 2, 3]), lambda x: x.repeat(1, 2, 3)),
    "concat": ((3,), lambda x: L.concat([x, L.exp(x)], 1), lambda x: torch.cat([x, x.exp()], 1)),
    "reduce_max": ((3, 2), lambda x: L.reduce_max(x, 1, True), lambda x: x.amax(1, keepdim=True)),
    "reduce_min": ((3, 2), lambda x: L.reduce_min(x, [1, 2]), lambda x: x.flatten(1).min(1).values),
    "reduce_prod": ((3, 2), lambda x: L.reduce_prod(x, [1, 2]), lambda x: x.flatten(1).prod(1)),
    "reduce_mean": ((3, 2), lambda x: L.reduce_mean(x, 1), lambda x: x.mean(1)),
    "cast": ((3,), lambda x: L.cast(L.cast(x, "float64"), "float64"), lambda x: x),
    "topk": ((6,), lambda x: L.topk(x, 2)[0], lambda x: x.sort(1, descending=True).values[:, :2]),
    "l2_normalize": ((6,), lambda x: L.l2_normalize(x, 1), lambda x: x / x.norm(dim=1, keepdim=True)),
    "log_loss": (
        (1,),
        lambda x: L.log_loss(L.sigmoid(x), L.sigmoid(x)),
        lambda x: _log_loss(torch.sigmoid(x), torch.sigmoid(x)),
    ),
    "sigmoid_cross_entropy_with_logits": (
        (3,),
        lambda x: L.sigmoid_cross_entropy_with_logits(x, L.sigmoid(x)),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.sigmoid(x), reduction="none"),
    ),
    "huber_loss": (
        (3,),
        lambda x: L.huber_loss(x, L.exp(x), 0.8),
        lambda x: F.huber_loss(x, x.exp(), reduction="none", delta=0.8),
    ),
    "smooth_l1": ((3,), lambda x: L.smooth_l1(x, L.exp(x), sigma=2.0), lambda x: _smooth(x - x.exp(), 2.0)),
    "lrn": ((7, 2, 2), lambda x: L.lrn(x, 5, 1.0, 0.1), _lrn),
    "conv2d": (
        (4, 6, 6),
        lambda x: L.conv2d(x, 6, 3, stride=2, padding=1, groups=2, act="relu"),
        lambda x, w_0, b_0: F.conv2d(x, w_0, b_0, 2, 1, 1, 2).relu(),
    ),
    "conv2d same": (
        (2, 6, 5),
        lambda x: L.conv2d(x, 3, [2, 3], padding="SAME", bias_attr=False),
        lambda x, w_0: F.conv2d(F.pad(x, (1, 1, 0, 1)), w_0),
    ),
    "pool2d max": ((2, 7, 7), lambda x: L.pool2d(x, 3, "max", 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1)),
    "pool2d avg": (
        (2, 7, 7),
        lambda x: L.pool2d(x, 3, "avg", 2, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    ),
    "pool2d avg uneven": (
        (2, 7, 7),
        lambda x: L.pool2d(x, 3, "avg", 2, [0, 1, 1, 0]),
        lambda x: F.avg_pool2d(F.pad(x, (1, 0, 0, 1)), 3, 2) / F.avg_pool2d(F.pad(x * 0 + 1, (1, 0, 0, 1)), 3, 2),
    ),
    "expand_as multiples": (
        (2, 3),
        lambda x: L.expand_as(x, L.concat([x, x, x, x], axis=2)),
        lambda x: x.repeat(1, 1, 4),
    ),
    "pool2d global": (
        (2, 7, 7),
        lambda x: L.pool2d(x, pool_type="avg", global_pooling=True),
        lambda x: x.mean((2, 3), keepdim=True),
    ),
    "batch_norm": (
        (3, 2, 2),
        lambda x: L.batch_norm(x, act="relu"),
        lambda x, w_0, b_0: F.batch_norm(x, None, None, w_0, b_0, True).relu(),
    ),
    "batch_norm at rest": (
        (3, 2, 2),
        lambda x: L.batch_norm(x, is_test=True),
        lambda x, w_0, b_0: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w_0, b_0),
    ),
    "layer_norm": (
        (3, 2),
        L.layer_norm,
        lambda x, w_0, b_0: F.layer_norm(x, [3, 2], w_0.reshape(3, 2), b_0.reshape(3, 2)),
    ),
}


def _log_loss(p: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return -label * (p + 1e-4).log() - (1 - label) * (1 - p + 1e-4).log()


def recorded(
    shape: tuple[int, ...], layer: Callable[[Any], Any], x: Any
) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Run a layer once; return (result and gradients, the parameters that it had)."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 5
    with fluid.program_guard(main, startup):
        inputs = fluid.data("x", [-1, *shape], "float64")
        factor = L.create_parameter(list(shape), "float64", "factor", default_initializer=fluid.initializer.Constant(1))
        out = layer(inputs * factor)
        pairs = fluid.append_backward(L.reduce_mean(out * out + out))
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    parameters = {n: t.clone() for n in scope.names() if (t := scope.find(n)) is not None}
    names = {"out": out.name, **{p.name: g.name for p, g in pairs}}
    values = exe.run(main, {"x": x}, list(names.values()), scope=scope, return_numpy=False)
    return dict(zip(names, (value.rows for value in values), strict=True)), parameters


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_torch(name: str) -> None:
    shape, layer, reference = CASES[name]
    x = np.random.default_rng(3).normal(size=(ROWS, *shape))
    got, parameters = recorded(shape, layer, x)
    own = {n: t.requires_grad_() for n, t in parameters.items() if n.rsplit(".", 1)[-1] in ("w_0", "b_0")}
    factor = parameters["factor"].requires_grad_()
    wanted = reference(torch.from_numpy(x) * factor, **{n.rsplit(".", 1)[-1]: t for n, t in own.items()})
    (wanted * wanted + wanted).mean().backward()  # type: ignore[no-untyped-call]  # torch
    assert got.keys() == {"out", "factor", *own}
    torch.testing.assert_close(got["out"], wanted.detach(), rtol=1e-12, atol=1e-13)
    for parameter, tensor in {"factor": factor, **own}.items():
        assert tensor.grad is not None
        torch.testing.assert_close(got[parameter], tensor.grad, rtol=1e-11, atol=1e-12, msg=parameter)
