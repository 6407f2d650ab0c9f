"""nn.LSTM, nn.GRU, nn.RNN and cells are recorded, one operator a layer and direction, and train as eager torch does."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.property.networks import Network, from_module
from tests.property.oracle import assert_engine_equals_interpreter, started
from torch import nn

import penstock
import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.program import Program

TOLERANCE = 1e-10  # float64; sums over steps and rows are taken in another order


class Last(nn.Module):
    """The last output of a recurrent module over x [n, 5, 6], and its last states, classified."""

    def __init__(self, inner: nn.Module, width: int, *, given: bool = False) -> None:
        super().__init__()
        self.inner, self.given = inner, given
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch_first = bool(self.inner.batch_first)
        out, states = self.inner(x if batch_first else x.transpose(0, 1), *self.starts(x))
        last = out[:, -1] if batch_first else out[-1]
        states = states if isinstance(states, tuple) else (states,)
        found: torch.Tensor = self.out(last)
        for state in states:
            found = found + torch.tanh(state).mean((0, 2)).unsqueeze(1)
        return found

    def starts(self, x: torch.Tensor) -> list[Any]:
        if not self.given:
            return []
        start = x.mean(1)[:, :1].expand(-1, 7).unsqueeze(0)
        return [(start, start * 2)]


class Stepped(nn.Module):
    """A cell, called step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]  # torch


MODULES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Last(nn.LSTM(6, 7), 7),
    "lstm, batch first, two layers": lambda: Last(nn.LSTM(6, 7, 2, batch_first=True), 7),
    "lstm, both directions": lambda: Last(nn.LSTM(6, 7, 2, bidirectional=True), 14),
    "lstm without bias": lambda: Last(nn.LSTM(6, 7, bias=False, batch_first=True), 7),
    "lstm with given states": lambda: Last(nn.LSTM(6, 7, batch_first=True), 7, given=True),
    "gru": lambda: Last(nn.GRU(6, 7), 7),
    "gru, both directions, two layers": lambda: Last(nn.GRU(6, 7, 2, bidirectional=True, batch_first=True), 14),
    "gru without bias": lambda: Last(nn.GRU(6, 7, bias=False), 7),
    "rnn": lambda: Last(nn.RNN(6, 7, 2, batch_first=True), 7),
    "rnn with relu": lambda: Last(nn.RNN(6, 7, nonlinearity="relu", bidirectional=True), 14),
    "lstm cell": lambda: Stepped(nn.LSTMCell(6, 7)),
    "gru cell": lambda: Stepped(nn.GRUCell(6, 7)),
    "rnn cell": lambda: Stepped(nn.RNNCell(6, 7)),
}


def trained_beside_eager(module: nn.Module, dtype: torch.dtype) -> float:
    """The largest difference of losses and parameters over steps of 6, 1 and 7 rows."""
    module = module.to(dtype)
    eager = copy.deepcopy(module)
    example = (torch.randn(3, 5, 6, dtype=dtype), torch.zeros(3).long())
    captured = penstock.capture(module, F.cross_entropy, fluid.optimizer.SGD(0.2), example)
    optimizer, worst = torch.optim.SGD(eager.parameters(), 0.2), 0.0
    for rows in (6, 1, 7):
        x, label = torch.randn(rows, 5, 6, dtype=dtype), torch.randint(4, (rows,))
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(x), label)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        worst = max(worst, abs(captured.step(x, label) - loss.item()))
    captured.close()
    module.load_state_dict(captured.state_dict())
    pairs = zip(module.parameters(), eager.parameters(), strict=True)
    return max(worst, *(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs))


