"""What every operator promises: declared writes, fake kernels that agree, clear errors that change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.ops import recurrent
from tests.native.ops.blocks import branch
from tests.native.ops.oracles_of_layers import saved
from tests.support import typed_ops as ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.compat.torch import schema_of
from penstock.distributed.collective import COLLECTIVE_NAMES
from penstock.native import fused_ops as _fused_ops  # noqa: F401 - registers its operators
from penstock.native import trees as _trees  # noqa: F401 - as above
from penstock.program.control.arrays import packed
from penstock.program.layers.python_functions import key_of  # and registers the operators of layers
from penstock.ps.remote_ops import REMOTE_NAMES

_OPS = torch.ops.penstock


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an operator; `make` gives fresh arguments.

    `idle`: declared writes that this call has no need of. `is_copied`: False if an argument lies behind its elements,
    as oneDNN's workspace does, where a check that copies arguments cannot follow, or if the operator takes a gradient
    itself, which is not there under that check's mode.
    """

    operator: str
    make: Callable[[], list[Any]]
    idle: frozenset[str] = frozenset()
    is_copied: bool = True

    @property
    def overload(self) -> Any:
        name, _, overload = self.operator.partition(".")
        return getattr(getattr(_OPS, name), overload or "default")


def _ids(*shape: int, below: int = 2) -> Tensor:
    return torch.randint(0, below, shape)


def _labels() -> Tensor:
    """Both classes: drawn ones are of a single class once in 32 runs, and one of the counters is then not written."""
    return torch.tensor([[0], [1], [1], [0], [0], [1]])


def _table(*shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 3)))


def _tables() -> list[Tensor]:
    return [_table(), _table(4)]


def _heads() -> Tensor:
    return torch.randn(2, 3, 5, 4)


def _attended() -> list[Tensor]:
    """Query, key and value."""
    return [_heads(), _heads(), _heads()]


def _positive() -> list[Tensor]:
    return [torch.rand(6, 3), torch.rand(4)]


def _wide() -> list[Tensor]:
    return [torch.randn(6, 3), torch.randn(4, 2)]


def _pieces() -> list[Any]:
    """Ids, values and pieces of two tables' gradients: two pieces of the first, one of the second."""
    ids = [torch.tensor([[5], [0], [5]]), torch.tensor([2, 5]), torch.tensor([1, 1, 3])]
    values = [torch.randn(3, 6), torch.randn(2, 3)]
    return [ids, values, [0, 0, 0, 1, 0, 1, 1, 0, 1, 2, 0, 4], [], []]


def _ragged_pieces() -> list[Any]:
    """As `_pieces`, but each table has the rows of two sequences, with one row of values each."""
    ids = [torch.tensor([[5], [0], [5]]), torch.tensor([1, 1, 3])]
    return [ids, [torch.randn(2, 6)], [0, 0, 0, 1, 1, 1, 0, 4], [torch.tensor([[2], [1]])], [0, 0]]


def _sequences() -> Tensor:
    """Lengths of three sequences with six rows."""
    return torch.tensor([2, 0, 4])


def _images() -> Tensor:
    return torch.randn(2, 3, 4, 4)


def _rate() -> Tensor:
    return torch.tensor(0.1)


def _two_lengths() -> list[Tensor]:
    return [torch.tensor([4, 2]), torch.tensor([3, 1])]


def _labelled() -> list[Any]:
    """Operands of ctc: logits [n, t, classes], labels [n, l], their lengths, the blank."""
    return [torch.randn(2, 4, 3), torch.tensor([[1, 2, 1], [2, 0, 0]]), *_two_lengths(), 0]


def _state() -> Tensor:
    """Seed of a program, number of a run, first row of a replica."""
    return torch.tensor([1, 2, 3])


def _crf() -> list[Any]:
    return [_table(), torch.rand(5, 3), torch.tensor([[0], [2], [1], [1], [0], [2]]), torch.tensor([2, 0, 4])]


