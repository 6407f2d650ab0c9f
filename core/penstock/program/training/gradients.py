"""A gradient on its way from the backward pass to the update: clipped, regularised, then applied.

It stands for the *exchanged* gradient: whatever works on it is recorded with the role OPTIMIZE and the pair
(parameter, gradient), which a graph places after the exchange, on the parameter's owner or on every replica.
Results are always new variables: in AllReduce mode a replica without rows reads another one's gradient.

A sparse gradient is merged first, without a sort and without a size that depends on data: the rows are added into a
scratch table that is zero between steps, read back row by row (equal rows then hold equal sums), and cleared. The cost
is that of the rows used; the scratch takes the memory of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.errors import ProgramError
from penstock.program.ir import Role
from penstock.program.program import Program
from penstock.program.record.context import default_startup_program, role
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable
from penstock.program.training.backward import Gradient, SelectedRows
from penstock.program.training.parameters import ParamAttr, attribute_of, constant_state


class PendingGradient:
    """The gradient of one parameter. `value`: dense, or [n, d] for the n `rows` of a sparse one, duplicates merged."""

    def __init__(self, param: Variable, gradient: Gradient, prefix: str) -> None:
        self.param, self.gradient = param, gradient
        self.attribute: ParamAttr = attribute_of(param)
        self._prefix = prefix
        self._scratch: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._changes: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self._is_linear = True
        self.clipped_by: object = None
        value = gradient.values if isinstance(gradient, SelectedRows) else gradient
        before = recording_of(param.program).changed_gradients.get(value.name)
        if isinstance(before, PendingGradient):  # the script has clipped it, or given it a decay; see the module there
            self.gradient, self._value, self._scratch = before.gradient, before._value, before._scratch
            self._changes, self._is_linear = list(before._changes), before._is_linear
            self.clipped_by = before.clipped_by

    @property
    def rows(self) -> torch.Tensor | None:
        """The rows of a sparse gradient, which may repeat; None for a dense one."""
        return self.gradient.rows.fake if isinstance(self.gradient, SelectedRows) else None

    @property
    def is_raw(self) -> bool:
        """Whether nothing was done to it yet, so that a kernel may merge and apply it in one go."""
        return self._value is None

    @contextmanager
    def role(self) -> Iterator[None]:
        """Record within the block where this parameter is updated."""
        with role(Role.OPTIMIZE, ((self.param.name, self.gradient.name),)):
            yield

    def reserve(self) -> None:
        """Create the scratch table of a sparse gradient; called before operators are recorded."""
        if self.rows is not None and self._scratch is None:
            sizes = [int(d) for d in self.param.fake.shape]
            name = f"{self._prefix}.merge.{self.param.name}"
            self._scratch = constant_state(name, 0.0, self.param.desc.dtype, sizes).fake

    @property
    def value(self) -> torch.Tensor:
        """The gradient as it stands; merged at the first use."""
        if self._value is None:
            if isinstance(self.gradient, SelectedRows):
                self._value = self._merged(self.gradient)
            else:
                self._value = self.gradient.fake
        return self._value

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        self._value, self._is_linear = value, False

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the gradient by a function of it that works element by element and is linear."""
        self._value = change(self.value)
        self._changes.append(change)

    def _merged(self, gradient: SelectedRows) -> torch.Tensor:
        rows, scratch = gradient.rows.fake, self.scratch
        scratch.index_add_(0, rows, gradient.values.fake)
        merged = scratch.index_select(0, rows)
        scratch.index_fill_(0, rows, 0.0)
        return merged

    @property
    def scratch(self) -> torch.Tensor:
        """The table that is zero between uses. Call `reserve` before."""
        assert self._scratch is not None
        return self._scratch

    def param_rows(self) -> torch.Tensor:
        """The parameter, or a copy of the rows that are used."""
        return self.param.fake if self.rows is None else self.param.fake.index_select(0, self.rows)

    def square_sum(self) -> torch.Tensor:
        """The sum of squares. Raises ProgramError for a sparse gradient that was changed other than by `change`."""
        if isinstance(self.gradient, SelectedRows):
            if not self._is_linear:
                raise ProgramError(
                    f"{user_line()}: the norm is wanted of the sparse gradient of {self.param.name!r}, which was "
                    "clipped by value or decayed before. Clip by norm first, or look it up with is_sparse=False",
                    variable=self.param.name,
                )
            # Of n appearances of a row, each holds the merged row m; the sum over them of v_i m is m m.
            values = self.gradient.values.fake
            for change in self._changes:
                values = change(values)
            return (values * self.value).sum()
        return (self.value * self.value).sum()


def prefix_of_state(program: Program, kind: str, name: str | None = None) -> str:
    """The names of an update's state begin with it: of updates of several programs that share a startup program, each
    has its own. `name`: what the script calls it."""
    known = [*program.variables, *default_startup_program().variables]
    prefix = name or program.unique(kind)
    while any(one.startswith(f"{prefix}.") for one in known):
        prefix = program.unique(name or kind)
    return prefix
