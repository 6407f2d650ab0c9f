"""Contracts of torch's symbolic sizes and fake tensors; `test_torch_names.py` runs them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.compat.contracts import contract

from penstock.compat import torch as private

aten = torch.ops.aten
sym_max: Any = torch.sym_max  # torch has typed neither
sym_min: Any = torch.sym_min


class Sizes:
    """A ShapeEnv, a fake mode over it and symbols of it."""

    def __init__(self) -> None:
        self.env = private.ShapeEnv(specialize_zero_one=False)
        self.mode = private.FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.num_symbols = 0

    def symbol(self) -> Any:
        self.num_symbols += 1
        return private.new_size_symbol(self.mode, f"s{self.num_symbols}", 7919 + self.num_symbols)

    @staticmethod
    def is_free(size: Any) -> bool:
        """Whether a size is still a symbol, and no number."""
        return bool(private.expression_of(size).is_Symbol)


# ---------------------------------------------------------------- sizes


@contract
def ShapeEnv() -> None:
    sizes = Sizes()
    size = sizes.symbol()
    assert bool(size > 5)
    assert [str(guard.expr) for guard in sizes.env.guards] == [f"{size} > 5"]
    assert sizes.is_free(size)


@contract
def statically_known_true() -> None:
    sizes = Sizes()
    size = sizes.symbol()
    assert private.statically_known_true(size >= 0)
    assert not private.statically_known_true(size > 5)
    assert not sizes.env.guards


@contract
def FloorDiv() -> None:
    assert isinstance(private.expression_of(Sizes().symbol() // 2), private.FloorDiv)


@contract
def Mod() -> None:
    size = Sizes().symbol()
    found = private.expression_of(size % 2)
    assert isinstance(found, private.Mod) and found.args == (private.expression_of(size), 2)


@contract
def PythonMod() -> None:
    size = Sizes().symbol()
    found = private.expression_of((size - 4) % 3)
    assert isinstance(found, private.PythonMod) and found.args[1] == 3


@contract
def Max() -> None:
    assert isinstance(private.expression_of(sym_max(Sizes().symbol(), 20)), private.Max)


@contract
def Min() -> None:
    assert isinstance(private.expression_of(sym_min(Sizes().symbol(), 20)), private.Min)


@contract
def new_size_symbol() -> None:
    sizes = Sizes()
    first, second = sizes.symbol(), sizes.symbol()
    assert isinstance(first, torch.SymInt) and isinstance(second, torch.SymInt)
    assert private.expression_of(first) != private.expression_of(second)
    assert int(sizes.mode.from_tensor(torch.empty(2)).shape[0]) == 2


@contract
def expression_of() -> None:
    expression = private.expression_of(Sizes().symbol())
    assert expression.is_Symbol and expression.is_integer


@contract
def shape_env_of() -> None:
    sizes = Sizes()
    assert private.shape_env_of(sizes.symbol()) is sizes.env


@contract
def shape_knowledge() -> None:
    sizes = Sizes()
    one, other = sizes.symbol(), sizes.symbol()
    before = private.shape_knowledge(sizes.env)
    bool(one == other)
    bool(one >= 10)
    after = private.shape_knowledge(sizes.env)
    assert (before.num_guards, after.num_guards) == (0, 2)
    assert before.ranges != after.ranges


@contract
def ShapeKnowledge() -> None:
    known = private.shape_knowledge(Sizes().env)
    assert [type(part) for part in (known.replacements, known.axioms, known.ranges, known.divisible)] == [
        dict, dict, dict, set,
    ]  # fmt: skip


@contract
def forget_since() -> None:
    sizes = Sizes()
    size = sizes.symbol()
    known = private.shape_knowledge(sizes.env)
    asked = []
    for _ in range(2):
        assert bool(size > 5) and bool(size == 7920)
        asked.append([str(guard.expr) for guard in private.guards_since(sizes.env, known)])
        private.forget_since(sizes.env, known)
        assert sizes.is_free(size) and private.shape_knowledge(sizes.env) == known
    assert asked[0] == asked[1] and len(asked[0]) == 2


@contract
def guards_since() -> None:
    sizes = Sizes()
    size = sizes.symbol()
    bool(size > 5)
    known = private.shape_knowledge(sizes.env)
    bool(size < 1 << 20)
    assert [str(guard.expr) for guard in private.guards_since(sizes.env, known)] == [f"{size} < {1 << 20}"]


@contract
def guard_frame() -> None:
    sizes = Sizes()
    assert bool(sizes.symbol() > 5)
    frame = private.guard_frame(sizes.env.guards[0])
    assert (frame.filename, frame.name) == (__file__, "guard_frame")


# ---------------------------------------------------------------- fake tensors


@contract
def FakeTensor() -> None:
    with private.FakeTensorMode():
        fake = torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(fake, private.FakeTensor) and fake.shape == (2, 4)
    assert not isinstance(torch.ones(2), private.FakeTensor)


@contract
def FakeTensorMode() -> None:
    sizes = Sizes()
    size = sizes.symbol()
    with sizes.mode:
        found = torch.ones(2) + aten.empty.memory_format([size, 2])
    assert found.shape[1] == 2 and isinstance(found.shape[0], torch.SymInt)


@contract
def FAKE_TENSOR_LOGGER() -> None:
    seen: list[logging.LogRecord] = []
    logger = logging.getLogger(private.FAKE_TENSOR_LOGGER)

    def leave_out(record: logging.LogRecord) -> bool:
        seen.append(record)
        return False

    logger.addFilter(leave_out)
    try:
        with Sizes().mode, pytest.raises((RuntimeError, TypeError)):
            torch.ones(2, 3) @ torch.ones(2, 3)
    finally:
        logger.removeFilter(leave_out)
    assert seen