UPDATES = [
    Case("sparse_sgd_", lambda: [_table(), _ids(5), torch.randn(5, 3), _rate()]),
    Case(
        "sparse_adam_",
        lambda: [
            *(_table(), torch.rand(6, 3), torch.rand(6, 3), torch.tensor(2.0), _ids(5), torch.randn(5, 3), _rate()),
            *(0.9, 0.999, 1e-8),
        ],
    ),
    Case("sparse_adagrad_", lambda: [_table(), torch.rand(6, 3), _ids(5), torch.randn(5, 3), _rate(), 1e-8]),
    Case("sgd_", lambda: [_table(), _table(), _rate()]),
    Case(
        "adam_",
        lambda: [
            *(_table(), torch.rand(6, 3), torch.rand(6, 3), torch.tensor(2.0), _table(), _rate()),
            *(0.9, 0.999, 1e-8, 0.1, True),
        ],
    ),
]


def _part_of(update: Case) -> list[Any]:
    return [*update.make(), 0, 1]


CASES = [
    Case("lookup_table", lambda: [_table(), _ids(5, 2), 0]),
    *UPDATES,
    *(Case(f"{one.operator}.part", partial(_part_of, one)) for one in UPDATES),
    Case("all_reduce_", lambda: [[_table(), _table(), _table()]]),
    Case("reduce_", lambda: [[_table(), _table(), _table()], 1]),
    Case("all_reduce_.part", lambda: [[_table(), _table()], 0, 1]),
    Case("reduce_.part", lambda: [[_table(), _table(), _table()], 1, 0, 1]),
    Case("broadcast_", lambda: [[_table(), _table()], _table()]),
    Case("dropout", lambda: [_table(8, 3), torch.tensor([1, 2, 3]), 0.5, True, 7, 0, 2]),
    Case("dropout", lambda: [_table(8, 3), torch.tensor([1, 2, 3]), 0.5, False, 7, 0, 2]),
    Case("dropout_backward", lambda: [_table(), _table() > 0, 0.5, True]),
    Case("dropout_backward", lambda: [_table(), torch.empty(0, dtype=torch.bool), 0.5, False]),
    Case("normal", lambda: [[4, 5], 0.0, 1.0, 3, torch.float32]),
    Case("truncated_normal", lambda: [[4, 5], 0.0, 1.0, 3, torch.float64]),
    Case("uniform", lambda: [[4, 5], 0.0, 1.0, 3, torch.float32]),
    Case("scale_loss_grad", lambda: [_table(), 0.5]),
    Case(
        "auc",
        lambda: [torch.rand(6, 2), _labels(), torch.zeros(11, dtype=torch.int64), torch.zeros(11, dtype=torch.int64)],
    ),
    Case("accuracy", lambda: [_ids(6, 2), _ids(6, 1)]),
    Case("fused_all_reduce_", lambda: [[_table(), _table(), _table(4), _table(4)], 2]),
    Case("fused_sgd_", lambda: [_tables(), _tables(), _rate()]),
    Case("fused_momentum_", lambda: [_tables(), _tables(), _tables(), _rate(), 0.9, True]),
    Case("fused_adagrad_", lambda: [_tables(), _positive(), _tables(), _rate(), 1e-6]),
    Case(
        "fused_adam_",
        lambda: [_tables(), _tables(), _positive(), torch.tensor(2.0), _tables(), _rate(), 0.9, 0.999, 1e-8, 0.1, True],
    ),
    Case("batch_norm_stats", lambda: [_images()]),
    Case(
        "sync_batch_norm",
        lambda: [
            *(_images(), torch.rand(3), None, torch.zeros(3), torch.ones(3)),
            *(_OPS.batch_norm_stats(_images()).unsqueeze(0), 0.1, 1e-5),
        ],
    ),
    Case("batch_norm_grad_stats", lambda: [_images(), _images(), torch.rand(3), torch.rand(3)]),
    Case(
        "sync_batch_norm_backward",
        lambda: [
            *(_images(), _images(), torch.rand(3), torch.rand(3), torch.rand(3)),
            *(_OPS.batch_norm_stats(_images()), _OPS.batch_norm_stats(_images()).unsqueeze(0)),
        ],
    ),
    Case("product", lambda: [_table(), torch.randn(3, 4), torch.randn(4), False, False, "relu", "onednn"]),
    Case("product", lambda: [_table(3, 6), torch.randn(4, 3), None, True, True, "tanh", "torch"]),
    Case("product_by", lambda: [_table(), torch.randn(3, 4), torch.randn(4), False, False, "relu", "torch"]),
    Case("fused_add_act", lambda: [_table(), _table(3), "relu", 1.0]),
    Case("max_pool_2x2", lambda: [torch.randn(2, 3, 4, 6), True]),
    Case("max_pool_2x2_backward", lambda: [torch.randn(2, 3, 2, 3), torch.randint(0, 5, (2, 3, 2, 3)).byte()]),
    Case("mkl_vendor_check", list),
    Case(
        "lookup_concat", lambda: [[_table(), _table(6, 2)], [_ids(5), _ids(5, 1)], [-1, 0], [_table(5, 4)], [1, -1, 0]]
    ),
    Case("fused_sparse_sgd_", lambda: [_wide(), *_pieces(), _rate()]),
    Case("fused_sparse_sgd_", lambda: [_wide(), *_ragged_pieces(), _rate()]),
    Case("lookup_pool", lambda: [_table(), torch.tensor([[5], [0], [5], [1], [1], [2]]), _sequences(), 1, 0.5]),
    Case(
        "fused_sparse_adam_",
        lambda: [_wide(), _wide(), _wide(), torch.tensor(2.0), *_pieces(), _rate(), 0.9, 0.999, 1e-8],
    ),
    Case("fused_sparse_adagrad_", lambda: [_wide(), [torch.rand(6, 3), torch.rand(4, 2)], *_pieces(), _rate(), 1e-8]),
    Case("fused_broadcast_", lambda: [_tables(), _tables()]),
    Case("gather_rows", lambda: [[_table(), _table(2, 3)], 1]),
    Case("attention", lambda: [*_attended(), 0.0, True, None, None]),
    Case("attention_backward", lambda: [_heads(), *_attended(), *_OPS.attention(*_attended()), 0.0, False, None, 0.3]),
    Case("sequence_pool", lambda: [_table(), torch.tensor([2, 0, 4]), "sqrt", 0.5]),
    Case("sequence_pool", lambda: [_table(), torch.tensor([[2], [0], [4]]), "max", 0.5]),
    Case("sequence_pool_backward", lambda: [_table(3, 2), torch.empty(0).long(), _sequences(), 6, "average"]),
    Case("sequence_pool_backward", lambda: [_table(3, 1), torch.tensor([[1], [-1], [3]]), _sequences(), 6, "max"]),
    Case("sequence_rows", lambda: [_sequences(), 6, "mirror"]),
    Case("expect_rows", lambda: [_table(), 6]),
    Case("delayed", lambda: [_table(), _table(4)]),
    Case("checked_lengths", lambda: [torch.tensor([1, 0, 4]), 4, "lstm_0"]),
    Case("linear_chain_crf", _crf),
    Case("linear_chain_crf_backward", lambda: [torch.rand(3, 1), *_crf(), *_OPS.linear_chain_crf(*_crf())[1:]]),
    Case("crf_decoding", lambda: [_table(), torch.rand(5, 3), torch.tensor([2, 0, 4])]),
    Case("lstm", lambda: recurrent.lstm(torch.float32)),
    Case("lstm", lambda: recurrent.lstm(torch.float64)),
    Case("lstm_backward", lambda: recurrent.lstm_backward(torch.float32), is_copied=False),
    Case("lstm_backward", lambda: recurrent.lstm_backward(torch.float64), idle=frozenset({"saved"})),
    Case("lstm_sequence", lambda: [*recurrent.sequence(), *recurrent.CELL]),
    Case("lstm_sequence_backward", lambda: [*recurrent.sequence_backward(), *recurrent.CELL]),
    Case("gru", recurrent.gru),
    Case("gru_backward", recurrent.gru_backward),
    Case("gru_sequence", recurrent.gru_sequence),
    Case("gru_sequence_backward", recurrent.gru_sequence_backward),
    Case("ctc", _labelled),
    Case("ctc_backward", lambda: [torch.rand(2, 1), *_labelled()], is_copied=False),
    Case("edit_distance", lambda: [_ids(2, 4), _ids(2, 3), *_two_lengths(), [1], False]),
    Case("chunk_eval", lambda: [_ids(6, 1, below=5), _ids(6, 1, below=5), _sequences(), "IOB", 2, []]),
    Case("load_file", lambda: [saved(torch.randn(3, 2)), [3, 2], torch.float32]),
    Case("hash_rows", lambda: [_ids(6, 3), 2, 1000]),
    Case(
        "sample_tree", lambda: [_ids(6), _ids(2, 2, below=5), _ids(5, below=5), torch.rand(6, 3), [0, 1], [1, 4], True]
    ),
    Case("cvm", lambda: [torch.rand(6, 3), torch.rand(6, 2), True]),
    Case("cvm", lambda: [torch.rand(6, 3), torch.rand(6, 2), False]),
    Case("data_norm_update_", lambda: [*torch.rand(3, 4), torch.rand(6, 4), torch.rand(4), 0.1, 0.5, 2, True]),
    Case("gather_tree", lambda: [_ids(3, 2, 2, below=9), _ids(3, 2, 2)]),
    Case("print", lambda: [_table(), _sequences(), _state(), "x", "seen", 0, 3, "name lod shape type", "both"]),
    Case("expect_true", lambda: [torch.tensor([True]), _tables(), ["x", "y"], "holds", 20]),
    Case("random", lambda: [_state(), [6, 3], "normal", 0.0, 1.0, 4, True, 0, 2, torch.float64]),
    Case("distinct_ids", lambda: [_state(), 40, 5, 4, True]),
    Case("py_func", lambda: [[torch.rand(2, 3)], [2, 3], [2], ["float32"], key_of(np.tanh), "", [0]]),
    Case("py_func_grad", lambda: [[torch.rand(2, 3), None], [torch.rand(2, 3)], key_of(lambda x, _: np.array(x))]),
    Case("control", lambda: branch(taken=True)),
    Case("add_arrays", lambda: [packed([torch.rand(2)], torch.float32) for _ in range(2)], is_copied=False),
    Case("control_backward", lambda: [[torch.rand(2, 3)], *branch(taken=False), [1]]),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.operator for case in CASES])


