"""Which operators a step is at that does not end, from how often each ran since some moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.services.evidence import GraphFacts, OpFacts, unfinished_name, unfinished_of


def facts_of(edges: list[tuple[int, int]], num_ops: int, *, communication: tuple[int, ...] = ()) -> GraphFacts:
    roles = ["communication" if op in communication else "forward" for op in range(num_ops)]
    ordered = sorted(edges, key=lambda edge: (edge[1], edge[0]))
    return GraphFacts(
        tuple(OpFacts(f"op_{op}", role, "") for op, role in enumerate(roles)),
        np.array(ordered, np.int32).reshape(-1, 2), True,
    )  # fmt: skip


def chain(num_ops: int) -> GraphFacts:
    return facts_of([(op, op + 1) for op in range(num_ops - 1)], num_ops)


@given(st.data())
def test_the_operator_of_a_chain_that_hangs_is_found(data: st.DataObject) -> None:
    """Reports begin within one step, after operator `begins`, and end in another, before operator `hangs`."""
    num_ops = data.draw(st.integers(2, 12))
    begins, hangs = data.draw(st.integers(-1, num_ops - 1)), data.draw(st.integers(1, num_ops - 1))
    whole = data.draw(st.integers(1, 5))
    count = {op: whole + (op > begins) + (op < hangs) for op in range(num_ops)}
    expected = () if begins == hangs - 1 else (hangs,)  # then every operator looks as far as the one before it
    assert unfinished_of(chain(num_ops), count) == expected


def test_between_steps_no_operator_is_unfinished() -> None:
    assert unfinished_of(chain(5), dict.fromkeys(range(5), 7)) == ()
    assert unfinished_of(chain(5), {}) == ()
    assert unfinished_of(chain(1), {0: 3}) == ()


def test_what_waits_for_an_unfinished_operator_is_not_named() -> None:
    facts = facts_of([(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)], 5)
    assert unfinished_of(facts, {0: 8, 1: 8, 2: 7, 3: 7, 4: 7}) == (2,)


def test_an_operator_that_never_ran_does_not_hang() -> None:
    assert unfinished_of(chain(3), {0: 1, 1: 1}) == ()


def test_what_computes_is_named_before_an_exchange() -> None:
    facts = facts_of([(0, 1), (0, 2)], 3, communication=(1,))
    assert unfinished_name(facts, {0: 8, 1: 7, 2: 7}) == "op_2"
    assert unfinished_name(facts, {0: 8, 1: 7, 2: 8}) == "op_1"
    assert unfinished_name(facts, {0: 8, 1: 8, 2: 8}) == ""
