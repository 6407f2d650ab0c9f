"""Linear algebra, positions and parts: value and gradient against torch, for batches of two sizes; wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.program.layer_cases import Case, Ints, compare

import penstock as fluid
from penstock.errors import ProgramError
from penstock.scope import Scope

L: Any = fluid.layers


def _kron(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.kron(x, y)


def _multiplexed(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.stack([(a, b)[int(which)][i] for i, which in enumerate(index)])


def _shard(ids: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[int(v) % 7 if int(v) // 7 == 1 else -9 for v in row] for row in ids])


CASES: dict[str, Case] = {
    "concat with ones behind": (
        ((3,), (2, 1, 1)),
        lambda x, y: L.concat([x, y], 1),
        lambda x, y: torch.cat([x, y[:, :, 0, 0]], 1),
    ),
    "bmm": (((2, 3), (3, 4)), L.bmm, torch.bmm),
    "dot of rows": (((3,), (3,)), L.dot, lambda x, y: (x * y).sum(1, keepdim=True)),
    "dot": (((), ()), L.dot, lambda x, y: torch.dot(x, y).reshape(1)),
    "addmm": (
        ((3,), (3,)),
        lambda x, y: L.addmm(y, x, L.matmul(x, y, True), 0.5, 2.0),
        lambda x, y: 2.0 * y + 0.5 * x @ (x.t() @ y),
    ),
    "addcmul": (((3,), (3,)), lambda x, y: L.addcmul(x, x, y, 0.5), lambda x, y: x + 0.5 * x * y),
    "cross": (((2, 3), (2, 3)), L.cross, lambda x, y: torch.linalg.cross(x, y, dim=2)),
    "cross along the first of size 3": (((3, 3), (3, 3)), L.cross, lambda x, y: torch.linalg.cross(x, y, dim=1)),
    "cross along a dimension": (
        ((3, 3), (3, 3)),
        lambda x, y: L.cross(x, y, 2),
        lambda x, y: torch.linalg.cross(x, y, dim=2),
    ),
    "dist": (((3,), (3,)), L.dist, lambda x, y: (x - y).norm()),
    "dist with another p": (((3,), (3,)), lambda x, y: L.dist(x, y, 1.5), lambda x, y: (x - y).norm(p=1.5)),
    "dist at most": (((3,), (3,)), lambda x, y: L.dist(x, y, float("inf")), lambda x, y: (x - y).abs().max()),
    "t": (((3,),), L.t, lambda x: x.t()),
    "t of a vector": (((),), L.t, lambda x: x),
    "trace": (((5,),), L.trace, lambda x: torch.diagonal(x).sum()),
    "trace of parts": (
        ((3, 4),),
        lambda x: L.trace(x, 1, 1, -1),
        lambda x: torch.diagonal(x, 1, 1, 2).sum(-1),
    ),
    "kron": (((3,), (2,)), L.kron, _kron),
    "kron of ranks": (((2, 3), (2,)), L.kron, _kron),
    "diag_embed": (((3,),), L.diag_embed, torch.diag_embed),
    "diag_embed elsewhere": (
        ((3,),),
        lambda x: L.diag_embed(x, -1, 0, 2),
        lambda x: torch.diag_embed(x, -1, 0, 2),
    ),
    "logsumexp": (((3,),), L.logsumexp, lambda x: x.exp().sum().log()),
    "logsumexp kept": (
        ((3, 2),),
        lambda x: L.logsumexp(x * 400.0, [1], True),
        lambda x: torch.logsumexp(x * 400, 1, keepdim=True),
    ),
    "allclose": (((3,),), lambda x: L.allclose(x, x + 1e-9), lambda x: torch.tensor(True)),
    "not allclose": (((3,),), lambda x: L.allclose(x, x + 1e-3), lambda x: torch.tensor(False)),
    "elementwise_equal": ((Ints(3), Ints(3)), L.elementwise_equal, torch.eq),
    "bilinear_tensor_product": (
        ((3,), (2,)),
        lambda x, y: L.bilinear_tensor_product(x, y, 4, "tanh"),
        lambda x, y, w_0, b_0: (F.bilinear(x, y, w_0) + b_0).tanh(),
    ),
    "fsp_matrix": (
        ((2, 3, 4), (5, 3, 4)),
        L.fsp_matrix,
        lambda x, y: torch.einsum("nahw,nbhw->nab", x, y) / 12,
    ),
    "log1p": (((3,),), lambda x: L.log1p(x * x), lambda x: torch.log1p(x * x)),
    "clamp": (((3,),), lambda x: L.clamp(x, -0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "clamp from above": (((3,),), lambda x: L.clamp(x, max=0.5), lambda x: x.clamp(max=0.5)),
    "clamp by variables": (((3,), (3,)), lambda x, y: L.clamp(x, min=y), torch.maximum),
    "mish": (((3,),), L.mish, F.mish),
    "mish with a threshold": (
        ((3,),),
        lambda x: L.mish(x, 0.5),
        lambda x: x * torch.tanh(torch.where(x > 0.5, x, torch.where(x < -0.5, x.exp(), (1 + x.exp()).log()))),
    ),
    "flip": (((3, 2),), lambda x: L.flip(x, [0, 2]), lambda x: x.flip(0, 2)),
    "roll": (((3, 2),), lambda x: L.roll(x, [1, -1], [0, 1]), lambda x: x.roll((1, -1), (0, 1))),
    "roll in one line": (((3,),), lambda x: L.roll(x, 2), lambda x: x.roll(2)),
    "meshgrid": (
        ((), (3,)),
        lambda x, y: L.meshgrid([x, L.reduce_sum(y, 0)])[1] * L.meshgrid([x, L.reduce_sum(y, 0)])[0],
        lambda x, y: x[:, None] * y.sum(0)[None],
    ),
    "index_select": (
        ((3,), Ints(4, ())),
        L.index_select,
        lambda x, i: x[i],
    ),
    "index_select of columns": (
        ((4,), Ints(4, (), "int32")),
        lambda x, i: L.index_select(x, i, 1),
        lambda x, i: x[:, i.long()],
    ),
    "index_sample": (((5,), Ints(5, (2,))), L.index_sample, lambda x, i: torch.gather(x, 1, i)),
    "scatter_nd_add": (
        ((3,), Ints(4, (2, 1)), (2, 3)),
        L.scatter_nd_add,
        lambda x, i, y: x.index_put((i[..., 0],), y, accumulate=True),
    ),
    "scatter_nd": (
        (Ints(3, (2,)), (4,)),
        lambda i, y: L.scatter_nd(i, y, [3, 3, 4]),
        lambda i, y: torch.zeros(3, 3, 4).double().index_put((i[:, 0], i[:, 1]), y, accumulate=True),
    ),
    "multiplex": (
        ((3, 2), (3, 2), Ints(2, (1,), "int32")),
        lambda x, y, i: L.multiplex([x, y], i),
        _multiplexed,
    ),
    "crop": (((4, 5),), lambda x: L.crop(x, [-1, 2, 3], [0, 1, 2]), lambda x: x[:, 1:3, 2:5]),
    "crop to a variable": (((4,), (2,)), L.crop, lambda x, y: x[:, :2]),
    "crop_tensor": (((4, 5),), lambda x: L.crop_tensor(x, [-1, 2, -1], [1, 1, 2]), lambda x: x[1:, 1:3, 2:]),
    "crop_tensor at a variable": (
        ((4,),),
        lambda x: L.crop_tensor(x, [-1, 2], [0, L.fill_constant([1], "int32", 1)]),
        lambda x: x[:, 1:3],
    ),
    "pad_constant_like": (
        ((4, 3), (2, 2)),
        lambda x, y: L.pad_constant_like(x, y, 0.5),
        lambda x, y: F.pad(y, (0, 1, 0, 2), value=0.5),
    ),
    "shard_index": ((Ints(20),), lambda x: L.shard_index(x, 20, 3, 1, -9), _shard),
    "rank": (((4, 3),), L.rank, lambda x: torch.tensor([3], dtype=torch.int32)),
    "size": (((4, 3),), L.size, lambda x: torch.tensor([x.numel()])),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_torch(name: str) -> None:
    compare(CASES[name])


def test_full_and_arange_are_float32_by_default() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        made = [L.full([2, 3], 7), L.full([1], 2.0, dtype="int64"), L.arange(1, 8, 3), L.arange(0, 3, dtype="int64")]
    found = fluid.Executor().run(main, {}, made, scope=Scope())
    wanted = [np.full([2, 3], 7, "float32"), np.array([2]), np.array([1, 4, 7], "float32"), np.arange(3)]
    for got, array in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bmm": (lambda x: L.bmm(x, x), "bmm needs a variable of 3 dimensions"),
    "dot": (lambda x: L.dot(L.unsqueeze(x, 1), x), "dot needs a variable of 1 or 2 dimensions"),
    "addmm": (lambda x: L.addmm(x, L.unsqueeze(x, 1), x), "addmm needs a variable of 2 dimensions"),
    "cross": (lambda x: L.cross(x, x), "cross needs size 3 along dim=None"),
    "t": (lambda x: L.t(L.unsqueeze(x, 1)), "t needs at most two dimensions"),
    "trace": (lambda x: L.trace(x, 0, 1, -1), "trace needs two dimensions, dim1=1 and dim2=-1"),
    "bilinear": (lambda x: L.bilinear_tensor_product(x, L.unsqueeze(x, 1), 2), "bilinear_tensor_product needs"),
    "fsp_matrix": (lambda x: L.fsp_matrix(x, x), "fsp_matrix needs a variable of 4 dimensions"),
    "clamp": (L.clamp, "clamp: min and max are None"),
    "mish": (lambda x: L.mish(x, 0), "mish: threshold is 0"),
    "meshgrid": (lambda x: L.meshgrid([x]), "meshgrid needs a variable of 1 dimension"),
    "index_select": (lambda x: L.index_select(x, x), "index_select needs a variable of 1 dimension"),
    "index_sample": (lambda x: L.index_sample(x, L.unsqueeze(x, 1)), "index_sample needs"),
    "scatter_nd": (lambda x: L.scatter_nd(L.cast(x, "int64"), x, [3, 3]), "at most 2"),
    "multiplex": (lambda x: L.multiplex([x], x), "multiplex: inputs has 1 variables"),
    "crop": (lambda x: L.crop(x, [2]), r"crop needs a shape of as many sizes as x has dimensions; shape=\[2\]"),
    "crop beyond": (lambda x: L.crop(x, [-1, 3], [0, 2]), "crop needs 3 elements from 2 on along dimension 1"),
    "crop_tensor": (lambda x: L.crop_tensor(x, [-1, 2], [0]), "an offset for each dimension"),
    "pad_constant_like": (lambda x: L.pad_constant_like(x, L.unsqueeze(x, 1)), "pad_constant_like needs"),
    "shard_index": (lambda x: L.shard_index(x, 20, 2, 2), "shard_id is 2; expected 0 to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    with fluid.program_guard(fluid.Program(), fluid.Program()):
        x = fluid.data("x", [None, 4], "float64")
        with pytest.raises(ProgramError, match=said):
            build(x)
