"""Rule 1 of DESIGN 2: every write is declared, and storages are those of the kernels. The audit is tested too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.property.networks import NETWORKS, Feed, Network, conv_net, ctr_dnn, from_module
from tests.property.oracle import started
from tests.property.random_programs import Recipe, build, recipes
from torch import nn

import penstock as fluid
from penstock.exec.audit import audit
from penstock.program.program import Program


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_write_what_they_declare(name: str, rows: int) -> None:
    network = NETWORKS[name]()
    for program in (network.main, network.main.clone(for_test=True)):
        assert audit(program, network.feed(rows, 1), started(network.startup)) == []


class Recurrent(nn.Module):
    """All outputs of a recurrent module, reversed too."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = kind(6, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]  # torch


def dynamic(kind: str, dtype: str) -> Network:
    """`dynamic_lstm` or `dynamic_gru`, trained."""
    main, startup = Program(seed=9), Program(seed=9)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [5, 12], dtype=dtype)
        if kind == "lstm":
            out = fluid.layers.dynamic_lstm(x, 12, dtype=dtype)[0]
        else:
            out = fluid.layers.dynamic_gru(x, 4, is_reverse=True)
        loss = fluid.layers.mean(out * out)
        fluid.optimizer.SGD(0.1).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        return {"x": np.random.default_rng(seed).normal(size=(rows, 5, 12)).astype(dtype)}

    return Network(f"dynamic_{kind}", main, startup, loss.name, feed)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_write_what_they_declare(kind: type[nn.Module], dtype: str) -> None:
    module = Recurrent(kind).to(getattr(torch, dtype))
    network = from_module(kind.__name__, module, (5, 6), 8, dtype=dtype)
    assert audit(network.main, network.feed(4, 1), started(network.startup)) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers_write_what_they_declare(kind: str, dtype: str) -> None:
    network = dynamic(kind, dtype)
    assert audit(network.main, network.feed(4, 1), started(network.startup)) == []


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(recipe=recipes())
def test_random_programs_write_what_they_declare(recipe: Recipe) -> None:
    network = build(recipe)
    for rows in (4, 1):
        assert audit(network.main, network.feed(rows, 1), started(network.startup)) == []


def test_startup_programs_write_what_they_declare() -> None:
    assert audit(ctr_dnn().startup, {}) == []


def _without_writes(program: Program, type_: str) -> Program:
    copy = program.clone()
    copy.operators[:] = [replace(op, writes=()) if op.type == type_ else op for op in copy.operators]
    return copy


@pytest.fixture
def unknown_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the static check of declared writes off: a kernel that its table does not know is the audit's to find."""
    monkeypatch.setattr("penstock.exec.executor.check_writes", lambda program: None)


@pytest.mark.usefixtures("unknown_to_the_table")
def test_an_undeclared_write_is_found_by_operator_and_line() -> None:
    network = conv_net()
    program = _without_writes(network.main, "aten.native_batch_norm.default")
    findings = audit(program, network.feed(4, 0), started(network.startup))
    assert {f.kind for f in findings} == {"undeclared write"}
    assert "sequential_0.1.running_mean" in {f.variable for f in findings}
    assert all("native_batch_norm" in str(f) and "networks.py:" in str(f) for f in findings)


@pytest.mark.usefixtures("unknown_to_the_table")
def test_an_undeclared_write_of_a_penstock_operator_is_found() -> None:
    network = ctr_dnn(metrics=False)
    program = _without_writes(network.main, "penstock.sparse_adam_.default")
    found = {f.variable for f in audit(program, network.feed(4, 0), started(network.startup))}
    assert {"shared_table", "adam_0.moment1.shared_table", "adam_0.moment2.shared_table"} <= found


def test_a_view_described_as_its_own_storage_is_found() -> None:
    network = ctr_dnn(metrics=False)
    program = network.main.clone()
    view = next(v for v in program.variables.values() if v.storage != v.name)
    program.variables[view.name] = replace(view, storage=view.name)
    findings = audit(program, network.feed(4, 0), started(network.startup))
    assert [(f.kind, f.variable) for f in findings] == [("undeclared view", view.name)]


def test_a_copy_that_is_described_as_a_view_is_found() -> None:
    network = ctr_dnn(metrics=False)
    program = network.main.clone()
    op = next(o for o in program.operators if o.type == "aten.relu.default")
    (made,), base = op.output_names(), program.variables[op.input_names()[0]].storage
    program.variables[made] = replace(program.variables[made], storage=base)
    findings = audit(program, network.feed(4, 0), started(network.startup))
    assert ("view that is a copy", made) in [(f.kind, f.variable) for f in findings]
