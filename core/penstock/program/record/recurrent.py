"""LSTM, GRU and plain RNN under record: one operator a layer and direction, as `torch.nn` calls them.

Directions of a layer are operators of their own, so that an engine runs them at once. Dropout between layers is
`penstock.dropout`. A plain RNN and single cells are recorded as products and activations, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from penstock.compat.torch import PACK_PADDED_SEQUENCE
from penstock.errors import ProgramError
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line

Dropout = Callable[[Recording, torch.Tensor, float, bool], torch.Tensor]
Layer = Callable[..., tuple[torch.Tensor, ...]]
"""(x [t, b, i], states [b, h] each, w_ih, w_hh, b_ih, b_hh, reverse) -> (out [t, b, h], last states)."""


def _lstm_layer(x: torch.Tensor, states: Sequence[torch.Tensor], *weights: Any) -> tuple[torch.Tensor, ...]:
    out, h, c, _ = torch.ops.penstock.lstm(x, *states, *weights, torch.is_grad_enabled())
    return out, h, c


def _gru_layer(x: torch.Tensor, states: Sequence[torch.Tensor], *weights: Any) -> tuple[torch.Tensor, ...]:
    out, h, _ = torch.ops.penstock.gru(x, *states, *weights, torch.is_grad_enabled())
    return out, h


def _rnn_layer(activate: Callable[[torch.Tensor], torch.Tensor]) -> Layer:
    def layer(
        x: torch.Tensor, states: Sequence[torch.Tensor], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, reverse: bool
    ) -> tuple[torch.Tensor, ...]:
        if isinstance(x.shape[0], torch.SymInt):
            raise ProgramError(
                f"{user_line()}: nn.RNN is recorded step by step, so its time must be a number, but it is symbolic; "
                "use nn.LSTM or nn.GRU, which are one operator, or give the input its length"
            )
        (h,), given = states, F.linear(x, w_ih, b_ih)
        made = [h] * x.shape[0]
        for t in range(x.shape[0] - 1, -1, -1) if reverse else range(x.shape[0]):
            h = made[t] = activate(given[t] + F.linear(h, w_hh, b_hh))
        return torch.stack(made), h

    return layer


def recurrent(layer: Layer, num_states: int, dropout: Dropout) -> Callable[..., Any]:
    """Return the recorded form of torch.lstm and its like; with `dropout` between layers."""

    def record(rec: Recording, *args: Any) -> Any:
        x, hx, weights, has_biases, num_layers, p, training, bidirectional, batch_first = _arguments(args)
        directions = 2 if bidirectional else 1
        groups = _groups(weights, num_layers * directions, has_biases)
        initial = hx if num_states > 1 else (hx,)
        x = x.transpose(0, 1) if batch_first else x
        last: list[Sequence[torch.Tensor]] = []
        for number in range(num_layers):
            found = []
            for direction in range(directions):
                index = number * directions + direction
                states = [state[index] for state in initial]
                found.append(layer(x, states, *groups[index], direction == 1))
            last += [one[1:] for one in found]
            x = found[0][0] if directions == 1 else torch.cat([one[0] for one in found], 2)
            if p and number < num_layers - 1:
                x = dropout(rec, x, p, training)
        x = x.transpose(0, 1) if batch_first else x
        return x, *(torch.stack(list(states)) for states in zip(*last, strict=True))

    return record


def _arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(args[3], (list, tuple)):  # (data, batch sizes, hx, weights, …): a packed sequence
        refuse_packed()
    return args


def refuse_packed(*args: Any, **kwargs: Any) -> Any:
    """Raise ProgramError for a packed sequence."""
    raise ProgramError(
        f"{user_line()}: a packed sequence has sizes that depend on data, which a recorded program cannot have. Keep "
        "the sequences padded, and give their lengths to layers.dynamic_lstm or layers.dynamic_gru; or mask the results"
    )


def _groups(weights: Sequence[Any], count: int, has_biases: bool) -> list[tuple[Any, Any, Any, Any]]:
    """(w_ih, w_hh, b_ih, b_hh) of each layer and direction."""
    each = 4 if has_biases else 2
    if len(weights) != each * count:
        raise ProgramError(
            f"{user_line()}: an LSTM with proj_size cannot be recorded; put a Linear behind one without it"
        )
    groups = [tuple(weights[i * each : (i + 1) * each]) for i in range(count)]
    return [group if has_biases else (*group, None, None) for group in groups]


# -- single cells, as nn.LSTMCell and its like call them ------------------------------------------------


def lstm_cell(
    rec: Recording, x: Any, hx: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """Record torch.lstm_cell."""
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(hx[0], w_hh, b_hh)).chunk(4, 1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(rec: Recording, x: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Record torch.gru_cell."""
    given, own = F.linear(x, w_ih, b_ih).chunk(3, 1), F.linear(h, w_hh, b_hh).chunk(3, 1)
    r, z = (given[0] + own[0]).sigmoid(), (given[1] + own[1]).sigmoid()
    n = (given[2] + r * own[2]).tanh()
    return n + z * (h - n)


def _rnn_cell(activate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def cell(rec: Recording, x: Any, h: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return activate(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))

    return cell


def rewrites(dropout: Dropout) -> dict[str, Callable[..., Any]]:
    """Return the recorded forms by the name of torch's function."""
    return {
        "lstm": recurrent(_lstm_layer, 2, dropout),
        "gru": recurrent(_gru_layer, 1, dropout),
        "rnn_tanh": recurrent(_rnn_layer(torch.tanh), 1, dropout),
        "rnn_relu": recurrent(_rnn_layer(torch.relu), 1, dropout),
        "lstm_cell": lstm_cell,
        "gru_cell": gru_cell,
        "rnn_tanh_cell": _rnn_cell(torch.tanh),
        "rnn_relu_cell": _rnn_cell(torch.relu),
        PACK_PADDED_SEQUENCE: refuse_packed,
    }
