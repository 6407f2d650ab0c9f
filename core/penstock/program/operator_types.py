"""Fluid's names of recorded operators, as `Block.ops` shows them. Torch-free.

A recorded operator is one ATen call or one of Penstock's own; `kernel` is its name. `type` is the name of Fluid's
operator for the same, where there is one: of a layer that records several calls the last call has the layer's name, of
an update the one that writes the parameter has the optimizer's, and a backward operator ends in `_grad`.
Else it is the plain name of the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProgramError
from penstock.program.expr import Expr
from penstock.program.ir import Operator, Role

_CALLS = {
    "addmm": "mul", "mm": "mul", "bmm": "matmul", "matmul": "matmul", "add": "elementwise_add",
    "sub": "elementwise_sub", "rsub": "elementwise_sub", "mul": "elementwise_mul", "div": "elementwise_div",
    "maximum": "elementwise_max", "minimum": "elementwise_min", "convolution": "conv2d",
    "max_pool2d_with_indices": "pool2d", "avg_pool2d": "pool2d", "native_batch_norm": "batch_norm",
    "native_layer_norm": "layer_norm", "cat": "concat", "view": "reshape2", "_unsafe_view": "reshape2",
    "reshape": "reshape2", "t": "transpose2", "transpose": "transpose2", "permute": "transpose2",
    "squeeze": "squeeze2", "unsqueeze": "unsqueeze2", "_softmax": "softmax", "_log_softmax": "log_softmax",
    "threshold": "relu", "native_dropout": "dropout", "embedding": "lookup_table", "full": "fill_constant",
    "scalar_tensor": "fill_constant", "clone": "assign", "copy": "assign", "_to_copy": "cast", "topk": "top_k",
    "argmax": "arg_max", "argmin": "arg_min", "sort": "argsort", "clamp": "clip", "clamp_min": "clip",
    "index_select": "gather", "lt": "less_than", "le": "less_equal", "gt": "greater_than", "ge": "greater_equal",
    "eq": "equal", "ne": "not_equal", "neg": "scale", "hardtanh": "relu6", "repeat": "expand", "amax": "reduce_max",
    "amin": "reduce_min", "prod": "reduce_prod", "silu": "swish", "hardsigmoid": "hard_sigmoid", "sum": "reduce_sum",
    "constant_pad_nd": "pad",
    # Penstock's own
    "uniform": "uniform_random", "normal": "gaussian_random", "truncated_normal": "truncated_gaussian_random",
    "send_rows": "send", "prefetch": "distributed_lookup_table", "scale_loss_grad": "fill_constant",
    "captured": "assign_value",
}  # fmt: skip
_GRADIENTS = {
    "threshold_backward": "relu_grad", "_softmax_backward_data": "softmax_grad", "sigmoid_backward": "sigmoid_grad",
    "_log_softmax_backward_data": "log_softmax_grad", "tanh_backward": "tanh_grad",
    "convolution_backward": "conv2d_grad",
    "max_pool2d_with_indices_backward": "pool2d_grad", "avg_pool2d_backward": "pool2d_grad",
    "native_batch_norm_backward": "batch_norm_grad", "native_layer_norm_backward": "layer_norm_grad",
    "dropout_backward": "dropout_grad", "embedding_dense_backward": "lookup_table_grad",
    "scale_loss_grad": "fill_constant",
}  # fmt: skip
_LAYERS = {
    "smooth_l1": "smooth_l1_loss", "square_error_cost": "square",
    **{name: name for name in (
        "cross_entropy", "softmax_with_cross_entropy", "log_loss", "sigmoid_cross_entropy_with_logits", "huber_loss",
        "cos_sim", "one_hot", "rank_loss", "margin_rank_loss", "bpr_loss", "kldiv_loss", "lrn",
    )},
}  # fmt: skip
_OPERANDS = {  # Fluid's attributes that are operands of the call, in its order
    "aten.full.default": ("shape", "value"),
    "penstock.uniform.default": ("shape", "min", "max", "seed"),
    "penstock.normal.default": ("shape", "mean", "std", "seed"),
    "penstock.truncated_normal.default": ("shape", "mean", "std", "seed"),
}
_INPUTS = {  # Fluid's slots, where they are other ones than X, or X and Y of two operands
    "mul": ("X", "Y"), "matmul": ("X", "Y"), "lookup_table": ("W", "Ids"), "conv2d": ("Input", "Filter", "Bias"),
    "conv2d_transpose": ("Input", "Filter", "Bias"), "batch_norm": ("X", "Scale", "Bias", "Mean", "Variance"),
    "layer_norm": ("X", "Scale", "Bias"), "less_than": ("X", "Y"), "less_equal": ("X", "Y"),
    "greater_than": ("X", "Y"), "greater_equal": ("X", "Y"), "equal": ("X", "Y"), "not_equal": ("X", "Y"),
    "gather": ("X", "Index"),
}  # fmt: skip
_OUTPUTS = {"conv2d": "Output", "conv2d_transpose": "Output", "batch_norm": "Y", "layer_norm": "Y",
            "cross_entropy": "Y", "softmax_with_cross_entropy": "Loss"}  # fmt: skip
_LISTS = {"concat", "sum", "stack"}
_OF_SCALARS = {"add", "sub", "rsub", "mul", "div"}
_ROLES = {
    Role.FORWARD: 0, Role.BACKWARD: 1, Role.OPTIMIZE: 2, Role.RPC: 4, Role.DIST: 8, Role.LR_SCHED: 16, Role.LOSS: 256,
}  # fmt: skip
_COUNTED = re.compile(r"([a-z0-9_]+?)_\d+\Z")


@dataclass(frozen=True, slots=True)
class BlockOperator:
    """Fluid's view of an operator. Everything else (`name`, `role`, `source`, …) is that of `operator`."""

    operator: Operator
    type: str

    @property
    def kernel(self) -> str:
        """What runs: the name of the ATen call, or of Penstock's own operator."""
        return self.operator.type

    @property
    def attr_names(self) -> list[str]:
        """Names of its attributes: keywords of the call, those of an initialiser, and Fluid's `op_role`, `op_role_var`,
        `op_namescope` and `op_callstack`."""
        return list(self.all_attrs())

    def has_attr(self, name: str) -> bool:
        """Whether there is such an attribute."""
        return name in self.all_attrs()

    def attr(self, name: str) -> Any:
        """Return an attribute. Raises ProgramError."""
        found = self.all_attrs()
        if name not in found:
            raise ProgramError(
                f"operator {self.operator.name!r} ({self.type}, {self.kernel}) has no attribute {name!r}; it has "
                f"{', '.join(found)}",
                operator=self.operator.name,
            )
        return found[name]

    def all_attrs(self) -> dict[str, Any]:
        """Return all attributes. A seed that follows from the Program's is 0."""
        op = self.operator
        operands = dict(zip(_OPERANDS.get(op.type, ()), op.args, strict=False))
        if isinstance(operands.get("seed"), Expr):
            operands["seed"] = 0
        return {
            **operands,
            **dict(op.kwargs),
            "op_role": sum(number for role, number in _ROLES.items() if role in op.role),
            "op_role_var": [name for pair in op.role_vars for name in pair],
            "op_namescope": "/" + op.module.replace(".", "/") + "/" * bool(op.module),
            "op_callstack": [op.source],
        }

    @property
    def input_names(self) -> list[str]:
        """Fluid's slots of its inputs; [] for a call that Fluid has no operator of the same inputs for."""
        return list(_inputs_of(self))

    @property
    def output_names(self) -> list[str]:
        """Fluid's slots of its outputs; [] for a call that Fluid has no operator of the same outputs for."""
        return list(_outputs_of(self))

    def input(self, name: str) -> list[str]:
        """Return the names of the variables in a slot of the inputs ("X", "Param", …). Raises ProgramError."""
        return _slot(self, "input", name, _inputs_of(self), self.operator.input_arg_names)

    def output(self, name: str) -> list[str]:
        """Return the names of the variables in a slot of the outputs ("Out", "ParamOut", …). Raises ProgramError."""
        return _slot(self, "output", name, _outputs_of(self), self.operator.output_arg_names)

    @property
    def desc(self) -> OperatorDescription:
        """Fluid's description of it, which has the same as methods."""
        return OperatorDescription(self)

    def to_string(self, throw_on_error: bool = True) -> str:
        """Return its type, kernel and variables in one line."""
        return f"{self.type}({self.kernel}): {self.operator.input_arg_names} -> {self.operator.output_arg_names}"

    __str__ = to_string

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


