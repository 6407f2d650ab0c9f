"""A Program that was read from text takes more layers: its variables are Variables again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.property.networks import NETWORKS, Network
from tests.property.oracle import copy_of, started, value

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program import legality
from penstock.program.program import Program
from penstock.scope import Scope

L: Any = fluid.layers


def base() -> tuple[Program, Program, str]:
    """Two layers with dropout, recorded; (main, startup, name of the features)."""
    main, startup = Program(seed=4), Program(seed=4)
    with fluid.program_guard(main, startup):
        hidden = L.dropout(L.fc(L.data("x", [4], dtype="float64"), 6, act="relu"), 0.3)
        features = L.fc(hidden, 3)
    return main, startup, features.name


def read_again(main: Program) -> Program:
    return Program.parse(str(main))


@pytest.mark.parametrize("name", NETWORKS)
def test_all_dense_variables_of_a_parsed_program_are_operands(name: str) -> None:
    network: Network = NETWORKS[name]()
    parsed = read_again(network.main)
    dense = [v.name for v in parsed.variables.values() if v.kind == "dense"]
    for one in dense:
        handle = parsed.global_block().var(one)
        assert handle.desc == network.main.variables[one]
        assert handle.fake.requires_grad == (handle.desc.parameter and handle.desc.trainable)
    before = len(parsed.operators)
    with fluid.program_guard(parsed, Program(seed=1)):
        doubled = parsed.global_block().var(network.fetches[0]) * 2.0
    legality.check(parsed)
    names = [op.name for op in parsed.operators]
    assert len(set(names)) == len(names) > before
    scope = started(network.startup)
    other, feed = copy_of(scope), network.feed(5, 1)
    exe = fluid.Executor()
    wanted = exe.run(network.main, feed, network.all_fetches, scope=scope)
    got = exe.run(parsed, feed, [*network.all_fetches, doubled], scope=other)
    for mine, theirs in zip(got, wanted, strict=False):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(got[-1], wanted[1] * 2.0)


def test_new_layers_on_a_parsed_program_train_and_old_ones_stay() -> None:
    main, startup, features = base()
    parsed, fresh = read_again(main), Program(seed=5)
    with fluid.program_guard(parsed, fresh):
        score = L.fc(parsed.global_block().var(features), 1)
        loss = L.mean(L.square_error_cost(score, L.data("y", [1], dtype="float64")))
        new = [p for p in parsed.parameters() if p.name not in main.variables]
        fluid.optimizer.SGD(0.1).minimize(loss, parameter_list=[p.name for p in new])
    assert {p.name for p in new} == {"fc_2.w_0", "fc_2.b_0"}
    assert read_again(parsed) == parsed
    scope, exe = Scope(), fluid.Executor()
    for program in (startup, fresh):
        exe.run(program, scope=scope)
    first = {p.name: value(scope, p.name).clone() for p in parsed.parameters()}
    for rows in (3, 1, 5):
        feed = {"x": np.ones((rows, 4)), "y": np.full((rows, 1), 2.0)}
        exe.run(parsed, feed, [loss], scope=scope)
    changed = {name for name, before in first.items() if not value(scope, name).equal(before)}
    assert changed == {p.name for p in new}


def test_a_loss_through_parsed_operators_fails_with_advice() -> None:
    main, _, features = base()
    parsed = read_again(main)
    with fluid.program_guard(parsed, Program(seed=1)):
        loss = L.mean(L.fc(parsed.global_block().var(features), 1))
        before = len(parsed.operators)
        with pytest.raises(ProgramError, match=r"depends on 'fc_1\.\w_0' by operator .*parameter_list"):
            fluid.optimizer.SGD(0.1).minimize(loss)
    assert len(parsed.operators) == before


def test_a_new_dropout_differs_from_the_parsed_one() -> None:
    main, _, _ = base()
    parsed = read_again(main)
    with fluid.program_guard(parsed, Program(seed=1)):
        L.dropout(parsed.global_block().var("x"), 0.5)
    seeds = [op.args[4] for op in parsed.operators if op.type == "penstock.dropout.default"]
    assert seeds == [1, 2]


def test_a_clone_of_a_parsed_program_takes_layers_too() -> None:
    main, startup, features = base()
    clone = read_again(main).clone(for_test=True)
    with fluid.program_guard(clone, Program(seed=1)):
        out = L.relu(clone.global_block().var(features))
    [got] = fluid.Executor().run(clone, {"x": np.ones((2, 4))}, [out], scope=started(startup))
    assert got.shape == (2, 3)
    assert (got >= 0).all()


def test_first_call_on_a_parsed_program_gives_a_variable() -> None:
    script = (
        "import penstock as fluid; "
        "p = fluid.Program.parse('program version=1 seed=0 symbols=[]\\nvar x : float32[2] feed\\n'); "
        "print(type(p.global_block().var('x')).__name__)"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("Variable\n", "")


FRESH = """
import sys
import penstock as fluid
program = fluid.Program.parse(sys.stdin.read())
from penstock.program.kernels import check_writes
check_writes(program)
assert "grpc" not in sys.modules
"""


@pytest.mark.parametrize("which", ["trainer", "pserver"])
def test_a_fresh_process_checks_a_saved_program_of_servers(which: str) -> None:
    main, startup = Program(), Program()
    with fluid.program_guard(main, startup):
        loss = L.mean(L.fc(L.data("x", [4]), 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(0, program=main, pservers="127.0.0.1:6174", trainers=1, startup_program=startup)
    trainer = which == "trainer"
    program = transpiler.get_trainer_program() if trainer else transpiler.get_pserver_program("127.0.0.1:6174")
    subprocess.run([sys.executable, "-c", FRESH], input=str(program), text=True, check=True, timeout=150)
