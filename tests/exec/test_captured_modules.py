"""`penstock.capture` trains any module as eager torch does: in float64 to 1e-9, on one replica and on two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.fluid_adam import FluidAdam
from torch import nn

import penstock
import penstock as fluid
from penstock.captured import Captured
from penstock.errors import FeedError, SpecError

STEPS = 8
TOLERANCE = 1e-9  # the same kernels in float64; what differs is the order of a few sums (2e-16 relative a step)


class Tied(nn.Module):
    """A table that is also the weight of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.hidden = nn.Linear(6, 6)
        self.out = nn.Linear(6, 12, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.table(ids).mean(1))))  # type: ignore[no-any-return]  # torch


class Words(nn.Module):
    """Two sparse tables and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(20, 4, sparse=True), nn.Embedding(20, 4, sparse=True)
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.first(ids[:, 0]), self.second(ids[:, 1:]).mean(1)], -1)
        return self.tower(both)  # type: ignore[no-any-return]  # torch


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 12),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 12))


def numbers(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape, dtype=torch.float64)


def ids(high: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randint(high, (rows, 4))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 12)), numbers(5)),
    "conv and batch-norm": (conv, numbers(2, 6, 6)),
    "transformer encoder layer": (encoder, numbers(5, 8)),
    "tied weights": (Tied, ids(12)),
    "sparse embeddings": (Words, ids(20)),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def eager_optimizers(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    sparse = [p for m in module.modules() if isinstance(m, nn.Embedding) and m.sparse for p in m.parameters()]
    dense = [p for p in module.parameters() if not any(p is s for s in sparse)]
    if kind == "SGD":
        return [torch.optim.SGD([*dense, *sparse], lr=0.1)]
    found: list[torch.optim.Optimizer] = [FluidAdam(dense, lr=0.01)]
    return [*found, torch.optim.SparseAdam(sparse, lr=0.01)] if sparse else found


def penstock_optimizer(kind: str) -> Any:
    return fluid.optimizer.SGD(0.1) if kind == "SGD" else fluid.optimizer.Adam(0.01)


@pytest.fixture
def captured_of(request: pytest.FixtureRequest) -> Callable[..., Captured]:
    def make(*args: Any, **kwargs: Any) -> Captured:
        captured = penstock.capture(*args, **kwargs)
        request.addfinalizer(captured.close)
        assert isinstance(captured, Captured)
        return captured

    return make


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_operators_of_a_loss_broadcast_as_torchs(
    captured_of: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    module, x, y = torch.nn.Linear(4, 3).double(), torch.randn(6, 4).double(), torch.randn(6).double()

    def loss(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return ((made[:, :1] - wanted) ** 2).mean()  # of each with each

    expected = loss(module(x), y).item()
    assert captured_of(module, loss, "SGD", (x, y)).step(x, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("name", MODULES)
def test_training_equals_eager_torch(
    name: str, kind: str, captured_of: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    make, inputs = MODULES[name]
    module = make().double()
    if (name, kind) == ("transformer encoder layer", "Adam"):
        # The keys' bias cancels in the softmax: its gradient is rounding, which Adam would blow up.
        for path, parameter in module.named_parameters():
            parameter.requires_grad_(not path.endswith("in_proj_bias"))
    before = copy.deepcopy(module.state_dict())
    captured = captured_of(module, F.cross_entropy, penstock_optimizer(kind), (inputs(3), torch.zeros(3).long()))
    eager = copy.deepcopy(module)
    optimizers = eager_optimizers(eager, kind)
    for step in range(STEPS):
        rows = 6 + step % 3
        x, label = inputs(rows), torch.randint(12, (rows,))
        eager.zero_grad()
        loss = F.cross_entropy(eager(x), label)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        for optimizer in optimizers:
            optimizer.step()
        assert_close(captured.step(x, label), loss.item())
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items()), "the module itself changed"
    trained = captured.state_dict()
    assert list(trained) == list(before)
    assert any(not torch.equal(trained[n], before[n]) for n in before)
    module.load_state_dict(trained)
    for path, wanted in eager.state_dict().items():
        assert_close(module.state_dict()[path], wanted)


@pytest.mark.parametrize("name", ["mlp", "sparse embeddings"])
def test_two_replicas_equal_one(
    name: str, captured_of: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, inputs = MODULES[name]
    module, batches = make().double(), [(inputs(7), torch.randint(12, (7,))) for _ in range(4)]
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for replicas in ("1", "2"):
        monkeypatch.setenv("CPU_NUM", replicas)
        captured = captured_of(module, F.cross_entropy, penstock_optimizer("SGD"), batches[0])
        losses = [captured.step(*batch) for batch in batches]
        assert captured.executor.device_count == int(replicas)
        found.append((losses, captured.state_dict()))
    assert_close(found[1], found[0])


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD by name": lambda _: "SGD",
    "Adam by class": lambda _: torch.optim.Adam,
    "SGD by instance": lambda m: torch.optim.SGD(m.parameters(), lr=0.3),
    "Adam by instance": lambda m: torch.optim.Adam(m.parameters(), lr=0.02, betas=(0.8, 0.9), eps=1e-6),
    "SGD with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "SGD with Nesterov and decay": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.02
    ),
    "SGD with decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.02),
    "Adam with decay": lambda m: torch.optim.Adam(m.parameters(), lr=0.02, weight_decay=0.05),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.3),
    "some parameters alone": lambda m: torch.optim.SGD([next(m.parameters())], lr=0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_keep_their_settings(name: str, captured_of: Callable[..., Captured]) -> None:
    module = nn.Linear(5, 12).double()
    captured = captured_of(
        module, F.cross_entropy, OPTIMIZERS[name](module), (torch.randn(4, 5).double(), torch.zeros(4).long())
    )
    eager = copy.deepcopy(module)
    same = OPTIMIZERS[name](eager)
    if not isinstance(same, torch.optim.Optimizer):
        same = (torch.optim.SGD if same == "SGD" else same)(eager.parameters())
    for _ in range(3):
        x, label = torch.randn(4, 5).double(), torch.randint(12, (4,))
        same.zero_grad()
        F.cross_entropy(eager(x), label).backward()  # type: ignore[no-untyped-call]  # torch
        same.step()
        captured.step(x, label)
    assert_close(dict(captured.state_dict()), dict(eager.state_dict()))


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    first, second = module.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5}]
    return torch.optim.SGD(groups, 0.1)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "dampening": (
        lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5), "dampening=0.5, which has no",
    ),
    "amsgrad": (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), "amsgrad=True"),
    "maximize": (lambda m: torch.optim.SGD(m.parameters(), 0.1, maximize=True), "maximize=True"),
    "another kind": (lambda m: torch.optim.Rprop(m.parameters()), "Rprop has no counterpart"),
    "another name": (lambda _: "Lion", "optimizer is 'Lion'; expected"),
    "a stranger's": (lambda _: torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), "none of the module's"),
    "groups": (
        two_groups, r"group 1.*\['lr'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_optimizer_has_and_penstock_has_not_is_named(name: str) -> None:
    make, message = REFUSED[name]
    module = nn.Linear(5, 12)
    with pytest.raises(SpecError, match=message):
        penstock.capture(module, F.cross_entropy, make(module), (torch.randn(4, 5), torch.zeros(4).long()))


def test_an_optimizer_that_has_trained_is_refused() -> None:
    module = nn.Linear(5, 12)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    with pytest.raises(SpecError, match="has trained already"):
        penstock.capture(module, F.cross_entropy, optimizer, (torch.randn(4, 5), torch.zeros(4).long()))


def test_a_static_input_goes_whole_to_every_replica(
    captured_of: Callable[..., Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.mix(x) @ mask  # type: ignore[no-any-return]  # torch

    monkeypatch.setenv("CPU_NUM", "2")
    module, mask = Masked().double(), torch.eye(3).double() * 2
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    captured = captured_of(module, nn.MSELoss(), "SGD", (x, mask, y), static_inputs=[1])
    assert captured.feed_names == ["input_0", "input_1", "target_0"]
    assert_close(captured.step(x, mask, y), F.mse_loss(module(x, mask), y).item())


def test_states_go_in_and_out_and_misfits_change_nothing(captured_of: Callable[..., Captured]) -> None:
    module = conv().double()
    example = (torch.randn(4, 2, 6, 6).double(), torch.zeros(4).long())
    captured = captured_of(module, F.cross_entropy, "Adam", example)
    captured.step(*example)
    first = captured.state_dict()
    loss = captured.step(*example)
    bad: list[dict[str, Any]] = [
        {},
        {**first, "extra": torch.ones(1)},
        {**first, "0.weight": torch.ones(2)},
        {**first, "5.bias": 3},
    ]
    kept = captured.state_dict()
    for state in bad:
        with pytest.raises(SpecError, match="state_dict"):
            captured.load_state_dict(state)
    assert all(torch.equal(v, kept[n]) for n, v in captured.state_dict().items())
    captured.load_state_dict(first)
    assert captured.step(*example) == loss


def test_arguments_that_do_not_fit_are_told(captured_of: Callable[..., Captured]) -> None:
    module, x = nn.Linear(5, 12), torch.randn(4, 5)
    with pytest.raises(SpecError, match="has 1 tensors, of which 1 are targets"):
        penstock.capture(module, F.cross_entropy, "SGD", x)
    with pytest.raises(SpecError, match="pass num_targets"):
        penstock.capture(module, lambda *all: all[0].mean(), "SGD", x)
    with pytest.raises(SpecError, match=r"example_inputs\[1\] has no dimensions"):
        penstock.capture(module, lambda out, scale: (out * scale).mean(), "SGD", (x, torch.tensor(2.0)))
    with pytest.raises(SpecError, match="loss returned float"):
        penstock.capture(module, lambda out: 1.0, "SGD", x)
    captured = captured_of(module, lambda out: (out * out).mean(), "SGD", x)
    with pytest.raises(FeedError, match="step got 2 tensors; expected 1: input_0"):
        captured.step(x, x)


def test_a_captured_training_is_saved_and_continued(captured_of: Callable[..., Captured], tmp_path: Any) -> None:
    example = (torch.randn(4, 5).double(), torch.zeros(4).long())
    modules = [nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.3)).double() for _ in range(2)]
    first, second = (captured_of(module, F.cross_entropy, "Adam", example) for module in modules)
    first.step(*example)
    fluid.save(first.main_program, tmp_path / "model", scope=first.scope)
    fluid.load(second.main_program, tmp_path / "model", scope=second.scope)
    assert [first.step(*example) for _ in range(3)] == [second.step(*example) for _ in range(3)]
