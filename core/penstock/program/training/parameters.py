"""Parameters and other persistable state: described in the main Program, initialised in the startup Program."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program import unique_name
from penstock.program.initializers import Constant, Initializer, Xavier
from penstock.program.ir import Operator, Ref, VarDesc
from penstock.program.program import Program
from penstock.program.record.attributes import ParamAttr, attributes_of
from penstock.program.record.context import default_main_program, default_startup_program
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable


class WeightNormParamAttr(ParamAttr):
    """A weight as direction and length: w = g v / |v|, with v and g trained.

    `dim`: |v| is taken over all other dimensions, and g has one number for each position; None: over all, one number.
    g starts as |v|, so that w starts as v does. Source: fluid.WeightNormParamAttr (Fluid 1.8).
    """

    def __init__(self, dim: int | None = None, name: str | None = None, **more: Any) -> None:
        super().__init__(name, **more)
        self.dim = dim


class GivenParameter(ParamAttr):
    """A variable that a layer takes as its parameter, instead of one that it creates: any of its shape and dtype."""

    def __init__(self, variable: Variable) -> None:
        super().__init__(variable.name)
        self.variable = variable


def create_parameter(
    shape: Sequence[int], dtype: str, attr: ParamAttr, default: Initializer | None = None, *, prefix: str, suffix: str
) -> Variable:
    """Create a parameter, or return the one that has this name and shape already (shared tables)."""
    name = attr.name or f"{prefix}.{suffix}"
    if isinstance(attr, GivenParameter):
        _expect_same(attr.variable.desc, shape, dtype)
        return attr.variable
    if isinstance(attr, WeightNormParamAttr):
        return _normed(name, list(shape), dtype, attr, default)
    main = default_main_program()
    if name in main.variables:
        return _shared(main, name, shape, dtype)
    shared = attr.name is not None or unique_name.chosen() is not None
    initializer = attr.initializer or default or Xavier()
    variable = create_persistable(name, shape, dtype, initializer, parameter=True, shared=shared)
    recording_of(main).attributes[name] = copy.copy(attr)  # one ParamAttr may serve many parameters
    if not attr.trainable:
        main.variables[name] = replace(variable.desc, trainable=False)
    else:
        variable.fake.requires_grad_(True)
    return variable


def _normed(
    name: str, shape: list[int], dtype: str, attr: WeightNormParamAttr, default: Initializer | None
) -> Variable:
    """Return g v / |v|, recorded of the parameters `<name>_v` and `<name>_g`."""
    if attr.dim is not None and not 0 <= attr.dim < len(shape):
        raise ProgramError(f"{user_line()}: WeightNormParamAttr: dim is {attr.dim}; {name!r} has shape {shape}")
    dims = tuple(i for i in range(len(shape)) if i != attr.dim)
    lengths = [size if i == attr.dim else 1 for i, size in enumerate(shape)]
    plain = {key: value for key, value in vars(attr).items() if key not in ("dim", "name")}
    v = create_parameter(shape, dtype, ParamAttr(f"{name}_v", **plain), default, prefix=name, suffix="v")
    known = f"{name}_g" in default_startup_program().variables
    g: Any = create_parameter(lengths, dtype, ParamAttr(f"{name}_g", **plain), Constant(1.0), prefix=name, suffix="g")
    if not known:
        startup = default_startup_program()
        norm = startup.unique_operator("linalg_vector_norm")
        args = (Ref(v.name), 2.0, dims, True)
        startup.operators[-1] = Operator(norm, "aten.linalg_vector_norm.default", args, (g.name,), source=v.desc.source)
    direction: Any = v
    made: Variable = direction * (g / torch.linalg.vector_norm(direction, 2, dims, keepdim=True))
    return made


def _shared(main: Program, name: str, shape: Sequence[int], dtype: str) -> Variable:
    old = main.variables[name]
    _expect_same(old, shape, dtype, is_shared=old.parameter)
    return main.handle(name)  # type: ignore[no-any-return]  # a Variable


def _expect_same(old: VarDesc, shape: Sequence[int], dtype: str, *, is_shared: bool = True) -> None:
    if not is_shared or tuple(old.shape) != tuple(shape) or old.dtype != dtype:
        raise ProgramError(
            f"{user_line()}: parameter {old.name!r} is asked for with shape {list(shape)} of {dtype}, but it exists "
            "with shape "
            f"{list(old.shape)} of {old.dtype} (created at {old.source}). "
            "Use another name, or the same shape to share it",
            variable=old.name,
        )


def attribute_of(param: Variable) -> ParamAttr:
    """Return how a parameter is trained; the default for one that was captured from a module."""
    return attributes_of(recording_of(param.program), param.name)


def create_persistable(
    name: str,
    shape: Sequence[int],
    dtype: str,
    initializer: Initializer,
    *,
    parameter: bool = False,
    shared: bool = False,
) -> Variable:
    """Create a persistable variable in the main Program and its initialisation in the startup Program.

    `shared`: one that the startup Program has, for another main Program, is the same one, and starts once.
    """
    main, startup = default_main_program(), default_startup_program()
    recording = recording_of(main)
    if any(d < 0 for d in shape):
        raise ProgramError(
            f"{user_line()}: {name!r} is asked for with shape {list(shape)}; sizes of persistable variables are "
            "positive"
        )
    old = startup.variables.get(name)  # before it is one of the main Program, which may be the startup Program
    fake = recording.fake_of_shape(shape, getattr(torch, dtype))
    var = recording.bind(fake, recording.describe(fake, name, persistable=True, parameter=parameter))
    if not shared or old is None or replace(old, source=var.source) != var:
        startup.add_variable(var)
        startup.append(initializer.operator(var, startup))
    return recording.handle(fake)  # type: ignore[no-any-return]  # a Variable


def constant_state(name: str, value: float, dtype: str = "float32", shape: Sequence[int] = ()) -> Variable:
    """Create persistable state with one starting value (learning rates, counters, moments)."""
    return create_persistable(name, shape, dtype, Constant(value))


__all__ = [
    "GivenParameter", "ParamAttr", "WeightNormParamAttr", "attribute_of", "constant_state", "create_parameter",
    "create_persistable",
]  # fmt: skip
