"""Variable: the user's handle of a tensor in a Program. Any torch call on it is recorded.

It is no tensor and holds no value; values come from `run(fetch_list=[...])`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.compat.torch import tree_leaves, tree_map
from penstock.errors import ProgramError
from penstock.logger import warn_once
from penstock.program.ir import VarDesc
from penstock.program.program import Block, Program
from penstock.program.record import alignment
from penstock.program.record.attributes import Kind, ParamAttr, Rates, attributes_of
from penstock.program.record.composite import CompositeMode, plain_functional
from penstock.program.record.context import default_main_program, recording_lock, variable_used
from penstock.program.record.dispatch import RecordMode
from penstock.program.record.failures import called, described, telling
from penstock.program.record.patches import patches
from penstock.program.record.ragged import with_equal_rows
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.slicing import with_known_bounds
from penstock.program.record.source import running_module, user_line
from penstock.program.sequences import is_ragged, lengths_of

_log = logging.getLogger(__name__)


class Variable:
    """A variable of a Program under record. `name`, `shape` (symbolic sizes), `dtype`; torch methods work."""

    lifted: Callable[..., Any] | None = None
    """How a call on a variable of this class is recorded, if not as any other; see `record/unsized.py`."""

    def __init__(self, recording: Recording, name: str, fake: torch.Tensor) -> None:
        self._recording = recording
        self.name = name
        self.fake = fake

    def for_recording(self, recording: Recording) -> Variable:
        """Return the handle of the same variable in a clone of its Program."""
        return type(self)(recording, self.name, self.fake)

    def stand_for(self, fake: torch.Tensor, name: str) -> None:
        """Be the handle of another tensor from now on: what an operator has made of this variable."""
        self.fake, self.name = fake, name

    @property
    def program(self) -> Program:
        """The Program that it belongs to."""
        return self._recording.program

    @property
    def desc(self) -> VarDesc:
        """Its plain-data description."""
        described: VarDesc = self.program.variables[self.name]
        return described

    @property
    def shape(self) -> torch.Size:
        """Sizes; the batch is a symbol like s77, which takes part in arithmetic. Reading them opens the recording."""
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
    def lod_level(self) -> int:
        """Levels of sequences over its rows: those of the ragged input that it is made of."""
        rows = self.desc.shape[0] if self.desc.shape else 1
        return self.desc.lod_level or len(lengths_of(self.program, rows))

    @property
    def is_ragged(self) -> bool:
        """Whether it has rows of its own, apart from its sequences."""
        return is_ragged(self.program, self.name)

    @property
    def grad_name(self) -> str:
        """The name that its gradient has in the Program, once a backward pass was recorded."""
        return f"{self.name}@GRAD"

    @property
    def persistable(self) -> bool:
        """Whether the value lives on between runs. Set it, and the scope holds what an operator made last.

        An input whose shape has no batch becomes a variable of the scope, which a feed sets; another one stays an
        input, with a warning. A view becomes a copy. Raises ProgramError for state.
        """
        return self.desc.persistable

    @persistable.setter
    def persistable(self, value: bool) -> None:
        self._set_persistable(value)

    def _set_persistable(self, value: bool) -> None:
        desc = self.desc
        if desc.persistable == bool(value):
            return
        if desc.feed and all(isinstance(size, int) for size in desc.shape):
            return self._describe(persistable=True, feed=False, buffer=True)
        if desc.feed and value:
            text = f"input {self.name!r} stays an input, fed to every run ({user_line()}): the scope keeps no batch"
            return warn_once(_log, text, self.program, about=self.name)
        if value and desc.storage != desc.name and self._is_made():
            self._recording.copy_view(self._recording, self.name)
        elif desc.storage != desc.name or (desc.persistable and not desc.buffer) or not self._is_made():
            raise ProgramError(
                f"{user_line()}: persistable of {self.name!r} cannot become {bool(value)}: it is state. Keep what an "
                "operator makes (layers.assign of it), or name what to save: save_vars(vars=[...])", variable=self.name,
            )  # fmt: skip
        self._describe(persistable=bool(value), buffer=bool(value))

    def _is_made(self) -> bool:
        return any(self.name in op.output_names() for op in self.program.operators)

    def _describe(self, **changes: Any) -> None:
        self.program.variables[self.name] = replace(self.desc, **changes)
        self.program.revision += 1

    @property
    def block(self) -> Block:
        """The block of its Program that runs."""
        return self.program.global_block()

    @property
    def type(self) -> Kind:
        """Fluid's kind of variable (`fluid.core.VarDesc.VarType`). Called, it is torch's `type`: another dtype."""
        return Kind(self.desc.type, lambda *dtype: record_call(torch.Tensor.type, (self, *dtype), {}))

    @property
    def is_data(self) -> bool:
        """Whether the script declared it as an input."""
        return self.desc.is_data

    def astype(self, dtype: Any) -> Any:
        """Return it as another dtype: a name, numpy's or torch's."""
        return record_call(torch.Tensor.to, (self, dtype_named(dtype)), {})

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        """Return its text."""
        return repr(self)

    @property
    def error_clip(self) -> Any:
        """What clips its gradient on its way back (`fluid.clip.ErrorClipByValue`); None."""
        return self._recording.error_clips.get(self.name)

    @error_clip.setter
    def error_clip(self, clip: Any) -> None:
        if clip is not None and not hasattr(clip, "clipped"):
            raise ProgramError(f"{user_line()}: error_clip is {clip!r}; expected ErrorClipByValue", variable=self.name)
        self._recording.error_clips[self.name] = clip

    def _set_error_clip(self, error_clip: Any) -> None:
        """As `error_clip = …`, Fluid's name."""
        self.error_clip = error_clip

    @property
    def stop_gradient(self) -> bool:
        """Whether gradients end here."""
        return not self.fake.requires_grad

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        if self.desc.parameter:
            self._describe(trainable=not value)
        if not value:
            self.fake.requires_grad_(self.fake.is_floating_point() or self.fake.requires_grad)
        elif self._recording.open_blocks:
            detached = record_call(torch.Tensor.detach, (self,), {})
            self._recording.handles[detached.name] = self
            self.stand_for(detached.fake, detached.name)
        elif self.fake.is_leaf:
            self.fake.requires_grad_(False)
        else:
            detached = self.fake.detach()
            self._recording.alias(detached, self.name)
            self.fake = detached

    def __repr__(self) -> str:
        dims = ", ".join(str(d) for d in self.desc.shape)
        return f"{type(self).__name__}({self.name!r}, [{dims}], {self.desc.dtype})"

    __str__ = __repr__
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        """True for what has more elements than one and holds no truths: as in Fluid, where `if x:` asks for None.

        In torch that is an error in every program. The rest depends on data. Raises ProgramError.
        """
        if self.desc.dtype != "bool" and any(dim != 1 for dim in self.desc.shape):
            return True
        raise ProgramError(
            f"{user_line()}: the truth of variable {self.name!r} depends on data, so Python cannot branch on it while "
            "a program is recorded. Use torch.where, or layers.cond",
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

    def __getitem__(self, index: Any) -> Any:
        """Return elements. The first of a number, which has the shape [1] in Fluid, is the number."""
        if type(index) is int and index in (0, -1) and self.fake.ndim == 0:
            return self
        return record_call(torch.Tensor.__getitem__, with_known_bounds(self, index, record_call), {})

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


class Parameter(Variable):
    """A Variable that is trained."""

    @property
    def trainable(self) -> bool:
        """Whether optimizers update it."""
        return self.desc.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.stop_gradient = not value

    @property
    def _attribute(self) -> ParamAttr:
        return attributes_of(self._recording, self.name)

    @property
    def optimize_attr(self) -> Rates:
        """The factor on the optimizer's learning rate, as `{"learning_rate": factor}`, until `minimize`."""
        return Rates(self._attribute)

    @optimize_attr.setter
    def optimize_attr(self, value: Mapping[str, float]) -> None:
        self.optimize_attr.update(value)

    @property
    def regularizer(self) -> Any:
        """Its own regularizer, if it has one."""
        return self._attribute.regularizer

    @regularizer.setter
    def regularizer(self, value: Any) -> None:
        self._attribute.regularizer = value

    @property
    def gradient_clip_attr(self) -> Any:
        """Its own clip, if it has one."""
        return self._attribute.gradient_clip

    @gradient_clip_attr.setter
    def gradient_clip_attr(self, value: Any) -> None:
        self._attribute.gradient_clip = value

    @property
    def do_model_average(self) -> bool:
        """Whether `ModelAverage` takes it in."""
        return bool(self._attribute.do_model_average)

    @do_model_average.setter
    def do_model_average(self, value: bool) -> None:
        self._attribute.do_model_average = bool(value)


def dtype_named(dtype: Any) -> torch.dtype:
    """Return torch's dtype of a name, of numpy's dtype, or of torch's own. Raises ProgramError.

    A name means what it does to numpy, as in Fluid: "int" is int64, "float" float64.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    with contextlib.suppress(TypeError):  # bfloat16 is none of numpy's
        name = None if name is None else np.dtype(name).name
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ProgramError(f"{user_line()}: {dtype!r} is no dtype; expected a name such as 'float32' or 'int64'")
    return found


def _operator(name: str) -> Callable[..., Any]:
    """Return an operator. `+=` makes another variable, as in Fluid, but within a module or a captured loss."""
    method, making = (getattr(torch.Tensor, n) for n in (name, alignment.maker_of(name)))

    def call(self: Variable, *args: Any) -> Any:
        operands = alignment.operands_of(name, self, args)
        if alignment.divides_whole(name, operands) and alignment.follows_fluid(self._recording):
            return alignment.whole_quotient(name, operands, record_call)
        is_fluids = making is not method and alignment.follows_fluid(self._recording)
        return record_call(making if is_fluids else method, operands, {})

    call.__name__ = name
    return call


_DUNDERS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs "
    "eq ne lt le gt ge setitem iadd isub imul itruediv and or xor invert"
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
            with CompositeMode(recording), plain_functional(), RecordMode(recording):
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
    for leaf in tree_leaves((args, kwargs)):
        lift = type(leaf).lifted if isinstance(leaf, Variable) else None
        if lift is not None:
            return lift(recording, (args, kwargs), lambda operands: record_call(func, *operands))
        known = recording.program.variables.get(leaf.name) if isinstance(leaf, Variable) else None
        if known is not None and known.kind == "array":
            raise ProgramError(
                f"{user_line()}: {called(func, '')} is given the array {known.name!r}, which has no elements to "
                "compute with. Read them (layers.array_read), or put them together (layers.tensor_array_to_tensor)",
                variable=known.name,
            )
    return with_equal_rows(
        recording,
        (args, kwargs),
        lambda operands: _recorded(recording, func, *operands),
        lambda x, rows: _recorded(recording, torch.ops.penstock.expect_rows, (x, rows), {}),
    )


def _recorded(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    with undone_on_failure(recording):
        args, kwargs = unwrap(recording, (args, kwargs))
        with (
            recording_modes(recording),
            telling(lambda: called(func, recording.module_path()), lambda: operands_of((args, kwargs), recording)),
        ):
            recording.detaches = getattr(func, "__name__", "") == "detach"
            try:
                out = func(*args, **kwargs)
            finally:
                recording.detaches = False
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
    recording.add_guards(recording.symbols.new_guards(user_line()))
    return tree_map(lambda v: _handle_of(recording, v) if isinstance(v, torch.Tensor) else v, out)


def _handle_of(recording: Recording, tensor: torch.Tensor) -> Any:
    """Return the handle of a result; of a detached variable one of its own, at which gradients end."""
    known = recording.handle(tensor)
    if known.fake is not tensor and known.fake.requires_grad and not tensor.requires_grad:
        return Variable(recording, known.name, tensor)
    return known


def _handle(recording: Recording, name: str, fake: torch.Tensor) -> Variable:
    return (Parameter if recording.program.variables[name].parameter else Variable)(recording, name, fake)


Recording.handle_type = staticmethod(_handle)
