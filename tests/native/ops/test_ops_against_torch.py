"""Every operator once against torch, on small shapes: what an emulated processor runs, and a new operator owes.

The other files of this folder go deeper. Tolerances: relative to the largest value, a few roundings of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.native.ops.attended import ATTENTION
from tests.native.ops.blocks import ORACLES as BLOCKS
from tests.native.ops.fields import FIELDS
from tests.native.ops.oracles_of_layers import LAYERS
from tests.native.ops.sequences import POOLS, RAGGED, pooled
from tests.native.ops.tables import LR, TABLES, adagrad, adam
from torch import Tensor
from torch.nn import functional

from penstock.distributed.collective import COLLECTIVE_NAMES
from penstock.native import fused_ops as _fused_ops  # noqa: F401 - registers its operators
from penstock.native import ops as _ops  # noqa: F401 - registers its operators
from penstock.native import recurrent as _recurrent_ops  # noqa: F401 - registers its operators
from penstock.native.matrix_kernels import KERNELS
from penstock.native.matrix_probe import available
from penstock.program.control import kernel as _control_ops  # noqa: F401 - registers its operators
from penstock.ps.remote_ops import REMOTE_NAMES

OPS: Any = torch.ops.penstock
ROUNDINGS = {torch.float32: 3e-6, torch.float64: 1e-12}

Pairs = Sequence[tuple[Tensor, Tensor]]
"""What an operator gave, and what torch gives."""
Oracle = Callable[[], Pairs]
ORACLES: dict[str, Oracle] = {oracle.__name__: oracle for oracle in (*TABLES, *BLOCKS, *FIELDS, *ATTENTION)} | LAYERS


def oracle(function: Oracle) -> Oracle:
    """Register the comparison of the operator that the function is named for."""
    ORACLES[function.__name__] = function
    return function


def registered() -> set[str]:
    """Name the operators that one process can run by itself; a ring of ranks has `test_ops_ring.py`."""
    names = {
        name.removeprefix("penstock::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("penstock::") and not name.startswith("penstock::test_")
    }
    return {name for name in names - REMOTE_NAMES - COLLECTIVE_NAMES if not name.startswith("ring_")}


# ---------------------------------------------------------------- tables, updates


def table() -> Tensor:
    return torch.randn(6, 19)


@oracle
def lookup_table() -> Pairs:
    weight, ids = table(), torch.tensor([[5, 0], [2, 2]])
    return [(OPS.lookup_table(weight, ids, 0), functional.embedding(ids, weight) * (ids != 0).unsqueeze(-1))]


def sparse_gradient() -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a duplicate, their values, and the same as a dense gradient."""
    rows, values = torch.tensor([4, 1, 4]), torch.randn(3, 19)
    return rows, values, torch.zeros(6, 19).index_add_(0, rows, values)


def adam_state() -> list[Tensor]:
    return [table(), table() * 0.1, torch.rand(6, 19)]


@oracle
def sparse_sgd_() -> Pairs:
    param = table()
    rows, values, dense = sparse_gradient()
    wanted = param - LR * dense
    OPS.sparse_sgd_(param, rows, values, LR)
    return [(param, wanted)]


@oracle
def sparse_adam_() -> Pairs:
    state = adam_state()
    rows, values, dense = sparse_gradient()
    touched = (dense != 0).any(1, keepdim=True)
    wanted = [torch.where(touched, new, old) for new, old in zip(adam(state, dense, 2), state, strict=True)]
    OPS.sparse_adam_(*state, torch.tensor(2.0), rows, values, LR, 0.9, 0.999, 1e-8)
    return list(zip(state, wanted, strict=True))


@oracle
def sparse_adagrad_() -> Pairs:
    state = [table(), torch.rand(6, 19)]
    rows, values, dense = sparse_gradient()
    wanted = adagrad(state, dense)
    OPS.sparse_adagrad_(*state, rows, values, LR, 1e-6)
    return list(zip(state, wanted, strict=True))


@oracle
def sgd_() -> Pairs:
    param, grad = table(), table()
    wanted = param - LR * grad
    OPS.sgd_(param, grad, LR)
    return [(param, wanted)]


