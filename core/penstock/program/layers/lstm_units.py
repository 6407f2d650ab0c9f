"""LSTMs in other forms: one step, and a layer whose output is projected to fewer values.

Source: fluid.layers.lstm_unit, dynamic_lstmp; lstm_unit_op.h, lstmp_op.h (Fluid 1.8).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from penstock.errors import ProgramError
from penstock.native.activations import ACTIVATIONS
from penstock.program.initializers import Constant, Xavier
from penstock.program.layers.dynamic_rnn import DynamicRNN
from penstock.program.layers.expected import expect_known, expect_rank, refuse
from penstock.program.layers.network import fc
from penstock.program.layers.sequences import is_sequence, sequence_reverse
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.source import user_line
from penstock.program.training.parameters import ParamAttr, create_parameter


def lstm_unit(
    x_t: Any,
    hidden_t_prev: Any,
    cell_t_prev: Any,
    forget_bias: float = 0.0,
    param_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> tuple[Any, Any]:
    """Return (hidden, cell) after one step of an LSTM.

    Shapes: x_t [n, d], hidden_t_prev and cell_t_prev [n, h]. The gates i, f, o and the candidate are an fc of the input
    and the hidden state, with w_0 [d + h, 4 h] and b_0 [4 h]; `forget_bias` is added to f.
    """
    for operand in (x_t, hidden_t_prev, cell_t_prev):
        expect_rank("lstm_unit", operand, 2)
    hidden = expect_known("lstm_unit", cell_t_prev, 1)
    if expect_known("lstm_unit", hidden_t_prev, 1) != hidden:
        refuse("lstm_unit", f"a hidden state of the cell's size {hidden}", hidden_t_prev, "Give both one size")
    both = torch.cat([x_t, hidden_t_prev], 1)
    gates = fc(both, 4 * hidden, param_attr=param_attr, bias_attr=bias_attr, name=name)
    i, f, o, candidate = gates.split(hidden, 1)
    cell = torch.sigmoid(f + forget_bias) * cell_t_prev + torch.sigmoid(i) * torch.tanh(candidate)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def dynamic_lstmp(
    input: Any,
    size: int,
    proj_size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_peepholes: bool = True,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    candidate_activation: str = "tanh",
    proj_activation: str = "tanh",
    dtype: str = "float32",
    name: str | None = None,
    h_0: Any = None,
    c_0: Any = None,
    cell_clip: float | None = None,
    proj_clip: float | None = None,
) -> tuple[Any, Any]:
    """LSTM over projected rows whose outputs are projected; return them [rows, proj_size] and all cells [rows, h].

    Shapes: input [rows, size] with size = 4 h, ragged; h_0 [n, proj_size], c_0 [n, h]. Parameters, as in
    Fluid's files: w_0 [proj_size, 4 h], the projection w_1 [h, proj_size], b_0 [1, 4 h], with peepholes [1, 7 h]; gates
    in the order candidate, i, f, o, then the peepholes of i, f, o, as `dynamic_lstm`. Cells and outputs are clipped to
    ±cell_clip and ±proj_clip. It is a `DynamicRNN`, a step of all sequences at a time.
    """
    kinds = (gate_activation, cell_activation, candidate_activation, proj_activation)
    _expect(input, size, proj_size, kinds)
    hidden, prefix = size // 4, name or default_main_program().unique("lstmp")
    with name_scope(prefix):
        weights = _weights(prefix, param_attr, bias_attr, hidden, proj_size, dtype, use_peepholes)
        clips = (cell_clip, proj_clip)
        return projected_lstm(input, weights, (h_0, c_0), kinds, clips, is_reverse=is_reverse)


def projected_lstm(
    input: Any,
    weights: tuple[Any, Any, Any, Any],
    first: tuple[Any, Any],
    kinds: tuple[str, ...],
    clips: tuple[float | None, float | None],
    *,
    is_reverse: bool,
) -> tuple[Any, Any]:
    """Return the projected outputs and the cells of an LSTM over ragged rows, of weights that are there.

    `weights`: the recurrent one, the projection, the bias of the gates, and peepholes [3, h] or None; `first`: memories
    or None for zeros; `kinds`: activations of gates, cell, candidate and projection. See `dynamic_lstmp`.
    """
    rows, (hidden, proj_size) = sequence_reverse(input) if is_reverse else input, weights[1].desc.shape
    rnn = DynamicRNN()
    with rnn.block():
        x = rnn.step_input(rows)
        before = rnn.memory(init=first[0], shape=[proj_size], dtype=weights[0].desc.dtype)
        cell = rnn.memory(init=first[1], shape=[hidden], dtype=weights[0].desc.dtype)
        found, after = _step(x, before, cell, weights, kinds, clips)
        rnn.update_memory(before, found)
        rnn.update_memory(cell, after)
        rnn.output(found, after)
    projected, cells = rnn()
    return (sequence_reverse(projected), sequence_reverse(cells)) if is_reverse else (projected, cells)


def _expect(input: Any, size: int, proj_size: int, kinds: tuple[str, ...]) -> None:
    if not is_sequence(input) or input.ndim != 2 or input.desc.shape[1] != size or size % 4 or proj_size < 1:
        refuse(
            "dynamic_lstmp", f"ragged rows of size={size}, four times the cell's, and proj_size={proj_size} above 0",
            input, "Project the rows of an input with lod_level=1 by fc(x, 4 * hidden)",
        )  # fmt: skip
    if unknown := [kind for kind in kinds if kind not in ACTIVATIONS]:
        raise ProgramError(
            f"{user_line()}: dynamic_lstmp has no activation {unknown[0]!r}; expected one of {', '.join(ACTIVATIONS)}"
        )


def _weights(
    prefix: str, param_attr: Any, bias_attr: Any, hidden: int, proj_size: int, dtype: str, use_peepholes: bool
) -> tuple[Any, Any, Any, Any]:
    """(recurrent weight, projection, bias of the gates, peepholes or None)."""
    wanted, bias_wanted = ParamAttr.of(param_attr), ParamAttr.of(bias_attr)
    if wanted is None or bias_wanted is None:
        raise ProgramError(f"{user_line()}: {prefix}: param_attr and bias_attr cannot be False")
    weight = create_parameter([proj_size, 4 * hidden], dtype, wanted, Xavier(), prefix=prefix, suffix="w_0")
    second = copy.copy(wanted)
    second.name = None if wanted.name is None else f"{wanted.name}.projection"
    projection = create_parameter([hidden, proj_size], dtype, second, Xavier(), prefix=prefix, suffix="w_1")
    length = (7 if use_peepholes else 4) * hidden
    bias: Any = create_parameter([1, length], dtype, bias_wanted, Constant(0.0), prefix=prefix, suffix="b_0")
    peepholes = bias[:, 4 * hidden :].reshape([3, hidden]) if use_peepholes else None
    return weight, projection, bias[:, : 4 * hidden], peepholes


def _step(
    x: Any, before: Any, cell: Any, weights: tuple[Any, Any, Any, Any], kinds: tuple[str, ...], clips: tuple[Any, Any]
) -> tuple[Any, Any]:
    weight, projection, bias, peepholes = weights
    gate, of_cell, of_candidate, of_projection = (_FUNCTIONS[kind] for kind in kinds)
    gates = x + bias + before.matmul(weight)
    candidate, i, f, o = gates.split(cell.desc.shape[1], 1)
    if peepholes is not None:
        i, f = i + cell * peepholes[0], f + cell * peepholes[1]
    after = gate(f) * cell + gate(i) * of_candidate(candidate)
    if clips[0]:
        after = after.clamp(-clips[0], clips[0])
    if peepholes is not None:
        o = o + after * peepholes[2]
    found = of_projection((gate(o) * of_cell(after)).matmul(projection))
    return found.clamp(-clips[1], clips[1]) if clips[1] else found, after


_FUNCTIONS: dict[str, Any] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "identity": lambda x: x,
}
