"""Every write is declared, by whatever argument it comes, and a Program that hides one is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as fluid
from penstock.errors import ProgramError
from penstock.program import kernels
from penstock.program.ir import Ref
from penstock.program.program import Program
from penstock.scope import Scope


def record(write: Callable[[Any], Any]) -> tuple[Program, Program, Any]:
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        return main, startup, write(fluid.layers.data("x", [4]))


def out_keyword(x: Any) -> Any:
    kept = torch.zeros_like(x)
    torch.mul(x, 3.0, out=kept)
    return kept + 1.0


def out_pair(x: Any) -> Any:
    values, places = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.int64)
    torch.sort(x, 1, out=(values, places))
    return values + places


def test_a_write_through_a_keyword_is_declared() -> None:
    main, _, out = record(out_keyword)
    (op,) = [o for o in main.operators if o.type == "aten.mul.out"]
    assert dict(op.kwargs) == {"out": Ref(*op.writes)}
    (got,) = fluid.Executor().run(main, {"x": torch.ones(2, 4)}, [out], scope=Scope())
    assert (got == 4).all()


def test_writes_through_two_keywords_are_declared() -> None:
    main, _, _ = record(out_pair)
    (op,) = [o for o in main.operators if o.writes]
    assert len(op.writes) == 2


def test_writes_through_a_list_are_declared() -> None:
    main, _, _ = record(lambda x: torch._foreach_mul_([x * 1.0, x * 2.0], 3.0))
    (op,) = [o for o in main.operators if o.type.startswith("aten._foreach_mul_")]
    assert op.writes == op.input_names()


HIDDEN: list[Callable[[Any], Any]] = [
    out_keyword,
    lambda x: (x * 2.0).mul_(3.0),
    lambda x: torch._foreach_mul_([x * 1.0, x * 2.0], 3.0),
    nn.BatchNorm1d(4),
]


@pytest.mark.parametrize("write", HIDDEN)
def test_a_program_with_an_undeclared_write_is_refused(write: Callable[[Any], Any]) -> None:
    main, startup, _ = record(write)
    kernels.check_writes(main)
    kernels.check_writes(startup)
    position = max(i for i, op in enumerate(main.operators) if op.writes)
    honest = main.operators[position]
    main.operators[position] = replace(honest, writes=())
    with pytest.raises(ProgramError, match=f"{honest.name}.*in place, but declares no write"):
        kernels.check_writes(main)


def test_a_batch_norm_at_rest_declares_no_write_and_has_none() -> None:
    norm = nn.BatchNorm1d(4)
    main, _, _ = record(lambda x: F.relu(norm(x)))
    kernels.check_writes(main.clone(for_test=True))
