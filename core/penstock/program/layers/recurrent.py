"""Recurrent layers: `dynamic_lstm`, `dynamic_gru`, `lstm`.

Ragged rows are padded, and what is made of them are rows again. A padded batch is [batch, time, …], with the number of
true steps of each row in `lengths` if they differ. Beyond them results are zero, a reverse layer starts at a row's end.
A length below 0 or above the steps of the input is an OperatorError of the run. A sequence input is declared with
lod_level=1; its lengths are an input beside it, `<name>@LENGTHS` int64 [batch, 1], which data sets feed. A variable
belongs to the input whose time it has: its dimension 1 is the same symbol, so an embedding of words has their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.native.activations import ACTIVATIONS
from penstock.program.initializers import Constant, Xavier
from penstock.program.layers.sequences import is_sequence, padded, unpadded
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.record.variable import record_call
from penstock.program.training.parameters import ParamAttr, create_parameter


def dynamic_lstm(
    input: Any,
    size: int,
    h_0: Any = None,
    c_0: Any = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_peepholes: bool = True,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    candidate_activation: str = "tanh",
    dtype: str = "float32",
    name: str | None = None,
    lengths: Any = None,
) -> tuple[Any, Any]:
    """LSTM over a projected input (`fc(x, 4 * h, num_flatten_dims=2)`); return all outputs and all cells.

    Shapes: input [rows, size] with size = 4 h, ragged, results [rows, h]; or input [n, t, size], lengths int64 [n] or
    [n, 1], results [n, t, h]. h_0, c_0 [n, h].
    Activations are sigmoid, tanh, relu or identity: that of the gates, of the cell on its way to the output, and of the
    candidate. Parameters, as in Fluid's files: w_0 [h, 4 h]; b_0 [1, 4 h], with peepholes [1, 7 h]: gates in the order
    candidate, i, f, o, then the peepholes of i, f, o. The gates of the input are in that order, too.
    Source: fluid.layers.dynamic_lstm, lstm_op.cc (Fluid 1.8).
    """
    if is_sequence(input):
        steps, own = padded("dynamic_lstm", input)
        attributes = (param_attr, bias_attr, use_peepholes, is_reverse)
        kinds = (gate_activation, cell_activation, candidate_activation)
        found = dynamic_lstm(steps, size, h_0, c_0, *attributes, *kinds, dtype, name, own)
        return unpadded(found[0], input), unpadded(found[1], input)
    activations = _activations("dynamic_lstm", gate_activation, cell_activation, candidate_activation)
    hidden = _hidden("dynamic_lstm", input, size, 4)
    prefix = name or default_main_program().unique("lstm")
    with name_scope(prefix):
        weight = _weight(param_attr, [hidden, 4 * hidden], dtype, prefix)
        bias = _bias(bias_attr, [1, (7 if use_peepholes else 4) * hidden], dtype, prefix)
        if use_peepholes and bias is None:
            raise ProgramError(
                "dynamic_lstm: peepholes are part of the bias, so bias_attr=False needs use_peepholes=False"
            )
        gates = input if bias is None else input + bias[:, : 4 * hidden]
        peephole = bias[:, 4 * hidden :].reshape(3, hidden) if use_peepholes else None
        states = [_state(gates, given, hidden) for given in (h_0, c_0)]
        lengths = _checked("dynamic_lstm", gates, lengths)
        turned, reverse = _turned(gates, lengths, is_reverse)
        call = torch.ops.penstock.lstm_sequence
        operands = (turned.transpose(0, 1), *states, weight, peephole, reverse, True, *activations)
        found = record_call(call, operands, {})
        outputs = [_turned_back(one.transpose(0, 1), lengths, is_reverse) for one in found[:2]]
    return outputs[0], outputs[1]


def dynamic_gru(
    input: Any,
    size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    candidate_activation: str = "tanh",
    h_0: Any = None,
    origin_mode: bool = False,
    lengths: Any = None,
) -> Any:
    """GRU over a projected input (`fc(x, 3 * size, num_flatten_dims=2)`); return all outputs.

    Shapes: input [rows, 3 size], ragged, result [rows, size]; or input [n, t, 3 size], lengths int64 [n] or [n, 1],
    result [n, t, size]. h_0 [n, size].
    Parameters, as in Fluid's files: w_0 [size, 3 size], whose values are [size, 2 size] of update and reset and then
    [size, size] of the candidate; b_0 [1, 3 size]. The gates of the input are in that order, too.
    The candidate is act(x + (reset * h) W), the reset gate before the product. `origin_mode`: h' = u h + (1 - u)
    candidate; else h' = (1 - u) h + u candidate. Activations of gates and candidate are sigmoid, tanh, relu or
    identity. Source: fluid.layers.dynamic_gru, gru_op.h (Fluid 1.8).
    """
    if is_sequence(input):
        steps, own = padded("dynamic_gru", input)
        attributes = (param_attr, bias_attr, is_reverse, gate_activation, candidate_activation)
        return unpadded(dynamic_gru(steps, size, *attributes, h_0, origin_mode, own), input)
    activations = _activations("dynamic_gru", gate_activation, candidate_activation)
    hidden, dtype = _hidden("dynamic_gru", input, 3 * size, 3), input.desc.dtype
    prefix = default_main_program().unique("gru")
    with name_scope(prefix):
        weight = _weight(param_attr, [hidden, 3 * hidden], dtype, prefix)
        bias = _bias(bias_attr, [1, 3 * hidden], dtype, prefix)
        gates = input if bias is None else input + bias
        lengths = _checked("dynamic_gru", gates, lengths)
        turned, reverse = _turned(gates, lengths, is_reverse)
        call, state = torch.ops.penstock.gru_sequence, _state(gates, h_0, hidden)
        operands = (turned.transpose(0, 1), state, weight, reverse, bool(origin_mode), True, *activations)
        found = record_call(call, operands, {})
        return _turned_back(found[0].transpose(0, 1), lengths, is_reverse)


def lstm(
    input: Any,
    init_h: Any,
    init_c: Any,
    max_len: int,
    hidden_size: int,
    num_layers: int,
    dropout_prob: float = 0.0,
    is_bidirec: bool = False,
    is_test: bool = False,
    name: str | None = None,
    default_initializer: Any = None,
    seed: int = -1,
) -> tuple[Any, Any, Any]:
    """Stacked LSTM over an input of full length; return (outputs, last h, last c).

    Shapes: input [t, n, i]; init_h, init_c [layers * directions, n, hidden_size]; outputs [t, n, hidden_size *
    directions]. Parameters are those of torch.nn.LSTM, under its names. `max_len` is the input's own length.
    Source: fluid.layers.lstm.
    """
    width = input.desc.shape[-1]
    if input.ndim != 3 or not isinstance(width, int):
        raise ProgramError(f"{user_line()}: lstm needs an input [time, batch, size]; got {input}", variable=input.name)
    prefix, dtype = name or default_main_program().unique("cudnn_lstm"), input.desc.dtype
    weights, directions = [], 2 if is_bidirec else 1
    with name_scope(prefix):
        for layer in range(num_layers):
            wide = width if layer == 0 else hidden_size * directions
            for suffix in ("", "_reverse")[:directions]:
                for kind, shape in _SHAPES.items():
                    sizes = [4 * hidden_size, *({"i": wide, "h": hidden_size}[d] for d in shape)]
                    attr = ParamAttr(initializer=default_initializer)
                    start = Xavier() if shape else Constant(0.0)
                    weights.append(
                        create_parameter(sizes, dtype, attr, start, prefix=prefix, suffix=f"{kind}_l{layer}{suffix}")
                    )
        call, states = torch.lstm, (init_h, init_c)
        settings = (True, num_layers, float(dropout_prob), not is_test, is_bidirec, False)
        out, h, c = record_call(call, (input, states, weights, *settings), {})
    return out, h, c


_SHAPES = {"weight_ih": "i", "weight_hh": "h", "bias_ih": "", "bias_hh": ""}


def _activations(layer: str, *names: str) -> tuple[str, ...]:
    """Return the activations, those of gates first; none if they are the usual ones."""
    if unknown := [name for name in names if name not in ACTIVATIONS]:
        raise ProgramError(
            f"{user_line()}: {layer} has no activation {unknown[0]!r}; expected one of {', '.join(ACTIVATIONS)}"
        )
    return () if names[0] == "sigmoid" and set(names[1:]) == {"tanh"} else names


def _hidden(layer: str, input: Any, size: int, gates: int) -> int:
    if input.ndim != 3 or input.desc.shape[-1] != size or size % gates:
        raise ProgramError(
            f"{user_line()}: {layer} needs an input [batch, time, {gates} * hidden] and size={size} to fit it; got "
            f"{input}. Sequences are dense here, padded to one length; project them with "
            f"fc(x, {gates} * hidden, num_flatten_dims=2)",
            variable=input.name,
        )
    return size // gates


def _weight(attr: Any, shape: Sequence[int], dtype: str, prefix: str) -> Any:
    wanted = ParamAttr.of(attr)
    if wanted is None:
        raise ProgramError(f"{prefix} needs a weight; param_attr=False is not possible")
    return create_parameter(shape, dtype, wanted, Xavier(), prefix=prefix, suffix="w_0")


def _bias(attr: Any, shape: Sequence[int], dtype: str, prefix: str) -> Any:
    wanted = ParamAttr.of(attr)
    if wanted is None:
        return None
    return create_parameter(shape, dtype, wanted, Constant(0.0), prefix=prefix, suffix="b_0")


def _state(like: Any, given: Any, hidden: int) -> Any:
    return like.new_zeros(like.shape[0], hidden) if given is None else given


def _checked(layer: str, x: Any, lengths: Any) -> Any:
    return (
        None if lengths is None else record_call(torch.ops.penstock.checked_lengths, (lengths, x.shape[1], layer), {})
    )


def _within(x: Any, lengths: Any) -> tuple[Any, Any]:
    """(steps [t], whether a step is one of the row's own [n, t])."""
    steps = x.new_zeros(x.shape[1], dtype=torch.int64).add(1).cumsum(0) - 1
    return steps, steps.unsqueeze(0) < lengths.reshape(-1, 1)


def _turned(x: Any, lengths: Any, is_reverse: bool) -> tuple[Any, bool]:
    """The input of a loop, and whether it runs backwards; rows of different length are turned round one by one."""
    return (x, is_reverse) if lengths is None or not is_reverse else (_each_turned(x, lengths), False)


def _turned_back(x: Any, lengths: Any, is_reverse: bool) -> Any:
    if lengths is None:
        return x
    _, own = _within(x, lengths)
    return (_each_turned(x, lengths) if is_reverse else x).masked_fill(own.logical_not().unsqueeze(-1), 0.0)


def _each_turned(x: Any, lengths: Any) -> Any:
    steps, own = _within(x, lengths)
    mirrored = torch.where(own, lengths.reshape(-1, 1) - 1 - steps.unsqueeze(0), steps.unsqueeze(0))
    return torch.gather(x, 1, mirrored.unsqueeze(-1).expand(-1, -1, x.shape[2]))
