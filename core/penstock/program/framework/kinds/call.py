"""One kind of Fluid's operators, and one call of it with its inputs and attributes.

What a call asks for is done or refused by name. An input or an attribute that a kind does not list is refused if it
asks for something: an input that is given, an attribute whose value is not its default, or not nothing (False, 0, -1,
empty) where no default is listed. What only places, quantises or explains an operator changes no result.
Source: the makers of paddle/fluid/operators (Fluid 1.8), and the protos of PaddlePaddle 2.6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from penstock.errors import ProgramError
from penstock.program.record.source import user_line
from penstock.program.record.variable import dtype_named
from penstock.program.training.parameters import GivenParameter

REQUIRED: Final = "<required>"
"""In the place of a default: the attribute has to be given."""
_WITHOUT_EFFECT = frozenset(
    [
        "op_role", "op_role_var", "op_namescope", "op_callstack", "op_device", "with_quant_attr", "skip_quant", "name",
        "use_mkldnn", "use_cudnn", "use_quantizer", "mkldnn_data_type", "is_test", "workspace_size_MB", "infer_flags",
        "exhaustive_search", "in_dtype", "force_cpu", "place_type", "is_sparse", "remote_prefetch",
        "entry_config", "entry", "table_class", "table_names", "trainer_id", "slot", "grad_inplace", "epmap",
        "height_sections", "numeric_stable_mode", "fix_seed", "sorted", "use_addto",
        "allow_out_of_range", "lazy_mode", "min_row_size_to_use_multithread", "inplace",
        "im2col_step", "@ALL_KERNELS_MUST_COMPUTE_RUNTIME_SHAPE@", "overwrite",
    ]
)  # fmt: skip
_LAYOUTS = ("", "AnyLayout", "NCHW", "NCDHW")
# Attributes that no kind honours, with what they may be. One that begins with "scale" is a factor of quantised values.
_DEFAULTS: dict[str, Sequence[Any]] = {
    "data_format": _LAYOUTS, "data_layout": _LAYOUTS, "x_data_format": _LAYOUTS, "y_data_format": _LAYOUTS,
    "use_softmax": (True,), "head_number": (0, 1), "paddingTrainable": (False,), "contextStride": (1,),
    "rescale_grad": (1.0,), "diag_val": (1.0,), "iou_aware_factor": (0.5,),
    "align_corners": (True,), "mode": ("bilinear",), "padding_mode": ("zeros",),
}  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (False, 0, -1, "", [], None)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a type of Fluid's is recorded.

    `inputs`, `outputs`: Fluid's slots, as in "X Y? Zs*": Y may be absent, Zs is a list; an output "XShape-" is not
    made, since nothing reads it. `make` returns a result for each other output, in order, or a list for the first one;
    None for one that this call does not make. `attrs`: the attributes that are honoured, with Fluid's defaults.
    """

    make: Callable[[Call], Any]
    inputs: str = "X"
    outputs: str = "Out"
    attrs: Mapping[str, Any] = field(default_factory=dict)
    updates: bool = False  # the update of a parameter: it writes what it reads

    @property
    def input_slots(self) -> list[str]:
        """Names of the inputs."""
        return [slot.rstrip("?*") for slot in self.inputs.split()]

    @property
    def made(self) -> list[str]:
        """Names of the outputs that `make` returns."""
        return [slot.rstrip("*?") for slot in self.outputs.split() if not slot.endswith("-")]

    @property
    def output_slots(self) -> list[str]:
        """Names of all outputs."""
        return [slot.rstrip("-*?") for slot in self.outputs.split()]

    def asks(self, inputs: Mapping[str, Sequence[Any]], attrs: Mapping[str, Any]) -> Iterator[str]:
        """Iterate over what is asked for and not done: "input 'Shape'", "attribute 'largest' False"."""
        slots = self.input_slots
        for slot, variables in inputs.items():
            if variables and slot not in slots:
                yield f"input {slot!r}"
        for name, value in attrs.items():
            if name not in self.attrs and name not in _WITHOUT_EFFECT and not _asks_nothing(name, value):
                yield f"attribute {name!r} {value!r}"


