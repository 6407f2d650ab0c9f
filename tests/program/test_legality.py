"""Each rule of legality is broken once; the error names the rule, the operator and the line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.property.networks import NETWORKS, ctr_dnn, fit_a_line

from penstock.errors import ProgramError
from penstock.program import legality
from penstock.program.expr import sym
from penstock.program.ir import Ref
from penstock.program.program import Program


def _of(program: Program, type_: str) -> int:
    return next(i for i, op in enumerate(program.operators) if op.type == type_)


def _rule_1_unknown(p: Program) -> None:
    op = p.operators[0]
    p.operators[0] = replace(op, args=(Ref("predicted"), *op.args[1:]))


def _rule_1_too_early(p: Program) -> None:
    p.operators.append(p.operators.pop(0))


def _rule_2_not_described(p: Program) -> None:
    p.operators[0] = replace(p.operators[0], outputs=("ghost",))


def _rule_2_made_twice(p: Program) -> None:
    p.operators.insert(1, p.operators[0])


def _rule_3(p: Program) -> None:
    name = p.operators[0].output_names()[0]
    p.variables[name] = replace(p.variables[name], storage="nowhere")


def _rule_4(p: Program) -> None:
    i = _of(p, "penstock.adam_.default")
    p.operators[i] = replace(p.operators[i], writes=("label",))


def _rule_5(p: Program) -> None:
    name = p.operators[0].output_names()[0]
    p.variables[name] = replace(p.variables[name], shape=(sym("s9"), 4))


def _rule_6(p: Program) -> None:
    p.variables["shared_table@GRAD"] = replace(p.variables["shared_table@GRAD"], rows="gone")


def _rule_7(p: Program) -> None:
    i = _of(p, "penstock.adam_.default")
    p.operators[i] = replace(p.operators[i], role_vars=(("label", "label@GRAD"),))


BROKEN: list[tuple[Callable[[Program], None], str]] = [
    (_rule_1_unknown, r"rule 1: operator '\w+' \(networks\.py:\d+\): variable 'predicted' is not in the program"),
    (_rule_1_too_early, r"rule 1: operator '\w+' \(networks\.py:\d+\) reads .*, but it is made later, by "),
    (_rule_2_not_described, r"rule 2: operator '\w+' \(networks\.py:\d+\) makes 'ghost', which is not described"),
    (_rule_2_made_twice, r"rule 2: .* is made a second time by operator '\w+' \(networks\.py:\d+\)"),
    (_rule_3, r"rule 3: .* is a view of 'nowhere', which is no storage"),
    (_rule_4, r"rule 4: operator '\w+' .*writes 'label', which is none of its operands"),
    (_rule_5, r"rule 5: .* uses the symbols \['s9'\], which the program does not declare"),
    (_rule_6, r"rule 6: parts of 'shared_table@GRAD' are not described"),
    (_rule_7, r"rule 7: operator '\w+' .*names 'label', which is no parameter"),
]


@pytest.mark.parametrize(("breaks", "says"), BROKEN)
def test_each_rule_is_checked(breaks: Callable[[Program], None], says: str) -> None:
    program = ctr_dnn(metrics=False).main.clone()
    legality.check(program)
    breaks(program)
    with pytest.raises(ProgramError, match=says):
        legality.check(program)


@pytest.mark.parametrize("name", NETWORKS)
def test_recorded_programs_and_their_clones_are_legal(name: str) -> None:
    network = NETWORKS[name]()
    for program in (network.main, network.startup, network.main.clone(), network.main.clone(for_test=True)):
        legality.check(program)


def test_a_clone_for_test_has_all_feeds_no_backward_or_update() -> None:
    network = fit_a_line()
    clone = network.main.clone(for_test=True)
    assert {op.type for op in clone.operators} == {
        "aten.addmm.default",
        "aten.sub.Tensor",
        "aten.mul.Tensor",
        "aten.mean.default",
    }
    assert [v.name for v in clone.feeds()] == ["x", "y"]
    assert [v.name for v in clone.parameters()] == ["fc_0.w_0", "fc_0.b_0"]
    assert not [n for n in clone.variables if "@GRAD" in n or "sgd" in n]