@dataclass(frozen=True, slots=True)
class OperatorDescription:
    """Fluid's `op.desc`: what the operator has, by methods."""

    _op: BlockOperator

    def type(self) -> str:
        """Return Fluid's type."""
        return self._op.type

    def attr_names(self) -> list[str]:
        """Return the names of its attributes."""
        return self._op.attr_names

    def has_attr(self, name: str) -> bool:
        """Whether there is such an attribute."""
        return self._op.has_attr(name)

    def attr(self, name: str) -> Any:
        """Return an attribute. Raises ProgramError."""
        return self._op.attr(name)

    def input_names(self) -> list[str]:
        """Return Fluid's slots of its inputs."""
        return self._op.input_names

    def output_names(self) -> list[str]:
        """Return Fluid's slots of its outputs."""
        return self._op.output_names

    def input(self, name: str) -> list[str]:
        """Return the names of the variables in a slot of the inputs. Raises ProgramError."""
        return self._op.input(name)

    def output(self, name: str) -> list[str]:
        """Return the names of the variables in a slot of the outputs. Raises ProgramError."""
        return self._op.output(name)

    def input_arg_names(self) -> list[str]:
        """Return the names of all inputs."""
        return self._op.operator.input_arg_names

    def output_arg_names(self) -> list[str]:
        """Return the names of all outputs, and of what it writes in place."""
        return self._op.operator.output_arg_names


