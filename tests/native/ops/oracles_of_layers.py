"""Operators of single layers against plain loops: labels, beams, features of clicks, random numbers, messages.

Imported by tests. Operators that give no tensor are compared by what they leave behind: what was written, what raised.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from itertools import groupby, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.io import load_operator as _load_operator  # noqa: F401 - as below
from penstock.io.fluid.folders import write_separate
from penstock.io.fluid.tensors import FluidTensor
from penstock.native import fused_ops as _fused_ops  # noqa: F401 - registers its operators
from penstock.native import ops as _ops  # noqa: F401 - as above
from penstock.native import trees as _trees  # noqa: F401 - as above
from penstock.program.layers.python_functions import key_of

OPS: Any = torch.ops.penstock
Pairs = list[tuple[Tensor, Tensor]]
LENGTHS = [3, 0, 1, 4]

# ---------------------------------------------------------------- labels


def spelled(tags: Sequence[int], letters: str, others: Sequence[int]) -> set[tuple[int, int, int]]:
    """Cut tags where their letters or types say so: what lies between two cuts is a chunk, but of `others`."""
    words = [(letters[tag % len(letters)], tag // len(letters)) for tag in tags]
    inner = [
        i for i, ((last, old), (letter, type_)) in enumerate(pairwise(words), start=1)
        if old != type_ or letter in "BS" or last in "ES"
    ]  # fmt: skip
    cuts = [0, *inner, len(words)] if words else []
    return {(i, j, words[i][1]) for i, j in pairwise(cuts) if words[i][1] not in others}


def chunk_eval() -> Pairs:
    pairs: Pairs = []
    for scheme, letters in {"IOB": "BI", "IOE": "IE", "IOBES": "BIES", "plain": "I"}.items():
        for excluded in ([], [1]):
            label = torch.randint(2 * len(letters) + 1, (4, 9))
            found = torch.where(torch.rand(4, 9) < 0.8, label, torch.randint(2 * len(letters) + 1, (4, 9)))
            lengths = [9, 0, 1, 7]
            each = [
                [
                    spelled(row[:length], letters, [2, *excluded])
                    for row, length in zip(t.tolist(), lengths, strict=True)
                ]
                for t in (found, label)
            ]
            both = [a & b for a, b in zip(*each, strict=True)]
            wanted = torch.tensor([sum(map(len, chunks)) for chunks in (*each, both)])
            ragged = [torch.cat([row[:n] for row, n in zip(t, lengths, strict=True)])[:, None] for t in (found, label)]
            settings = (torch.tensor(lengths), scheme, 2, excluded)
            pairs += [(OPS.chunk_eval(found, label, *settings), wanted), (OPS.chunk_eval(*ragged, *settings), wanted)]
    return pairs


def placed(logits: Tensor, label: list[int], blank: int) -> Tensor:
    """Minus the logarithm of a label's probability, by going through every path."""
    logs = functional.log_softmax(logits, 1)
    paths = product(range(logits.shape[1]), repeat=len(logits))
    fitting = [path for path in paths if [tag for tag, _ in groupby(path) if tag != blank] == label]
    steps = torch.arange(len(logits))
    return -torch.logsumexp(torch.stack([logs[steps, torch.tensor(path)].sum() for path in fitting]), 0)


def temporal() -> tuple[Pairs, Pairs]:
    """Compare losses, and gradients, with sums over all paths and with torch's own."""
    values: Pairs = []
    slopes: Pairs = []
    for blank, labels in ((0, [[1, 1], [2, 1], [0, 0]]), (2, [[1, 1], [0, 1], [0, 0]])):
        logits = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
        label, steps, sizes = torch.tensor(labels), torch.tensor([4, 3, 2]), torch.tensor([2, 2, 0])
        each = zip(logits, labels, steps.tolist(), sizes.tolist(), strict=True)
        ways = torch.stack([placed(x[:step], own[:size], blank) for x, own, step, size in each])
        logs = functional.log_softmax(logits, 2).transpose(0, 1)
        theirs = functional.ctc_loss(logs, label, steps, sizes, blank, reduction="none")
        operands = (logits, label, steps, sizes, blank)
        got, weights = OPS.ctc(*operands), torch.arange(1.0, 4.0, dtype=torch.float64)[:, None]
        (wanted,) = torch.autograd.grad(ways[:, None], logits, weights)
        values += [(got, ways[:, None]), (got, theirs[:, None])]
        slopes += [
            (OPS.ctc_backward(weights, *operands), wanted),
            (torch.autograd.grad(got, logits, weights)[0], wanted),
            (torch.autograd.grad(theirs, logits, weights[:, 0])[0], wanted),
        ]
    return values, slopes


