"""Variables that are declared before an operator makes them.

Such a variable is in its block (`Block.vars`, `list_vars`), but not in the Program's text: it becomes what its first
use makes of it. An operator that writes it makes it; where one reads it before, it is an input, which a run is fed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.ir import VarDesc
from penstock.program.record.attributes import Kind
from penstock.program.record.recording import Recording
from penstock.program.record.renaming import rename_recorded
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named, recording_in, recording_modes
from penstock.program.record.versions import is_replaceable, take_over


class Declared(Variable):
    """A variable that no operator has made yet: its sizes and dtype are what was declared, if they were.

    `is_sized`: its sizes were declared, so that it may become an input. `kind`: of Fluid's kinds one that no operator
    here makes or reads, such as 'raw'.
    """

    def __init__(self, recording: Recording, described: VarDesc, *, is_sized: bool = False, kind: str = "") -> None:
        self._recording, self._kind = recording, kind
        self.name = described.name
        self._declared = described
        self._is_sized = is_sized
        self._depth = len(recording.open_blocks)
        self._stops_gradient = False
        self._is_read = False  # before an operator made it
        self._fake: torch.Tensor | None = None

    def for_recording(self, recording: Recording) -> Variable:
        """Return the handle of the same variable in a clone of its Program."""
        if self._fake is not None:
            return Variable(recording, self.name, self._fake)
        copy = Declared(recording, self._declared, is_sized=self._is_sized, kind=self._kind)
        copy._stops_gradient = self._stops_gradient
        return copy

    @property
    def fake(self) -> torch.Tensor:  # type: ignore[override]  # an attribute there; here it is made late
        """The tensor that stands for it: an input's, if nothing has made it. Raises ProgramError without its sizes."""
        self._refuse_kind()
        if self._fake is None or (self._is_read and not self._recording.is_named(self._fake)):  # undone by a failure
            if not self._is_sized or self._depth:
                raise ProgramError(
                    f"{user_line()}: variable {self.name!r} (declared at {self._declared.source}) is used, but no "
                    "operator has made it. Append the one that writes it first, or declare it with its shape, to feed "
                    "it: fluid.data(name, shape, dtype)",
                    variable=self.name,
                )
            return self._begin(persistable=False)
        return self._fake

    def _refuse_kind(self) -> None:
        if self._kind:
            raise ProgramError(
                f"{user_line()}: variable {self.name!r} (declared at {self._declared.source}) has the type "
                f"{self._kind!r}, which no operator makes or reads here. Declare it without a type for tensors",
                variable=self.name,
            )

    @property
    def type(self) -> Kind:
        """Fluid's kind of variable, as it was declared."""
        own = Variable.type.__get__(self)
        return Kind(self._kind, own) if self._kind else own

    def _begin(self, *, persistable: bool) -> torch.Tensor:
        """Be an input or state of the sizes that were declared, from before the blocks that are open now."""
        recording, declared = self._recording, self._declared
        sizes = [size if isinstance(size, int) else -1 for size in declared.shape]
        fake = recording.fake_of_shape(sizes, dtype_named(declared.dtype))
        described = replace(declared, shape=recording.shape_of(fake), persistable=persistable, feed=not persistable)
        recording.bind(fake, described)
        fake.requires_grad_(fake.is_floating_point() and not (self._stops_gradient or persistable))
        recording.handles[self.name] = self
        self._fake, self._is_read = fake, True
        return fake

    @property
    def shape(self) -> torch.Size:
        """Sizes: as declared, with -1 for those that a run knows, until it is made."""
        if self._fake is not None:
            return Variable.shape.__get__(self)  # type: ignore[no-any-return]  # a property's
        return torch.Size([size if isinstance(size, int) else -1 for size in self._declared.shape])

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._fake.dtype if self._fake is not None else dtype_named(self._declared.dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._declared.shape) if self._fake is None else self._fake.dim()

    def stand_for(self, fake: torch.Tensor, name: str) -> None:
        """Be the handle of another tensor from now on."""
        self._fake, self.name = fake, name

    @property
    def desc(self) -> VarDesc:
        """Its description: as declared, until an operator has made it."""
        described: VarDesc = self.program.variables.get(self.name, self._declared)
        return described

    @property
    def is_made(self) -> bool:
        """Whether an operator has made it."""
        return self._fake is not None

    @property
    def persistable(self) -> bool:
        """Whether the value lives on between runs. Set before it is made, it is state, which the scope has."""
        return self.desc.persistable

    @persistable.setter
    def persistable(self, value: bool) -> None:
        if self._fake is not None:
            self._set_persistable(value)
        elif value and self._is_sized:
            self._begin(persistable=True)
        elif value:
            raise ProgramError(
                f"{user_line()}: variable {self.name!r} is made persistable, but was declared (at "
                f"{self._declared.source}) without a shape",
                variable=self.name,
            )

    @property
    def stop_gradient(self) -> bool:
        """Whether gradients end here."""
        return self._stops_gradient if self._fake is None else not self._fake.requires_grad

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        if self._fake is None:
            self._stops_gradient = bool(value)
        else:
            self._fake = (
                self._fake.detach() if value and not self._fake.is_leaf else self._fake.requires_grad_(not value)
            )
            self._recording.alias(self._fake, self.name)

    def become(self, made: Variable) -> None:
        """Take over what `made` stands for, under the declared name."""
        self._take(made.fake)

    def begin_outside(self, made: Variable) -> bool:
        """Where blocks are open that were not when it was declared, begin before them as zeros like `made`, and return
        True: it outlives them, and what they write is its next value."""
        recording = self._recording
        blocks = recording.open_blocks[self._depth :]
        with ExitStack() as stack:
            for block in reversed(blocks):
                stack.enter_context(block.outside())
            if blocks:
                with recording_modes(recording):
                    self._take(torch.zeros(list(made.fake.shape), dtype=made.dtype))
        return bool(blocks)

    def _take(self, fake: torch.Tensor) -> None:
        self._refuse_kind()
        rename_recorded(self._recording, fake, self.name)
        self._fake = fake
        self._recording.handles[self.name] = self


def written(out: Variable, value: Any) -> Any:
    """Give an output variable its value and return it: a declared one and a temporary become it, others are written."""
    if isinstance(out, Declared) and not out.is_made and not out.begin_outside(value):
        out.become(value)
    elif out is not value:
        recording = recording_in((out, value))
        if recording is not None and _becomes(recording, recording.own(out), value):
            take_over(recording, recording.own(out).name, value.fake)
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not out.persistable):
                out.copy_(value)
    return out


def _becomes(recording: Recording, out: Variable, value: Any) -> bool:
    """Whether a variable may stand for a value that was just made, so that nothing is copied."""
    if not isinstance(value, Variable) or not is_replaceable(recording, out.name):
        return False
    same = (out.desc.shape, out.desc.dtype) == (value.desc.shape, value.desc.dtype)
    return same and is_replaceable(recording, value.name)
