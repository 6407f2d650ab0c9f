"""What of each optimizer servers do: state that is cut, numbers that are shared, and what is sent for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.transpile.recorded import Recorded, tower

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program.ir import Operator, Ref, Role, VarDesc
from penstock.program.optimizers import Optimizer
from penstock.transpile.partition import Partition

opt = fluid.optimizer
OPTIMIZERS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "sgd": (lambda: opt.SGD(0.1), set()),
    "momentum": (lambda: opt.Momentum(0.1, 0.9), {"velocity"}),
    "lars_momentum": (lambda: opt.LarsMomentum(0.1, 0.9), {"velocity"}),
    "adagrad": (lambda: opt.Adagrad(0.1), {"moment"}),
    "decayed_adagrad": (lambda: opt.DecayedAdagrad(0.1), {"moment"}),
    "rmsprop": (lambda: opt.RMSProp(0.1, centered=True), {"mean_square", "velocity", "mean_grad"}),
    "ftrl": (lambda: opt.Ftrl(0.1), {"squared", "linear"}),
    "adam": (lambda: opt.Adam(0.1), {"moment1", "moment2"}),
    "adamw": (lambda: opt.AdamW(0.1), {"moment1", "moment2"}),
    "adamax": (lambda: opt.Adamax(0.1), {"moment", "inf_norm"}),
    "adadelta": (lambda: opt.Adadelta(0.1), {"avg_squared_grad", "avg_squared_update"}),
}
_KERNELS = {"sgd", "adam", "adagrad"}  # their sparse form needs no scratch table


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("parameter", ["w", "table"])
def test_state_is_cut_like_the_parameter_and_numbers_are_shared(kind: str, parameter: str) -> None:
    make, states = OPTIMIZERS[kind]
    partition = Partition(tower(make).main)
    update = partition.update(parameter)
    scratch = {"merge"} if parameter == "table" and kind not in _KERNELS else set()
    assert {name.split(".")[1] for name in update.state} == states | scratch
    counted = {f"{kind}_0.step"} if kind.startswith("adam") else set()
    assert set(update.shared) == (set() if kind == "adadelta" else {f"{kind}_0.learning_rate"}) | counted
    assert set(partition.shared_state) == counted
    dense = ("w@GRAD",) if parameter == "w" else ("table@GRAD@ROWS", "table@GRAD@VALUES")
    assert update.sent == dense
    assert update.sparse is (parameter == "table")
    assert update.row_wise is (kind != "lars_momentum")


def test_decay_and_schedule_are_the_servers_and_clipping_is_not() -> None:
    def make() -> Any:
        rate = fluid.layers.piecewise_decay([2], [0.1, 0.01])
        return opt.SGD(rate, regularization=fluid.regularizer.L1Decay(0.1))

    recorded = tower(make, clip=fluid.clip.GradientClipByNorm(1.0))
    partition = Partition(recorded.main)
    update = partition.update("w")
    assert {op.module.split(".")[-1] for op in update.operators} == {"regularization", "sgd_0"}
    assert {op.module.split(".")[-1] for op in update.local} == {"gradient_clip"}
    assert update.sent == update.local[-1].outputs
    assert all(op.role & Role.LR_SCHED for op in partition.shared)
    assert len(partition.shared_state) == 2  # the rate and the count of runs


def test_a_rate_of_the_parameters_own_belongs_to_its_update() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        out = fluid.layers.fc(
            fluid.layers.data("x", [4]), 1, param_attr=fluid.ParamAttr("w", learning_rate=0.5), bias_attr=False
        )
        opt.SGD(0.1).minimize(fluid.layers.mean(out))
    update = Partition(main).update("w")
    assert [op.type.split(".")[1] for op in update.operators] == ["mul", "sgd_"]
    assert update.sent == ("w@GRAD",)


def edited(change: Callable[[Recorded, Operator], Operator]) -> Recorded:
    """A program whose update of `w` is another one."""
    recorded = tower(width=8)
    operators = recorded.main.operators
    at = next(i for i, op in enumerate(operators) if op.type.endswith("sgd_.default") and "w" in op.writes)
    operators[at] = change(recorded, operators[at])
    return recorded


def reading(op: Operator, *names: str) -> Operator:
    """The update, reading other variables after the parameter."""
    return replace(op, args=(Ref("w"), *(Ref(name) for name in names)))


def test_state_of_another_shape_is_refused_by_name() -> None:
    def change(recorded: Recorded, op: Operator) -> Operator:
        recorded.main.add_variable(VarDesc("factors", (128,), "float32", persistable=True))
        return reading(op, "w@GRAD", "factors")

    with pytest.raises(ProgramError, match=r"Not supported optimizer for distributed training.*'factors' \[128\]"):
        Partition(edited(change).main)


def test_an_update_that_reads_more_than_its_gradient_is_refused() -> None:
    def change(recorded: Recorded, op: Operator) -> Operator:
        return reading(op, "w@GRAD", recorded.loss)

    with pytest.raises(ProgramError, match=r"Not supported optimizer.*expected \['w@GRAD'\] alone"):
        Partition(edited(change).main)


def test_an_update_of_two_parameters_in_one_go_is_refused() -> None:
    def change(recorded: Recorded, op: Operator) -> Operator:
        return replace(op, role_vars=(*op.role_vars, ("out", "out@GRAD")))

    with pytest.raises(ProgramError, match=r"updates \['w', 'out'\] in one go"):
        Partition(edited(change).main)


@pytest.mark.parametrize(("sizes", "may_be_cut"), [((128, 8), False), ((128, 9), True)])
def test_an_update_with_the_parameters_sizes_in_it_is_not_cut(sizes: tuple[int, ...], may_be_cut: bool) -> None:
    def change(recorded: Recorded, op: Operator) -> Operator:
        rate = next(name for name in op.input_names() if name.endswith("learning_rate"))
        recorded.main.add_variable(VarDesc("wide", sizes, "float32"))
        expand = Operator("expand", "aten.expand.default", (Ref(rate), sizes), ("wide",))
        recorded.main.operators.append(replace(expand, role=Role.OPTIMIZE, role_vars=op.role_vars))
        return op

    assert Partition(edited(change).main).update("w").row_wise is may_be_cut


def test_a_gradient_that_no_update_uses_stays_with_the_trainer() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [4])
        hidden = fluid.layers.fc(x, 3, param_attr="frozen", bias_attr=False)
        loss = fluid.layers.mean(fluid.layers.fc(hidden, 1, param_attr="w", bias_attr=False))
        opt.SGD(0.1).minimize(loss, parameter_list=["w"])
    assert [u.parameter for u in Partition(main).updates] == ["w"]


def test_optimizers_of_this_table_are_all_that_there_are() -> None:
    known = {c.kind for c in vars(opt).values() if isinstance(c, type) and issubclass(c, Optimizer)}
    assert known == {*OPTIMIZERS, "lamb", "dpsgd", "dgc_momentum", "optimizer"}


def test_an_update_with_noise_is_refused() -> None:
    with pytest.raises(
        ProgramError, match=r"Not supported optimizer for distributed training: the update with .*@RNG@"
    ):
        Partition(tower(lambda: opt.Dpsgd(0.1), is_sparse=False).main)


def test_an_update_by_the_norm_of_its_parameter_is_not_cut() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        x = fluid.layers.data("x", [4])
        loss = fluid.layers.mean(fluid.layers.fc(x, 3, param_attr="w", bias_attr=False))
        opt.Lamb(0.1).minimize(loss)
    update = Partition(main).update("w")
    assert {name.split(".")[1] for name in update.state} == {"moment1", "moment2"}
    assert not update.row_wise


def test_states_that_the_backward_pass_reads_are_refused() -> None:
    def make() -> Any:
        return opt.DGCMomentumOptimizer(0.1, 0.9, rampup_begin_step=0)

    main = tower(make, width=20_000).main
    with pytest.raises(ProgramError, match="DGCMomentumOptimizer trains without servers"):
        Partition(main)