def ctc() -> Pairs:
    return temporal()[0]


def ctc_backward() -> Pairs:
    return temporal()[1]


@cache
def apart(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Edits between two sequences, by their last ids."""
    if not one or not other:
        return len(one) + len(other)
    replaced = apart(one[:-1], other[:-1]) + (one[-1] != other[-1])
    return min(replaced, apart(one[:-1], other) + 1, apart(one, other[:-1]) + 1)


def edit_distance() -> Pairs:
    pairs: Pairs = []
    tensors, sizes = [torch.randint(4, (4, 6)), torch.randint(4, (4, 5))], [[6, 0, 3, 5], [5, 4, 3, 2]]
    tensors[1][:, 0] = 1  # so that each label has an id that is not ignored
    for ignored in ([], [0, 3]):
        found, label = (
            [tuple(v for v in row[:n] if v not in ignored) for row, n in zip(t.tolist(), own, strict=True)]
            for t, own in zip(tensors, sizes, strict=True)
        )
        edits = torch.tensor([[float(apart(*both))] for both in zip(found, label, strict=True)])
        operands = (*tensors, *map(torch.tensor, sizes), ignored)
        lengths = torch.tensor([[len(row)] for row in label])
        pairs += [(OPS.edit_distance(*operands, False), edits), (OPS.edit_distance(*operands, True), edits / lengths)]
    return pairs


def gather_tree() -> Pairs:
    pairs: Pairs = []
    for dtype in (torch.int64, torch.int32):
        ids, parents = torch.randint(50, (5, 2, 3), dtype=dtype), torch.randint(3, (5, 2, 3), dtype=dtype)
        wanted = torch.zeros_like(ids)
        for sample, beam in product(range(2), range(3)):
            at = beam
            for step in reversed(range(5)):
                wanted[step, sample, beam] = ids[step, sample, at]
                at = int(parents[step, sample, at])
        pairs.append((OPS.gather_tree(ids, parents), wanted))
    return pairs


# ---------------------------------------------------------------- features of clicks


def cvm() -> Pairs:
    x, counts = torch.rand(5, 6, dtype=torch.float64, requires_grad=True), torch.rand(5, 2, dtype=torch.float64)
    logs, pairs = torch.log1p(x[:, :1]), []
    for keeps, heads in ((True, [logs, torch.log1p(x[:, 1:2]) - logs]), (False, [])):
        got, grad = OPS.cvm(x, counts, keeps), torch.randn(5, 6 if keeps else 4, dtype=torch.float64)
        slope = torch.autograd.grad(got, x, grad)[0]
        pairs += [(got, torch.cat([*heads, x[:, 2:]], 1)), (slope, torch.cat([counts, grad[:, -4:]], 1))]
    return pairs


def data_norm_update_() -> Pairs:
    pairs: Pairs = []
    x, means = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    x[1, 0], x[:, 3] = 0.0, 0.0  # of slots of three: the first was not shown once, the second never
    for slot, training in ((0, True), (3, True), (3, False)):
        state = list(torch.rand(3, 6, dtype=torch.float64))
        wanted = [kept.clone() for kept in state]
        for column in range(6 if training else 0):
            rows = [row for row in x if not slot or float(row[column - column % slot])]
            number, floor = max(len(rows), 1), 0.1 * (len(rows) if slot else 1)
            new = [
                float(len(rows) > 0),
                sum(float(row[column]) for row in rows) / number,
                sum(float(row[column] - means[column]) ** 2 for row in rows) / number + floor,
            ]
            for kept, value in zip(wanted, new, strict=True):
                kept[column] = kept[column] * 0.9 + value
        OPS.data_norm_update_(*state, x, means, 0.1, 0.9, slot, training)
        pairs += zip(state, wanted, strict=True)
    return pairs


# ---------------------------------------------------------------- random numbers


def drawn(state: list[int], size: list[int], kind: str = "uniform", **more: Any) -> Tensor:
    first, second = (0.0, 1.0) if kind == "uniform" else (1.0, 2.0)
    settings = {"op_seed": 7, "each_run": True, "batch_dim": -1, "rows": 1, "dtype": torch.float64, **more}
    found: Tensor = OPS.random(torch.tensor(state), size, kind, first, second, *settings.values())
    return found


def random() -> Pairs:
    size = [4000]
    unit = drawn([1, 2, 0], size)
    for other in (drawn([2, 2, 0], size), drawn([1, 3, 0], size), drawn([1, 2, 0], size, op_seed=8)):
        assert int((other == unit).sum()) == 0
        assert abs(float(torch.corrcoef(torch.stack([other, unit]))[0, 1])) < 0.1  # six standard deviations
    assert 0.0 <= float(unit.min()) <= float(unit.max()) < 1.0
    assert abs(float(unit.mean()) - 0.5) < 0.03  # six standard deviations
    assert abs(float(unit.std()) - math.sqrt(1 / 12)) < 0.02
    low, high = torch.special.ndtr(torch.tensor([-2.0, 2.0], dtype=torch.float64))
    again, fixed = drawn([1, 2, 5], size), drawn([3, 4, 0], size, each_run=False)
    pairs = [
        (again, unit),
        (fixed, OPS.uniform(size, 0.0, 1.0, 7, torch.float64)),
        (drawn([1, 2, 0], size, "normal"), torch.special.ndtri(unit) * 2 + 1),
        (drawn([1, 2, 0], size, "truncated_normal"), torch.special.ndtri(low + unit * (high - low)) * 2 + 1),
    ]
    for batch_dim, rows, whole, part in ((0, 1, [6, 3], [4, 3]), (1, 2, [3, 8], [3, 4]), (1, 1, [2, 5, 2], [2, 3, 2])):
        for kind in ("uniform", "normal", "truncated_normal"):
            more = {"batch_dim": batch_dim, "rows": rows, "dtype": torch.float32}
            of_all, own = drawn([1, 2, 0], whole, kind, **more), drawn([1, 2, 2], part, kind, **more)
            pairs.append((own, of_all.narrow(batch_dim, 2 * rows, part[batch_dim])))
    return pairs


def distinct_ids() -> Pairs:
    pairs: Pairs = []
    for below, num, each_run in ((40, 5, True), (40, 5, False), (4, 4, True)):
        ids: list[int] = []
        tries = 0
        for number in drawn([1, 2, 0], [1000], each_run=each_run).tolist():
            tries += 1
            own = next(k for k in range(below) if number < math.log(k + 2) / math.log(below + 1))
            ids += [own] if own not in ids else []
            if len(ids) == num:
                break
        got = OPS.distinct_ids(torch.tensor([1, 2, 3]), below, num, 7, each_run)
        pairs += zip(got, (torch.tensor(ids), torch.tensor(tries)), strict=True)
    return pairs


# ---------------------------------------------------------------- messages

SAID = """Variable: {}
  - message: hello
  - lod: {{{{0, 2, 3}}}}
  - place: CPUPlace
  - shape: [3, 2]
  - layout: NCHW
  - dtype: float
  - data: [{}]
"""
SHOWS = "name lod shape layout type"


def printed() -> Pairs:
    x = torch.tensor([[1.0, 2.5], [-3.0, 4.0], [0.0, 1e-7]], requires_grad=True)
    values = {"x": "1 2.5 -3", "x@GRAD": "2 2 2"}
    pairs: Pairs = []
    for phase, run, names in (("both", 1, ["x", "x@GRAD"]), ("forward", 1, ["x"]), ("backward", 1, ["x@GRAD"]),
                              ("both", 2, [])):  # fmt: skip
        with redirect_stdout(io.StringIO()) as said:
            got = OPS.print(x, torch.tensor([2, 1]), torch.tensor([0, run, 0]), "x", "hello", 2, 3, SHOWS, phase)
            (slope,) = torch.autograd.grad(got, x, torch.full_like(x, 2.0))
        assert said.getvalue() == "".join(SAID.format(name, values[name]) for name in names)
        pairs += [(got, x), (slope, torch.full_like(x, 2.0))]
    return pairs


def expect_true() -> Pairs:
    conditions = [torch.tensor(True), torch.tensor([True]), torch.tensor([False]), torch.tensor([True, True])]
    passed, texts = [], []
    for condition in conditions:
        with redirect_stdout(io.StringIO()) as said, suppress(ValueError):
            OPS.expect_true(condition, [torch.tensor([4, 5, 6])], ["v"], "c", 2)
            passed.append(condition.numel())
        texts.append("Variable: v\n" in said.getvalue() and "- data: [4 5]\n" in said.getvalue())
    assert not texts[0]
    return [
        (torch.tensor(passed), torch.tensor([1, 1])),
        (torch.tensor(texts), torch.tensor([False, False, True, True])),
    ]


def _gru_steps(gates: Tensor, h: Tensor, weight: Tensor, *, origin: bool) -> Tensor:
    """Fluid's GRU from the last step to the first, with gates of tanh and a candidate of relu."""
    size, flat, found = len(weight), weight.reshape(-1), []
    for x in gates.flip(0):
        both = torch.tanh(x[:, : 2 * size] + h @ flat[: 2 * size * size].view(size, -1))
        update, reset = both.chunk(2, 1)
        new = torch.relu(x[:, 2 * size :] + (reset * h) @ flat[2 * size * size :].view(size, -1))
        old, new = (h, new) if origin else (new, h)
        h = update * old + (1 - update) * new
        found.append(h)
    return torch.stack(found[::-1])


@cache
def _gru_sequences() -> tuple[Pairs, Pairs]:
    """Results, and gradients."""
    results: Pairs = []
    gradients: Pairs = []
    for origin in (False, True):
        shapes = ((3, 2, 12), (2, 4), (4, 12))
        operands = [torch.randn(shape, dtype=torch.float64).div(4).requires_grad_() for shape in shapes]
        found, _ = OPS.gru_sequence(*operands, True, origin, True, "tanh", "relu")
        wanted, weight = _gru_steps(*operands, origin=origin), torch.randn(3, 2, 4, dtype=torch.float64)
        results.append((found, wanted))
        each = (torch.autograd.grad(made, operands, weight) for made in (found, wanted))
        gradients += zip(*each, strict=True)
    return results, gradients


def gru_sequence() -> Pairs:
    return _gru_sequences()[0]


def gru_sequence_backward() -> Pairs:
    return _gru_sequences()[1]


def hash_rows() -> Pairs:
    """Values of Fluid's documentation and of its own tests, and of xxhash 3.5 for rows of 36, 40 and 12 bytes."""
    rows = [
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), 1000, [[722, 407, 337, 395], [603, 590, 386, 901]]),
        (torch.tensor([[1], [2**32 + 1]]), 10000, [[1269, 9609], [3868, 7268]]),
        (torch.arange(9, dtype=torch.int32)[None] * 7 - 11, 10**9, [[772138695, 385824020]]),
        (torch.arange(5)[None] * 7 - 11, 10**9, [[182815343, 925147455]]),
        (torch.arange(3, dtype=torch.int32)[None] * 7 - 11, 10**9, [[314964400, 211849085]]),
    ]
    return [
        (OPS.hash_rows(ids, len(wanted[0]), size), torch.tensor(wanted, dtype=ids.dtype)[..., None])
        for ids, size, wanted in rows
    ]


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def saved(values: Tensor) -> str:
    """The path of a file of Fluid's with one variable."""
    write_separate(Path(_folder().name), {"x": FluidTensor(values)})
    return str(Path(_folder().name) / "x")


