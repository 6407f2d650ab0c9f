"""Variable: the user's handle of a tensor in a Program. Any torch call on it is recorded.

It is no tensor and holds no value; values come from `run(fetch_list=[...])`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.compat.torch import tree_leaves, tree_map
from penstock.errors import ProgramError
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.record.composite import CompositeMode, plain_functional
from penstock.program.record.context import default_main_program, recording_lock, variable_used
from penstock.program.record.dispatch import RecordMode
from penstock.program.record.failures import called, described, telling
from penstock.program.record.patches import patches
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.source import running_module, user_line


class Variable:
    """A variable of a Program under record. `name`, `shape` (symbolic sizes), `dtype`; torch methods work."""

    def __init__(self, recording: Recording, name: str, fake: torch.Tensor) -> None:
        self._recording = recording
        self.name = name
        self.fake = fake

    def for_recording(self, recording: Recording) -> Variable:
        """Return the handle of the same variable in a clone of its Program."""
        return Variable(recording, self.name, self.fake)

    @property
    def program(self) -> Program:
        """The Program that it belongs to."""
        return self._recording.program

    @property
    def desc(self) -> VarDesc:
        """Its plain-data description."""
        return self.program.variables[self.name]

    @property
    def shape(self) -> torch.Size:
        """Sizes; the batch is a symbol that prints like s77 and takes part in arithmetic.

        They are recorded in torch's functions, so reading them opens the recording of the Program.
        """
        _refuse_module()
        variable_used(recording_now(self._recording).program)
        return self.fake.shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.fake.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.fake.dim()

    @property
    def persistable(self) -> bool:
        """Whether the value lives on between runs."""
        return self.desc.persistable

    @property
    def stop_gradient(self) -> bool:
        """Whether gradients end here."""
        return not self.fake.requires_grad

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        if not value:
            self.fake.requires_grad_(True)
        elif self.fake.is_leaf:
            self.fake.requires_grad_(False)
        else:
            detached = self.fake.detach()
            self._recording.alias(detached, self.name)
            self.fake = detached

    def __repr__(self) -> str:
        dims = ", ".join(str(d) for d in self.desc.shape)
        return f"Variable({self.name!r}, [{dims}], {self.desc.dtype})"

    __str__ = __repr__
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise ProgramError(
            f"{user_line()}: the truth of variable {self.name!r} depends on data, so Python cannot branch on it while "
            "a program is recorded. Use torch.where",
            variable=self.name,
        )

    def __len__(self) -> int:
        return int(self._refuse_number("len(x)"))

    def __float__(self) -> float:
        return float(self._refuse_number("float(x)"))

    def __int__(self) -> int:
        return int(self._refuse_number("int(x)"))

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any:
        return self._refuse_number("an array of x")

    __array_ufunc__ = None  # so that a numpy number times x is left to x

    def backward(self, *args: object, **kwargs: object) -> None:
        """Refuse: gradients are recorded by `append_backward` or an optimizer."""
        raise ProgramError(
            f"{user_line()}: {self.name!r}.backward() has nothing to run while a program is recorded. Use "
            "fluid.append_backward(loss), or optimizer.minimize(loss), and fetch the gradients from run()",
            variable=self.name,
        )

    def numpy(self) -> Any:
        """Refuse: a Variable holds no values."""
        return self._refuse_number("x.numpy()")

    def tolist(self) -> Any:
        """Refuse: a Variable holds no values."""
        return self._refuse_number("x.tolist()")

    def __iter__(self) -> Iterator[Any]:
        self._refuse_number("a loop over x")
        return iter(())

    def _refuse_number(self, what: str) -> Any:
        raise ProgramError(
            f"{user_line()}: {what} asks for a number, but variable {self.name!r} has none while it is recorded. "
            "Fetch its value from run(), or use torch operations on the whole tensor",
            variable=self.name,
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return record_call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)  # AttributeError for what tensors do not have
        if callable(attribute):
            return lambda *args, **kwargs: record_call(attribute, (self, *args), kwargs)
        return record_call(getattr, (self, name), {})


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def call(self: Variable, *args: Any) -> Any:
        return record_call(method, (self, *args), {})

    call.__name__ = name
    return call


_DUNDERS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs "
    "eq ne lt le gt ge getitem setitem iadd isub imul itruediv and or xor invert"
)
for _name in _DUNDERS.split(" "):
    setattr(Variable, f"__{_name}__", _operator(f"__{_name}__"))


@contextmanager
def recording_modes(recording: Recording) -> Iterator[None]:
    """Run torch calls within the block on fakes, and record them. One thread at a time; another one waits."""
    with recording_lock:
        variable_used(recording.program)
        recording.active += 1
        try:
            with CompositeMode(recording), plain_functional(), RecordMode(recording), recording.fake_mode:
                yield
        finally:
            recording.active -= 1


def recording_now(own: Recording) -> Recording:
    """Return the Recording that calls go into now: under the guard of a clone (or of its original), that Program's."""
    current = default_main_program().recording
    chosen: Recording = current if current is not None and current.origin is own.origin else own
    return chosen


def recording_in(values: Any) -> Recording | None:
    """Return the Recording that a call on a nest of values goes into: that of the Variables among them.

    Under the guard of a clone (or of its original) it is that Program's. Raises ProgramError for two Programs.
    """
    found: Recording | None = None
    for leaf in tree_leaves(values):
        if not isinstance(leaf, Variable):
            continue
        target = recording_now(leaf._recording)
        if found is not None and target is not found:
            raise ProgramError(f"{user_line()}: {leaf.name!r} belongs to another program than the other operands")
        found = target
    return found


def operands_of(values: Any, recording: Recording) -> Iterator[tuple[str, str]]:
    """Name and shape of each tensor among the operands."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            name = recording.name_of(value) if recording.is_named(value) else "a tensor"
            yield name, described(value)


def record_call(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function on Variables: record it and return Variables."""
    recording = recording_in((args, kwargs))
    if recording is None:
        raise ProgramError(f"{user_line()}: a call to {func} has no Variable among its operands")
    _refuse_module()
    with undone_on_failure(recording):
        args, kwargs = unwrap(recording, (args, kwargs))
        with (
            recording_modes(recording),
            telling(lambda: called(func, recording.module_path()), lambda: operands_of((args, kwargs), recording)),
        ):
            out = func(*args, **kwargs)
        return wrap(recording, out)


def _refuse_module() -> None:
    """Raise ProgramError within a module that was called while nothing was recorded, so that torch ran its forward."""
    if not patches.num_open and (module := running_module()) is not None:
        raise ProgramError(
            f"{user_line()}: module {type(module).__name__} is called on a variable after the recording of its program "
            "has ended. Call it under fluid.program_guard(program), where a module is recorded whole"
        )


def unwrap(recording: Recording, values: Any) -> Any:
    """Return a nest of operands with fake tensors for Variables and stand-ins for real tensors.

    Stand-ins are put in here, above autograd, so that the gradient of a parameter goes to its stand-in.
    """

    def one(value: Any) -> Any:
        if isinstance(value, Variable):
            return recording.own(value).fake
        if isinstance(value, torch.Tensor) and not recording.is_known(value):
            return recording.capture(value)
        return value.item() if isinstance(value, np.generic) else value

    return tree_map(one, values)


def wrap(recording: Recording, out: Any) -> Any:
    """Return Variables for the tensors in a nest of results; guards that arose are taken over."""
    recording.program.guards.extend(recording.symbols.new_guards(user_line()))
    return tree_map(lambda v: recording.handle(v) if isinstance(v, torch.Tensor) else v, out)


Recording.handle_type = Variable
