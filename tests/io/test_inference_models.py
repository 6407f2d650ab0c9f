"""An inference model gives what the test program gives, holds no more than its targets need, and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.property.networks import Network, conv_net, ctr_dnn, fit_a_line, transformer
from tests.property.oracle import intra_op_threads, started

import penstock as fluid
from penstock.errors import UserError
from penstock.program.ir import Role
from penstock.scope import Scope

MODELS: dict[str, Callable[[], Network]] = {
    "conv_net": conv_net, "transformer": transformer, "ctr_dnn": lambda: ctr_dnn(metrics=False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_the_test_program(name: str, tmp_path: Path) -> None:
    network = MODELS[name]()
    scope, exe = started(network.startup), fluid.Executor()
    target = network.fetches[0]
    inputs = [v.name for v in network.main.feeds() if v.name != "label"]
    with intra_op_threads(1), fluid.scope_guard(scope):
        for number in range(2):
            exe.run(network.main, network.feed(5, number), [network.loss])
        feed = network.feed(7, 9)
        wanted = exe.run(network.main.clone(for_test=True), feed, [target])[0]
        fluid.io.save_inference_model(tmp_path, inputs, [network.main.handle(target)], exe, network.main)
    with intra_op_threads(1), fluid.scope_guard(Scope()) as _:
        program, feeds, fetches = fluid.io.load_inference_model(tmp_path, exe)
        got = exe.run(program, {n: feed[n] for n in feeds}, fetches)[0]
    assert got.tobytes() == wanted.tobytes()
    assert feeds == inputs
    assert program.is_test
    assert "label" not in program.variables
    assert all(op.role == Role.FORWARD for op in program.operators)
    assert not [n for n, v in program.variables.items() if v.persistable and n.startswith(("adam", "sgd"))]


def test_a_whole_program_is_saved_to_be_trained_on(tmp_path: Path) -> None:
    network = fit_a_line("adam")
    scope, exe = started(network.startup), fluid.Executor()
    with intra_op_threads(1), fluid.scope_guard(scope):
        exe.run(network.main, network.feed(5, 0), [])
        fluid.io.save_inference_model(tmp_path, [], [], exe, network.main, export_for_deployment=False)
        wanted = [exe.run(network.main, network.feed(5, n), [network.loss])[0] for n in range(1, 4)]
    with intra_op_threads(1), fluid.scope_guard(Scope()):
        program, feeds, fetches = fluid.io.load_inference_model(tmp_path, exe)
        got = [exe.run(program, network.feed(5, n), [network.loss])[0] for n in range(1, 4)]
    assert (feeds, fetches) == ([], [])
    assert [one.tobytes() for one in got] == [one.tobytes() for one in wanted]


def test_a_missing_unknown_or_training_variable_is_refused(tmp_path: Path) -> None:
    network = ctr_dnn(metrics=False)
    scope, exe, target = started(network.startup), fluid.Executor(), network.fetches[0]
    gradient = next(pair[1] for op in network.main.operators for pair in op.role_vars)
    cases: list[tuple[list[str], str, str]] = [
        (["slot0"], target, r"need the input 'slot1' \(created at networks.py:\d+\)"),
        (["slot9"], target, "'slot9' is not in the program. Did you mean"),
        ([target], target, "is no input of the program; expected some of"),
        (["slot0"], gradient, "is made by training alone"),
    ]
    for feeds, fetch, message in cases:
        with pytest.raises(UserError, match=message):
            fluid.io.save_inference_model(tmp_path / "model", feeds, [fetch], exe, network.main, scope=scope)
    assert not (tmp_path / "model").exists()


def test_a_save_without_a_model_is_refused(tmp_path: Path) -> None:
    network = conv_net()
    fluid.io.save_params(None, tmp_path, network.main, "__model__", scope=started(network.startup))
    scope = Scope()
    with pytest.raises(UserError, match="holds variables without a model"):
        fluid.io.load_inference_model(tmp_path, None, scope=scope)
    assert not scope.names()


def test_a_model_whose_program_is_damaged_is_refused(tmp_path: Path) -> None:
    network = conv_net()
    scope = started(network.startup)
    fluid.io.save_inference_model(tmp_path, ["x"], [network.fetches[0]], None, network.main, scope=scope)
    text = next(tmp_path.glob("*.program.txt"))
    text.write_text(text.read_text().replace("aten", "eval", 1))
    fresh = Scope()
    with pytest.raises(UserError, match=f"{text.name} is damaged"):
        fluid.io.load_inference_model(tmp_path, None, scope=fresh)
    assert not fresh.names()


def test_a_file_for_parameters_alone_is_said_to_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = conv_net()
    scope, fetches = started(network.startup), [network.fetches[0]]
    fluid.io.save_inference_model(tmp_path, ["x"], fetches, None, network.main, "net", "weights", scope=scope)
    assert "params_filename 'weights' has no effect" in caplog.text
    program, _, _ = fluid.io.load_inference_model(tmp_path, None, "net", scope=Scope())
    assert program.is_test
