"""A clone is a Program of its own: what is recorded under its guard goes into it and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program import legality
from penstock.program.program import Program
from penstock.scope import Scope

ROWS = np.ones((3, 4), "float32")


@pytest.mark.parametrize("for_test", [True, False])
def test_what_is_recorded_into_a_clone_is_in_the_clone_alone(for_test: bool) -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        out = fluid.layers.fc(fluid.layers.data("x", [4]), 2)
    before = list(main.operators), dict(main.variables)
    clone = main.clone(for_test=for_test)
    with fluid.program_guard(clone, startup):
        label = fluid.layers.data("label", [2])
        more = torch.sigmoid(fluid.layers.fc(out, 2)) + label
    assert (list(main.operators), dict(main.variables)) == before
    assert more.program is clone
    assert {"label", more.name, "fc_1.w_0"} <= clone.variables.keys()
    legality.check(clone)
    scope, exe = Scope(), fluid.Executor()
    exe.run(startup, scope=scope)
    (got,) = exe.run(clone, {"x": ROWS, "label": np.full((3, 2), 5, "float32")}, [more], scope=scope)
    assert ((got > 5) & (got < 6)).all()


def test_a_clone_and_its_original_are_trained_on_their_own() -> None:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        loss = fluid.layers.fc(fluid.layers.data("x", [4]), 1).mean()
    clone = main.clone()
    with fluid.program_guard(clone, startup):
        fluid.optimizer.SGD(0.1).minimize(clone.global_block().var(loss.name))
    assert all("@GRAD" not in name for name in main.variables)
    with fluid.program_guard(main, startup):
        fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
    assert sum(name.endswith("fc_0.w_0@GRAD") for name in main.variables) == 1
    legality.check(main)
    legality.check(clone)


def test_a_variable_that_the_clone_lacks_is_refused_by_name() -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data("x", [4])
        clone = main.clone()
        later = torch.relu(x)
    with (
        fluid.program_guard(clone, Program(seed=1)),
        pytest.raises(ProgramError, match=r"test_recorder_clones.*'aten_relu_0.tmp_0' is not in the program"),
    ):
        torch.relu(later)


def test_a_non_numeric_constant_survives_a_text_round_trip() -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        fluid.layers.data("x", [4]) + float("nan")
    again = Program.parse(str(main))
    assert again == main
    again.seed = 2
    assert again != main