def load_file() -> Pairs:
    values = torch.randn(3, 2, dtype=torch.float64)
    path, half = saved(values), torch.float16
    return [
        (OPS.load_file(path, [3, 2], values.dtype), values),
        (OPS.load_file(path, [3, 2], half), values.to(half)),
    ]


def sample_tree() -> Pairs:
    """Rows that are drawn one by one: a position that is there already stands for the last one."""
    paths, levels = torch.tensor([[1, 2, 5], [1, 3, 0]]), torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    items, negatives, sizes = torch.tensor([0, 1, 0, 0]), [0, 1, 2], [1, 3, 4]
    numbers = torch.tensor([[0.0, 0.9, 0.4, 0.9, 0.1, 0.2, 0.5], [0.5] * 7, [0.99] * 7, [0.3] * 7], dtype=torch.float64)
    rows = []
    for row, item in enumerate(items.tolist()):
        left, first, own_row = numbers[row].tolist(), 0, []
        for level, (num, size) in enumerate(zip(negatives, sizes, strict=True)):
            own, chosen = int(paths[item, level]), list[int]()
            for last in range(size - num - 1, size) if num else ():
                drawn = int(left.pop(0) * (last + 1))
                chosen.append(last if drawn in chosen else drawn)
            nodes = [int(levels[first + position]) for position in chosen]
            if num:
                at = int(left.pop(0) * (num + 1))
                nodes.pop(nodes.index(own) if own in nodes else at)
            exists = own != 0
            own_row += [(node * exists, int(k == 0 and exists), int(exists)) for k, node in enumerate([own, *nodes])]
            first += size
        rows.append(own_row)
    found = OPS.sample_tree(items, paths, levels, numbers, negatives, sizes, True)
    return list(zip(found, torch.tensor(rows).unbind(2), strict=True))


