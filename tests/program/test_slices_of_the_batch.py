"""Slices along the batch have the sizes that eager torch gives them, for batches larger and smaller than the slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.property.oracle import started, value

import penstock as fluid
from penstock.errors import FeedError
from penstock.exec.feeding import share_sizes
from penstock.program.program import Program

SLICES: dict[str, Callable[[Any], Any]] = {
    "x[:20]": lambda x: x[:20],
    "x[2:]": lambda x: x[2:],
    "x[-3:]": lambda x: x[-3:],
    "x[:-3]": lambda x: x[:-3],
    "x[::2]": lambda x: x[::2],
    "x[1:5:3]": lambda x: x[1:5:3],
    "x[-20:-2]": lambda x: x[-20:-2],
    "x[: n // 2]": lambda x: x[: x.shape[0] // 2],
    "x[:10000]": lambda x: x[:10000],
    "x[4:][:2]": lambda x: x[4:][:2],
    "x[1:] - x[:-1]": lambda x: x[1:] - x[:-1],
}
ROWS = (1, 2, 3, 4, 5, 8, 19, 20, 21, 25)


def mean(x: Any) -> Any:
    """By the size that was recorded."""
    return x.sum() / x.shape[0]


def recorded(cut: Callable[[Any], Any]) -> tuple[Program, Program, list[Any]]:
    """A network over a slice of its batch, trained on the sum; fetches: the slice, its mean, the loss."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [5], dtype="float64")
        hidden = fluid.layers.fc(x, 3, param_attr=fluid.ParamAttr(name="w"), bias_attr=False)
        part = cut(hidden)
        fetches = [part, mean(part), (part * part).sum()]
        fluid.optimizer.SGD(0.1).minimize(fetches[-1])
    return main, startup, fetches


def expected(cut: Callable[[Any], Any], x: Any, start: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """Eager torch: the fetches, and the parameter after the step."""
    weight = start.clone().requires_grad_()
    part = cut(torch.from_numpy(x) @ weight)
    loss = (part * part).sum()
    loss.backward()
    assert weight.grad is not None
    return [t.detach().numpy() for t in (part, mean(part), loss)], (weight - 0.1 * weight.grad).detach()


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_equals_eager_torch_for_any_batch(name: str) -> None:
    main, startup, fetches = recorded(SLICES[name])
    scope, random = started(startup), np.random.default_rng(0)
    for rows in ROWS:
        x, start = random.normal(size=(rows, 5)), value(scope, "w").clone()
        wanted, after = expected(SLICES[name], x, start)
        found = fluid.Executor().run(main, {"x": x}, fetches, scope=scope)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.reshape(-1), other.reshape(-1), rtol=1e-10, err_msg=f"{name}, {rows} rows")
        torch.testing.assert_close(value(scope, "w"), after, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["x[:20]", "x[2:]", "x[-3:]", "x[::2]"])
def test_each_replica_slices_its_share(name: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", str(replicas))
    main, startup, fetches = recorded(SLICES[name])
    scope, random = started(startup), np.random.default_rng(0)
    engine = fluid.ParallelExecutor(False, fetches[-1].name, main, scope=scope)
    try:
        for rows in (2, 3, 6, 20, 41):
            x, start = random.normal(size=(rows, 5)), value(scope, "w").clone()
            shares = np.split(x, np.cumsum(share_sizes(rows, replicas))[:-1])
            each = [expected(SLICES[name], share, start) for share in shares]
            means, losses = engine.run([fetches[1].name, fetches[2].name], {"x": x})
            np.testing.assert_allclose(means.reshape(-1), [m.item() for (_, m, _), _ in each], rtol=1e-10)
            np.testing.assert_allclose(losses.reshape(-1), [loss.item() for (_, _, loss), _ in each], rtol=1e-10)
            parts = [(after - start) * (len(s) / rows) for (_, after), s in zip(each, shares, strict=True)]
            torch.testing.assert_close(value(scope, "w"), start + sum(parts), rtol=1e-9, atol=1e-11)
    finally:
        engine.close()


def test_a_slice_recorded_with_twenty_rows_is_right_for_fewer() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [5])
        made = x[:20] + torch.arange(20.0).unsqueeze(1)
    scope = started(startup)
    for rows in (20, 25):
        fed = np.ones((rows, 5), np.float32)
        assert fluid.Executor().run(main, {"x": fed}, [made], scope=scope)[0].shape == (20, 5)
    for rows in (1, 3, 19):
        with pytest.raises(FeedError, match=r"test_slices_of_the_batch.py:\d+: .*min\(20, s0\) == 20"):
            fluid.Executor().run(main, {"x": np.ones((rows, 5), np.float32)}, [made], scope=scope)


def test_a_position_that_becomes_negative_is_a_feed_error() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [5])
        made = x[: x.shape[0] - 4]
    for rows in (4, 5, 9):
        found = fluid.Executor().run(main, {"x": np.ones((rows, 5), np.float32)}, [made])[0]
        assert found.shape == (rows - 4, 5)
    with pytest.raises(FeedError, match=r"test_slices_of_the_batch.py:\d+: .*s0 \+ \(-4\) >= 0"):
        fluid.Executor().run(main, {"x": np.ones((3, 5), np.float32)}, [made])


def test_a_cut_size_outlives_the_text_of_a_program() -> None:
    main, _, (part, _, loss) = recorded(SLICES["x[:20]"])
    again = Program.parse(str(main))
    with fluid.program_guard(again, Program(seed=1)):
        more = again.global_block().var(part.name) * 2.0
    assert str(more.desc.shape[0]) == str(part.desc.shape[0]) == "min(20, s0)"
    assert again.variables[loss.name] == main.variables[loss.name]


def test_squeeze_takes_away_no_size_of_the_batch() -> None:
    main, startup = Program(), Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [1, 3], dtype="float64")
        wide = fluid.layers.fc(x.squeeze(), 2, bias_attr=False, param_attr=fluid.ParamAttr(name="w"))
        loss = fluid.layers.mean(torch.squeeze(wide))
        ((_, grad),) = fluid.append_backward(loss)
    scope = started(startup)
    for rows in (3, 2, 1):
        batch = np.arange(3.0 * rows).reshape(rows, 1, 3)
        found, gradient = fluid.Executor().run(main, {"x": batch}, [wide, grad], scope=scope)
        assert found.shape == (rows, 2)
        np.testing.assert_allclose(gradient, np.repeat(batch.mean(0).T / 2.0, 2, 1), rtol=1e-12)
