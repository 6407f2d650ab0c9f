"""Executor.close leaves the parameter servers of every program that it ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.remotes import remotes_of_a_test

from penstock.compat.torch import schema_of
from penstock.errors import Unavailable
from penstock.exec.executor import Executor
from penstock.exec.parallel import CompiledProgram
from penstock.program.ir import Operator, VarDesc
from penstock.program.program import Program
from penstock.ps.communicator import Remotes, remotes
from penstock.ps.remote import REMOTE_TYPES, SEND_BARRIER, Descriptor
from penstock.scope import Scope

DESCRIPTOR = "async 0/1 127.0.0.1:1"


class Recorded:
    """A remote that remembers how often it was closed."""

    def __init__(self) -> None:
        self.num_barriers = self.num_closed = 0

    def send_barrier(self) -> None:
        self.num_barriers += 1

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def opened() -> Iterator[dict[str, Recorded]]:
    found: dict[str, Recorded] = {}

    def open_one(descriptor: Descriptor) -> Any:
        return found.setdefault(str(descriptor), Recorded())

    with remotes_of_a_test(open_one):
        yield found


def test_a_remote_that_is_not_open_has_no_client() -> None:
    assert Remotes().find_client(DESCRIPTOR) is None
    with pytest.raises(Unavailable, match="not connected"):
        Remotes().client(DESCRIPTOR)


def program_with_a_barrier() -> Program:
    program = Program()
    token = program.add_variable(VarDesc("token", (0,), "int64"))
    program.append(Operator("barrier", SEND_BARRIER, ((), DESCRIPTOR), (token.name,)))
    return program


@pytest.mark.parametrize("compiled", [False, True])
def test_close_closes_the_remotes_of_programs_that_ran(opened: dict[str, Recorded], compiled: bool) -> None:
    program = program_with_a_barrier()
    executor, other = Executor(), Executor()
    for _ in range(2):
        executor.run(CompiledProgram(program) if compiled else program, scope=Scope())
    assert opened[DESCRIPTOR].num_barriers == 2
    other.close()
    assert opened[DESCRIPTOR].num_closed == 0, "another Executor used it"
    executor.close()
    executor.close()
    assert opened[DESCRIPTOR].num_closed == 1
    assert remotes.opened() == []


def test_the_operators_name_their_remote_by_schema() -> None:
    for type in REMOTE_TYPES:
        schema = schema_of(getattr(torch.ops.penstock, type.split(".")[1]).default)
        assert [a.name for a in schema.arguments].count("remote") == 1