def _slot(op: BlockOperator, kind: str, name: str, slots: Mapping[str, list[str]], all_names: list[str]) -> list[str]:
    if name not in slots:
        raise ProgramError(
            f"operator {op.operator.name!r} ({op.type}, {op.kernel}) has no {kind} slot {name!r}; it has "
            f"{sorted(slots) or 'none'}. Its {kind}s are {kind}_arg_names: {all_names}",
            operator=op.operator.name,
        )
    return slots[name]


def _inputs_of(op: BlockOperator) -> dict[str, list[str]]:
    call, names = op.operator, op.operator.input_names()
    if _is_update(call):
        parameters, gradients = ([pair[at] for pair in call.role_vars] for at in (0, 1))
        return {"Param": parameters, "Grad": gradients}
    if op.type != _type(call) or Role.BACKWARD in call.role:
        return {}  # the last of several calls that a layer has recorded
    if call.type == "aten.addmm.default":
        return {"X": [names[1]], "Y": [names[2]]}
    if op.type in _LISTS:
        return {"X": list(names)}
    slots = _INPUTS.get(op.type, ("X", "Y") if op.type.startswith("elementwise_") else ("X",))
    return {slot: [name] for slot, name in zip(slots, names, strict=False)}


def _outputs_of(op: BlockOperator) -> dict[str, list[str]]:
    call = op.operator
    if _is_update(call):
        return {"ParamOut": [param for param, _ in call.role_vars]}
    made = call.output_arg_names
    return {_OUTPUTS.get(op.type, "Out"): made[:1]} if made and Role.BACKWARD not in call.role else {}


def _is_update(op: Operator) -> bool:
    return Role.OPTIMIZE in op.role and any(param in op.writes for param, _ in op.role_vars)


def in_fluids_names(operators: Sequence[Operator]) -> list[BlockOperator]:
    """Return Fluid's views of the operators of a block, in order."""
    last = {op.module: op for op in operators if Role.FORWARD in op.role and _layer(op)}
    return [BlockOperator(op, _layer(op) if last.get(op.module) is op else _type(op)) for op in operators]


def _layer(op: Operator) -> str:
    found = _COUNTED.match(op.module.rpartition(".")[2])
    return _LAYERS.get(found.group(1), "") if found else ""


def _type(op: Operator) -> str:
    parts = op.type.split(".")
    call = parts[1]
    plain = call.rstrip("_")
    if plain.startswith("control") and parts[0] == "penstock":
        kind = next(arg for arg in op.args if isinstance(arg, str))
        return kind if plain == "control" else f"{kind}_grad"
    if _is_update(op):
        return _update(op, parts[0], plain)
    if Role.BACKWARD in op.role and Role.RPC not in op.role:
        return _GRADIENTS.get(plain) or (f"{_CALLS[plain]}_grad" if plain in _CALLS else plain.lstrip("_"))
    if plain == "convolution" and len(op.args) > 6 and op.args[6] is True:
        return "conv2d_transpose"
    if plain in ("mean", "sum") and len(op.args) > 1:
        return f"reduce_{plain}"
    if plain == "hardtanh" and tuple(op.args[1:3]) != (0.0, 6.0):
        return "clip"
    if plain in _OF_SCALARS and isinstance(op.args[1], (int, float)):
        return "scale"
    if plain == "add" and op.module.rpartition(".")[2] == "regularization":
        return "sum"
    return _CALLS.get(plain, plain.lstrip("_"))


def fluid_type(op: Operator) -> str:
    """Return Fluid's type of an operator as a call: a layer of several calls does not name its last one."""
    return _type(op)


def layer_of(op: Operator) -> str:
    """Return the layer that recorded an operator: "fc" of the module path "fc_0"; "" outside of layers."""
    found = _COUNTED.match(op.module.rpartition(".")[2])
    return found.group(1) if found else ""


def _update(op: Operator, namespace: str, plain: str) -> str:
    if namespace == "penstock":
        return plain.removeprefix("sparse_")
    found = _COUNTED.match(op.module.partition(".")[0])
    return found.group(1) if found else _CALLS.get(plain, plain)
