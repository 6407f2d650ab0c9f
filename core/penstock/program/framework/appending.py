"""Variables that are declared by hand, and operators that are appended by Fluid's type.

`append_op` runs the layer of that type under the recorder, and gives its result the name of the output variable: what
is recorded is what the layer records. An output that has a value already is written in place. Initialisers of
persistable variables are recorded as such, in whichever Program the block is of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program import layers
from penstock.program.framework.kinds.shapes import number_of
from penstock.program.framework.kinds.table import KINDS, Slots, recorded, similar
from penstock.program.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform
from penstock.program.ir import Role, VarDesc
from penstock.program.operator_types import BlockOperator
from penstock.program.program import Block, Program
from penstock.program.record.arrays import named_array
from penstock.program.record.context import current_role, program_guard, record_on, role
from penstock.program.record.declared import Declared, written
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named
from penstock.program.training.parameters import ParamAttr

# of an operator's attributes and the dtype of what it fills
_INITIALISERS: dict[str, Callable[[Mapping[str, Any], str], Initializer]] = {
    "fill_constant": lambda a, dtype: Constant(number_of("fill_constant", a, dtype)),
    "uniform_random": lambda a, _: Uniform(a.get("min", -1.0), a.get("max", 1.0), a.get("seed", 0)),
    "gaussian_random": lambda a, _: Normal(a.get("mean", 0.0), a.get("std", 1.0), a.get("seed", 0)),
    "truncated_gaussian_random": lambda a, _: TruncatedNormal(a.get("mean", 0.0), a.get("std", 1.0), a.get("seed", 0)),
}


class Writer:
    """What a Block declares and appends with (`Framework`)."""

    def create_var(
        self,
        program: Program,
        name: str | None = None,
        shape: Sequence[int | None] | None = None,
        dtype: Any = None,
        persistable: bool = False,
        stop_gradient: bool = False,
        lod_level: int = 0,
        type: str | None = None,
        initializer: Initializer | None = None,
        **ignored: object,
    ) -> Variable:
        """See `Block.create_var`. A persistable variable needs its sizes; its value is set in the scope, or by
        `initializer`, which is recorded into the same Program.

        `type`: a tensor's by default; `core.VarDesc.VarType.LOD_TENSOR_ARRAY` makes an empty array, another kind a
        variable that no operator takes.
        """
        name = name or program.unique("_generated_var")
        recording = recording_of(program)
        sizes = [-1 if size is None or isinstance(size, torch.SymInt) else int(size) for size in shape or ()]
        if program.own_name(name) == name:
            return _known(program.handle(name), None if shape is None else sizes, dtype)
        record_on(program)
        kind = dtype_named(dtype or "float32")
        if type == "array":
            return named_array(recording, name, kind)
        other = "" if type in (None, "dense") else str(type)
        if not persistable or other:
            text = str(kind).removeprefix("torch.")
            described = VarDesc(name, tuple(sizes), text, lod_level=lod_level, source=user_line())
            made = recording.declared[name] = Declared(recording, described, is_sized=shape is not None, kind=other)
            made.stop_gradient = stop_gradient
            return made
        if shape is None:
            raise ProgramError(
                f"{user_line()}: persistable variable {name!r} is declared without a shape", variable=name
            )
        fake = recording.fake_of_shape(sizes, kind)
        described = recording.bind(fake, recording.describe(fake, name, persistable=True))
        if initializer is not None:
            program.append(initializer.operator(described, program))
        return recording.handle(fake)  # type: ignore[no-any-return]  # a Variable

    def create_parameter(
        self,
        program: Program,
        shape: Sequence[int] = (),
        dtype: Any = "float32",
        name: str | None = None,
        attr: Any = None,
        initializer: Initializer | None = None,
        trainable: bool = True,
        **more: Any,
    ) -> Variable:
        """See `Block.create_parameter`."""
        if not shape or any(int(size) < 1 for size in shape):
            raise ProgramError(
                f"{user_line()}: create_parameter({name!r}): shape is {shape}; expected one positive size or more"
            )
        if dtype is None:
            raise ProgramError(f"{user_line()}: create_parameter({name!r}): dtype is None; expected 'float32', …")
        wanted = ParamAttr.of(attr) or ParamAttr()
        chosen = ParamAttr(
            name or wanted.name,
            initializer or wanted.initializer,
            (more.get("optimize_attr") or {}).get("learning_rate", wanted.learning_rate),
            more.get("regularizer") or wanted.regularizer,
            trainable and wanted.trainable,
            more.get("gradient_clip_attr") or wanted.gradient_clip,
        )
        with program_guard(program, None if initializer is None else program):
            text = str(dtype_named(dtype)).removeprefix("torch.")
            return layers.create_parameter(list(shape), text, chosen.name, chosen)

    def append_op(
        self,
        block: Block,
        type_: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
    ) -> BlockOperator:
        """See `Block.append_op`."""
        program = block.program
        given = {slot: _handles(program, value) for slot, value in inputs.items()}
        results = {slot: _handles(program, value) for slot, value in outputs.items()}
        first = next((handles[0] for handles in results.values() if handles), None)
        if type_ in _INITIALISERS and first is not None and first.persistable:
            program.append(_INITIALISERS[type_](attrs, first.desc.dtype).operator(first.desc, program))
            return block.ops[-1]
        kind = KINDS.get(type_)
        if kind is None:
            alike = similar(type_)
            raise ProgramError(
                f"{user_line()}: append_op(type={type_!r}): there is no operator of this type here"
                f"{'; similar ones: ' + ', '.join(alike) if alike else ''}. Call the layer or a torch function on the "
                "variables; docs/fluid-operators.md has all types that can be appended"
            )
        pairs = ((given["Param"][0].name, given["Grad"][0].name),) if kind.updates and given.get("Grad") else ()
        own = Role.OPTIMIZE if kind.updates else current_role()[0]
        with program_guard(program), role(own, pairs or current_role()[1]):
            record_into(results, type_, given, attrs)
        return block.ops[-1]

    def guard(self, own: Role, pairs: Iterable[Any]) -> AbstractContextManager[None]:
        """See `Program._optimized_guard`. `pairs`: a parameter, its gradient, … as variables or names."""
        names = [getattr(one, "name", one) for one in pairs]
        return role(own, tuple(zip(names[::2], names[1::2], strict=True)))


def record_into(
    outputs: Slots,
    type_: str,
    inputs: Slots,
    attrs: Mapping[str, Any],
    write: Callable[[Any, Any], object] = written,
) -> None:
    """Record an operator into the current Program, and let its outputs have the results.

    `outputs`: variables, or what else `write(output, result)` takes. Raises ProgramError, see `kinds.table.recorded`,
    and for a slot with another number of outputs than there are results.
    """
    read = {variable.name for variables in inputs.values() for variable in variables}
    results = {slot: values for slot, values in recorded(type_, inputs, outputs, attrs).items() if outputs.get(slot)}
    for slot, values in results.items():
        if len(outputs[slot]) != len(values):
            raise ProgramError(
                f"{user_line()}: operator {type_!r} is given {len(outputs[slot])} variables for its output {slot!r}, "
                f"and makes {len(values)}; give one variable for each"
            )
    for slot, values in results.items():
        for out, value in zip(outputs[slot], values, strict=True):
            # what an operator returns as it is, a matrix that is flattened say, keeps its own name
            is_input = value.name in read and value.name != getattr(out, "name", out)
            write(out, layers.assign(value) if is_input else value)


def _known(variable: Any, sizes: list[int] | None, dtype: Any) -> Variable:
    """Return a variable that is there already. Raises ProgramError where it is declared again as another one."""
    have = [size if isinstance(size, int) else -1 for size in variable.desc.shape]
    is_same = sizes is None or sizes == have or (sizes == [1] and not have)  # a number is [1] in Fluid
    if not is_same or (dtype is not None and dtype_named(dtype) != variable.dtype):
        raise ProgramError(
            f"{user_line()}: variable {variable.name!r} is declared with shape {sizes} of {dtype}, but it exists with "
            f"shape {have} of {variable.desc.dtype} (created at {variable.desc.source}). Give one of them another name",
            variable=variable.name,
        )
    return variable  # type: ignore[no-any-return]  # a Variable


def _handles(program: Program, value: Any) -> list[Any]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [program.global_block().var(v) if isinstance(v, str) else v for v in values if v is not None]


__all__ = ["Writer", "record_into"]