def _flat(argument: Any) -> list[Tensor]:
    items = argument if isinstance(argument, list) else [argument]
    return [item for item in items if isinstance(item, Tensor)]


def _memory(argument: Any) -> list[Tensor]:
    """Copies of the bytes under an argument's tensors, also those that no element covers."""
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone() for t in _flat(argument)]


def test_every_registered_operator_has_a_case() -> None:
    registered = {
        name.removeprefix("penstock::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("penstock::") and not name.startswith("penstock::test_")  # those of other tests
    }
    # Those of several processes have no case by themselves: tests/distributed compares them with one process.
    elsewhere = REMOTE_NAMES | COLLECTIVE_NAMES | {name for name in registered if name.startswith("ring_")}
    elsewhere |= {name for name in registered if name.startswith("roi_")}  # tests/program/test_layers_of_regions.py
    elsewhere |= {"card_dropout"}  # it has a kernel for cards alone: tests/gpu/test_one_card.py
    assert registered - elsewhere == {case.operator.partition(".")[0] for case in CASES}


def _declared_writes(case: Case) -> set[str]:
    arguments = schema_of(case.overload).arguments
    return {item.name for item in arguments if item.alias_info is not None and item.alias_info.is_write}


def _observed_writes(case: Case) -> set[str]:
    arguments = case.make()
    before = [_memory(argument) for argument in arguments]
    case.overload(*arguments)
    names = [item.name for item in schema_of(case.overload).arguments]
    return {
        name
        for name, argument, copies in zip(names, arguments, before, strict=True)
        if not all(map(torch.equal, _memory(argument), copies))
    }


@every_case
def test_an_operator_writes_exactly_what_its_schema_declares(case: Case) -> None:
    assert _observed_writes(case) == _declared_writes(case) - case.idle


@pytest.mark.parametrize("case", [c for c in CASES if c.is_copied], ids=lambda case: case.operator)
def test_torch_accepts_schema_fake_kernel_and_derivative(case: Case) -> None:
    torch.library.opcheck(
        case.overload,
        tuple(case.make()),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def _fake(mode: FakeTensorMode, argument: Any) -> Any:
    if isinstance(argument, list):
        return [_fake(mode, item) for item in argument]
    return mode.from_tensor(argument, static_shapes=False) if isinstance(argument, Tensor) else argument


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result] if isinstance(result, Tensor) else []


@every_case
def test_fake_kernels_give_shape_and_dtype_with_symbolic_sizes(case: Case) -> None:
    arguments = case.make()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [_fake(mode, argument) for argument in arguments]
    with mode:
        fake = _outputs(case.overload(*fakes))
    real = _outputs(case.overload(*arguments))
    assert [(list(map(int, t.shape)), t.dtype) for t in fake] == [(list(t.shape), t.dtype) for t in real]


def test_a_symbolic_batch_stays_a_symbol() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    table = mode.from_tensor(_table(), static_shapes=True)
    ids = mode.from_tensor(_ids(5, 2), static_shapes=False)
    with mode:
        looked_up = ops.lookup_table(table, ids)
        drawn = ops.normal([looked_up.shape[0], 3], 0.0, 1.0, seed=1)
    assert looked_up.shape == (ids.shape[0], ids.shape[1], 3)
    assert isinstance(looked_up.shape[0], torch.SymInt)
    assert drawn.shape[0] == ids.shape[0]
    assert not environment.guards


def _adam(**changes: Tensor) -> None:
    arguments = {
        "param": _table(),
        "moment1": torch.zeros(6, 3),
        "moment2": torch.zeros(6, 3),
        "step": torch.tensor(1.0),
        "rows": _ids(5),
        "values": torch.randn(5, 3),
        "lr": _rate(),
    }
    arguments.update(changes)
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    try:
        ops.sparse_adam_(*arguments.values(), beta1=0.9, beta2=0.999, epsilon=1e-8)
    finally:
        assert all(torch.equal(before[name], tensor) for name, tensor in arguments.items())


BAD_SPARSE: list[tuple[dict[str, Tensor], type[Exception], str]] = [
    ({"rows": torch.tensor([0, 1, 6, 2, 3])}, IndexError, r"row 6 at position 2 of rows \[5\].* has 6 rows"),
    ({"rows": torch.tensor([0, 1, 2, 3, -1])}, IndexError, "row -1 at position 4"),
    ({"rows": torch.zeros(5)}, TypeError, "rows has dtype Float; expected Long"),
    ({"rows": torch.zeros(4, dtype=torch.int64)}, ValueError, r"values has shape \[5, 3\]; expected \[4, 3\]"),
    ({"values": torch.zeros(5, 2)}, ValueError, r"values has shape \[5, 2\]; expected \[5, 3\]"),
    ({"values": torch.zeros(5, 3).double()}, TypeError, "values has dtype Double; expected Float"),
    ({"param": torch.zeros(6, 3).half()}, TypeError, "param has dtype Half; expected Float or Double"),
    ({"param": torch.zeros(3, 6).t()}, ValueError, "param of shape .* must be contiguous"),
    ({"moment2": torch.zeros(6, 2)}, ValueError, r"moment2 has shape \[6, 2\]; expected \[6, 3\], the shape of param"),
    ({"step": torch.tensor(0.0)}, ValueError, "step is 0; expected at least 1"),
    ({"lr": torch.zeros(2)}, ValueError, r"lr has shape \[2\]; expected a tensor with one element"),
    ({"lr": torch.tensor(True)}, TypeError, "lr has dtype Bool"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_SPARSE)
def test_a_bad_sparse_update_is_explained_and_writes_nothing(
    changes: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"penstock\.sparse_adam_: {message}"):
        _adam(**changes)


def _auc(predict: Tensor, label: Tensor) -> Tensor:
    return ops.auc(predict, label, torch.zeros(11, dtype=torch.int64), torch.zeros(11, dtype=torch.int64))


def _drop(x: Tensor, *, p: float = 0.5, batch_dim: int = 0, rows: int = 1, first_row: int = 0) -> Tensor:
    rng = torch.tensor([1, 1, first_row])
    return ops.dropout(x, rng, p, training=True, op_seed=1, batch_dim=batch_dim, rows_per_sample=rows)[0]


BAD_CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ops.lookup_table(_table(), torch.tensor([[0, 7]])), IndexError, r"id 7 at position 1 of ids \[1, 2\]"),
    (lambda: ops.lookup_table(_table(), torch.tensor([-3])), IndexError, "id -3 at position 0"),
    (lambda: ops.lookup_table(_table(), torch.tensor([0]), 6), ValueError, "padding_idx is 6; expected -1"),
    (lambda: ops.lookup_table(_table(6), torch.tensor([0])), ValueError, r"table has shape \[6\]; expected \[rows"),
    (lambda: ops.sgd_(_table(), torch.zeros(2, 3), _rate()), ValueError, r"grad has shape \[2, 3\]; expected \[6, 3\]"),
    (lambda: ops.all_reduce_([_table(), _table().double()]), TypeError, "tensor 1 has dtype Double; expected Float"),
    (lambda: ops.all_reduce_([_table(), _table(5, 3)]), ValueError, r"tensor 1 has shape \[5, 3\]"),
    (lambda: ops.all_reduce_([_table(6, 6)[::2], _table(6, 6)[::2]]), ValueError, "leave gaps or overlap"),
    (lambda: ops.all_reduce_([_table().bool(), _table().bool()]), TypeError, "dtype Bool; expected Float, Double"),
    (lambda: ops.all_reduce_([shared := _table(), shared]), ValueError, "tensors 0 and 1 are the same memory"),
    (lambda: ops.reduce_([_table()], 1), IndexError, "owner is 1; expected a position in the list of 1 tensors"),
    (lambda: ops.broadcast_([_table()], _table(5, 3)), ValueError, "expected .* the shape of source"),
    (lambda: _drop(_table(), p=1.5), ValueError, "p is 1.5; expected a probability"),
    (lambda: _drop(_table(), batch_dim=2), IndexError, "batch_dim is 2"),
    (lambda: _drop(_table(), rows=4), ValueError, "rows_per_sample is 4; expected a positive divisor of x's size 6"),
    (lambda: _drop(_table(), first_row=-1), ValueError, r"rng is \(1, 1, -1\)"),
    (lambda: _drop(_table().half()), TypeError, "x has dtype Half"),
    (lambda: ops.dropout_backward(_table(), torch.ones(2) > 0, 0.5, training=True), ValueError, "mask has shape"),
    (lambda: ops.normal([2], 0.0, -1.0, seed=1), ValueError, "std is -1"),
    (lambda: ops.uniform([2], 1.0, 0.0, seed=1), ValueError, "low is 1 and high is 0"),
    (lambda: ops.normal([2], 0.0, 1.0, seed=1, dtype=torch.int64), TypeError, "dtype is Long"),
    (lambda: _auc(torch.tensor([0.5, 1.5]), _ids(2)), ValueError, "prediction of row 1 is 1.5"),
    (lambda: _auc(torch.tensor([torch.nan]), _ids(1)), ValueError, "prediction of row 0 is nan"),
    (lambda: _auc(torch.rand(4, 3), _ids(4)), ValueError, r"predict has shape \[4, 3\]"),
    (lambda: _auc(torch.rand(4), _ids(3)), ValueError, r"label has shape \[3\]; expected \[4\] or \[4, 1\]"),
    (lambda: ops.accuracy(_ids(4), _ids(4)), ValueError, r"topk_indices has shape \[4\]; expected \[n, k\]"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_names_operator_argument_value_and_limit(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^penstock\.\w+: .*{message}"):
        call()


def test_a_fake_kernel_refuses_wrong_shapes_as_the_real_one() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    param, grad = (mode.from_tensor(tensor, static_shapes=True) for tensor in (_table(), _table(5, 3)))
    with mode, pytest.raises(ValueError, match=r"penstock.sgd_: grad has shape \[5, 3\]; expected \[6, 3\]"):
        ops.sgd_(param, grad, torch.tensor(0.1))


def test_threads_share_no_state() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        (torch.randint(0, 200_000, (3000,), generator=generator), torch.randn(3000, 4, generator=generator))
        for _ in range(4)
    ]

    def update(number: int) -> Tensor:
        param, moment = torch.zeros(200_000, 4), torch.zeros(200_000, 4)
        for rows, values in gradients[number:] + gradients[:number]:
            ops.sparse_adagrad_(param, moment, rows, values, _rate(), epsilon=1e-8)
        return param

    alone = [update(number) for number in range(4)]
    together: dict[int, Tensor] = {}
    threads = [threading.Thread(target=lambda n=number: together.__setitem__(n, update(n))) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[number], alone[number]) for number in range(4))
