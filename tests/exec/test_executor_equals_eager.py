"""The recorder's oracle: a recorded network, run by Executor, equals the same module in eager torch.

The operators are the same kernels on the same operands, so in float64 20 steps differ by rounding alone (1e-12
relative; Adam's update is one fused operator here and several in torch). In float32 one step rounds at 6e-8
relative; 20 steps of a chaotic, but short, training keep 5e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.property.networks import Network, conv_module, from_module, transformer_module
from tests.property.oracle import intra_op_threads, started, value
from tests.support.fluid_adam import FluidAdam
from torch import nn

import penstock as fluid
from penstock.scope import Scope

STEPS = 20
TOLERANCE = {"float64": 1e-12, "float32": 5e-5}


class Words(nn.Module):
    """Two lookups of one table, summed; a linear layer used twice, its weight tied to nothing else."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, padding_idx=2, sparse=sparse)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 10).long().clamp(0, 39)
        both = self.table(ids[:, 0]) + self.table(ids[:, 1:]).mean(1)
        mixed: torch.Tensor = self.norm(self.mix(torch.relu(self.mix(both))))
        return mixed


def words(dtype: torch.dtype, *, sparse: bool) -> nn.Module:
    """Always the same weights."""
    torch.manual_seed(6)
    return Words(sparse=sparse).to(dtype)


MODULES: dict[str, tuple[Callable[[torch.dtype], nn.Module], tuple[int, ...], int]] = {
    "conv and batch-norm": (conv_module, (2, 6, 6), 3),
    # Without biases: that of the keys cancels in the softmax, so its gradient is rounding, which Adam would blow up.
    "transformer": (lambda d: transformer_module(d, dropout=0.0, bias=False), (5, 8), 8),
    "sparse table": (lambda d: words(d, sparse=True), (4,), 6),
    "dense table": (lambda d: words(d, sparse=False), (4,), 6),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


class Eager:
    """The same training in torch."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.module = module
        named = dict(module.named_parameters())
        sparse = [p for n, p in named.items() if n == "table.weight" and getattr(module.table, "sparse", False)]
        dense = [p for p in named.values() if not any(p is s for s in sparse)]
        rate = 0.1 if kind == "sgd" else 0.01
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(dense, rate) if kind == "sgd" else FluidAdam(dense, rate)
        ]
        if sparse:
            self.optimizers.append(
                torch.optim.SGD(sparse, rate) if kind == "sgd" else torch.optim.SparseAdam(sparse, rate)
            )

    def step(self, x: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on a batch; return (loss, predictions)."""
        out = self.module(x)
        predicted = (out.mean(1) if out.dim() == 3 else out).softmax(-1)
        loss = -predicted.gather(1, label).clamp_min(1e-20).log().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach(), predicted.detach()


def recorded(name: str, kind: str, dtype: str) -> tuple[nn.Module, Network]:
    make, shape, classes = MODULES[name]
    module = make(getattr(torch, dtype))
    return module, from_module(name, module, shape, classes, kind, dtype)


def tensors(network: Network, rows: int, number: int) -> dict[str, torch.Tensor]:
    """A batch as torch has it."""
    return {n: torch.from_numpy(v) for n, v in network.feed(rows, number).items()}


def assert_equal(got: torch.Tensor, wanted: torch.Tensor, tolerance: float, where: str) -> None:
    scale = max(1.0, wanted.abs().max().item())
    difference = (got.reshape(wanted.shape) - wanted).abs().max().item()
    assert difference <= tolerance * scale, f"{where} differs by {difference} at {scale}"


def state_name(scope: Scope, path: str) -> str:
    """The variable of a module's parameter or buffer."""
    return next(n for n in scope.names() if n.endswith(f"_0.{path}") and not n.startswith(("adam", "sgd")))


@pytest.mark.parametrize(("kind", "dtype"), [("sgd", "float64"), ("adam", "float32")])
@pytest.mark.parametrize("name", MODULES)
def test_training_equals_eager(name: str, kind: str, dtype: str) -> None:
    module, network = recorded(name, kind, dtype)
    eager = Eager(copy.deepcopy(module), kind)
    scope, exe = started(network.startup), fluid.Executor(fluid.CPUPlace())
    for number in range(STEPS):
        batch = tensors(network, 5 + number % 2, number)
        loss, predicted = eager.step(batch["x"], batch["label"])
        got = exe.run(network.main, batch, network.all_fetches, scope=scope, return_numpy=False)
        assert_equal(got[0].rows, loss, TOLERANCE[dtype], f"loss {number}")
        assert_equal(got[1].rows, predicted, TOLERANCE[dtype], f"predictions {number}")
    for path, wanted in eager.module.state_dict().items():
        if wanted.is_floating_point():
            assert_equal(value(scope, state_name(scope, path)), wanted, TOLERANCE[dtype], path)
        else:
            assert torch.equal(value(scope, state_name(scope, path)), wanted), path


@pytest.mark.parametrize("name", [*MODULES, "transformer with dropout"])
def test_the_clone_for_test_equals_the_module_at_rest(name: str) -> None:
    if name == "transformer with dropout":
        module = transformer_module(torch.float64, dropout=0.3)
        network = from_module(name, module, (5, 8), 8, "sgd", "float64")
    else:
        module, network = recorded(name, "sgd", "float64")
    scope, exe = started(network.startup), fluid.Executor(fluid.CPUPlace())
    test_program = network.main.clone(for_test=True)
    for number in range(3):
        exe.run(network.main, network.feed(6, number), [], scope=scope)
    trained = {path: value(scope, state_name(scope, path)).clone() for path in module.state_dict()}
    resting = copy.deepcopy(module).eval()
    resting.load_state_dict(trained)
    batch = tensors(network, 7, 99)
    with torch.no_grad():
        out = resting(batch["x"])
        wanted = (out.mean(1) if out.dim() == 3 else out).softmax(-1)
    (got,) = exe.run(test_program, batch, network.fetches, scope=scope, return_numpy=False)
    assert_equal(got.rows, wanted, 1e-12, "predictions")
    for path, before in trained.items():
        assert torch.equal(value(scope, state_name(scope, path)), before), f"the test program changed {path}"


@pytest.mark.parametrize("name", MODULES)
def test_recording_and_running_leave_the_users_module_alone(name: str) -> None:
    make, shape, classes = MODULES[name]
    module = make(torch.float32)
    addresses = {n: t.data_ptr() for n, t in module.state_dict().items()}
    before = copy.deepcopy(module.state_dict())
    identities = {n: id(p) for n, p in module.named_parameters()}
    network = from_module(name, module, shape, classes, "adam")
    scope = started(network.startup)
    fluid.Executor(fluid.CPUPlace()).run(network.main, network.feed(4, 0), network.all_fetches, scope=scope)
    assert {n: t.data_ptr() for n, t in module.state_dict().items()} == addresses
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert {n: id(p) for n, p in module.named_parameters()} == identities
    assert all(p.grad is None and type(p) is nn.Parameter for p in module.parameters())
    assert module.training
    assert all(m.training for m in module.modules())


def test_a_module_can_still_be_used_eagerly_between_recordings() -> None:
    module = conv_module()
    network = from_module("first", module, (2, 6, 6), 3)
    out = module(torch.zeros(2, 2, 6, 6))
    assert type(out) is torch.Tensor
    assert out.shape == (2, 3)
    again = from_module("second", module, (2, 6, 6), 3)
    assert [op.type for op in again.main.operators] == [op.type for op in network.main.operators]
