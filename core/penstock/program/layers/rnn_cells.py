"""Cells of recurrent networks, and `rnn`, which runs one over the steps of padded sequences.

A cell maps the input of a step and states to an output and new states, each a variable or a nest of them (lists,
tuples, dicts). A user's cell is a class of `RNNCell` with `call`. Cells have their parameters from their first call on
and share them among all calls. Source: fluid.layers.rnn and fluid.contrib.layers.rnn_impl (Fluid 1.8).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.compat.torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from penstock.errors import ProgramError
from penstock.program.initializers import Constant
from penstock.program.layers.sequences import sequence_mask
from penstock.program.layers.static_rnn import StaticRNN
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.variable import dtype_named
from penstock.program.training.parameters import ParamAttr, create_parameter

Activation = Callable[[Any], Any]


class RNNCell:
    """Base class of cells: `outputs, new_states = cell(inputs, states)`, by `call`, which a class of it writes."""

    def call(self, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return (outputs, new states); the new states nest like the states, with their shapes and dtypes."""
        raise NotImplementedError(f"{type(self).__name__} has no method call(inputs, states)")

    def __call__(self, inputs: Any, states: Any, **kwargs: Any) -> Any:
        return self.call(inputs, states, **kwargs)

    @property
    def state_shape(self) -> Any:
        """Sizes of the states without the batch, nested as they are; for `get_initial_states`."""
        raise NotImplementedError(f"{type(self).__name__} has no state_shape, so its initial states must be given")

    @property
    def state_dtype(self) -> Any:
        """Dtypes of the states, nested as they are, or one for all."""
        raise NotImplementedError(f"{type(self).__name__} has no state_dtype")

    def get_initial_states(
        self, batch_ref: Any, shape: Any = None, dtype: Any = "float32", init_value: float = 0, batch_dim_idx: int = 0
    ) -> Any:
        """Return states full of `init_value`, in the nest of `shape` (`state_shape` by default).

        The batch is the size of `batch_ref` at `batch_dim_idx`; of a nest, that of its first variable. A dtype of None
        is `state_dtype`, and float32 without one.
        """
        whole = tree_leaves(batch_ref)[0]
        size = whole.shape[batch_dim_idx]

        def state(sizes: Sequence[int], kind: Any) -> Any:
            own = list(sizes)[1:] if list(sizes)[:1] == [-1] else list(sizes)
            return whole.new_full([size, *own], init_value, dtype=dtype_named(kind))

        return _map_shapes(state, self.state_shape if shape is None else shape, self._dtypes(dtype))

    def _dtypes(self, dtype: Any) -> Any:
        if dtype is not None:
            return dtype
        try:
            return self.state_dtype
        except NotImplementedError:
            return "float32"


def _map_shapes(function: Callable[[Any, Any], Any], shapes: Any, dtypes: Any) -> Any:
    """Call `function` for each list of sizes in a nest of them, with the dtype at its place or the one for all."""
    if isinstance(shapes, dict):
        return {
            key: _map_shapes(function, one, dtypes[key] if isinstance(dtypes, dict) else dtypes)
            for key, one in shapes.items()
        }
    if all(isinstance(size, int) for size in shapes):
        return function(shapes, dtypes)
    each = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes] * len(shapes)
    return [_map_shapes(function, one, kind) for one, kind in zip(shapes, each, strict=True)]