@oracle
def adam_() -> Pairs:
    state, grad = adam_state(), table()
    hat, wanted = [tensor.clone() for tensor in state], adam(state, grad, 2, weight_decay=0.1)
    wanted_of_hat = adam(hat, grad, 2, hat=0.1)
    OPS.adam_(*state, torch.tensor(2.0), grad, LR, 0.9, 0.999, 1e-8, 0.1)
    OPS.adam_(*hat, torch.tensor(2.0), grad, LR, 0.9, 0.999, 0.1, 0.0, True)
    return [*zip(state, wanted, strict=True), *zip(hat, wanted_of_hat, strict=True)]


@oracle
def fused_sgd_() -> Pairs:
    params, grads = [table(), torch.randn(4)], [table(), torch.randn(4)]
    wanted = [param - LR * grad for param, grad in zip(params, grads, strict=True)]
    OPS.fused_sgd_(params, grads, LR)
    return list(zip(params, wanted, strict=True))


@oracle
def fused_momentum_() -> Pairs:
    params, velocities, grads = ([torch.randn(37), torch.randn(4)] for _ in range(3))
    moved = [0.9 * velocity + grad for velocity, grad in zip(velocities, grads, strict=True)]
    wanted = [p - LR * (g + 0.9 * v) for p, g, v in zip(params, grads, moved, strict=True)]
    OPS.fused_momentum_(params, velocities, grads, LR, 0.9, True)
    return [*zip(params, wanted, strict=True), *zip(velocities, moved, strict=True)]


@oracle
def fused_adagrad_() -> Pairs:
    states, grads = (
        [[torch.randn(37), torch.rand(37)], [torch.randn(4), torch.rand(4)]],
        [torch.randn(37), torch.ones(4)],
    )
    wanted = [adagrad(state, grad) for state, grad in zip(states, grads, strict=True)]
    OPS.fused_adagrad_([state[0] for state in states], [state[1] for state in states], grads, LR, 1e-6)
    return [pair for state, new in zip(states, wanted, strict=True) for pair in zip(state, new, strict=True)]


@oracle
def fused_adam_() -> Pairs:
    pairs: list[tuple[Tensor, Tensor]] = []
    for hat, settings in ((0.0, (1e-8, 0.1)), (0.1, (0.1, 0.1, True))):
        states, grads = [adam_state(), adam_state()], [table(), table()]
        wanted = [adam(state, grad, 2, weight_decay=0.1, hat=hat) for state, grad in zip(states, grads, strict=True)]
        columns = [list(column) for column in zip(*states, strict=True)]
        OPS.fused_adam_(*columns, torch.tensor(2.0), grads, LR, 0.9, 0.999, *settings)
        pairs += [pair for state, new in zip(states, wanted, strict=True) for pair in zip(state, new, strict=True)]
    return pairs


# ---------------------------------------------------------------- exchanges


@oracle
def all_reduce_() -> Pairs:
    whole, parts = ([torch.randn(133) for _ in range(3)] for _ in range(2))
    wanted = [t[0] + t[1] + t[2] for t in (whole, parts)]
    OPS.all_reduce_(whole)
    for part in range(2):
        OPS.all_reduce_.part(parts, part, 2)
    return [*((tensor, wanted[0]) for tensor in whole), *((tensor, wanted[1]) for tensor in parts)]


@oracle
def reduce_() -> Pairs:
    whole, parts = ([torch.randn(133) for _ in range(3)] for _ in range(2))
    wanted = [[t[0].clone(), t[0] + t[1] + t[2], t[2].clone()] for t in (whole, parts)]
    OPS.reduce_(whole, 1)
    for part in range(2):
        OPS.reduce_.part(parts, 1, part, 2)
    return [*zip(whole, wanted[0], strict=True), *zip(parts, wanted[1], strict=True)]


