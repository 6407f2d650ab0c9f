"""The startup program of one parameter server: what its blocks begin with, equal to the bit with a run on one machine.

Random values follow from (seed, position), so they are made for the whole parameter and cut; constants are made at the
size of the block. One whole parameter is in memory at a time: temporaries are released at their last use. Tables that
are spread by id begin on first touch, and have nothing here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.program.ir import Arg, Operator, Ref, VarDesc
from penstock.program.program import MemoryMark, Program
from penstock.transpile.pserver import Served, describe, needed

_FULL = "aten.full.default"
_CAPTURED = "penstock.captured"


def pserver_startup(pserver: Program, startup: Program) -> Program:
    """Return the startup program of a server's program. `startup`: that of the program before it was distributed.

    Raises ProgramError for a variable that `startup` does not make.
    """
    description = describe(pserver)
    if description is None:
        raise ProgramError("a server's startup program is made for a pserver program; this one has no listen_and_serv")
    builder = _Builder(startup)
    for served in description.served:
        builder.add(_kept_by(pserver, served.block), served, pserver)
    if description.round_block:
        shared = Served("", "", 0, description.round_block)
        builder.add(_kept_by(pserver, description.round_block), shared, pserver)
    return builder.finished()


def _kept_by(program: Program, block: int) -> list[str]:
    """Return the persistable variables that a block uses."""
    operators = program.block(block).ops if block < program.num_blocks else []
    variables = program.variables
    used = dict.fromkeys(n for op in operators for n in (*op.input_names(), *op.output_names()))
    return [n for n in dict.fromkeys(variables[n].storage for n in used) if variables[n].persistable]


class _Builder:
    """Collects which rows of which variable are kept, then records one variable after the other."""

    def __init__(self, startup: Program) -> None:
        self.startup = startup
        self.program = Program(seed=startup.seed, memory_mark=MemoryMark(frozenset(), skip_grads=False))
        self.wanted: dict[str, dict[str, tuple[int, VarDesc]]] = {}

    def add(self, names: Iterable[str], served: Served, pserver: Program) -> None:
        """Ask for the variables of a block."""
        for name in names:
            parts = self.wanted.setdefault(served.whole_name(name), {})
            parts.setdefault(name, (served.first_row, pserver.variables[name]))

    def finished(self) -> Program:
        """Return the program."""
        for whole, parts in self.wanted.items():
            operators = needed(self.startup.operators, [whole], self.startup)
            if not operators:
                raise ProgramError(
                    f"the startup program does not initialise {whole!r}; give transpile the startup program that "
                    "belongs to the program",
                    variable=whole,
                )
            if len(operators) == 1 and operators[0].type == _FULL:
                self._constants(operators[0], parts)
            else:
                self._cut(whole, operators, parts)
        return self.program

    def _constants(self, op: Operator, parts: dict[str, tuple[int, VarDesc]]) -> None:
        for number, (name, (_, var)) in enumerate(parts.items()):
            self.program.add_variable(var)
            args: tuple[Arg, ...] = (var.shape, *op.args[1:])
            self.program.append(replace(op, name=_numbered(op.name, number), args=args, outputs=(name,)))

    def _cut(self, whole: str, operators: tuple[Operator, ...], parts: dict[str, tuple[int, VarDesc]]) -> None:
        # The whole variable has its own name, unless a block that is the whole variable has it.
        own = self.startup.variables[whole]
        only = list(parts) == [whole]
        for op in operators:
            for name in op.output_names():
                var = self.startup.variables[name]
                kept = only and name == whole
                self.program.add_variable(parts[name][1] if kept else replace(var, persistable=False, parameter=False))
            if op.type == _CAPTURED:
                self.program.captured[str(op.args[0])] = self.startup.captured[str(op.args[0])]
            self.program.append(op)
        if not only:
            for name, (first, var) in parts.items():
                self._part(own, name, first, var)

    def _part(self, whole: VarDesc, name: str, first: int, var: VarDesc) -> None:
        """A copy of the rows that the block has: a view would keep the whole parameter alive."""
        source = Ref(whole.name)
        if var.shape != whole.shape:
            view = f"{name}@VIEW"
            self.program.add_variable(VarDesc(view, var.shape, var.dtype, storage=whole.name, source=var.source))
            rows = int(str(var.shape[0]))
            args: tuple[Arg, ...] = (source, 0, first, first + rows)
            self.program.append(Operator(f"slice.{name}", "aten.slice.Tensor", args, (view,), source=var.source))
            source = Ref(view)
        self.program.add_variable(var)
        self.program.append(Operator(f"clone.{name}", "aten.clone.default", (source,), (name,), source=var.source))


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name