class _Gates:
    """The parameters of a cell, made at its first call, and its activations."""

    def __init__(self, name: str, attrs: tuple[Any, Any], activations: tuple[Any, Any], dtype: str) -> None:
        self.prefix = default_main_program().unique(name)
        self._attrs, self._dtype = attrs, dtype
        self.gate: Activation = activations[0] or torch.sigmoid
        self.act: Activation = activations[1] or torch.tanh
        self._made: dict[str, tuple[Any, Any]] = {}

    def affine(self, parts: Sequence[Any], size: int, kind: str = "") -> Any:
        """Return the product of joined inputs [n, k] with the weight [k, size] of a kind, and the bias [size] added."""
        joined = torch.cat(list(parts), 1)
        if kind not in self._made:
            width = joined.desc.shape[1]  # type: ignore[attr-defined]  # a Variable
            if not isinstance(width, int):
                raise ProgramError(f"{user_line()}: {self.prefix}: the last size of the input {parts[0]} is not known")
            self._made[kind] = self._parameters([width, size], kind, len(self._made))
        weight, bias = self._made[kind]
        product = torch.matmul(joined, weight)
        return product if bias is None else product + bias

    def _parameters(self, shape: list[int], kind: str, number: int) -> tuple[Any, Any]:
        weight, bias = (_named(ParamAttr.of(attr), kind) for attr in self._attrs)
        if weight is None:
            raise ProgramError(f"{user_line()}: {self.prefix} needs its weights; param_attr=False is not possible")
        w = create_parameter(shape, self._dtype, weight, prefix=self.prefix, suffix=f"w_{number}")
        if bias is None:
            return w, None
        zero = Constant(0.0)
        return w, create_parameter(shape[1:], self._dtype, bias, zero, prefix=self.prefix, suffix=f"b_{number}")


def _named(attr: ParamAttr | None, kind: str) -> ParamAttr | None:
    """An attribute for one of two parameters: a name gets the kind behind it."""
    if attr is None or attr.name is None or not kind:
        return attr
    own = copy.copy(attr)
    own.name = f"{attr.name}_{kind}"
    return own


class GRUCell(RNNCell):
    """Gated recurrent unit: r, u = gates([x, h]); h' = u h + (1 - u) act([x, r h] W + b).

    Shapes: x [n, i], h [n, hidden_size]. Parameters: w_0 [i + hidden_size, 2 hidden_size] and b_0 of the gates (reset,
    then update), w_1 and b_1 of the candidate; a name in `param_attr` is followed by `_gate` and `_candidate`.
    """

    def __init__(
        self,
        hidden_size: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        gate_activation: Activation | None = None,
        activation: Activation | None = None,
        dtype: str = "float32",
        name: str = "GRUCell",
    ) -> None:
        self.hidden_size = hidden_size
        activations = (gate_activation, activation)
        self._gates = _Gates(f"{name}/BasicGRUUnit", (param_attr, bias_attr), activations, dtype)

    def call(self, inputs: Any, states: Any) -> tuple[Any, Any]:  # type: ignore[override]  # no further arguments
        """Return the new state, as output and as state."""
        gates, size = self._gates, self.hidden_size
        with name_scope(gates.prefix):
            both = gates.gate(gates.affine([inputs, states], 2 * size, "gate"))
            reset, update = both[:, :size], both[:, size:]
            candidate = gates.act(gates.affine([inputs, reset * states], size, "candidate"))
            new = update * states + (1.0 - update) * candidate
        return new, new

    @property
    def state_shape(self) -> list[int]:
        """[hidden_size]."""
        return [self.hidden_size]


class LSTMCell(RNNCell):
    """Long short-term memory: states [h, c]; c' = f c + i candidate, h' = o act(c').

    Shapes: x [n, i], h and c [n, hidden_size]. Parameters: w_0 [i + hidden_size, 4 hidden_size], b_0 [4 hidden_size],
    in the order input gate, candidate, forget gate, output gate; `forget_bias` is added before the forget gate's.
    `gate_activation` and `activation` are accepted and, as in Fluid, without effect: sigmoid and tanh.
    """

    def __init__(
        self,
        hidden_size: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        gate_activation: Activation | None = None,
        activation: Activation | None = None,
        forget_bias: float = 1.0,
        dtype: str = "float32",
        name: str = "LSTMCell",
    ) -> None:
        self.hidden_size = hidden_size
        self._forget_bias = forget_bias
        self._gates = _Gates(f"{name}/BasicLSTMUnit", (param_attr, bias_attr), (None, None), dtype)

    def call(self, inputs: Any, states: Any) -> tuple[Any, Any]:  # type: ignore[override]  # no further arguments
        """Return h' and the states [h', c']."""
        hidden, cell = states
        size = self.hidden_size
        with name_scope(self._gates.prefix):
            gates = self._gates.affine([inputs, hidden], 4 * size)
            i, j, f, o = (gates[:, k * size : (k + 1) * size] for k in range(4))
            cell = cell * torch.sigmoid(f + self._forget_bias) + torch.sigmoid(i) * torch.tanh(j)
            hidden = torch.tanh(cell) * torch.sigmoid(o)
        return hidden, [hidden, cell]

    @property
    def state_shape(self) -> list[list[int]]:
        """[[hidden_size], [hidden_size]]."""
        return [[self.hidden_size], [self.hidden_size]]