def _asks_nothing(name: str, given: Any) -> bool:
    value = _plain(given)
    if name in _DEFAULTS:
        return value in _DEFAULTS[name]
    if name.lower().startswith("scale"):
        return value in (1.0, 0.0, [1.0], [])
    return value in _NEUTRAL


def _plain(value: Any) -> Any:
    """Numbers and lists of them in the place of arrays, which do not compare to one truth."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic, torch.Tensor)) else value


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that is recorded now: the variables of its input slots, and its attributes with their defaults.

    `outputs`: the variables, or names, that its results will have.
    """

    type: str
    inputs: Mapping[str, Sequence[Any]]
    attrs: Mapping[str, Any]
    outputs: Mapping[str, Sequence[Any]]

    def one(self, slot: str) -> Any:
        """Return the variable of a slot. Raises ProgramError if it has none."""
        found = self.optional(slot)
        if found is None:
            raise ProgramError(
                f"{user_line()}: operator {self.type!r} has no input {slot!r}; it is given {sorted(self.inputs)}"
            )
        return found

    def optional(self, slot: str) -> Any:
        """Return the variable of a slot, or None."""
        given = self.inputs.get(slot) or ()
        return given[0] if given else None

    def many(self, slot: str) -> list[Any]:
        """Return the variables of a slot."""
        return list(self.inputs.get(slot) or ())

    def parameter(self, slot: str) -> GivenParameter | bool:
        """Return what a layer takes as `param_attr`, to use the variable of a slot; False if there is none."""
        variable = self.optional(slot)
        return False if variable is None else GivenParameter(variable)

    def __getitem__(self, name: str) -> Any:
        """Return an attribute. Raises ProgramError for one that has no default and is not given."""
        value = self.attrs.get(name, REQUIRED)
        if value is REQUIRED:
            raise ProgramError(f"{user_line()}: operator {self.type!r} has no attribute {name!r}, which has no default")
        return value

    def dtype(self, name: str = "dtype") -> str | None:
        """Return the name of the dtype in an attribute; None for -1, which stands for that of the input."""
        value = self[name]
        return None if value in (-1, None) else str(dtype_named(value)).removeprefix("torch.")

    def sizes(self, name: str, tensor: str = "ShapeTensor", parts: str = "ShapeTensorList") -> Any:
        """Return sizes: the variable in the slot `tensor`, or those in `parts`, or the attribute `name`."""
        whole, each = self.optional(tensor), self.many(parts)
        return whole if whole is not None else each or list(self[name])

    def refuse(self, reason: str) -> ProgramError:
        """Return the error of a use that is not supported."""
        return ProgramError(f"{user_line()}: operator {self.type!r} {reason}; that is not supported")


def layer(
    function: Callable[..., Any],
    inputs: str = "X",
    outputs: str = "Out",
    attrs: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
) -> Kind:
    """Return the kind that calls a function with its inputs, in their order, and its attributes as keywords.

    `names`: Fluid's attributes that the function calls otherwise. Those called dtype or out_dtype are names of dtypes.
    """
    slots = [(slot.rstrip("?*"), slot[-1]) for slot in inputs.split()]
    keywords = {name: (names or {}).get(name, name) for name in attrs or {}}

    def make(call: Call) -> Any:
        given = [
            call.many(slot) if mark == "*" else call.optional(slot) if mark == "?" else call.one(slot)
            for slot, mark in slots
        ]
        values = {key: call.dtype(own) if own.endswith("dtype") else call[own] for own, key in keywords.items()}
        return function(*given, **values)

    return Kind(make, inputs, outputs, dict(attrs or {}))


def like(x: Any, dtype: str | None) -> torch.dtype:
    """The dtype of that name; that of x for None."""
    found: torch.dtype = x.dtype if dtype is None else dtype_named(dtype)
    return found