@pytest.mark.parametrize(("name", "num_replicas"), [*((name, 2) for name in MODULES), ("lstm", 1), ("gru", 1)])
def test_recurrent_modules_train_as_eager_torch(name: str, num_replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", str(num_replicas))
    torch.manual_seed(2)
    assert trained_beside_eager(MODULES[name](), torch.float64) < TOLERANCE


@pytest.mark.parametrize("name", ["lstm, both directions", "gru", "lstm with given states"])
def test_in_float32_they_agree_to_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    torch.manual_seed(2)
    assert trained_beside_eager(MODULES[name](), torch.float32) < 1e-5


def network(inner: nn.Module, width: int, kind: str = "adam") -> Network:
    torch.manual_seed(3)
    return from_module("recurrent", Last(inner, width), (5, 6), 4, kind)


def types(program: Program) -> Counter[str]:
    return Counter(op.type.split(".")[1] for op in program.operators if op.type.startswith("penstock."))


def test_each_layer_and_direction_is_one_operator_a_phase() -> None:
    found = types(network(nn.LSTM(6, 7, 2, bidirectional=True), 14).main)
    assert found["lstm"] == 4
    assert found["lstm_backward"] == 4
    found = types(network(nn.GRU(6, 7), 7).main)
    assert found["gru"] == found["gru_backward"] == 1


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_the_engine_equals_the_interpreter_to_the_bit(make: Any, mode: Any) -> None:
    recurrent = (
        network(make(6, 7, 2, dropout=0.4), 7) if make is nn.GRU else network(make(6, 7, bidirectional=True), 14)
    )
    assert_engine_equals_interpreter(
        recurrent, mode=mode, num_replicas=2, batches=(6, 7, 1), schedule_seeds=(0, 1, 2), num_threads=3
    )


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_a_clone_for_test_is_the_module_at_rest(make: Any) -> None:
    torch.manual_seed(5)
    module = Last(make(6, 7, 2, dropout=0.5), 7).double()
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        out = module(fluid.layers.data("x", [5, 6], dtype="float64"))
        loss = fluid.layers.mean(out)
        at_rest = main.clone(for_test=True)
        fluid.optimizer.SGD(0.1).minimize(loss)
    scope, x = started(startup), np.random.default_rng(1).normal(size=(4, 5, 6))
    [trained] = fluid.Executor().run(main, {"x": x}, [out], scope=scope)
    scope = started(startup)
    [got] = fluid.Executor().run(at_rest, {"x": x}, [out.name], scope=scope)
    wanted = module.eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    assert not np.allclose(trained, wanted)
    assert [op.args[-1] for op in at_rest.operators if op.type.split(".")[1] in ("lstm", "gru")] == [False, False]


def test_a_recurrent_program_travels_as_text() -> None:
    main = network(nn.LSTM(6, 7), 7).main
    assert Program.parse(str(main)) == main


def test_a_sequence_whose_length_is_fed_is_recorded() -> None:
    torch.manual_seed(6)
    module = nn.GRU(6, 7, batch_first=True).double()
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        out, _ = module(fluid.data("x", [None, None, 6], "float64"))
    for rows, steps in ((3, 5), (1, 2), (4, 9)):
        x = np.random.default_rng(rows).normal(size=(rows, steps, 6))
        [got] = fluid.Executor().run(main, {"x": x}, [out], scope=started(startup))
        np.testing.assert_allclose(got, module(torch.from_numpy(x))[0].detach().numpy(), atol=TOLERANCE)


def packed(x: Any) -> Any:
    return nn.LSTM(4, 3)(nn.utils.rnn.pack_padded_sequence(x.reshape(5, -1, 4), [5, 5], enforce_sorted=False))[0]


def projected(x: Any) -> Any:
    return nn.LSTM(4, 3, proj_size=2)(x.reshape(-1, 1, 4))[0]


def stepped(x: Any) -> Any:
    return nn.RNN(4, 3)(x.reshape(-1, 1, 4))[0]


REFUSED: dict[Callable[[Any], Any], str] = {
    packed: "Keep the sequences padded",
    projected: "put a Linear behind",
    stepped: "use nn.LSTM or nn.GRU",
}


@pytest.mark.parametrize("write", REFUSED)
def test_what_cannot_be_one_operator_is_refused_with_a_way_out(write: Callable[[Any], Any]) -> None:
    with fluid.program_guard(Program(seed=1), Program(seed=1)):
        x = fluid.layers.data("x", [4])
        with pytest.raises(ProgramError, match=REFUSED[write]) as caught:
            write(x)
    assert str(caught.value).startswith(f"test_recurrent_modules.py:{write.__code__.co_firstlineno + 1}")


def test_two_backward_passes_of_one_lstm_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's backward pass uses what the forward pass kept as scratch: run at once, two give wrong gradients."""
    monkeypatch.setenv("CPU_NUM", "1")
    torch.manual_seed(0)
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [20, 16])
        hidden = fluid.layers.fc(x, 16, num_flatten_dims=2, param_attr=fluid.ParamAttr(name="w"), bias_attr=False)
        out = nn.LSTM(16, 32, batch_first=True)(hidden)[0]
        losses = [fluid.layers.mean(out * out), fluid.layers.mean(out.sin())]
        inner = [p.name for p in main.parameters() if "weight" in p.name]
        pairs = fluid.append_backward(losses[0], parameter_list=inner)
        pairs += fluid.append_backward(losses[1], parameter_list=["w"])
    backward = [op for op in main.operators if op.type == "penstock.lstm_backward.default"]
    assert len(backward) == 2
    assert len({op.writes for op in backward}) == 1 and len(backward[0].writes) == 1, "the same variable"
    names, scope = [gradient.name for _, gradient in pairs], started(startup)
    feed = {"x": np.random.default_rng(0).random((64, 20, 16), dtype=np.float32)}
    expected = fluid.Executor().run(main, feed, names, scope=scope)
    threads = fluid.ExecutionStrategy()
    threads.num_threads = 2
    engine = fluid.ParallelExecutor(False, losses[0].name, main, exec_strategy=threads, scope=scope)
    try:
        for _ in range(40):
            for found, wanted in zip(engine.run(names, feed), expected, strict=True):
                np.testing.assert_allclose(found.reshape(-1), wanted.reshape(-1), rtol=1e-3, atol=1e-6)
    finally:
        engine.close()


def test_one_lstm_is_differentiated_twice_in_eager_torch() -> None:
    x, h = torch.randn(5, 3, 4), torch.zeros(3, 6)
    weights = [torch.randn(24, n, requires_grad=True) for n in (4, 6)]
    out = torch.ops.penstock.lstm(x, h, h, *weights, None, None, False, True)[0]
    first = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    second = torch.autograd.grad(out.sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
