"""LayerHelper: what layers that users write by Fluid's own means create parameters and operators with.

Source: fluid.layer_helper.LayerHelper (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import ProgramError
from penstock.program.initializers import Constant, Initializer
from penstock.program.layers.activations import activate
from penstock.program.program import Program
from penstock.program.record.context import default_main_program, default_startup_program
from penstock.program.record.source import user_line
from penstock.program.record.variable import Variable, dtype_named
from penstock.program.training.parameters import ParamAttr, create_parameter


class LayerHelper:
    """One layer under construction. `kwargs`: the layer's arguments (`input`, `param_attr`, `bias_attr`, `act`, …)."""

    def __init__(self, layer_type: str, **kwargs: Any) -> None:
        self.layer_type, self.kwargs = layer_type, kwargs
        self.name: str = kwargs.get("name") or default_main_program().unique(layer_type)
        self._num_weights = 0

    @property
    def main_program(self) -> Program:
        """The Program that layers record into."""
        return default_main_program()

    @property
    def startup_program(self) -> Program:
        """The Program that initialisers record into."""
        return default_startup_program()

    @property
    def param_attr(self) -> ParamAttr | None:
        """How the layer's weights are made; None: it has none."""
        return ParamAttr.of(self.kwargs.get("param_attr"))

    @property
    def bias_attr(self) -> ParamAttr | None:
        """How the layer's bias is made; None: it has none."""
        return ParamAttr.of(self.kwargs.get("bias_attr"))

    def append_op(self, *args: Any, **kwargs: Any) -> Any:
        """Append an operator to the main Program, see `Block.append_op`."""
        return self.main_program.global_block().append_op(*args, **kwargs)

    def multiple_input(self, input_param_name: str = "input") -> list[Variable]:
        """Return the layer's inputs as a list."""
        given = self.kwargs.get(input_param_name, [])
        return list(given) if isinstance(given, (list, tuple)) else [given]

    def input(self, input_param_name: str = "input") -> Variable:
        """Return the layer's one input. Raises ProgramError for several."""
        inputs = self.multiple_input(input_param_name)
        if len(inputs) != 1:
            raise ProgramError(f"{user_line()}: {self.layer_type} takes one input; got {len(inputs)}")
        return inputs[0]

    def iter_inputs_and_params(self, input_param_name: str = "input") -> Iterator[tuple[Variable, ParamAttr | None]]:
        """Return each input with how its weight is made."""
        inputs = self.multiple_input(input_param_name)
        given = self.kwargs.get("param_attr")
        attributes = list(given) if isinstance(given, (list, tuple)) else [given] * len(inputs)
        return zip(inputs, map(ParamAttr.of, attributes), strict=True)

    def input_dtype(self, input_param_name: str = "input") -> str:
        """Return the dtype that all inputs have. Raises ProgramError if they differ."""
        kinds = {v.desc.dtype for v in self.multiple_input(input_param_name)}
        if len(kinds) != 1:
            raise ProgramError(f"{user_line()}: {self.layer_type} has inputs of {sorted(kinds)}; expected one dtype")
        return kinds.pop()

    def create_parameter(
        self,
        attr: Any,
        shape: Sequence[int],
        dtype: Any = None,
        is_bias: bool = False,
        default_initializer: Initializer | None = None,
    ) -> Variable | None:
        """Create a weight, or a bias, which starts at zero; None for `attr=False`."""
        wanted = ParamAttr.of(attr)
        if wanted is None:
            return None
        kind = self.input_dtype() if dtype is None else str(dtype_named(dtype)).removeprefix("torch.")
        default = default_initializer or (Constant(0.0) if is_bias else None)
        suffix = "b_0" if is_bias else f"w_{self._num_weights}"
        self._num_weights += not is_bias
        return create_parameter(list(shape), kind, wanted, default, prefix=self.name, suffix=suffix)

    def get_parameter(self, name: str) -> Variable:
        """Return a parameter by its name. Raises ProgramError."""
        found: Variable = self.main_program.global_block().var(name)
        if not found.desc.parameter:
            raise ProgramError(f"{user_line()}: {name!r} is no parameter", variable=name)
        return found

    def create_variable_for_type_inference(self, dtype: Any = "float32", stop_gradient: bool = False) -> Variable:
        """Return a variable for the result of an operator that is appended next."""
        return self.create_variable(name=self.main_program.unique(f"{self.name}.tmp"), dtype=dtype or "float32")

    create_tmp_variable = create_variable_for_type_inference

    def create_variable(self, **described: Any) -> Variable:
        """Declare a variable of the main Program, see `Block.create_var`."""
        found: Variable = self.main_program.global_block().create_var(**described)
        return found

    def create_global_variable(self, persistable: bool = False, **described: Any) -> Variable:
        """Declare a variable of block 0, which lives on between runs if `persistable`."""
        named = {"name": self.main_program.unique(f"{self.name}.tmp"), **described}
        return self.create_variable(persistable=persistable, **named)

    def create_or_get_global_variable(self, name: str, **described: Any) -> tuple[Variable, bool]:
        """Return a variable, and whether it was declared now."""
        is_new = self.main_program.own_name(name) != name
        return self.create_variable(name=name, **{"persistable": True, **described}), is_new

    def set_variable_initializer(self, var: Variable, initializer: Initializer) -> Variable:
        """Record a persistable variable's first value into the startup Program."""
        startup = self.startup_program
        described = replace(var.desc)
        if described.name not in startup.variables:
            startup.add_variable(described)
        startup.append(initializer.operator(described, startup))
        return var

    def append_bias_op(self, input_var: Variable, dim_start: int = 1, dim_end: int | None = None) -> Any:
        """Add the layer's bias, which has the sizes of dimensions `dim_start` to `dim_end`, if it has one."""
        sizes = list(input_var.desc.shape[dim_start:dim_end])
        if self.bias_attr is None:
            return input_var
        bias: Any = self.create_parameter(
            self.bias_attr, [int(str(s)) for s in sizes], input_var.desc.dtype, is_bias=True
        )
        behind = input_var.ndim - dim_start - len(sizes)
        return input_var + bias.reshape([*sizes, *[1] * behind])

    def append_activation(self, input_var: Variable) -> Any:
        """Return the layer's activation `act` of a variable, or the variable itself."""
        act = self.kwargs.get("act")
        return activate(input_var, act.get("type") if isinstance(act, dict) else act)
