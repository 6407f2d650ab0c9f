"""Parameters and other persistable state: described in the main Program, initialised in the startup Program."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Initializer, Xavier
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, default_startup_program
from penstock.program.record.opening import recording_of
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable


class ParamAttr:
    """How a parameter is named, initialised and trained. `learning_rate`: factor on the optimizer's."""

    def __init__(
        self,
        name: str | None = None,
        initializer: Initializer | None = None,
        learning_rate: float = 1.0,
        regularizer: Any = None,
        trainable: bool = True,
        gradient_clip: Any = None,
        do_model_average: bool = False,
    ) -> None:
        self.name = name
        self.initializer = initializer
        self.learning_rate = float(learning_rate)
        self.regularizer = regularizer
        self.trainable = trainable
        self.gradient_clip = gradient_clip

    @staticmethod
    def of(attr: Any) -> ParamAttr | None:
        """Return what Fluid accepts as a ParamAttr: None, a name, an initialiser, or False for no parameter."""
        if attr is None or attr is True:
            return ParamAttr()
        if attr is False:
            return None
        if isinstance(attr, ParamAttr):
            return attr
        if isinstance(attr, str):
            return ParamAttr(name=attr)
        if hasattr(attr, "operator"):
            return ParamAttr(initializer=attr)
        raise ProgramError(
            f"{user_line()}: a parameter attribute is {attr!r}; expected None, False, a name, an initialiser or "
            "ParamAttr"
        )


def create_parameter(
    shape: Sequence[int], dtype: str, attr: ParamAttr, default: Initializer | None = None, *, prefix: str, suffix: str
) -> Variable:
    """Create a parameter, or return the one that has this name and shape already (shared tables)."""
    name = attr.name or f"{prefix}.{suffix}"
    main = default_main_program()
    if name in main.variables:
        return _shared(main, name, shape, dtype)
    variable = create_persistable(name, shape, dtype, attr.initializer or default or Xavier(), parameter=True)
    recording_of(main).attributes[name] = copy.copy(attr)  # one ParamAttr may serve many parameters
    if not attr.trainable:
        main.variables[name] = replace(variable.desc, trainable=False)
    else:
        variable.fake.requires_grad_(True)
    return variable


def _shared(main: Program, name: str, shape: Sequence[int], dtype: str) -> Variable:
    old = main.variables[name]
    if not old.parameter or tuple(old.shape) != tuple(shape) or old.dtype != dtype:
        raise ProgramError(
            f"{user_line()}: parameter {name!r} is asked for with shape {list(shape)} of {dtype}, but it exists "
            "with shape "
            f"{list(old.shape)} of {old.dtype} (created at {old.source}). "
            "Use another name, or the same shape to share it",
            variable=name,
        )
    return main.handle(name)  # type: ignore[no-any-return]  # a Variable


def attribute_of(param: Variable) -> ParamAttr:
    """Return how a parameter is trained; the default for one that was captured from a module."""
    attribute = recording_of(param.program).attributes.get(param.name)
    return attribute if isinstance(attribute, ParamAttr) else ParamAttr()


def create_persistable(
    name: str, shape: Sequence[int], dtype: str, initializer: Initializer, *, parameter: bool = False
) -> Variable:
    """Create a persistable variable in the main Program and its initialisation in the startup Program."""
    main, startup = default_main_program(), default_startup_program()
    recording = recording_of(main)
    if any(d < 0 for d in shape):
        raise ProgramError(
            f"{user_line()}: {name!r} is asked for with shape {list(shape)}; sizes of persistable variables are "
            "positive"
        )
    fake = recording.fake_of_shape(shape, getattr(torch, dtype))
    var = recording.bind(fake, recording.describe(fake, name, persistable=True, parameter=parameter))
    startup.add_variable(var)
    startup.append(initializer.operator(var, startup))
    return recording.handle(fake)  # type: ignore[no-any-return]  # a Variable


def constant_state(name: str, value: float, dtype: str = "float32", shape: Sequence[int] = ()) -> Variable:
    """Create persistable state with one starting value (learning rates, counters, moments)."""
    return create_persistable(name, shape, dtype, Constant(value))
