"""Recurrent networks of several layers over padded sequences: `basic_gru`, `basic_lstm`, and the cells that they stack.

One StaticRNN runs all layers of a direction. The numbers are those of `GRUCell` and `LSTMCell`. Source:
fluid.contrib.layers.rnn_impl (Fluid 1.8), but for the bias of the reverse LSTM layers, which has `bias_attr` here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.program.layers.network import dropout
from penstock.program.layers.rnn_cells import Activation, GRUCell, LSTMCell, RNNCell, kept_state
from penstock.program.layers.sequences import sequence_mask
from penstock.program.layers.static_rnn import StaticRNN
from penstock.program.training.parameters import ParamAttr

Finals = list[list[Any]]  # of each layer the states [n, h] after the last step


class BasicGRUUnit:
    """One step of a GRU: `unit(input, pre_hidden)` returns the new state. Shapes: [n, i], [n, h]; see `GRUCell`."""

    def __init__(
        self,
        name_scope: str,
        hidden_size: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        gate_activation: Activation | None = None,
        activation: Activation | None = None,
        dtype: str = "float32",
    ) -> None:
        self._cell = GRUCell(hidden_size, param_attr, bias_attr, gate_activation, activation, dtype, name_scope)

    def __call__(self, input: Any, pre_hidden: Any) -> Any:
        return self._cell.call(input, pre_hidden)[0]


class BasicLSTMUnit:
    """One step of an LSTM: `unit(input, pre_hidden, pre_cell)` returns (hidden, cell). See `LSTMCell`."""

    def __init__(
        self,
        name_scope: str,
        hidden_size: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        gate_activation: Activation | None = None,
        activation: Activation | None = None,
        forget_bias: float = 1.0,
        dtype: str = "float32",
    ) -> None:
        self._cell = LSTMCell(
            hidden_size, param_attr, bias_attr, gate_activation, activation, forget_bias, dtype, name_scope
        )

    def __call__(self, input: Any, pre_hidden: Any, pre_cell: Any) -> tuple[Any, Any]:
        hidden, cell = self._cell.call(input, [pre_hidden, pre_cell])[1]
        return hidden, cell


def basic_gru(
    input: Any,
    init_hidden: Any,
    hidden_size: int,
    num_layers: int = 1,
    sequence_length: Any = None,
    dropout_prob: float = 0.0,
    bidirectional: bool = False,
    batch_first: bool = True,
    param_attr: Any = None,
    bias_attr: Any = None,
    gate_activation: Activation | None = None,
    activation: Activation | None = None,
    dtype: str = "float32",
    name: str = "basic_gru",
) -> tuple[Any, Any]:
    """Run layers of GRUs over sequences; return (outputs of the last layer, states of all after the last step).

    Shapes: input [batch, time, i], with batch_first=False [time, batch, i], outputs likewise with hidden_size, twice
    that if bidirectional; states [layers * directions, batch, hidden_size], as `init_hidden`, None for zeros.
    `sequence_length` int [batch]: behind its end a sequence keeps its states. Dropout is applied to the output of each
    layer. A name in an attribute is followed by `_fw_w_<layer>` (`_bw_w_`, `_fw_b_`, `_bw_b_`) and the kind.
    """

    def cell(layer: str, weight: Any, bias: Any) -> RNNCell:
        return GRUCell(hidden_size, weight, bias, gate_activation, activation, dtype, layer)

    stack = _Stack(cell, name, num_layers, (param_attr, bias_attr), dropout_prob, "downgrade_in_infer")
    outputs, (hidden,) = stack.run(input, [init_hidden], hidden_size, sequence_length, bidirectional, batch_first)
    return outputs, hidden


def basic_lstm(
    input: Any,
    init_hidden: Any,
    init_cell: Any,
    hidden_size: int,
    num_layers: int = 1,
    sequence_length: Any = None,
    dropout_prob: float = 0.0,
    bidirectional: bool = False,
    batch_first: bool = True,
    param_attr: Any = None,
    bias_attr: Any = None,
    gate_activation: Activation | None = None,
    activation: Activation | None = None,
    forget_bias: float = 1.0,
    dtype: str = "float32",
    name: str = "basic_lstm",
) -> tuple[Any, Any, Any]:
    """Run layers of LSTMs over sequences; return (outputs of the last layer, states h, states c after the last step).

    Arguments and shapes are those of `basic_gru`; `init_hidden` and `init_cell` are given both, or none.
    """

    def cell(layer: str, weight: Any, bias: Any) -> RNNCell:
        return LSTMCell(hidden_size, weight, bias, gate_activation, activation, forget_bias, dtype, layer)

    stack = _Stack(cell, name, num_layers, (param_attr, bias_attr), dropout_prob, "upscale_in_train")
    first = [init_hidden, init_cell]
    outputs, (hidden, c) = stack.run(input, first, hidden_size, sequence_length, bidirectional, batch_first)
    return outputs, hidden, c


class _Stack:
    """Layers of cells, in one or two directions."""

    def __init__(
        self,
        cell: Callable[[str, Any, Any], RNNCell],
        name: str,
        num_layers: int,
        attrs: tuple[Any, Any],
        dropout_prob: float | None,
        implementation: str,
    ) -> None:
        self._cell, self._name, self._layers, self._attrs = cell, name, num_layers, attrs
        self._dropout = (dropout_prob or 0.0, implementation)

    def run(
        self, x: Any, first: Sequence[Any], size: int, lengths: Any, bidirectional: bool, batch_first: bool
    ) -> tuple[Any, list[Any]]:
        """Return the outputs, and of each kind of state [layers * directions, n, h] those after the last step."""
        steps = x.transpose(0, 1) if batch_first else x
        mask: Any = None
        if lengths is not None:
            mask = sequence_mask(lengths.reshape([-1]), steps.shape[0], steps.desc.dtype).transpose(0, 1)
        directions = 2 if bidirectional else 1
        zeros = steps.new_zeros([steps.shape[1], size])
        outputs: list[Any] = []
        finals: list[Finals] = []
        for direction in range(directions):
            cells = self._cells("bw" if direction else "fw", "_reverse" if direction else "")
            own = [[_state(one, i * directions + direction, size, zeros) for one in first] for i in range(self._layers)]
            output, final = self._direction(cells, steps, mask, own, reverse=bool(direction))
            outputs.append(output)
            finals.append(final)
        whole = torch.cat(outputs, 2) if bidirectional else outputs[0]
        states = [
            torch.stack([final[layer][kind] for layer in range(self._layers) for final in finals])
            for kind in range(len(first))
        ]
        return whole.transpose(0, 1) if batch_first else whole, states

    def _cells(self, direction: str, infix: str) -> list[RNNCell]:
        weight, bias = self._attrs
        return [
            self._cell(
                f"{self._name}{infix}_layers_{i}",
                _named(weight, f"_{direction}_w_{i}"),
                _named(bias, f"_{direction}_b_{i}"),
            )
            for i in range(self._layers)
        ]

    def _direction(
        self, cells: list[RNNCell], steps: Any, mask: Any, first: Finals, *, reverse: bool
    ) -> tuple[Any, Finals]:
        if reverse:
            steps = torch.flip(steps, [0])
            mask = None if mask is None else torch.flip(mask, [0])
        loop, kept = StaticRNN(), list[Any]()
        with loop.step():
            below = loop.step_input(steps)
            inside = None if mask is None else loop.step_input(mask)
            for cell, starts in zip(cells, first, strict=True):
                before = [loop.memory(init=one) for one in starts]
                after = cell.call(below, before if len(before) > 1 else before[0])[1]
                new = list(after) if len(before) > 1 else [after]
                if inside is not None:
                    new = [kept_state(old, one, inside) for old, one in zip(before, new, strict=True)]
                for old, one in zip(before, new, strict=True):
                    loop.update_memory(old, one)
                kept += new
                below = self._dropped(new[0])
            loop.output(*kept, below)
        *states, output = loop()
        kinds = len(first[0])
        last = [one[-1] for one in states]
        finals = [last[i * kinds : (i + 1) * kinds] for i in range(len(cells))]
        return (torch.flip(output, [0]) if reverse else output), finals

    def _dropped(self, x: Any) -> Any:
        """The input of the next layer; the last layer's output too. A variable of its own in any case."""
        prob, implementation = self._dropout
        return dropout(x, prob, dropout_implementation=implementation) if prob > 0 else x * 1.0


def _state(given: Any, index: int, size: int, zeros: Any) -> Any:
    """State `index` of those that are given, [layers * directions, n, h] or any shape of as many elements; or zeros."""
    if given is None:
        return zeros
    if given.ndim == 3:
        return given[index]
    rows = zeros.shape[0]
    return given.reshape([-1, size])[index * rows : (index + 1) * rows]


def _named(attr: Any, suffix: str) -> Any:
    """An attribute for the parameters of one layer: a name gets the suffix behind it."""
    made = ParamAttr.of(attr)
    if made is None or made.name is None:
        return attr
    own = copy.copy(made)
    own.name = made.name + suffix
    return own