def py_func() -> Pairs:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    forward, backward = key_of(np.tanh), key_of(lambda _, y, grad: np.array(grad) * (1 - np.array(y) ** 2))
    (found,) = OPS.py_func([x], [4, 3], [2], ["float64"], forward, backward, [0, 1])
    wanted, weight = torch.tanh(x), torch.randn(4, 3, dtype=torch.float64)
    gradients = [torch.autograd.grad(made, x, weight)[0] for made in (found, wanted)]
    return [(found, wanted), (gradients[0], gradients[1])]


def py_func_grad() -> Pairs:
    x = torch.randn(4, 3)
    found = OPS.py_func_grad([x, None], [x, x], key_of(lambda one, other: (np.array(one) * 2, other)))
    return [(found[0], x * 2), (found[1], torch.zeros_like(x))]


def max_pool_2x2() -> Pairs:
    x = torch.randn(2, 3, 6, 10)
    return [(OPS.max_pool_2x2(x, relu)[0], functional.max_pool2d(x.relu() if relu else x, 2)) for relu in (False, True)]


def max_pool_2x2_backward() -> Pairs:
    pairs: Pairs = []
    for relu in (False, True):
        x, grad = torch.randn(2, 3, 6, 10, requires_grad=True), torch.randn(2, 3, 3, 5)
        (wanted,) = torch.autograd.grad(functional.max_pool2d(x.relu() if relu else x, 2), x, grad)
        pairs.append((OPS.max_pool_2x2_backward(grad, OPS.max_pool_2x2(x.detach(), relu)[1]), wanted))
    return pairs


LAYERS = {
    "print": printed,  # whose name is Python's own
    **{
        function.__name__: function
        for function in (
            chunk_eval, ctc, ctc_backward, cvm, data_norm_update_, distinct_ids, edit_distance, expect_true,
            gather_tree, gru_sequence, gru_sequence_backward, hash_rows, load_file, max_pool_2x2, max_pool_2x2_backward,
            py_func, py_func_grad, random, sample_tree,
        )
    },
}  # fmt: skip
