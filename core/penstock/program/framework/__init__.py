"""Fluid's framework API for scripts that declare variables and append operators by hand: `fluid.framework`."""

from penstock.program.eager import in_dygraph_mode
from penstock.program.framework.appending import Writer
from penstock.program.framework.device_guard import device_guard
from penstock.program.framework.layer_helper import LayerHelper
from penstock.program.framework.name_scopes import name_scope
from penstock.program.operator_types import BlockOperator
from penstock.program.program import Block, Program
from penstock.program.record.context import (
    default_main_program,
    default_startup_program,
    program_guard,
    switch_main_program,
    switch_startup_program,
)
from penstock.program.record.declared import Declared
from penstock.program.record.variable import Parameter, Variable, dtype_named
from penstock.program.training.backward import grad_name

Block._framework = Writer()


def _get_var(name: str, program: Program | None = None) -> Variable:
    """Return a variable of a program, by default the main one, by its name; scripts call it by Fluid's private name."""
    found: Variable = (program or default_main_program()).global_block().var(name)
    return found


Operator, grad_var_name, convert_np_dtype_to_dtype_ = BlockOperator, grad_name, dtype_named

__all__ = [
    "Block", "Declared", "LayerHelper", "Operator", "Parameter", "Program", "Variable", "_get_var",
    "convert_np_dtype_to_dtype_", "default_main_program", "default_startup_program", "device_guard", "grad_var_name",
    "in_dygraph_mode", "name_scope", "program_guard", "switch_main_program", "switch_startup_program",
]  # fmt: skip