def rnn(
    cell: RNNCell,
    inputs: Any,
    initial_states: Any = None,
    sequence_length: Any = None,
    time_major: bool = False,
    is_reverse: bool = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Run a cell over sequences; return (the outputs of all steps, the states after the last one).

    Shapes: inputs [batch, time, …] or a nest of them, with `time_major` [time, batch, …]; outputs likewise.
    `sequence_length` int [batch]: behind its end a sequence keeps its states. `is_reverse`: from the last step to the
    first, with the steps behind an end before it. Other arguments go to the cell.
    """
    if initial_states is None:
        initial_states = cell.get_initial_states(batch_ref=inputs, batch_dim_idx=1 if time_major else 0)
    steps = inputs if time_major else tree_map(_turned, inputs)
    mask: Any = None
    if sequence_length is not None:
        first = tree_leaves(initial_states)[0]
        own = sequence_mask(sequence_length.reshape([-1]), tree_leaves(steps)[0].shape[0], first.desc.dtype)
        mask = own.transpose(0, 1)
    if is_reverse:
        steps = tree_map(lambda x: torch.flip(x, [0]), steps)
        mask = None if mask is None else torch.flip(mask, [0])
    outputs, states, nest = _unrolled(cell, steps, initial_states, mask, kwargs)
    if is_reverse:
        outputs = [torch.flip(one, [0]) for one in outputs]
    if not time_major:
        outputs = [_turned(one) for one in outputs]
    return tree_unflatten(outputs, nest), tree_map(lambda x: x[-1], states)


def _turned(x: Any) -> Any:
    return x.transpose(0, 1)


def _unrolled(
    cell: RNNCell, steps: Any, initial_states: Any, mask: Any, kwargs: dict[str, Any]
) -> tuple[list[Any], Any, Any]:
    """The outputs of all steps, as a list, the states after each step, and how the outputs nest."""
    loop = StaticRNN()
    with loop.step():
        now = tree_map(loop.step_input, steps)
        states = tree_map(loop.memory, initial_states)
        outputs, new = cell.call(now, states, **kwargs)
        before, nest_before = tree_flatten(states)
        after, nest_after = tree_flatten(new)
        if str(nest_before) != str(nest_after):
            raise ProgramError(
                f"{user_line()}: {type(cell).__name__} returns states in the nest {nest_after}, but was given "
                f"{nest_before}"
            )
        if mask is not None:
            inside = loop.step_input(mask)
            after = [kept_state(old, one, inside) for old, one in zip(before, after, strict=True)]
        for old, one in zip(before, after, strict=True):
            loop.update_memory(old, one)
        flat, nest = tree_flatten(outputs)
        loop.output(*flat, *after)
    found = loop()
    return list(found[: len(flat)]), tree_unflatten(found[len(flat) :], nest_after), nest


def kept_state(old: Any, new: Any, inside: Any) -> Any:
    """The new state of the rows that have the step, the old one of the others."""
    own = inside.reshape([-1, *[1] * (old.ndim - 1)]).to(old.dtype)
    return new * own - old * (own - 1)