@oracle
def fused_all_reduce_() -> Pairs:
    tensors = [torch.randn(size) for size in (40, 40, 3, 3)]
    wanted = [tensors[0] + tensors[1], tensors[2] + tensors[3]]
    OPS.fused_all_reduce_(tensors, 2)
    return [(tensor, wanted[number // 2]) for number, tensor in enumerate(tensors)]


@oracle
def broadcast_() -> Pairs:
    destinations, source = [table(), table()], table()
    OPS.broadcast_(destinations, source)
    return [(destination, source) for destination in destinations]


@oracle
def fused_broadcast_() -> Pairs:
    sources = [torch.randn(3), torch.randn(2, 2)]
    destinations = [torch.zeros_like(source) for _ in range(2) for source in sources]
    OPS.fused_broadcast_(destinations, sources)
    return list(zip(destinations, sources * 2, strict=True))


@oracle
def gather_rows() -> Pairs:
    parts = [table(), torch.randn(2, 19)]
    return [(OPS.gather_rows(parts, 1), torch.cat(parts))]


@oracle
def scale_loss_grad() -> Pairs:
    return [(OPS.scale_loss_grad(table(), 0.5), torch.full((6, 19), 0.5))]


# ---------------------------------------------------------------- random numbers, metrics


@oracle
def dropout() -> Pairs:
    x, rng = torch.randn(64, 50), torch.tensor([1, 2, 3])
    y, mask = OPS.dropout(x, rng, 0.25, True, 7, 0, 1)
    assert 0.7 < float(mask.float().mean()) < 0.8  # 3200 draws: six standard deviations
    copied, none = OPS.dropout(x, rng, 0.25, False, 7, 0, 1)
    return [(y, torch.where(mask, x / 0.75, torch.zeros(()))), (copied, x), (none, torch.empty(0, dtype=torch.bool))]


@oracle
def dropout_backward() -> Pairs:
    grad, mask = table(), table() > 0
    none = torch.empty(0, dtype=torch.bool)
    kept = torch.where(mask, grad / 0.75, torch.zeros(()))
    return [
        (OPS.dropout_backward(grad, mask, 0.25, True), kept),
        (OPS.dropout_backward(grad, none, 0.25, False), grad),
    ]


@oracle
def uniform() -> Pairs:
    unit = OPS.uniform([50, 4], 0.0, 1.0, 3, torch.float64)
    assert 0.35 < float(unit.mean()) < 0.65  # 200 draws: seven standard deviations
    return [(OPS.uniform([50, 4], -1.0, 2.0, 3, torch.float64), unit * 3 - 1)]


@oracle
def normal() -> Pairs:
    unit = OPS.uniform([50, 4], 0.0, 1.0, 3, torch.float64)
    return [(OPS.normal([50, 4], 1.0, 2.0, 3, torch.float64), torch.special.ndtri(unit) * 2 + 1)]


@oracle
def truncated_normal() -> Pairs:
    unit = OPS.uniform([50, 4], 0.0, 1.0, 3, torch.float64)
    low, high = torch.special.ndtr(torch.tensor([-2.0, 2.0], dtype=torch.float64))
    wanted = torch.special.ndtri(low + unit * (high - low))
    return [(OPS.truncated_normal([50, 4], 0.0, 1.0, 3, torch.float64), wanted)]


@oracle
def auc() -> Pairs:
    score, label = torch.randint(0, 257, (60,)) / 256, torch.arange(60) % 2
    positive, negative = (torch.zeros(257, dtype=torch.int64) for _ in range(2))
    area = OPS.auc(torch.stack([1 - score, score], 1), label[:, None], positive, negative)
    ahead = score[label == 1][:, None] - score[label == 0]
    wins = (ahead > 0).double() + 0.5 * (ahead == 0).double()
    counts = [torch.bincount((score[label == kind] * 256).long(), minlength=257) for kind in (1, 0)]
    return [(area, wins.mean()), (positive, counts[0]), (negative, counts[1])]


@oracle
def accuracy() -> Pairs:
    topk, label = torch.rand(20, 7).topk(2, 1).indices, torch.randint(0, 7, (20, 1))
    held = (topk == label).any(1)
    wanted = (held.float().mean(), held.sum(dtype=torch.int32), torch.tensor(20, dtype=torch.int32))
    return list(zip(OPS.accuracy(topk, label), wanted, strict=True))


# ---------------------------------------------------------------- batch norm


def images() -> Tensor:
    return torch.randn(4, 3, 5, 5)


def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_batch_norm(x, weight, bias, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)


@oracle
def batch_norm_stats() -> Pairs:
    x = images()
    lines = x.double().transpose(0, 1).flatten(1)
    sums = [torch.full((3,), 100.0, dtype=torch.float64), lines.mean(1), lines.var(1, correction=0) * 100]
    return [(OPS.batch_norm_stats(x), torch.stack(sums))]


@oracle
def sync_batch_norm() -> Pairs:
    x, weight, bias = images(), torch.rand(3), torch.randn(3)
    ours, theirs = ([torch.zeros(3), torch.ones(3)] for _ in range(2))
    shares = torch.stack([OPS.batch_norm_stats(x[:1]), OPS.batch_norm_stats(x[1:])])
    got = OPS.sync_batch_norm(x, weight, bias, *ours, shares, 0.1, 1e-5)
    wanted = torch.native_batch_norm(x, weight, bias, theirs[0], theirs[1], True, 0.1, 1e-5)
    return [*zip(got, wanted, strict=True), *zip(ours, theirs, strict=True)]


@oracle
def batch_norm_grad_stats() -> Pairs:
    x, grad = images(), images()
    _, mean, invstd = normalised(x, torch.ones(3), torch.zeros(3))
    lines, grads = (t.double().transpose(0, 1).flatten(1) for t in (x, grad))
    scaled = (lines - mean.double()[:, None]) * invstd.double()[:, None]
    sums = [torch.full((3,), 100.0, dtype=torch.float64), grads.sum(1), (grads * scaled).sum(1)]
    return [(OPS.batch_norm_grad_stats(grad, x, mean, invstd), torch.stack(sums))]


@oracle
def sync_batch_norm_backward() -> Pairs:
    x, grad, weight = images(), images(), torch.rand(3)
    _, mean, invstd = normalised(x, weight, torch.zeros(3))
    own = OPS.batch_norm_grad_stats(grad, x, mean, invstd)
    got = OPS.sync_batch_norm_backward(grad, x, weight, mean, invstd, own, own.unsqueeze(0))
    wanted = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, None, None, mean, invstd, True, 1e-5, [True, True, True]
    )
    return list(zip(got, wanted, strict=True))


# ---------------------------------------------------------------- matrix products


def products(operator: Any, kernels: Sequence[str]) -> Pairs:
    x, w, bias = torch.randn(33, 64), torch.randn(64, 40), torch.randn(40)
    wanted = x.double() @ w.double()
    turned = x.t().contiguous()
    found: list[tuple[Tensor, Tensor]] = []
    for kernel in kernels:
        found += [
            (operator(x, w, None, False, False, "none", kernel), wanted.float()),
            (operator(turned, w, None, True, False, "none", kernel), wanted.float()),
            (operator(x, w, bias, False, False, "relu", kernel), torch.relu(wanted + bias).float()),
        ]
    return found


@oracle
def product() -> Pairs:
    return products(OPS.product, KERNELS)


@oracle
def product_by() -> Pairs:
    return products(OPS.product_by, available())


@oracle
def fused_add_act() -> Pairs:
    x, y = table(), torch.randn(19)
    return [(OPS.fused_add_act(x, y, kind, 1.0), getattr(torch, kind)(x + y)) for kind in ("relu", "sigmoid", "tanh")]


@oracle
def mkl_vendor_check() -> Pairs:
    answer = torch.tensor(OPS.mkl_vendor_check())
    return [(answer, answer.clamp(-1, 1))]


# ---------------------------------------------------------------- recurrent layers


def layer(kind: type[torch.nn.LSTM] | type[torch.nn.GRU]) -> tuple[Tensor, list[Tensor], list[Tensor], Any]:
    """Input, states, weights, and torch's layer with these weights."""
    module = kind(4, 5)
    x = torch.randn(3, 2, 4, requires_grad=True)
    states = [torch.randn(1, 2, 5, requires_grad=True) for _ in range(2 if kind is torch.nn.LSTM else 1)]
    weights: Any = list(module.parameters())
    return x, states, weights, module


def forward_and_backward(operator: Any, x: Tensor, states: list[Tensor], weights: list[Tensor], module: Any) -> Pairs:
    """Compare the results, and the gradients of all operands."""
    out, last, *_ = operator(x, *(state[0] for state in states), *weights, False, True)
    wanted, final = module(x, tuple(states) if len(states) > 1 else states[0])
    final = final[0] if len(states) > 1 else final
    operands = [x, *states, *weights]
    got_gradients = torch.autograd.grad(out.square().sum() + last.sum(), operands)
    wanted_gradients = torch.autograd.grad(wanted.square().sum() + final.sum(), operands)
    return [(out, wanted), (last, final[0]), *zip(got_gradients, wanted_gradients, strict=True)]


@oracle
def lstm() -> Pairs:
    return forward_and_backward(OPS.lstm, *layer(torch.nn.LSTM))[:2]


@oracle
def lstm_backward() -> Pairs:
    return forward_and_backward(OPS.lstm, *layer(torch.nn.LSTM))[2:]


@oracle
def gru() -> Pairs:
    return forward_and_backward(OPS.gru, *layer(torch.nn.GRU))[:2]


@oracle
def gru_backward() -> Pairs:
    return forward_and_backward(OPS.gru, *layer(torch.nn.GRU))[2:]


CELLS: list[tuple[str, ...]] = [(), ("sigmoid", "sigmoid", "relu"), ("tanh", "identity", "sigmoid")]


def gated(*activations: str) -> tuple[Pairs, Pairs]:
    """Compare the results and the gradients of an LSTM over projected gates, with peepholes."""
    gate, state, candidate = (
        getattr(torch, name) if name != "identity" else torch.clone
        for name in activations or ("sigmoid", "tanh", "tanh")
    )
    shapes = [(3, 2, 20), (2, 5), (2, 5), (5, 20), (3, 5)]
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    gates, h, c, of_gates, peephole = operands
    out, cells, _ = OPS.lstm_sequence(*operands, False, True, *activations)
    wanted: list[Tensor] = []
    wanted_cells: list[Tensor] = []
    for now in gates:
        g, i, f, o = (now + h @ of_gates).chunk(4, 1)
        c = gate(f + c * peephole[1]) * c + gate(i + c * peephole[0]) * candidate(g)
        h = gate(o + c * peephole[2]) * state(c)
        wanted.append(h)
        wanted_cells.append(c)
    theirs = torch.stack(wanted), torch.stack(wanted_cells)
    ours_gradients = torch.autograd.grad(out.square().sum() + cells.sum(), operands)
    their_gradients = torch.autograd.grad(theirs[0].square().sum() + theirs[1].sum(), operands)
    return [(out, theirs[0]), (cells, theirs[1])], list(zip(ours_gradients, their_gradients, strict=True))


@oracle
def lstm_sequence() -> Pairs:
    return [pair for names in CELLS for pair in gated(*names)[0]]


@oracle
def lstm_sequence_backward() -> Pairs:
    return [pair for names in CELLS for pair in gated(*names)[1]]


@oracle
def checked_lengths() -> Pairs:
    lengths = torch.tensor([1, 0, 4])
    return [(OPS.checked_lengths(lengths, 4, "lstm_0"), lengths)]


@oracle
def sequence_pool() -> Pairs:
    rows = torch.randn(8, 3, 2, dtype=torch.float64)
    return [(OPS.sequence_pool(rows, RAGGED, kind, 0.5)[0], pooled(rows, kind, 0.5)) for kind in POOLS]


@oracle
def sequence_pool_backward() -> Pairs:
    rows, grad = torch.randn(8, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    pairs: list[tuple[Tensor, Tensor]] = []
    for kind in POOLS:
        _, index = OPS.sequence_pool(rows.detach(), RAGGED, kind, 0.5)
        wanted = torch.autograd.grad(pooled(rows, kind, 0.5), rows, grad)[0]
        pairs.append((OPS.sequence_pool_backward(grad, index, RAGGED, 8, kind), wanted))
    return pairs


@oracle
def sequence_rows() -> Pairs:
    wanted = {"sequence": [0, 0, 0, 2, 3, 3, 3, 3], "position": [0, 1, 2, 0, 0, 1, 2, 3]}
    wanted["mirror"] = [2, 1, 0, 3, 7, 6, 5, 4]
    return [(OPS.sequence_rows(RAGGED, 8, kind), torch.tensor(rows)) for kind, rows in wanted.items()]


# ---------------------------------------------------------------- the comparison


def test_every_operator_is_compared_with_torch() -> None:
    of_regions = {name for name in registered() if name.startswith("roi_")}  # tests/program/test_layers_of_regions.py
    of_cards = {"card_dropout"}  # tests/gpu/test_one_card.py
    assert registered() - of_regions - of_cards == ORACLES.keys()


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_an_operator_gives_what_torch_gives(name: str) -> None:
    torch.manual_seed(11)
    for got, wanted in ORACLES[name]():
        assert got.dtype == wanted.dtype
        largest = float(wanted.detach().abs().max()) if wanted.is_floating_point() else 0.0
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=ROUNDINGS.get(wanted.dtype, 0.0) * max(largest, 1.0))
