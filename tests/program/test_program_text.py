"""The text form: `parse(str(p)) == p`, and wrong text is a ProgramError with its line, never anything else."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.networks import NETWORKS
from tests.property.random_programs import Recipe, build, recipes

from penstock.errors import ProgramError
from penstock.program.expr import Expr, sym
from penstock.program.ir import Guard, Operator, Ref, Role, TorchConst, VarDesc
from penstock.program.program import Program


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_survive_their_text(name: str) -> None:
    network = NETWORKS[name]()
    for program in (network.main, network.startup, network.main.clone(for_test=True)):
        again = Program.parse(str(program))
        assert again == program
        assert str(again) == str(program)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(recipe=recipes())
def test_random_programs_survive_their_text(recipe: Recipe) -> None:
    network = build(recipe)
    assert Program.parse(str(network.main)) == network.main
    assert Program.parse(str(network.startup)) == network.startup


names = st.text(min_size=1, max_size=8)
dims: st.SearchStrategy[int | Expr] = st.recursive(
    st.integers(0, 1 << 40) | st.sampled_from([sym("s0"), sym("s1"), sym("seed")]),
    lambda inner: st.builds(
        lambda op, items: Expr(op, tuple(items)),
        st.sampled_from(["+", "*", "//", "%", "max", "min"]),
        st.lists(inner, min_size=2, max_size=3),
    ),
    max_leaves=6,
)
arguments = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.builds(Ref, names)
    | st.builds(TorchConst, st.just("dtype"), st.sampled_from(["float32", "int64"]))
    | dims,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
operators = st.builds(
    Operator,
    name=names,
    type=st.just("aten.add.Tensor"),
    args=st.lists(arguments, max_size=4).map(tuple),
    outputs=st.lists(st.none() | names | st.lists(names, max_size=2).map(tuple), max_size=3).map(tuple),
    kwargs=st.lists(st.tuples(st.sampled_from(["dtype", "alpha", "none", "s0"]), arguments), max_size=2).map(tuple),
    writes=st.lists(names, max_size=2).map(tuple),
    role=st.sampled_from([Role.FORWARD, Role.BACKWARD | Role.LOSS, Role.OPTIMIZE]),
    role_vars=st.lists(st.tuples(names, names), max_size=2).map(tuple),
    module=st.text(max_size=8),
    source=st.text(max_size=8),
    train_only=st.booleans(),
)
variables = st.builds(
    VarDesc,
    name=names,
    shape=st.lists(dims, max_size=3).map(tuple),
    dtype=st.just("float32"),
    persistable=st.booleans(),
    parameter=st.booleans(),
    trainable=st.booleans(),
    buffer=st.booleans(),
    feed=st.booleans(),
    lod_level=st.integers(0, 2),
    source=st.text(max_size=8),
)
guards = st.builds(
    Guard,
    left=dims,
    relation=st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    right=dims,
    source=st.text(max_size=8),
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(variables, max_size=3, unique_by=lambda v: v.name),
    st.lists(guards, max_size=2),
    st.lists(operators, max_size=3),
)
def test_whatever_a_program_can_hold_survives_its_text(
    found: list[VarDesc], relations: list[Guard], calls: list[Operator]
) -> None:
    program = Program(seed=3, symbols=["s0", "s1"], guards=relations, operators=calls)
    for variable in found:
        program.add_variable(variable)
    assert Program.parse(str(program)) == program


@cache
def lines_of(name: str) -> tuple[str, ...]:
    network = NETWORKS[name]()
    return tuple((str(network.main) if name != "fit_a_line" else str(network.startup)).splitlines())


CHARACTERS = st.text('abz019 .,%[]():="\\->+*/s@\n\t_é\x00', max_size=3)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(["fit_a_line", "ctr_dnn"]),
    st.integers(0, 10**6),
    st.integers(0, 400),
    st.integers(0, 4),
    CHARACTERS,
)
def test_damaged_text_is_a_program_error_with_its_line(
    name: str, line: int, start: int, length: int, inserted: str
) -> None:
    lines = list(lines_of(name))
    at = line % len(lines)
    start %= len(lines[at]) + 1
    lines[at] = lines[at][:start] + inserted + lines[at][start + length :]
    text = "\n".join(lines)
    with suppress(ProgramError):
        program = Program.parse(text)
        assert Program.parse(str(program)) == program
        return
    with pytest.raises(ProgramError, match="line "):
        Program.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text of the program is empty"),
        ("program version=2 seed=1 symbols=[]", "line 1: expected version 1, got '2'"),
        ("program version=1 seed=1 symbols=[]\nvariable x", "line 2: expected 'var', 'guard' or 'op', got 'variable'"),
        ("program version=1 seed=1 symbols=[]\nvar x : float32[s0]", "line 2: expected one of the symbols []"),
        ("program version=1 seed=1 symbols=[s0]\nvar x : float32[s0**2]", "line 2: expected "),
        ("program version=1 seed=1 symbols=[]\nop a aten.relu.default(%x -> %y", "line 2: expected "),
        ('program version=1 seed=1 symbols=[]\nvar x : float32[] at="\\q"', "line 2: expected a quoted string"),
        ("program version=1 seed=1 symbols=[]\nvar x : float32[__import__(1)]", "line 2: expected "),
        (
            "program version=1 seed=1 symbols=[]\nvar x : float32[]\nvar x : float32[1]",
            "line 3: variable 'x' is described",
        ),
        ("program version=1 seed=1 symbols=[]\nvar x : float32[" + "9" * 5000 + "]", "line 2: expected a number of"),
        (
            "program version=1 seed=1 symbols=[]\nvar x : float32[" + "(" * 50000 + "]",
            "line 2: expressions or lists are",
        ),
    ],
)
def test_errors_name_line_expected_and_got(text: str, says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        Program.parse(text)
    assert says in str(caught.value)
