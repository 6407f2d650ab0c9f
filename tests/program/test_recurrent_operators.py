"""Recurrent operators appended by Fluid's type give what torch's LSTM does with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError

LENGTHS = [3, 1, 2]


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    torch.manual_seed(3)
    with fluid.program_guard(fluid.Program(), fluid.Program()), fluid.scope_guard(fluid.Scope()):
        yield


def appended(type_: str, inputs: Mapping[str, Any], outputs: list[str], attrs: Mapping[str, Any]) -> list[Any]:
    block = fluid.default_main_program().global_block()
    made = {slot: block.create_var(dtype="float64") for slot in outputs}
    block.append_op(type=type_, inputs=inputs, outputs=made, attrs=attrs)
    return list(made.values())


def parameter(value: torch.Tensor) -> Any:
    initializer = fluid.initializer.NumpyArrayInitializer(value.detach().numpy())
    return fluid.layers.create_parameter(list(value.shape), "float64", default_initializer=initializer)


def run(fetches: list[Any], feed: Mapping[str, Any]) -> list[Any]:
    exe = fluid.Executor()
    exe.run(fluid.default_startup_program())
    found: list[Any] = exe.run(fluid.default_main_program(), feed=feed, fetch_list=fetches, return_numpy=False)
    return found


def in_order(gates: torch.Tensor) -> torch.Tensor:
    """Torch's gates i, f, candidate, o along the first dimension as Fluid's candidate, i, f, o along the last."""
    i, f, candidate, o = gates.chunk(4)
    return torch.cat([candidate, i, f, o]).t()


@pytest.mark.parametrize("is_reverse", [False, True])
def test_lstmp_is_an_lstm_with_a_projection(is_reverse: bool) -> None:
    lstm = torch.nn.LSTM(5, 4, proj_size=3, dtype=torch.float64)
    own = {name.removesuffix("_l0"): value for name, value in lstm.named_parameters()}
    values = torch.randn(sum(LENGTHS), 5, dtype=torch.float64)
    gates = in_order((values @ own["weight_ih"].t() + own["bias_ih"]).t().detach())
    x = fluid.layers.data("x", [16], dtype="float64", lod_level=1)
    inputs = {
        "Input": x, "Weight": parameter(in_order(own["weight_hh"])), "ProjWeight": parameter(own["weight_hr"].t()),
        "Bias": parameter(in_order(own["bias_hh"][:, None])),
    }  # fmt: skip
    attrs = {"use_peepholes": False, "is_reverse": is_reverse, "proj_activation": "identity"}
    made = appended("lstmp", inputs, ["Projection", "Cell"], attrs)
    (found, cells) = run(made, {"x": fluid.create_lod_tensor(gates.numpy(), [LENGTHS])})
    parts = [part.flip(0) if is_reverse else part for part in torch.split(values, LENGTHS)]
    wanted = [lstm(part)[0].flip(0) if is_reverse else lstm(part)[0] for part in parts]
    np.testing.assert_allclose(np.array(found), torch.cat(wanted).detach(), rtol=1e-10, atol=1e-12)
    last = [0, 3, 4] if is_reverse else [2, 3, 5]
    finals = torch.cat([lstm(part)[1][1] for part in parts])
    np.testing.assert_allclose(np.array(cells)[last], finals.detach(), rtol=1e-10, atol=1e-12)


def stacked(lstm: torch.nn.LSTM, **changed: Any) -> list[Any]:
    """`cudnn_lstm` over [4, 2, 3] with all weights, then all biases, in one parameter."""
    own = list(lstm.named_parameters())
    whole = torch.cat([p.reshape(-1) for kind in ("weight", "bias") for name, p in own if name.startswith(kind)])
    zeros = fluid.layers.fill_constant([4, 2, 2], "float64", 0.0)
    inputs = {"Input": fluid.data("x", [4, 2, 3], "float64"), "InitH": zeros, "InitC": zeros, "W": parameter(whole)}
    attrs = {"hidden_size": 2, "input_size": 3, "num_layers": 2, "is_bidirec": True, "is_test": True, **changed}
    return appended("cudnn_lstm", inputs, ["Out", "LastH", "LastC"], attrs)


def test_cudnn_lstm_takes_its_weights_as_one_parameter() -> None:
    lstm = torch.nn.LSTM(3, 2, num_layers=2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    found = run(stacked(lstm), {"x": x.numpy()})
    out, (h, c) = lstm(x)
    for one, wanted in zip(found, (out, h, c), strict=True):
        np.testing.assert_allclose(np.array(one), wanted.detach(), rtol=1e-10, atol=1e-12)


def test_one_parameter_of_another_size_is_refused() -> None:
    lstm = torch.nn.LSTM(3, 2, num_layers=2, bidirectional=True, dtype=torch.float64)
    with pytest.raises(ProgramError, match=r"'cudnn_lstm' has W of \(240,\), where its attributes ask for 112"):
        stacked(lstm, num_layers=1)
